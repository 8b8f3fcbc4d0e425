"""Time of kernels on one device (the slowest): what they ask of each of its parts, and the roofline over the parts.

Work adds up: that of a kernel is the sum over its ops, and the part that it keeps busy longest decides
(Williams, Waterman, Patterson: Roofline, https://doi.org/10.1145/1498765.1498785).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import NamedTuple

from unity_jax.cost.kernels import PRODUCTS, Counts, Use
from unity_jax.machine.device import Device
from unity_jax.ops.rule import Shard
from unity_jax.pcg.graph import Op

_ROWS = frozenset("gather scatter scatter-add scatter-sub scatter-mul scatter-max scatter-min".split())


class Work(NamedTuple):
    """Seconds that some ops keep each part of a device busy: its matrix unit, the writing of results, its vector unit,
    its memory, the memory on the chip; and the kernels they start."""

    matrix: float = 0.0
    results: float = 0.0
    vector: float = 0.0
    memory: float = 0.0
    chip: float = 0.0
    launches: int = 0

    def plus(self, other: Work) -> Work:
        return Work(*(a + b for a, b in zip(self, other, strict=True)))

    def seconds(self, device: Device) -> float:
        """How long it takes if all parts run at once."""
        return self.launches * device.kernel_overhead + max(self[:-1])


def total(works: Iterable[Work]) -> Work:
    return functools.reduce(Work.plus, works, Work())


def op_work(shard: Shard, device: Device, use: Use) -> Work:
    """The work of one op under one strategy."""
    op, counts, launches = shard.op, use.counts, use.launches
    if op.outputs and all(t.rank == 0 for t in (*op.inputs, *op.outputs)):
        return Work()  # scalar arithmetic: far below a kernel's start, and fused
    memory, chip = _traffic(shard, device, counts)
    results = 0.0
    if device.results_per_second:
        written = sum(n * math.prod(shard.result_shape(i)) for i, n in enumerate(counts[len(op.inputs) :]))
        results = written / device.results_per_second
    if op.name in PRODUCTS:
        return Work(_matrix(shard, device), results, 0.0, memory, chip, launches)
    return Work(0.0, results, shard.flops / device.flops_per_second("vector"), memory, chip, launches)


# Memory


def _traffic(shard: Shard, device: Device, counts: Counts) -> tuple[float, float]:
    """Seconds of memory and of memory on the chip."""
    op, memory, chip = shard.op, 0.0, 0.0
    if shard.rule.bytes is not None:
        nbytes = shard.rule.bytes(shard) if any(counts) else 0.0
        if op.name in _ROWS and nbytes and (padding := _row_padding(shard, device)) > 1:
            # The compiler keeps narrow arrays with their rows as lanes, and turns them for this op, and back.
            turned = shard.operand_bytes(0) + (shard.result_bytes() if op.name != "gather" else 0)
            nbytes = nbytes * padding + turned * (1 + padding)
        return nbytes / (device.memory_bandwidth * device.memory_efficiency), 0.0
    tensors, layouts = (*op.inputs, *op.outputs), (*shard.operand_layouts, *shard.result_layouts)
    minor = _minor_dims(op)
    for i, (t, layout, count) in enumerate(zip(tensors, layouts, counts, strict=True)):
        if count and t.literal is None:
            shape = layout.local_shape(t.shape, shard.mesh)
            stored = stored_bytes(device, shape, t.itemsize, minor[i])
            if stored > device.fast_bytes:
                memory += count * stored
            chip += count * stored
    memory /= device.memory_bandwidth * device.memory_efficiency
    return memory, chip / device.fast_bandwidth if device.fast_bandwidth else 0.0


@functools.lru_cache(maxsize=65536)
def stored_bytes(device: Device, shape: tuple[int, ...], itemsize: int, minor: tuple[int, ...] | None = None) -> float:
    """Bytes of an array in memory, padded to tiles in the order of dimensions that pads least.

    **Arguments:** `minor`: the dimensions that may come last (all of them by default).
    """
    n = math.prod(shape)
    sublanes, lanes = device.layout_tile
    if not lanes or not shape or not n:
        return float(n * itemsize)
    last = range(len(shape)) if minor is None or not minor else minor
    rows = {d: padded_rows(shape[d], sublanes) / shape[d] for d in range(len(shape))}
    padding = min(
        -(-shape[d] // lanes) * lanes / shape[d] * min((rows[e] for e in last if e != d), default=1.0) for d in last
    )
    return n * itemsize * padding


def padded_rows(n: int, sublanes: int) -> int:
    """XLA:TPU has smaller tiles for one, two and four rows."""
    return next((k for k in (1, 2, 4) if n <= k), -(-n // sublanes) * sublanes)


def _minor_dims(op: Op) -> list[tuple[int, ...] | None]:
    """Per operand and result, the dimensions that may come last in memory: those of a batch of products may not."""
    every: list[tuple[int, ...] | None] = [None] * (len(op.inputs) + len(op.outputs))
    if op.name == "dot_general":
        _, (lhs_b, rhs_b) = op.params["dimension_numbers"]
        if lhs_b:
            lhs, rhs = op.inputs
            every[0] = tuple(d for d in range(lhs.rank) if d not in lhs_b)
            every[1] = tuple(d for d in range(rhs.rank) if d not in rhs_b)
            every[2] = tuple(range(len(lhs_b), op.outputs[0].rank))
    return every


def _row_padding(shard: Shard, device: Device) -> float:
    """How much larger rows are in memory, where they are gathered or scattered one by one."""
    lanes = device.layout_tile[1]
    width = shard.operand_shape(0)[-1] if shard.op.inputs[0].rank > 1 else 1
    return -(-width // lanes) * lanes / width if lanes and width else 1.0


# Matrix products


def _matrix(shard: Shard, device: Device) -> float:
    batch, *sizes = product_size(shard)
    tiles = [math.ceil(n / tile) for n, tile in zip(sizes, device.matmul_tile, strict=True)]
    padding = math.prod(k * tile / n for k, n, tile in zip(tiles, sizes, device.matmul_tile, strict=True))
    at_once, waves = batch * tiles[0] * tiles[1], device.matmul_units
    padding *= math.ceil(at_once / waves) * waves / at_once
    rate = device.flops_per_second(shard.op.inputs[0].dtype) * device.matmul_efficiency
    return shard.flops * padding / rate


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
