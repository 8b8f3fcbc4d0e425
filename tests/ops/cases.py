"""One-op functions for the Shardy oracle: `(name, function, operand shapes or example arrays)`.

`name` is the primitive's name, with a remark after a colon where a primitive has several cases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Case = tuple[str, Callable[..., Any], tuple[Any, ...]]
F32 = np.float32


def s(*shape: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


CASES: list[Case] = []

# Contractions, convolutions, reductions, windows


def conv(stride=1, padding="SAME", groups=1, dilation=1, image_dilation=1):
    """A 2-D convolution over `NHWC` images and `HWIO` kernels."""

    def fn(x, k):
        return lax.conv_general_dilated(
            x,
            k,
            (stride, stride),
            padding,
            lhs_dilation=(image_dilation, image_dilation),
            rhs_dilation=(dilation, dilation),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )

    return fn


def conv_gradient(which, image, kernel, **options):
    """The gradient of `conv` by the image (0) or the kernel (1), as a function of the other and the cotangent."""
    fn = conv(**options)
    result = jax.eval_shape(fn, image, kernel)
    if which == 0:
        zeros = np.zeros(image.shape, F32)
        return lambda k, dy: jax.vjp(lambda x: fn(x, k), zeros)[1](dy)[0], (kernel, result)
    zeros = np.zeros(kernel.shape, F32)
    return lambda x, dy: jax.vjp(lambda k: fn(x, k), zeros)[1](dy)[0], (image, result)


def pool(window, stride, padding, init=-np.inf, fn=lax.max):
    """A 2-D window reduction of `NHWC` images."""

    def reduce(x):
        return lax.reduce_window(x, init, fn, (1, window, window, 1), (1, stride, stride, 1), padding)

    return reduce


def max_pool_gradient(window, stride, padding, image):
    fn = pool(window, stride, padding)
    return lambda x, dy: jax.vjp(fn, x)[1](dy)[0], (image, jax.eval_shape(fn, image))


IMAGE, KERNEL = s(2, 16, 12, 6), s(3, 3, 6, 10)

CASES += [
    ("dot_general", lambda x, y: x @ y, (s(8, 6), s(6, 4))),
    ("dot_general:batched", lambda x, y: jnp.einsum("bmk,bkn->bmn", x, y), (s(2, 8, 6), s(2, 6, 4))),
    ("dot_general:two contracted", lambda x, y: jnp.einsum("mhk,nhk->mn", x, y), (s(8, 3, 6), s(4, 3, 6))),
    ("dot_general:attention", lambda x, y: jnp.einsum("bqhd,bkhd->bhqk", x, y), (s(2, 5, 3, 4), s(2, 7, 3, 4))),
    ("dot_general:outer", lambda x, y: lax.dot_general(x, y, (((), ()), ((0,), (0,)))), (s(4, 3), s(4, 5))),
    ("dot_general:vector", lambda x, y: x @ y, (s(8, 6), s(6))),
    ("dot_general:integers", lambda x, y: x @ y, (s(8, 6, dtype=np.int32), s(6, 4, dtype=np.int32))),
    (
        "ragged_dot_general",
        lambda x, y, sizes: lax.ragged_dot(x, y, sizes),
        (s(8, 6), s(3, 6, 5), s(3, dtype=np.int32)),
    ),
    ("conv_general_dilated", conv(), (IMAGE, KERNEL)),
    ("conv_general_dilated:1x1", conv(), (IMAGE, s(1, 1, 6, 10))),
    ("conv_general_dilated:valid", conv(padding="VALID"), (IMAGE, KERNEL)),
    ("conv_general_dilated:strided", conv(stride=2), (IMAGE, KERNEL)),
    ("conv_general_dilated:patches", conv(stride=4, padding="VALID"), (IMAGE, s(4, 4, 6, 10))),
    ("conv_general_dilated:one corner", conv(stride=4, padding="VALID"), (s(2, 4, 4, 6), s(1, 1, 6, 10))),
    ("conv_general_dilated:dilated", conv(dilation=2), (IMAGE, KERNEL)),
    ("conv_general_dilated:transposed", conv(padding=((1, 2), (1, 2)), image_dilation=2), (IMAGE, KERNEL)),
    ("conv_general_dilated:grouped", conv(groups=2), (IMAGE, s(3, 3, 3, 10))),
    ("conv_general_dilated:depthwise", conv(groups=6), (IMAGE, s(3, 3, 1, 6))),
    ("conv_general_dilated:image gradient", *conv_gradient(0, IMAGE, KERNEL)),
    ("conv_general_dilated:image gradient, strided", *conv_gradient(0, IMAGE, KERNEL, stride=2)),
    ("conv_general_dilated:kernel gradient", *conv_gradient(1, IMAGE, KERNEL)),
    ("conv_general_dilated:kernel gradient, strided", *conv_gradient(1, IMAGE, KERNEL, stride=2)),
    ("conv_general_dilated:kernel gradient, grouped", *conv_gradient(1, IMAGE, s(3, 3, 3, 10), groups=2)),
    ("conv_general_dilated:kernel gradient, depthwise", *conv_gradient(1, IMAGE, s(3, 3, 1, 6), groups=6)),
    ("reduce_sum", lambda x: x.sum((0, 2)), (s(4, 6, 8),)),
    ("reduce_sum:all", lambda x: x.sum(), (s(4, 6),)),
    ("reduce_max", lambda x: x.max(1), (s(4, 6),)),
    ("reduce_min", lambda x: x.min(0), (s(4, 6),)),
    ("reduce_prod", lambda x: lax.reduce_prod_p.bind(x, axes=(1,)), (s(4, 6),)),
    ("reduce_and", lambda x: x.all(1), (s(4, 6, dtype=np.bool_),)),
    ("reduce_or", lambda x: x.any(1), (s(4, 6, dtype=np.bool_),)),
    ("reduce_xor", lambda x: lax.reduce(x, np.int32(0), lax.bitwise_xor, (1,)), (s(4, 6, dtype=np.int32),)),
    ("reduce", lambda x: lax.reduce(x, 0.0, lambda a, b: jnp.hypot(a, b), (1,)), (s(4, 6),)),
    ("argmax", lambda x: lax.argmax(x, 1, np.int32), (s(4, 6),)),
    ("argmin", lambda x: lax.argmin(x, 0, np.int32), (s(4, 6),)),
    ("cumsum", lambda x: lax.cumsum(x, 1), (s(4, 6),)),
    ("cumprod", lambda x: lax.cumprod(x, 1), (s(4, 6),)),
    ("cummax", lambda x: lax.cummax(x, 0, reverse=True), (s(4, 6),)),
    ("cummin", lambda x: lax.cummin(x, 0), (s(4, 6),)),
    ("cumlogsumexp", lambda x: lax.cumlogsumexp(x, 1), (s(4, 6),)),
    ("reduce_window_max", pool(3, 2, "SAME"), (IMAGE,)),
    ("reduce_window_max:no overlap", pool(2, 2, "VALID"), (IMAGE,)),
    ("reduce_window_max:one window", pool(4, 4, "VALID"), (s(2, 4, 4, 6),)),
    ("reduce_window_sum", pool(3, 1, "SAME", 0.0, lax.add), (IMAGE,)),
    ("reduce_window_sum:valid", pool(3, 1, "VALID", 0.0, lax.add), (IMAGE,)),
    ("reduce_window_min", pool(3, 2, "SAME", np.inf, lax.min), (IMAGE,)),
    ("reduce_window", pool(3, 2, "SAME", 1.0, lax.mul), (IMAGE,)),
    ("select_and_scatter_add", *max_pool_gradient(3, 2, "SAME", IMAGE)),
    ("select_and_scatter_add:no overlap", *max_pool_gradient(2, 2, "VALID", IMAGE)),
    ("select_and_scatter_add:one window", *max_pool_gradient(4, 4, "VALID", s(2, 4, 4, 6))),
    (
        "select_and_gather_add",
        lambda x, t: jax.jvp(pool(3, 2, "SAME"), (x,), (t,))[1],
        (IMAGE, IMAGE),
    ),
]

# Linear algebra and Fourier transforms

MATRICES, COLUMNS = s(3, 6, 6), s(3, 6, 4)

CASES += [
    ("cholesky", lambda x: lax.linalg.cholesky(x, symmetrize_input=False), (MATRICES,)),
    ("cholesky_update", lax.linalg.cholesky_update, (s(6, 6), s(6))),
    ("lu", lax.linalg.lu, (COLUMNS,)),
    ("lu_pivots_to_permutation", lambda p: lax.linalg.lu_pivots_to_permutation(p, 6), (s(3, 4, dtype=np.int32),)),
    ("qr", lambda x: lax.linalg.qr(x, full_matrices=False), (COLUMNS,)),
    ("householder_product", lax.linalg.householder_product, (COLUMNS, s(3, 4))),
    ("svd", lambda x: lax.linalg.svd(x, full_matrices=False), (COLUMNS,)),
    ("svd:values", lambda x: lax.linalg.svd(x, compute_uv=False), (COLUMNS,)),
    ("eigh", lambda x: lax.linalg.eigh(x, symmetrize_input=False), (MATRICES,)),
    ("eig", lax.linalg.eig, (MATRICES,)),
    ("schur", lax.linalg.schur, (MATRICES,)),
    ("hessenberg", lax.linalg.hessenberg, (MATRICES,)),
    ("tridiagonal", lambda x: lax.linalg.tridiagonal(x), (MATRICES,)),
    ("symmetric_product", lambda a, c: lax.linalg.symmetric_product(a, c), (COLUMNS, MATRICES)),
    (
        "triangular_solve",
        lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True, lower=True),
        (MATRICES, COLUMNS),
    ),
    ("triangular_solve:right", lambda a, b: lax.linalg.triangular_solve(a, b, lower=True), (s(4, 4), s(6, 4))),
    ("tridiagonal_solve", lax.linalg.tridiagonal_solve, (s(3, 6), s(3, 6), s(3, 6), COLUMNS)),
    ("fft", jnp.fft.fft, (s(3, 6, dtype=np.complex64),)),
    ("fft:two dimensions", jnp.fft.rfft2, (s(3, 6, 4),)),
    ("fft:inverse", jnp.fft.irfft, (s(3, 6, dtype=np.complex64),)),
]

# Shapes, indexing, sorting, random numbers


def gather(window, offset=(), collapsed=(), indexed=(), mode="clip", **batching):
    numbers = lax.GatherDimensionNumbers(offset, collapsed, indexed, **batching)
    return lambda x, i: lax.gather(x, i, numbers, window, mode=mode)


def scatter(fn, window=(), inserted=(), indexed=(), mode="drop", **batching):
    numbers = lax.ScatterDimensionNumbers(window, inserted, indexed, **batching)
    return lambda x, i, u: fn(x, i, u, numbers, mode=mode)


def ids(*shape):
    return s(*shape, dtype=np.int32)


TABLE, TABLE_IDS, TABLE_ROWS = s(10, 6), ids(4, 5, 1), s(4, 5, 6)
LOOKUP = {"offset": (2,), "collapsed": (0,), "indexed": (0,)}
UPDATE = {"window": (2,), "inserted": (0,), "indexed": (0,)}
ALONG = {"operand_batching_dims": (0,), "start_indices_batching_dims": (0,)}
INTO = {"operand_batching_dims": (0,), "scatter_indices_batching_dims": (0,)}

CASES += [
    ("broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (5, 4, 3, 6), (1, 3)), (s(4, 6),)),
    ("broadcast_in_dim:size 1", lambda x: lax.broadcast_in_dim(x, (4, 7, 6), (0, 1, 2)), (s(4, 1, 6),)),
    ("squeeze", lambda x: lax.squeeze(x, (1,)), (s(4, 1, 5),)),
    ("transpose", lambda x: lax.transpose(x, (2, 0, 1)), (s(4, 5, 6),)),
    ("reshape:split", lambda x: x.reshape(5, 4, 6), (s(5, 24),)),
    ("reshape:merge", lambda x: x.reshape(20, 6), (s(5, 4, 6),)),
    ("reshape:merge and split", lambda x: x.reshape(20, 2, 3), (s(5, 4, 6),)),
    ("reshape:size 1", lambda x: x.reshape(1, 4, 1, 5), (s(4, 1, 5),)),
    ("reshape:regroup", lambda x: x.reshape(4, 4), (s(8, 2),)),
    ("reshape:not nested", lambda x: x.reshape(6, 4), (s(4, 6),)),
    ("rev", lambda x: lax.rev(x, (0,)), (s(4, 6),)),
    ("slice", lambda x: lax.slice(x, (1, 0), (3, 6)), (s(4, 6),)),
    ("slice:strided", lambda x: lax.slice(x, (0, 0), (4, 6), (1, 2)), (s(4, 6),)),
    ("dynamic_slice", lambda x, i: lax.dynamic_slice(x, (i, 0), (2, 6)), (s(4, 6), ids())),
    ("dynamic_update_slice", lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0)), (s(4, 6), s(2, 6), ids())),
    ("pad", lambda x: lax.pad(x, F32(0), ((1, 2, 1), (0, 0, 0))), (s(4, 6),)),
    ("concatenate", lambda x, y: lax.concatenate([x, y], 1), (s(4, 6), s(4, 3))),
    ("split", lambda x: lax.split(x, (2, 4), 1), (s(4, 6),)),
    ("stack", lambda x, y: jnp.stack([x, y], 1), (s(4, 6), s(4, 6))),
    ("unstack", lambda x: jnp.unstack(x), (s(4, 6),)),
    ("tile", lambda x: jnp.tile(x, (2, 1, 5)), (s(4, 6, 1),)),
    ("bitcast_convert_type:narrower", lambda x: lax.bitcast_convert_type(x, np.uint16), (s(4, 6),)),
    ("bitcast_convert_type:wider", lambda x: lax.bitcast_convert_type(x, np.float32), (s(4, 2, dtype=np.uint16),)),
    ("iota", lambda: lax.broadcasted_iota(np.int32, (4, 6), 1), ()),
    ("gather", gather((1, 6), **LOOKUP), (TABLE, TABLE_IDS)),
    ("gather:fill", gather((1, 6), **LOOKUP, mode="fill"), (TABLE, TABLE_IDS)),
    ("gather:along axis", gather((1, 1), (), (1,), (1,), **ALONG), (s(4, 10), ids(4, 5, 1))),
    ("gather:two dimensions", gather((1, 3, 1), (1,), (0, 2), (0, 2)), (s(4, 3, 6), ids(5, 2))),
    ("gather:slices", gather((2, 6), (0, 2), (), (0,)), (TABLE, ids(5, 1))),
    ("scatter", scatter(lax.scatter, **UPDATE), (TABLE, TABLE_IDS, TABLE_ROWS)),
    ("scatter-add", scatter(lax.scatter_add, **UPDATE), (TABLE, TABLE_IDS, TABLE_ROWS)),
    (
        "scatter-add:along axis",
        scatter(lax.scatter_add, (), (1,), (1,), **INTO),
        (s(4, 10), ids(4, 5, 1), s(4, 5)),
    ),
    (
        "scatter-add:two dimensions",
        scatter(lax.scatter_add, (1,), (0, 2), (0, 2)),
        (s(4, 3, 6), ids(5, 2), s(5, 3)),
    ),
    ("scatter-add:slices", scatter(lax.scatter_add, (0, 2), (), (0,)), (TABLE, ids(5, 1), s(2, 5, 6))),
    ("scatter-sub", scatter(lax.scatter_sub, **UPDATE), (TABLE, TABLE_IDS, TABLE_ROWS)),
    ("scatter-mul", scatter(lax.scatter_mul, **UPDATE), (TABLE, TABLE_IDS, TABLE_ROWS)),
    ("scatter-max", scatter(lax.scatter_max, **UPDATE), (TABLE, TABLE_IDS, TABLE_ROWS)),
    ("scatter-min", scatter(lax.scatter_min, **UPDATE), (TABLE, TABLE_IDS, TABLE_ROWS)),
    ("sort", lambda x, y: lax.sort((x, y), dimension=1, num_keys=1), (s(4, 6), s(4, 6))),
    ("top_k", lambda x: lax.top_k(x, 2), (s(4, 6),)),
    ("approx_top_k", lambda x: lax.approx_max_k(x, 2), (s(4, 6),)),
    ("random_bits", lambda w: jax.random.bits(jax.random.wrap_key_data(w), (4, 6)), (s(2, dtype=np.uint32),)),
    ("random_split", lambda w: jax.random.split(jax.random.wrap_key_data(w), 6), (s(2, dtype=np.uint32),)),
]
