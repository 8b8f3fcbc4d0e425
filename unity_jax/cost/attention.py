"""Time of the arithmetic of attention as one op (`kernels.flash`, `kernels.cudnn`)."""

from __future__ import annotations

import math

import numpy as np

from unity_jax.kernels import cudnn
from unity_jax.kernels.primitive import operands
from unity_jax.kernels.tiles import padded
from unity_jax.machine.device import Device
from unity_jax.ops.attention import OPS, PRODUCTS
from unity_jax.ops.rule import Shard
from unity_jax.xla.targets import target_of

EFFICIENCY = {"tpu": (0.68, 0.94), "gpu": (0.12, 0.12), "cpu": (0.3, 0.3)}
"""The part of the peak rate of matmuls that each pass of our kernels reaches, by compiler. TPU: the schedules of both
for v5e, 8 heads of 4,096 positions and 128 features in bfloat16. GPU: of Pallas kernels by Triton, forward and backward
together, on an H200 with 32 heads of 2,048 positions and 128 features."""
BLOCK = 512
"""How many positions a block has, of which a causal mask hides all or nothing."""
DRAWING = 115
"""Operations on each score that dropout draws bits for (Threefry has twenty rounds of five)."""

CUDNN_FEATURES = (0, 64, 128)
CUDNN = (((0.0, 0.42, 0.63), 105), ((0.0, 0.445, 0.535), 330))
"""Of each pass by cuDNN, the part of the peak rate that it comes near as sequences grow, by features of a head, and of
how many queries it reaches half of that: fitted to what Shah et al. measured on an H100 of 512 to 16,384 positions
without a mask, to within 8 % (FlashAttention-3, 2024, https://arxiv.org/abs/2407.08608, figures 5 and 6); with a causal
mask the forward pass is up to .83 and 1.12 times as fast."""
CUDNN_PRODUCTS = (2, 5)
"""The scores of the backward pass and their cotangents are computed once."""


def attention_seconds(shard: Shard, device: Device) -> float:
    """Seconds that a device computes, its share of the batch and the heads."""
    op, spec, compiler = shard.op, shard.op.params["spec"], device.compiler
    turn = OPS.index(op.name)
    (batch, heads, queries, features), keys = shard.operand_shape(0), shard.operand_shape(1)[2]
    blocks = math.ceil(queries / BLOCK)
    scores = batch * heads * queries * keys * ((blocks + 1) / (2 * blocks) if spec.causal else 1.0)
    rate = device.flops_per_second(op.inputs[0].dtype)
    if target_of(device).library and cudnn.takes(spec, operands(op.inputs, op.params["given"])):
        parts, half = CUDNN[turn]
        part = float(np.interp(features, CUDNN_FEATURES, parts)) * queries / (queries + half)
        return 2 * CUDNN_PRODUCTS[turn] * scores * features / (rate * part)
    if target_of(device).lanes:
        tile = device.matmul_tile[-1]
        features = math.ceil(features / tile) * tile
    drawn = DRAWING * scores if spec.keep < 1 and turn == 0 else 0.0
    products = 2 * PRODUCTS[op.name] * scores * padded(features, compiler)
    return products / (rate * EFFICIENCY[compiler][turn]) + drawn / device.flops_per_second("vector")
