"""Time of matrix products and convolutions in the matrix unit, by how they fill its tiles."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from unity_jax.machine.device import Device
from unity_jax.machine.tiling import pass_bytes, stored_bytes
from unity_jax.ops.rule import Shard
from unity_jax.xla.convolutions import conv_groups, conv_shapes, in_strips, is_kernel_gradient
from unity_jax.xla.dots import product_size
from unity_jax.xla.targets import target_of


def matrix_seconds(shard: Shard, device: Device) -> float:
    if shard.op.name == "conv_general_dilated" and target_of(device).lanes:
        return _convolution(shard, device)
    batch, *sizes = product_size(shard)
    tiles = [math.ceil(n / tile) for n, tile in zip(sizes, device.matmul_tile, strict=True)]
    padding = math.prod(k * tile / n for k, n, tile in zip(tiles, sizes, device.matmul_tile, strict=True))
    at_once, waves = batch * tiles[0] * tiles[1], device.matmul_units
    padding *= math.ceil(at_once / waves) * waves / at_once
    rate = device.flops_per_second(shard.op.inputs[0].dtype) * device.matmul_efficiency
    return shard.flops * padding * _filled_gaps(shard, device) / rate


def _filled_gaps(shard: Shard, device: Device) -> float:
    """How many times as much a library multiplies where a kernel is dilated: cuDNN leaves the gaps out, but is given
    zeros for them where images are not padded alike on both sides, as of a causal convolution (`MaybePaddedKernel` in
    https://github.com/openxla/xla/blob/main/xla/service/gpu/transforms/conv_padding_legalization.cc). A kernel gradient
    is a call of its own."""
    op, params = shard.op, shard.op.params
    if op.name != "conv_general_dilated" or not target_of(device).library or is_kernel_gradient(shard):
        return 1.0
    if all(low == high >= 0 for low, high in params["padding"]):
        return 1.0
    window = [op.inputs[1].shape[d] for d in params["dimension_numbers"].rhs_spec[2:]]
    dilated = zip(window, params["rhs_dilation"], strict=True)
    return math.prod((1 + (n - 1) * gap) / n for n, gap in dilated)


def _convolution(shard: Shard, device: Device) -> float:
    """Seconds of the matrix unit of a TPU for a convolution.

    Grouped: XLA:TPU keeps the images in lanes and multiplies per group, position of the result and of the window; of
    the zeros between dilated inputs it skips those along one dimension. Cycles per such product, of probes compiled for
    v5e with 4, 8 and 16 features and up to 128 images: 2.1, 2.1 and 4.2, and 4.6, 4.3 and 9.1 where two dimensions are
    dilated by two; a kernel gradient takes 0.3 to 1.5 with 4 features, and then as many. In the kernel gradient of
    others the window is the image, and fills the depth of tiles. For the rest see `_passes`.
    """
    groups, *sizes = conv_groups(shard)
    least, *tile = device.matmul_tile
    rate = device.flops_per_second(shard.op.inputs[0].dtype) * device.matmul_efficiency
    gradient = is_kernel_gradient(shard)
    if groups > 1:
        sizes = sorted(sizes)
        tiles = (1 if gradient else least, *tile)
        dilations = shard.op.params["lhs_dilation"]
        padding = math.prod(dilations) / max(dilations, default=1)
    else:
        numbers, (_, rhs, out) = shard.op.params["dimension_numbers"], conv_shapes(shard)
        taps = math.prod(rhs[d] for d in numbers.rhs_spec[2:])
        rows = sizes[0] * math.prod(out[d] for d in numbers.out_spec[2:])
        made, taken = sizes[1:]
        passes = math.ceil(taken * taps / tile[1]) if gradient else _passes(taken, made, taps, shard.op.params, tile)
        padding = passes * tile[1] / max(taken * taps, 1)
        sizes, tiles = [rows, made], (least, tile[0])
    padding *= math.prod(math.ceil(n / k) * k / n for n, k in zip(sizes, tiles, strict=True) if n)
    return shard.flops * padding / rate


_FEW = 8
"""Features so few that XLA:TPU's schedules fill a part of a tile only."""


def _passes(taken: int, made: int, taps: int, params: Mapping[str, Any], tile: Sequence[int]) -> float:
    """Passes through the matrix unit per tile of positions and features made, as many as if no zero between dilated
    images were skipped.

    Windows are taken tap by tap, or, if the images are not dilated and it makes more features than it takes (of more
    than eight: as many), with as many taps at once as fill the depth of a tile, of windows with strides half of it.
    With at most eight features taken a pass takes four times as long, with at most eight made half as long. With a
    tile's features and more on both sides zeros are skipped along the last dimension only. Of 120 convolutions compiled
    for v5e (windows of 3 x 3 to 21 x 11, 2 to 256 features taken and 4 to 256 made, images dilated along no, one and
    both dimensions) those that memory does not bound take .8 to 1.4 times that many cycles.
    """
    dilations, strides = params["lhs_dilation"], params["window_strides"]
    folds = max(dilations, default=1) == 1 and (made > taken or made == taken > _FEW)
    passes = taps * math.ceil(taken / tile[1])
    if folds:
        passes = min(passes, math.ceil(taken * taps * (1 + (max(strides, default=1) > 1)) / tile[1]))
    if taken <= _FEW and (folds or made > _FEW):
        passes *= 4
    if made >= tile[0] and taken >= tile[1]:
        passes *= math.prod(dilations[:-1])
    return passes / 2 if made <= _FEW else passes


class GroupedImages(NamedTuple):
    """Bytes of an array of images as it lies outside of a grouped convolution, and inside, with groups apart and the
    images or the features of a group in lanes; and of an element."""

    outside: float
    inside: float
    itemsize: int


def grouped_images(shard: Shard, device: Device) -> tuple[GroupedImages, ...]:
    """The images that a grouped convolution takes and makes; none of a kernel gradient, which takes what the others
    have turned, and of what is not grouped."""
    groups, *_ = conv_groups(shard)
    if groups == 1 or is_kernel_gradient(shard) or not device.layout_tile[1]:
        return ()
    numbers, (lhs, _, out) = shard.op.params["dimension_numbers"], conv_shapes(shard)
    found = []
    for t, spec, shape in ((shard.op.inputs[0], numbers.lhs_spec, lhs), (shard.op.outputs[0], numbers.out_spec, out)):
        n, features, *spatial = (shape[d] for d in spec)
        apart = (n, *spatial, groups, features // groups)
        outside = stored_bytes(device, (n, *spatial, features), t.itemsize)
        inside = stored_bytes(device, apart, t.itemsize, (0, len(apart) - 1))
        found.append(GroupedImages(outside, inside, t.itemsize))
    return tuple(found)


def grouping_bytes(shard: Shard, device: Device) -> float:
    """Bytes that go through memory to turn the images of a grouped convolution into the order of dimensions in which it
    takes them, and what it makes out of it. XLA:TPU does so even where that pads no less: what lies around has its
    features in lanes. A kernel gradient reads the arrays that have been turned for the others."""
    return sum(pass_bytes(device, t.itemsize, t.outside, t.inside) for t in grouped_images(shard, device))


def strided_bytes(shard: Shard, device: Device) -> float:
    """Bytes that a grouped convolution with strides or dilated images moves before and after it multiplies: in programs
    compiled for v5e the time of the padded images in memory adds to that of the products, and hides behind it where
    windows move by one."""
    params = shard.op.params
    if all(n == 1 for n in (*params["window_strides"], *params["lhs_dilation"])):
        return 0.0
    return sum(t.inside for t in grouped_images(shard, device) if t.inside > device.fast_bytes)


_STRIP_FEATURES, _STRIP_PASSES = 64, 3.2


def strip_elements(shard: Shard, device: Device) -> float:
    """Elements that pass through kernels of one instruction to cut the images of a convolution into strips and to move
    borders between them, as XLA:TPU does with fewer than eight images.

    Of 14 steps of two convolutions of 3 x 3 compiled for v5e, images of 64 to 256 squared with 3 to 256 features take,
    with 1 to 4 of them, 24 to 118 cycles more per position than with 8. That is 2.6 to 3.6 such passes for each array
    of images, with 64 features at least; images of 32 and of 16 squared take 2 to 3 times as many.
    """
    _, images, made, taken = conv_groups(shard)
    lhs, _, other = conv_shapes(shard)
    if is_kernel_gradient(shard):
        images, taken, other = taken, images, shard.operand_shape(1)
    if not in_strips(shard, device):
        return 0.0
    features = (math.prod(lhs), taken), (math.prod(other), made)
    return _STRIP_PASSES * sum(n / max(f, 1) * max(f, _STRIP_FEATURES) for n, f in features)
