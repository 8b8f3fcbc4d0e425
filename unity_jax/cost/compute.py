"""Time of kernels on one device (the slowest): what they ask of each of its parts, and the roofline over the parts.

Work adds up: that of a kernel is the sum over its ops, and the part that it keeps busy longest decides
(Williams, Waterman, Patterson: Roofline, https://doi.org/10.1145/1498765.1498785).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import NamedTuple

from unity_jax.cost.kernels import PRODUCTS, REDUCTIONS, Use, is_batched
from unity_jax.machine.device import Device
from unity_jax.ops.indexing import compares, is_scatter
from unity_jax.ops.rule import Shard
from unity_jax.pcg.graph import Op

_ROWS = frozenset("gather scatter scatter-add scatter-sub scatter-mul scatter-max scatter-min".split())


class Work(NamedTuple):
    """Seconds that some ops keep each part of a device busy: its matrix unit, the writing of results, its vector unit,
    its memory, the memory on the chip; the longest pass over elements, which adds to the traffic; the turning of
    arrays, which goes before or after; and the kernels they start."""

    matrix: float = 0.0
    results: float = 0.0
    vector: float = 0.0
    memory: float = 0.0
    chip: float = 0.0
    swept: float = 0.0
    turned: float = 0.0
    launches: int = 0

    def plus(self, other: Work) -> Work:
        added = Work(*(a + b for a, b in zip(self, other, strict=True)))
        return added._replace(swept=max(self.swept, other.swept))

    def seconds(self, device: Device) -> float:
        """How long it takes if all parts run at once."""
        busy = max(self.matrix, self.results, self.vector, max(self.memory, self.chip) + self.swept)
        return self.launches * device.kernel_overhead + busy + self.turned


def total(works: Iterable[Work]) -> Work:
    return functools.reduce(Work.plus, works, Work())


def op_work(shard: Shard, device: Device, use: Use) -> Work:
    """The work of one op under one strategy."""
    op, counts, launches = shard.op, use.counts, use.launches
    if op.outputs and all(t.rank == 0 for t in (*op.inputs, *op.outputs)):
        return Work()  # scalar arithmetic: far below a kernel's start, and fused
    memory, chip, turned = _traffic(shard, device, use)
    swept = _sweep(shard, device, use)
    if op.name not in PRODUCTS and not use.rides:
        vector = shard.flops / device.flops_per_second("vector")
        return Work(0.0, 0.0, vector, memory, chip, swept, turned, launches)
    results = 0.0
    if device.results_per_second:
        chip = 0.0  # the matrix unit takes what is on the chip at its own rate
        written = sum(n * math.prod(shard.result_shape(i)) for i, n in enumerate(counts[len(op.inputs) :]))
        results = written / device.results_per_second
    if op.name in PRODUCTS:
        return Work(_matrix(shard, device), results, 0.0, memory, chip, swept, turned, launches)
    vector = shard.flops / device.flops_per_second("vector")
    return Work(0.0, results, vector, memory, chip, 0.0, turned, launches)


def fill_seconds(device: Device, shape: tuple[int, ...], itemsize: int) -> float:
    """Seconds to fill an array with a constant."""
    nbytes = stored_bytes(device, shape, itemsize)
    unfused = nbytes / itemsize / device.unfused_per_second if device.unfused_per_second else 0.0
    return device.kernel_overhead + nbytes / (device.memory_bandwidth * device.memory_efficiency) + unfused


def copy_seconds(device: Device, shape: tuple[int, ...], itemsize: int) -> float:
    """Seconds to copy an array."""
    nbytes = 2 * stored_bytes(device, shape, itemsize)
    return device.kernel_overhead + nbytes / (device.memory_bandwidth * device.memory_efficiency)


def _sweep(shard: Shard, device: Device, use: Use) -> float:
    """Seconds of the passes over elements that XLA:TPU counts besides the traffic: over the float32 values that a
    kernel rounds to less or reduces, as if they went through memory; and over all of them in a kernel of one
    instruction, which is no fusion."""
    op, seconds = shard.op, 0.0
    if device.compiler != "tpu" or shard.rule.bytes is not None or not any(use.counts):
        return 0.0
    if op.name in PRODUCTS and not is_batched(op):
        return 0.0  # hidden behind the arithmetic
    at, shape = len(op.inputs), shard.result_shape()
    if op.name in REDUCTIONS:
        at, shape = 0, shard.operand_shape(0)
    elif not use.counts[at]:
        return 0.0
    minor = _minor_dims(op, use)[at]
    elements = stored_bytes(device, shape, 1, minor, device.layout_tile[:1])
    if op.name in REDUCTIONS or op.outputs[0].itemsize < _WIDTH:
        seconds += elements * _WIDTH / (device.memory_bandwidth * device.memory_efficiency)
    if use.alone and op.name not in PRODUCTS and device.unfused_per_second:
        seconds += elements / device.unfused_per_second
    return seconds


_WIDTH = 4
"""Bytes of an element in vector registers."""


# Memory


def _traffic(shard: Shard, device: Device, use: Use) -> tuple[float, float, float]:
    """Seconds of memory, of memory on the chip, and of turning arrays for this op or after it."""
    op, counts, memory, chip, turned = shard.op, use.counts, 0.0, 0.0, 0.0
    bandwidth = device.memory_bandwidth * device.memory_efficiency
    tensors, layouts = (*op.inputs, *op.outputs), (*shard.operand_layouts, *shard.result_layouts)
    minor = _minor_dims(op, use)
    for i, allowed in enumerate(minor):
        if allowed is not None and counts[i] and (not use.rows or use.rows[i] != 1):
            shape, itemsize = layouts[i].local_shape(tensors[i].shape, shard.mesh), tensors[i].itemsize
            least, other = stored_bytes(device, shape, itemsize), stored_bytes(device, shape, itemsize, allowed)
            turned += _turning(device, itemsize, least, other)
    if op.name == "conv_general_dilated" and device.layout_tile[1]:
        turned += _grouped(shard, device)
    turned /= bandwidth
    if shard.rule.bytes is not None and not (device.compiler == "tpu" and compares(op)):
        nbytes = shard.rule.bytes(shard) if any(counts) else 0.0
        if is_scatter(op) and not counts[0] and any(counts):
            nbytes += shard.result_bytes()  # the operand is a constant, and written here
        if op.name in _ROWS:
            nbytes *= _row_padding(shard, device)
        return nbytes / bandwidth, 0.0, turned
    for i, (t, layout, count) in enumerate(zip(tensors, layouts, counts, strict=True)):
        if count and t.literal is None:
            shape = layout.local_shape(t.shape, shard.mesh)
            stored = stored_bytes(device, shape, t.itemsize, minor[i])
            if stored > device.fast_bytes:
                memory += count * stored
            chip += count * stored
    return memory / bandwidth, chip / device.fast_bandwidth if device.fast_bandwidth else 0.0, turned


def _turning(device: Device, itemsize: int, least: float, other: float) -> float:
    """Bytes that go through memory to turn an array of so many bytes into another order of dimensions: both, and as in
    `_sweep` float32 values where they are wider and do not stay on the chip."""
    if other <= least:
        return 0.0
    return least + other + (other / itemsize * _WIDTH if itemsize < _WIDTH and other > device.fast_bytes else 0.0)


def _grouped(shard: Shard, device: Device) -> float:
    """Bytes that go through memory to take groups and features of images apart for a grouped convolution, and to put
    them together: a kernel gradient takes two arrays of images, the others take and make one."""
    numbers, (lhs, rhs, out) = shard.op.params["dimension_numbers"], _conv_shapes(shard)
    groups, *_ = _groups(shard)
    if groups == 1:
        return 0.0
    x, y = shard.op.inputs
    batch, channels, *rest = (lhs[d] for d in numbers.lhs_spec)
    if shard.op.params["feature_group_count"] > 1:
        made, features, *more = (out[d] for d in numbers.out_spec)
        images = [(batch, rest, channels, x), (made, more, features, shard.op.outputs[0])]
    else:
        features, made, *more = (rhs[d] for d in numbers.rhs_spec)
        images = [(channels, rest, batch, x), (made, more, features, y)]
    found = 0.0
    for n, spatial, features, t in images:
        apart = (n, *spatial, groups, features // groups)
        together = stored_bytes(device, (n, *spatial, features), t.itemsize)
        found += _turning(device, t.itemsize, together, stored_bytes(device, apart, t.itemsize, (0, len(apart) - 1)))
    return found


def _conv_shapes(shard: Shard) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    return shard.operand_shape(0), shard.operand_shape(1), shard.result_shape()


def _groups(shard: Shard) -> tuple[int, int, int, int]:
    """The groups of a convolution on one device; per group its images, features made and features taken (of a kernel
    gradient in other roles)."""
    numbers, (lhs, rhs, out) = shard.op.params["dimension_numbers"], _conv_shapes(shard)
    images, depth = out[numbers.out_spec[0]], rhs[numbers.rhs_spec[1]]
    groups = max(lhs[numbers.lhs_spec[1]] // max(depth, 1), 1) * max(lhs[numbers.lhs_spec[0]] // max(images, 1), 1)
    return groups, images, rhs[numbers.rhs_spec[0]] // groups, depth


@functools.lru_cache(maxsize=65536)
def stored_bytes(
    device: Device,
    shape: tuple[int, ...],
    itemsize: int,
    minor: tuple[int, ...] | None = None,
    fewer: tuple[int, ...] = (1, 2, 4),
) -> float:
    """Bytes of an array in memory, padded to tiles in the order of dimensions that pads least.

    **Arguments:** `minor`: the dimensions that may come last (all of them by default); `fewer`: tiles of fewer rows,
    which XLA:TPU has in memory and not in registers.
    """
    n = math.prod(shape)
    sublanes, lanes = device.layout_tile
    if not lanes or not shape or not n:
        return float(n * itemsize)
    last = range(len(shape)) if minor is None or not minor else minor
    rows = {d: _padded_rows(shape[d], sublanes, fewer) / shape[d] for d in range(len(shape))}
    padding = min(
        -(-shape[d] // lanes) * lanes / shape[d] * min((rows[e] for e in last if e != d), default=1.0) for d in last
    )
    return n * itemsize * padding


def _padded_rows(n: int, sublanes: int, fewer: tuple[int, ...]) -> int:
    return next((k for k in fewer if n <= k), -(-n // sublanes) * sublanes)


def _minor_dims(op: Op, use: Use) -> list[tuple[int, ...] | None]:
    """Per operand and result, the dimensions that may come last in memory: those of a batch of products may not; of
    what lies row by row only the last one does."""
    every: list[tuple[int, ...] | None] = [None] * (len(op.inputs) + len(op.outputs))
    for i, (t, lies) in enumerate(zip((*op.inputs, *op.outputs), use.rows, strict=False)):
        if lies:
            every[i] = (t.rank - 1,)
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
    return max(lanes / width, 1.0) if width else 1.0


# Matrix products


def _matrix(shard: Shard, device: Device) -> float:
    if shard.op.name == "conv_general_dilated" and device.compiler == "tpu":
        return _convolution(shard, device)
    batch, *sizes = product_size(shard)
    tiles = [math.ceil(n / tile) for n, tile in zip(sizes, device.matmul_tile, strict=True)]
    padding = math.prod(k * tile / n for k, n, tile in zip(tiles, sizes, device.matmul_tile, strict=True))
    at_once, waves = batch * tiles[0] * tiles[1], device.matmul_units
    padding *= math.ceil(at_once / waves) * waves / at_once
    rate = device.flops_per_second(shard.op.inputs[0].dtype) * device.matmul_efficiency
    return shard.flops * padding / rate


def _convolution(shard: Shard, device: Device) -> float:
    """Seconds of the matrix unit of a TPU for a convolution.

    Grouped: XLA:TPU keeps the images in lanes and multiplies per group, position of the result and of the window. Else
    the window is taken in parts with as many dimensions of it as fill the depth of a tile, but in a kernel gradient,
    where it is the image.
    """
    groups, *sizes = _groups(shard)
    least, *tile = device.matmul_tile
    rate = device.flops_per_second(shard.op.inputs[0].dtype) * device.matmul_efficiency
    if groups > 1:
        sizes = sorted(sizes)
        tiles = (least, *tile)
    else:
        numbers, (_, rhs, out) = shard.op.params["dimension_numbers"], _conv_shapes(shard)
        window, made = [rhs[d] for d in numbers.rhs_spec[2:]], [out[d] for d in numbers.out_spec[2:]]
        gradient = math.prod(window) > math.prod(made)
        depth = rhs[numbers.rhs_spec[1]]
        for n in reversed(window):
            if gradient or depth * n <= tile[1]:
                depth *= n
        sizes = [sizes[0] * math.prod(made), sizes[1], depth]
        tiles = (least, *tile)
    padding = math.prod(math.ceil(n / k) * k / n for n, k in zip(sizes, tiles, strict=True) if n)
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
