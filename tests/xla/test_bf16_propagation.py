"""What XLA:TPU keeps in bfloat16: a cast moves before what only moves data."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from unity_jax.pcg.graph import Graph, Op, Tensor
from unity_jax.pcg.layout import Layout
from unity_jax.pcg.parallel import COLLECTIVES, Move
from unity_jax.xla.bf16_propagation import bf16_propagation

WHOLE = Layout.replicated(1)
ADDING = ("reduce", "reduce_scatter", "replicate")


class Kernel(NamedTuple):
    ops: tuple[Op, ...]


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_a_cast_moves_before_a_move_that_adds_nothing(kind):
    x, made, moved = (Tensor((8,), np.dtype(np.float32)) for _ in range(3))
    cast = Tensor((8,), jnp.dtype(jnp.bfloat16))
    ops = (
        Op("exp", (x,), (made,), {}),
        Op(kind, (made,), (moved,), move=Move(kind, ("x",), 0, 0, WHOLE, WHOLE)),
        Op("convert_element_type", (moved,), (cast,), {"new_dtype": jnp.bfloat16}),
    )
    kept = bf16_propagation(Graph((x,), (cast,), list(ops)), [Kernel((op,)) for op in ops])
    assert kept == ({moved} if kind in ADDING else {made, moved})
