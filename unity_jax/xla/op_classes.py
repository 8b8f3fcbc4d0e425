"""The classes of ops that compilers tell apart: one table of names, and what is told by more than a name.

XLA:TPU fuses any elementwise producer and consumer into its convolution; XLA:GPU takes producers that make the input of
a matmul no larger, and no consumers; its convolutions are calls of a library.
"""

from __future__ import annotations

import math

import numpy as np

from unity_jax.ops.attention import OPS
from unity_jax.ops.bags import GATHER
from unity_jax.ops.indexing import compares
from unity_jax.ops.persistent import NAME
from unity_jax.ops.rules import is_pointwise
from unity_jax.pcg.graph import Op, Tensor
from unity_jax.pcg.parallel import SPILLED
from unity_jax.xla.targets import Fusing

PRODUCTS = frozenset(["dot_general", "conv_general_dilated"])
REDUCTIONS = frozenset("reduce_sum reduce_max reduce_min reduce_and reduce_or reduce_prod argmax argmin".split())
WINDOWS = frozenset(["reduce_window_max", "reduce_window_sum"])
READERS = WINDOWS | {"gather", "select_and_scatter_add"}
"""Those that XLA:GPU computes their operands in, though they may read an element many times."""

BITCASTS = frozenset("reshape squeeze expand_dims optimization_barrier copy sharding_constraint".split())
"""Those whose result is their operand, seen differently."""
_REORDERS = frozenset("broadcast_in_dim transpose slice rev".split())
JOINS = frozenset(["concatenate", "pad"])
"""What no matmul computes while it reads."""
SHAPES = _REORDERS | JOINS | {"iota", "dynamic_slice"}
"""Those that compute nothing of the elements they move."""
NARROWED_THROUGH = _REORDERS | {"reshape", "squeeze", "copy"}
"""What bf16 propagation looks through."""
ROW_PRESERVING = frozenset("reshape optimization_barrier copy".split())
"""Those that leave the rows of an array as they lie."""
KERNELS = frozenset([*OPS, NAME])
"""Those that are kernels of ours (`unity_jax.kernels`)."""
IN_PLACE_NEVER = PRODUCTS | KERNELS | {"gather", GATHER, "sort", "all_to_all"}
"""Kernels that cannot write over what they read."""


def is_loop(op: Op, fusing: Fusing) -> bool:
    """Whether every result element takes few operand elements, so that it can be computed where it is used."""
    if op.bodies:
        return False
    if fusing.by_position and (op.name == "random_bits" or compares(op)):
        return True
    if op.move is not None:
        through_link = op.name == "from_host" and fusing.reads_host and SPILLED not in op.params
        return op.move.kind in ("partition", "replicate") or through_link
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
