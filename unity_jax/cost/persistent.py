"""Time of the arithmetic of a loop as one kernel (`kernels.persistent`)."""

from __future__ import annotations

from unity_jax.cost.products import matrix_seconds
from unity_jax.machine.device import Device
from unity_jax.ops.persistent import local_blocks, row_axes
from unity_jax.ops.rule import Shard
from unity_jax.xla.op_classes import PRODUCTS

_LOADED = 5.4e12
"""Bytes of weights a second that go from the chip's memory into its matrix unit. Schedules of LSTM layers, microseconds
a step, forward and backward, and predicted: v5e 3 rows of 1,500 features 3.4 and 5.2 (4.2), 32 of 1,536 6.2 and 5.9
(7.2), 128 of 1,024 6.0 and 5.9 (8.4); v6e 4 rows of 1,500 together 7.1 (7.2)."""


def persistent_seconds(shard: Shard, device: Device) -> float:
    """Seconds that a device computes, its share of the rows: products and all else one after the other, in each step
    of each block."""
    body, (_, blocks) = shard.op.params["body"], local_blocks(shard)
    each, vector = 0.0, device.flops_per_second("vector")
    rate = _LOADED if blocks else device.memory_bandwidth  # a scan reads weights in each step
    for inner in body.shards(shard.mesh, row_axes(shard), blocks or 1):
        if inner.op.name in PRODUCTS:
            each += matrix_seconds(inner, device) + inner.operand_bytes(1) / rate
        else:
            each += inner.flops / vector
    return float(max(blocks, 1) * shard.op.params["length"] * each)
