"""Time of the arithmetic of a loop as one kernel (`kernels.persistent`)."""

from __future__ import annotations

from unity_jax.cost.products import matrix_seconds
from unity_jax.machine.device import Device
from unity_jax.ops.persistent import local_blocks, row_axes
from unity_jax.ops.rule import Shard
from unity_jax.xla.op_classes import PRODUCTS

_LOADING = 32
"""A tile of weights takes as long to be put into the matrix unit as so many rows to be multiplied with it. Schedules of
LSTM layers for v5e, forward and backward, microseconds a step: 3 rows of 1,500 features 3.4 and 5.2 (predicted 3.9), 32
of 1,536 6.2 and 5.9 (6.8, 6.6), 128 of 1,024 6.0 and 5.9 (8.3, 7.9)."""


def persistent_seconds(shard: Shard, device: Device) -> float:
    """Seconds that a device computes, its share of the rows: products and all else one after the other, in each step
    of each block."""
    body, (_, blocks) = shard.op.params["body"], local_blocks(shard)
    each, least, vector = 0.0, device.matmul_tile[0], device.flops_per_second("vector")
    for inner in body.shards(shard.mesh, row_axes(shard), blocks):
        if inner.op.name in PRODUCTS:
            rows = -(-inner.result_shape()[0] // least) * least
            each += matrix_seconds(inner, device) * (1 + _LOADING / rows)
        else:
            each += inner.flops / vector
    return float(blocks * shard.op.params["length"] * each)
