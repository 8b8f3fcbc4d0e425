"""What the compilers fuse, and the kinds of ops that they tell apart.

XLA:TPU fuses any elementwise producer and consumer into its convolution; XLA:GPU takes producers that make the input of
a matmul no larger, and no consumers; its convolutions are calls of a library.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from unity_jax.ops.indexing import compares
from unity_jax.ops.rule import is_pointwise
from unity_jax.pcg.graph import Op, Tensor

PRODUCTS = frozenset(["dot_general", "conv_general_dilated"])
REDUCTIONS = frozenset("reduce_sum reduce_max reduce_min reduce_and reduce_or reduce_prod argmax argmin".split())
SHAPES = frozenset("broadcast_in_dim iota transpose slice rev pad concatenate dynamic_slice".split())
"""Those that compute nothing of the elements they move."""
_COSTLY = frozenset("exp exp2 expm1 log log1p logistic tanh sin cos erf erf_inv erfc pow rsqrt sqrt div".split())
ACTIVATIONS = frozenset("erf erfc logistic".split())
"""Those that XLA:TPU computes again, in the backward pass that is: what they are of is there, too."""


@dataclass(frozen=True)
class Fusing:
    """What a compiler fuses.

    With matmuls: `grows`: producers whose operands are larger than their result, in every dot that reads them;
    `epilogue`: elementwise consumers and reductions; `softmax`: what follows a reduction of the rows of a batch of
    products. `by_position`: what can be computed from an element's position is elementwise: random bits hash it, a
    scatter of one element per row compares it, and other scatters fill in a constant operand themselves. `tiles`:
    arrays lie in tiles, so that it matters which dimension comes last. `costly`: functions that are computed once, for
    all readers. `repeats`: these, too, are computed
    by every reader, gathers and windows included, if one is no loop and that moves no more bytes (`PriorityFusion` of
    XLA:GPU, which weighs time). `siblings`: equal constants are one array if one of them has to be in memory, and loops
    and reductions over as many elements that read that array are one kernel, as are reductions of any array
    (`MultiOutputFusion` of XLA:GPU).
    """

    grows: bool = False
    epilogue: bool = False
    softmax: bool = False
    by_position: bool = False
    tiles: bool = False
    costly: frozenset[str] = _COSTLY
    repeats: bool = False
    siblings: bool = False


FUSING = {
    "tpu": Fusing(grows=True, epilogue=True, softmax=True, by_position=True, tiles=True, costly=_COSTLY - ACTIVATIONS),
    "gpu": Fusing(repeats=True, siblings=True),
    "cpu": Fusing(),
}


def is_loop(op: Op, fusing: Fusing) -> bool:
    """Whether every result element takes few operand elements, so that it can be computed where it is used."""
    if op.bodies:
        return False
    if fusing.by_position and (op.name == "random_bits" or compares(op)):
        return True
    if (move := op.params.get("move")) is not None:
        return move.kind in ("partition", "replicate")
    return op.name in SHAPES or is_pointwise(op)


def is_batched(op: Op) -> bool:
    """Whether it is a batch of products."""
    return op.name == "dot_general" and bool(op.params["dimension_numbers"][1][0])


def is_zero(op: Op) -> bool:
    """Whether it makes an array of zeros."""
    values = [t.literal for t in op.inputs]
    return op.name == "broadcast_in_dim" and all(v is not None and not np.any(v) for v in values)


def elements(t: Tensor) -> int:
    return math.prod(t.shape)


def space(op: Op) -> int:
    """Elements that a loop or a reduction runs over."""
    return elements(op.inputs[0] if op.name in REDUCTIONS else op.outputs[0])
