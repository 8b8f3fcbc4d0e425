"""Shapes of results of JAX functions that are one op: traced once, such a function is known for all sizes.

    SIZES[lax.transpose](x, permutation=(1, 0))         the shape of the result, which is all that sizes change

A function has the parameters of its primitive, of which those that it is given here are the ones that depend on sizes.
**Raises:** `CannotEmit` where operands do not fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax import lax

from unity_jax.pcg.graph import Tensor
from unity_jax.rewrite.dims import CannotEmit

Shape = tuple[int, ...]
Numbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


def _need(fits: bool) -> None:
    if not fits:
        raise CannotEmit("operands do not fit")


def _same(x: Tensor, *others: Tensor) -> Shape:
    _need(all(y.shape == x.shape for y in others))
    return x.shape


def _reshaped(x: Tensor, new_sizes: Shape) -> Shape:
    _need(math.prod(x.shape) == math.prod(new_sizes))
    return new_sizes


def _transposed(x: Tensor, permutation: Shape) -> Shape:
    _need(sorted(permutation) == [*range(x.rank)])
    return tuple(x.shape[d] for d in permutation)


def _broadcast(x: Tensor, shape: Shape, broadcast_dimensions: Shape) -> Shape:
    _need(len(broadcast_dimensions) == x.rank)
    _need(all(n in (1, shape[d]) for n, d in zip(x.shape, broadcast_dimensions, strict=True)))
    return shape


def _without(x: Tensor, gone: Shape) -> Shape:
    return tuple(n for d, n in enumerate(x.shape) if d not in gone)


def _squeezed(x: Tensor, dimensions: Shape) -> Shape:
    _need(all(x.shape[d] == 1 for d in dimensions))
    return _without(x, dimensions)


def _cut(x: Tensor, start_indices: Shape, limit_indices: Shape, strides: Shape) -> Shape:
    _need(all(0 <= a <= b <= n for a, b, n in zip(start_indices, limit_indices, x.shape, strict=True)))
    return tuple(b - a for a, b in zip(start_indices, limit_indices, strict=True))


def _dot(x: Tensor, y: Tensor, dimension_numbers: Numbers) -> Shape:
    (x_k, y_k), (x_b, y_b) = dimension_numbers
    _need(all(x.shape[a] == y.shape[b] for a, b in zip((*x_k, *x_b), (*y_k, *y_b), strict=True)))
    return (*(x.shape[d] for d in x_b), *_without(x, (*x_k, *x_b)), *_without(y, (*y_k, *y_b)))


SIZES: Mapping[Callable[..., Any], Callable[..., Shape]] = {
    lax.add: _same,
    lax.sub: _same,
    lax.mul: _same,
    lax.neg: _same,
    lax.reshape: _reshaped,
    lax.transpose: _transposed,
    lax.broadcast_in_dim: _broadcast,
    lax.squeeze: _squeezed,
    lax.slice: _cut,
    lax.reduce_sum: lambda x, axes: _without(x, axes),
    lax.dot_general: _dot,
}
