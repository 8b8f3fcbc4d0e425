"""Sizes of dots on one device, and what XLA makes of their depth: XLA:GPU splits it (`split`)."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from unity_jax.ops.rule import Shard


def product_size(shard: Shard) -> tuple[int, int, int, int]:
    """Products in a batch, and the rows, columns and depth of each, on one device (at least 1)."""
    lhs, rhs, out = (math.prod(s) for s in (shard.operand_shape(0), shard.operand_shape(1), shard.result_shape()))
    params = shard.op.params
    if shard.op.name == "dot_general":
        (lhs_k, _), (lhs_b, _) = params["dimension_numbers"]
        shape = shard.operand_shape(0)
        batch, depth = math.prod(shape[d] for d in lhs_b), math.prod(shape[d] for d in lhs_k)
        rows, columns = lhs // max(batch * depth, 1), rhs // max(batch * depth, 1)
    else:
        batch = params["feature_group_count"] * params["batch_group_count"]
        features = shard.operand_shape(1)[params["dimension_numbers"].rhs_spec[0]]
        rows, columns, depth = out // max(features, 1), features // batch, rhs // max(features, 1)
    return max(batch, 1), max(rows, 1), max(columns, 1), max(depth, 1)


def is_vector_product(shard: Shard) -> bool:
    """Whether it is a batch of vectors times matrices on one device: XLA:TPU multiplies and adds those up element by
    element, outside of the matrix unit (all but one of the ten probed on v5e, the one with the smallest batch)."""
    _, (batch, _) = shard.op.params["dimension_numbers"]
    return bool(batch) and 1 in product_size(shard)[1:3]


_PARTS = tuple(2**i for i in range(12))
_TILE, _UNITS = 128, 132
_COMPUTING, _MOVING, _ADDING, _LAUNCH = 100.0, 0.194136, 193.1384, 4.36e7
"""XLA:GPU splits the depth of a matmul into the parts whose cost is least by its own count: of the operations of a tile
for each wave of tiles over the multiprocessors or of the bytes read and written, whichever costs more, of the bytes
that are added up and of one launch for that; here as for an H100
(https://github.com/openxla/xla/blob/main/xla/backends/gpu/transforms/splitk_rewriter.cc)."""
_ALIGNED = 16
"""Bytes: what a part begins with lies at a multiple of it."""


class Split(NamedTuple):
    """A matmul that XLA:GPU computes in parts of its depth: how many, bytes of their float32 results, which are then
    added, and of both operands in one type, padded so that every part is as deep and reads are aligned."""

    count: int = 1  # type: ignore[assignment]  # a tuple has a method of this name
    parts: float = 0.0
    padded: float = 0.0


def split(shard: Shard) -> Split:
    return _split(*product_size(shard), *(t.itemsize for t in (*shard.op.inputs, shard.op.outputs[0])))


@functools.lru_cache(maxsize=4096)
def _split(batch: int, rows: int, columns: int, depth: int, lhs: int, rhs: int, made: int) -> Split:
    """Of a product of these sizes; `lhs`, `rhs`, `made`: bytes of an element of the operands and the result."""
    results, partial = batch * rows * columns, max(made, 4)
    area = min(rows, _TILE) * min(columns, _TILE)

    def cost(parts: int) -> float:
        tiles = batch * parts * math.ceil(rows / _TILE) * math.ceil(columns / _TILE)
        waves = max(1.0, tiles * area / (_UNITS * _TILE**2))  # small tiles share a multiprocessor
        written = results * (parts * partial if parts > 1 else made)
        moved = batch * depth * (rows * lhs + columns * rhs) + written
        once = max(2 * area * math.ceil(depth / parts) * waves * _COMPUTING, moved * _MOVING)
        return once + (_LAUNCH + (written + results * made) * _ADDING if parts > 1 else 0.0)

    parts = min(_PARTS, key=cost)
    if parts == 1:
        return Split()
    itemsize = max(lhs, rhs)
    whole = parts * max(_ALIGNED // itemsize, 1)
    padded = batch * (rows + columns) * math.ceil(depth / whole) * whole * itemsize if depth % whole else 0
    return Split(parts, 4.0 * parts * results, padded)
