"""Time of the arithmetic of attention as one op (`kernels.flash`)."""

from __future__ import annotations

import math

from unity_jax.kernels.tiles import padded
from unity_jax.machine.device import Device
from unity_jax.ops.attention import OPS, PRODUCTS
from unity_jax.ops.rule import Shard
from unity_jax.xla.targets import target_of

EFFICIENCY = {"tpu": (0.68, 0.94), "gpu": (0.12, 0.12), "cpu": (0.3, 0.3)}
"""The part of the peak rate of matmuls that each pass reaches, by compiler. TPU: the schedules of both for v5e, 8 heads
of 4,096 positions and 128 features in bfloat16. GPU: of Pallas kernels by Triton, forward and backward together, on an
H200 with 32 heads of 2,048 positions and 128 features."""
BLOCK = 512
"""How many positions a block has, of which a causal mask hides all or nothing."""
DRAWING = 115
"""Operations on each score that dropout draws bits for (Threefry has twenty rounds of five)."""


def attention_seconds(shard: Shard, device: Device) -> float:
    """Seconds that a device computes, its share of the batch and the heads."""
    spec, compiler = shard.op.params["spec"], device.compiler
    (batch, heads, queries, features), keys = shard.operand_shape(0), shard.operand_shape(1)[2]
    if target_of(device).lanes:
        tile = device.matmul_tile[-1]
        features = math.ceil(features / tile) * tile
    features = padded(features, compiler)
    blocks = math.ceil(queries / BLOCK)
    scores = batch * heads * queries * keys * ((blocks + 1) / (2 * blocks) if spec.causal else 1.0)
    efficiency = EFFICIENCY[compiler][OPS.index(shard.op.name)]
    rate = device.flops_per_second(shard.op.inputs[0].dtype) * efficiency
    drawn = DRAWING * scores if spec.keep < 1 and shard.op.name == OPS[0] else 0.0
    return 2 * PRODUCTS[shard.op.name] * scores * features / rate + drawn / device.flops_per_second("vector")
