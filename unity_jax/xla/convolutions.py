"""What a convolution is on one device: its shapes, its groups, which role it has in a train step, and whether XLA:TPU
cuts its images into strips."""

from __future__ import annotations

import math

from unity_jax.machine.device import Device
from unity_jax.machine.tiling import stored_bytes
from unity_jax.ops.rule import Shard
from unity_jax.xla.targets import target_of

_IMAGES = 8
"""XLA:TPU multiplies as many images at once; of fewer it makes as many out of strips of each, with the borders that
windows reach over (https://github.com/openxla/xla/blob/main/xla/service/space_to_batch_converter.cc)."""


def conv_shapes(shard: Shard) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    return shard.operand_shape(0), shard.operand_shape(1), shard.result_shape()


def conv_groups(shard: Shard) -> tuple[int, int, int, int]:
    """The groups of a convolution on one device; per group its images, features made and features taken (of a kernel
    gradient in other roles)."""
    numbers, (lhs, rhs, out) = shard.op.params["dimension_numbers"], conv_shapes(shard)
    images, depth = out[numbers.out_spec[0]], rhs[numbers.rhs_spec[1]]
    groups = max(lhs[numbers.lhs_spec[1]] // max(depth, 1), 1) * max(lhs[numbers.lhs_spec[0]] // max(images, 1), 1)
    return groups, images, rhs[numbers.rhs_spec[0]] // groups, depth


def is_kernel_gradient(shard: Shard) -> bool:
    """Whether a convolution is the gradient of one for its kernel: of a grouped one its images are in groups, of others
    its window is the image."""
    params, (_, rhs, out) = shard.op.params, conv_shapes(shard)
    if params["feature_group_count"] > 1 or params["batch_group_count"] > 1:
        return params["feature_group_count"] == 1
    numbers = params["dimension_numbers"]
    return math.prod(rhs[d] for d in numbers.rhs_spec[2:]) > math.prod(out[d] for d in numbers.out_spec[2:])


def in_strips(shard: Shard, device: Device) -> bool:
    """Whether XLA:TPU cuts the images of a convolution into strips."""
    groups, images, _, taken = conv_groups(shard)
    few = (taken if is_kernel_gradient(shard) else images) < _IMAGES
    return target_of(device).lanes and groups == 1 and few and math.prod(_window(shard)) > 1


def strips_bytes(shard: Shard, device: Device) -> float:
    """Bytes of the images that a kernel gradient of strips reads: once for each place of the last dimension of the
    kernel, along which they are cut; 0 if it reads them as they are. There are none for windows that move by more than
    one in programs compiled for v5e (Faster R-CNN)."""
    params, t = shard.op.params, shard.op.inputs[0]
    moves = any(n != 1 for n in (*params["rhs_dilation"], *params["lhs_dilation"]))
    if moves or not is_kernel_gradient(shard) or not in_strips(shard, device):
        return 0.0
    features, images, *rest, width = (shard.operand_shape(0)[d] for d in params["dimension_numbers"].lhs_spec)
    strip = (*rest, -(-width // _IMAGES), images * _IMAGES, features)
    last = (len(strip) - 2, len(strip) - 1)  # images and features lie in tiles
    copies = _window(shard)[-1]
    return copies * stored_bytes(device, strip, t.itemsize, last) if copies > 1 else 0.0


def _window(shard: Shard) -> list[int]:
    """Along each spatial dimension, the places that a window, or the window that this is the gradient of, has."""
    numbers, (_, rhs, out) = shard.op.params["dimension_numbers"], conv_shapes(shard)
    spec, shape = (numbers.out_spec, out) if is_kernel_gradient(shard) else (numbers.rhs_spec, rhs)
    return [shape[d] for d in spec[2:]]
