"""Time of kernels on one device (the slowest): what they ask of each of its parts, and the roofline over the parts.

Work adds up: that of a kernel is the sum over its ops, and the part that it keeps busy longest decides
(Williams, Waterman, Patterson: Roofline, https://doi.org/10.1145/1498765.1498785).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from unity_jax.cost.attention import attention_seconds
from unity_jax.cost.persistent import persistent_seconds
from unity_jax.cost.products import grouping_bytes, matrix_seconds, strided_bytes, strip_elements
from unity_jax.machine.device import Device
from unity_jax.machine.tiling import WIDTH, stored_bytes, turning_bytes
from unity_jax.ops.indexing import addresses_rows, compares, masking_bytes
from unity_jax.ops.numbers import is_gather, is_scatter
from unity_jax.ops.own_rows import AT_ONCE, SUMMED, own_rows, row_bytes
from unity_jax.ops.persistent import NAME
from unity_jax.ops.rule import Shard
from unity_jax.xla.convolutions import is_kernel_gradient
from unity_jax.xla.dots import is_vector_product, split
from unity_jax.xla.kernel import Use
from unity_jax.xla.layout_constraints import THIN
from unity_jax.xla.op_classes import KERNELS, PRODUCTS, REDUCTIONS, is_batched
from unity_jax.xla.targets import target_of


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

    def seconds(self, device: Device) -> float:
        """How long it takes if all parts run at once."""
        busy = max(self.matrix, self.results, self.vector, max(self.memory, self.chip) + self.swept)
        return self.launches * device.kernel_overhead + busy + self.turned


def total(works: Iterable[Work]) -> Work:
    """The sum of some work, from the first to the last."""
    matrix = results = vector = memory = chip = swept = turned = 0.0
    launches = 0
    for work in works:
        matrix += work.matrix
        results += work.results
        vector += work.vector
        memory += work.memory
        chip += work.chip
        swept = max(swept, work.swept)
        turned += work.turned
        launches += work.launches
    return Work(matrix, results, vector, memory, chip, swept, turned, launches)


def op_work(shard: Shard, device: Device, use: Use) -> Work:
    """The work of one op under one strategy."""
    known, key = shard.works, (device, use)
    work: Work | None = known.get(key)
    if work is None:
        work = known[key] = _work(shard, device, use)
    return work


def _work(shard: Shard, device: Device, use: Use) -> Work:
    op, counts, launches = shard.op, use.counts, use.launches
    if op.outputs and all(t.rank == 0 for t in (*op.inputs, *op.outputs)):
        return Work()  # scalar arithmetic: far below a kernel's start, and fused
    memory, chip, turned = _traffic(shard, device, use)
    if op.name in KERNELS:
        matrix = persistent_seconds(shard, device) if op.name == NAME else attention_seconds(shard, device)
        return Work(matrix, 0.0, 0.0, memory, chip, 0.0, turned, launches)
    swept = _sweep(shard, device, use) + _addressing(shard, device, use)
    if _is_elementwise(shard, device) or (op.name not in PRODUCTS and not use.rides):
        vector = shard.flops / device.flops_per_second("vector")
        return Work(0.0, 0.0, vector, memory, chip, swept, turned, launches)
    results = 0.0
    if device.results_per_second:
        chip = 0.0  # the matrix unit takes what is on the chip at its own rate
        for i, n in enumerate(counts[len(op.inputs) :]):
            # XLA:TPU sums in HBM.
            fits = shard.result_bytes(i) <= device.fast_bytes and not use.summed
            rate = fits * device.fast_results_per_second or device.results_per_second
            results += n * math.prod(shard.result_shape(i)) / rate
    if op.name in PRODUCTS:
        if target_of(device).library and op.name == "dot_general" and (parts := split(shard)).count > 1:
            # Each operand that is padded is copied before, by a kernel of its own. The parts are added up after, by one
            # more if what reads the result cannot do that.
            turned += 2 * (parts.padded + parts.parts) / (device.memory_bandwidth * device.memory_efficiency)
            turned += (1 - use.in_parts + 2 * bool(parts.padded)) * device.kernel_overhead
        matrix = matrix_seconds(shard, device)
        if op.name == "conv_general_dilated" and target_of(device).lanes:
            matrix += strided_bytes(shard, device) / (device.memory_bandwidth * device.memory_efficiency)
            turned += strip_elements(shard, device) / device.unfused_per_second if device.unfused_per_second else 0.0
        return Work(matrix, results, 0.0, memory, chip, swept, turned, launches)
    vector = shard.flops / device.flops_per_second("vector")
    return Work(0.0, results, vector, memory, chip, 0.0, turned, launches)


def _is_elementwise(shard: Shard, device: Device) -> bool:
    """Whether it is a product that the matrix unit has no part in."""
    return target_of(device).vectors and shard.op.name == "dot_general" and is_vector_product(shard)


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
    kernel rounds to less or reduces, as if they went through memory, or that take more room in registers because they
    lie in thin rows; and over all of them in a kernel of one instruction, which is no fusion."""
    op, seconds = shard.op, 0.0
    if not target_of(device).sweeps or shard.rule.bytes is not None or not any(use.counts):
        return 0.0
    if op.name in PRODUCTS and not is_batched(op):
        return 0.0  # hidden behind the arithmetic
    at, shape = len(op.inputs), shard.result_shape()
    adds = op.name in REDUCTIONS or _is_elementwise(shard, device)
    if adds:
        at = max(range(at), key=lambda i: math.prod(shard.operand_shape(i)))
        shape = shard.operand_shape(at)
    elif not use.counts[at]:
        return 0.0
    thin = bool(use.rows) and use.rows[at] == THIN
    minor = _minor_dims(shard, device, use)[at]
    elements = stored_bytes(device, shape, 1, minor, device.layout_tile[:1])
    if adds or thin or op.outputs[0].itemsize < WIDTH:
        seconds += elements * WIDTH / (device.memory_bandwidth * device.memory_efficiency)
    if use.alone and op.name not in PRODUCTS and device.unfused_per_second:
        seconds += elements / device.unfused_per_second
    return seconds


_DIRECT, _IN_PLACE, _UNSORTED, _NARROW = 0.4, 0.55, 3.7, 1.4
_SORTING, _OWN = 0.06, 0.64
"""How long a row takes against one of sorted rows of float32 that are added to zeros: to a table on the chip, to a
table that is there, unsorted, and of values of less than 32 bits; to be sorted out, and then added (schedules of
kernels for v5e, v5p and v6e)."""


def _addressing(shard: Shard, device: Device, use: Use) -> float:
    """Seconds in which rows are read or added to by index, one after the other, besides their traffic."""
    op = shard.op
    if not addresses_rows(op) or compares(op) or not any(use.counts):
        return 0.0
    own = _own_rows(shard, device)
    only_read = is_gather(op) and not own
    rate = device.gathered_rows_per_second if only_read else device.scattered_rows_per_second
    if not rate:
        return 0.0
    seconds = _ids(shard) / rate
    if own:
        return _SORTING * seconds + _OWN * own / rate
    if only_read:
        return seconds + (0.0 if SUMMED in op.params else _masking_seconds(shard, device))
    if _table_bytes(shard, device) <= AT_ONCE:
        return _DIRECT * seconds
    if not _is_sorted(shard, device):
        return _UNSORTED * seconds
    if op.outputs[0].itemsize < WIDTH:
        return _NARROW * seconds
    return seconds if use.zeros else _IN_PLACE * seconds


def _masking_seconds(shard: Shard, device: Device) -> float:
    """Seconds in which XLA:TPU masks the rows that other devices have: a kernel behind the gather, which computes two
    selections of thin rows."""
    nbytes = masking_bytes(shard)
    if not nbytes:
        return 0.0
    shape = shard.result_shape()
    selected = stored_bytes(device, shape, 1, (len(shape) - 1,), device.layout_tile[:1])
    return (nbytes + 2 * selected * WIDTH) / (device.memory_bandwidth * device.memory_efficiency)


def _is_sorted(shard: Shard, device: Device) -> bool:
    """Whether XLA:TPU sorts the rows of a scatter, as it does if they outnumber the tiles of the table: then the table
    goes through the chip part by part. Otherwise each row waits for its tile."""
    if not target_of(device).sorts or not is_scatter(shard.op) or _table_bytes(shard, device) <= AT_ONCE:
        return False
    return _ids(shard) * device.layout_tile[0] > math.prod(shard.result_shape()[:-1])


def _ids(shard: Shard) -> int:
    return math.prod(shard.operand_shape(1)[:-1])


def _own_rows(shard: Shard, device: Device) -> int:
    """How many rows it adds of those of all, see `own_rows`; 0 where it goes through them all."""
    return own_rows(shard) if target_of(device).sorts else 0


def _own_bytes(shard: Shard, own: int, use: Use) -> float:
    """What is moved of so many rows, each read, and added to what is read and written; and to make what they are added
    to, if that is zeros, or one term of a sum."""
    made = shard.result_bytes() if use.zeros or is_gather(shard.op) else masking_bytes(shard)
    return 3.0 * own * row_bytes(shard) + made


def _table_bytes(shard: Shard, device: Device) -> float:
    shape = shard.result_shape()
    return stored_bytes(device, shape, shard.op.outputs[0].itemsize, (len(shape) - 1,))


# Memory


def _traffic(shard: Shard, device: Device, use: Use) -> tuple[float, float, float]:
    """Seconds of memory, of memory on the chip, and of turning arrays for this op or after it."""
    op, counts, memory, chip, turned = shard.op, use.counts, 0.0, 0.0, 0.0
    bandwidth = device.memory_bandwidth * device.memory_efficiency
    tensors = (*op.inputs, *op.outputs)
    minor = _minor_dims(shard, device, use)
    for i, allowed in enumerate(minor):
        if allowed is not None and counts[i] and (not use.rows or use.rows[i] not in (1, THIN)):
            shape, itemsize = shard.shapes[i], tensors[i].itemsize
            least, other = stored_bytes(device, shape, itemsize), stored_bytes(device, shape, itemsize, allowed)
            turned += turning_bytes(device, itemsize, least, other)
    if op.name == "conv_general_dilated":
        turned += grouping_bytes(shard, device)
    turned += _joining_bytes(shard, device)
    turned /= bandwidth
    if shard.rule.bytes is not None and not (target_of(device).fusing.by_position and compares(op)):
        nbytes = shard.rule.bytes(shard) if any(counts) else 0.0
        if any(counts) and (own := _own_rows(shard, device)):
            return _own_bytes(shard, own, use) * _row_padding(shard, device) / bandwidth, 0.0, turned
        if any(counts) and _is_sorted(shard, device):
            nbytes = (1 if use.zeros else 2) * shard.result_bytes()
        elif is_scatter(op) and not counts[0] and counts[len(op.inputs)]:
            nbytes += shard.result_bytes()  # the operand is a constant, and written here
        if is_scatter(op):
            nbytes += counts[1] * shard.operand_bytes(1) + counts[2] * shard.operand_bytes(2)
            nbytes += 0.0 if use.zeros else masking_bytes(shard)
        if addresses_rows(op):
            nbytes *= _row_padding(shard, device)
        return nbytes / bandwidth, 0.0, turned
    for i, (t, shape, count) in enumerate(zip(tensors, shard.shapes, counts, strict=True)):
        if count and t.literal is None:
            stored = stored_bytes(device, shape, t.itemsize, minor[i])
            if stored > device.fast_bytes:
                memory += count * stored
            chip += count * stored
    return memory / bandwidth, chip / device.fast_bandwidth if device.fast_bandwidth else 0.0, turned


def _joining_bytes(shard: Shard, device: Device) -> float:
    """Bytes that go through memory to join what neighbours send to an operand: a pass, on XLA:TPU also over float32
    values (`_sweep`). There a kernel gradient takes the images as they were joined for the convolution."""
    if not any(f.halo for f in shard.rule.factors) or shard.rule.inner is None or not shard.rule.inner(shard):
        return 0.0
    target, itemsize = target_of(device), shard.op.inputs[0].itemsize
    if target.lanes and shard.op.name == "conv_general_dilated" and is_kernel_gradient(shard):
        return 0.0
    joined = stored_bytes(device, shard.operand_shape(0), itemsize)
    return 2 * joined + (joined / itemsize * WIDTH if target.sweeps and itemsize < WIDTH else 0.0)


def _minor_dims(shard: Shard, device: Device, use: Use) -> list[tuple[int, ...] | None]:
    """Per operand and result, the dimensions that may come last in memory: those of a batch of products may not; of
    what lies row by row only the last one does."""
    op = shard.op
    every: list[tuple[int, ...] | None] = [None] * (len(op.inputs) + len(op.outputs))
    for i, (t, lies) in enumerate(zip((*op.inputs, *op.outputs), use.rows, strict=False)):
        if lies:
            every[i] = (t.rank - 1,)
    if op.name == "dot_general" and not _is_elementwise(shard, device):
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
