"""Which values XLA:TPU keeps in half of their bytes, because nothing needs the others.

    add_any    float32   add     read by two matmuls alone, whose units take bfloat16
    combine    float32   gathered weights that are cast to bfloat16

Matrix units take operands of bfloat16 at the default precision, so that what only they read is rounded when it is
written; a cast moves before what only moves data, collectives among it
(https://openxla.org/xla/operation_semantics#dot, `PrecisionConfig`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import jax
import numpy as np

from unity_jax.pcg.graph import Graph, Op, Tensor
from unity_jax.pcg.parallel import COLLECTIVES
from unity_jax.xla.kernel import Kernel
from unity_jax.xla.op_classes import NARROWED_THROUGH, PRODUCTS, REDUCTIONS

_MOVES = frozenset(COLLECTIVES) - {"reduce", "reduce_scatter", "replicate"}  # these add, or put zeros in place


def bf16_propagation(graph: Graph, kernels: Iterable[Kernel]) -> set[Tensor]:
    """The float32 values of a graph that are kept in bfloat16; its results are not.

    **Arguments:** `kernels`: of the graph.
    """
    of = {op: i for i, kernel in enumerate(kernels) for op in kernel.ops}
    found: set[Tensor] = set()
    for op in reversed(graph.ops):
        for t in op.outputs:
            others = [r for r in graph.readers.get(t, ()) if r not in of or of[r] != of.get(op)]
            others = [r for r in others if r.name not in REDUCTIONS]  # they run with what makes their operand
            round_it = (_rounds(r) or any(o in found for o in _moved(t, r)) for r in others)
            if t.dtype == np.float32 and others and t not in graph.outputs and all(round_it):
                found.add(t)
    return found


def _moved(t: Tensor, op: Op) -> Sequence[Tensor]:
    """What an op that only moves an operand makes of it."""
    if op.name == "optimization_barrier":
        return [o for i, o in zip(op.inputs, op.outputs, strict=True) if i is t]
    move = op.move
    only = op.name in NARROWED_THROUGH if move is None else move.kind in _MOVES
    return op.outputs[:1] if only else []


def _rounds(op: Op) -> bool:
    """Whether an op takes no more than bfloat16 of its operands."""
    if op.name in PRODUCTS:
        precision = op.params.get("precision")
        return precision in (None, jax.lax.Precision.DEFAULT, (jax.lax.Precision.DEFAULT,) * 2)
    return op.name == "convert_element_type" and op.params["new_dtype"] == jax.numpy.bfloat16
