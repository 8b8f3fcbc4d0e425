"""The kinds of ops that compilers tell apart when they fuse (`xla.targets.Fusing`).

XLA:TPU fuses any elementwise producer and consumer into its convolution; XLA:GPU takes producers that make the input of
a matmul no larger, and no consumers; its convolutions are calls of a library.
"""

from __future__ import annotations

import math

import numpy as np

from unity_jax.ops.indexing import compares
from unity_jax.ops.rules import is_pointwise
from unity_jax.pcg.graph import Op, Tensor
from unity_jax.xla.targets import Fusing

PRODUCTS = frozenset(["dot_general", "conv_general_dilated"])
REDUCTIONS = frozenset("reduce_sum reduce_max reduce_min reduce_and reduce_or reduce_prod argmax argmin".split())
SHAPES = frozenset("broadcast_in_dim iota transpose slice rev pad concatenate dynamic_slice".split())
"""Those that compute nothing of the elements they move."""


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
