"""Layers that keep less from the forward to the backward pass than differentiation does.

    y = unity.layers.gelu(x)     # keeps y, which the next layer keeps anyway, and a byte for each element

They are plain JAX functions, under any transformation but forward-mode differentiation, and are planned like others.
Their gradients follow from what is kept up to a stated error (Tempo, Andoorveedu et al., NeurIPS 2022).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.polynomial import chebyshev
from scipy.optimize import brentq
from scipy.special import expit, ndtr

Residual = Literal["output", "input"]
"""What a layer keeps for its gradient."""


def gelu(x: jax.typing.ArrayLike, approximate: bool = True, *, residual: Residual = "output") -> jax.Array:
    """`jax.nn.gelu`, its gradient from its output or its input alone.

    Differentiation keeps three to five arrays of the size of `x`. GELU falls to its minimum and rises from there, so
    its output and the side of the minimum tell the derivative: with `"output"` what is kept is what a product that
    follows keeps as well, and a byte for each element.

    **Arguments:**
    - `x`: any shape, of a floating-point type.
    - `approximate`: by tanh instead of erf, as in `jax.nn.gelu`.
    - `residual`: `"output"` keeps the result, computed in float32 at least and rounded once, and a byte for each
      element. The derivative has an error of at most 3e-7 where the result is exact; near the minimum it is known no
      better than the result is: to 2e-4 in float32 and 2e-2 in bfloat16 (root mean square over a normal distribution
      2e-6 and 2e-3, where differentiation in bfloat16 has 2e-2 and 3e-3). `"input"` keeps `x`; result and gradient are
      those of `jax.nn.gelu`, the latter computed again.

    **Raises:** `TypeError` for other types, `ValueError` for another residual.
    """
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"gelu takes an array of a floating-point type, not of {x.dtype}: convert it first")
    if residual not in get_args(Residual):
        raise ValueError(f"residual={residual!r}: one of {', '.join(map(repr, get_args(Residual)))}")
    return _gelu(x, bool(approximate), residual)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gelu(x: jax.Array, approximate: bool, residual: Residual) -> jax.Array:
    precise = x if residual == "input" else x.astype(_precise(x))
    return jax.nn.gelu(precise, approximate).astype(x.dtype)


def _forward(x: jax.Array, approximate: bool, residual: Residual) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    y = _gelu(x, approximate, residual)
    return y, (x,) if residual == "input" else (y, x >= _fit(approximate).turns)


def _backward(
    approximate: bool, residual: Residual, kept: tuple[jax.Array, ...], cotangent: jax.Array
) -> tuple[jax.Array]:
    kept = lax.optimization_barrier(kept)  # or compilers keep what they were computed from, to compute them again
    if residual == "input":
        return jax.vjp(lambda x: jax.nn.gelu(x, approximate), *kept)[1](cotangent)
    y, rising = kept
    slope = _fit(approximate).slope(y.astype(_precise(y)), rising)
    return ((cotangent * slope).astype(y.dtype),)


_gelu.defvjp(_forward, _backward)


def _precise(x: jax.Array) -> Any:
    """The type that a layer computes in."""
    return jnp.promote_types(x.dtype, jnp.float32)


class _Piece(NamedTuple):
    """A polynomial between two values of its variable, in powers of where it is between them, from -1 to 1."""

    low: float
    high: float
    coefficients: tuple[float, ...]

    def __call__(self, v: jax.Array) -> jax.Array:
        t = jnp.clip((v - self.low) * (2 / (self.high - self.low)) - 1, -1, 1)
        total = jnp.full_like(t, self.coefficients[-1])
        for c in self.coefficients[-2::-1]:
            total = total * t + c
        return total


class _Fit(NamedTuple):
    """The slope of GELU by its value: `turns` and `least`, where it turns and what it is there.

    By the root of what is above the minimum it is analytic through the minimum, on both sides (`falling`, then `rising`
    pieces, then 1). Far to the left it is the value times a polynomial (`tails`) of the root of its negative logarithm.
    """

    turns: float
    least: float
    falling: _Piece
    tails: tuple[_Piece, ...]
    rising: tuple[_Piece, ...]

    def slope(self, y: jax.Array, rising: jax.Array) -> jax.Array:
        above = jnp.sqrt(jnp.maximum(y - self.least, 0))
        depth = jnp.sqrt(-jnp.log(jnp.clip(-y, jnp.finfo(y.dtype).tiny, 0.5)))
        left = jnp.where(above <= self.falling.high, self.falling(above), y * _joined(self.tails, depth))
        right = jnp.where(above <= self.rising[-1].high, _joined(self.rising, above), 1)
        return jnp.where(rising, right, left)


def _joined(pieces: tuple[_Piece, ...], v: jax.Array) -> jax.Array:
    *before, last = pieces
    found = last(v)
    for piece in reversed(before):
        found = jnp.where(v <= piece.high, piece(v), found)
    return found


_Function = Callable[[Any], Any]


def _by_erf(x: Any) -> tuple[Any, Any]:
    below = ndtr(x)
    return x * below, below + x * np.exp(-x * x / 2) / np.sqrt(2 * np.pi)


def _by_tanh(x: Any) -> tuple[Any, Any]:
    scale, cubic = np.sqrt(8 / np.pi), 0.044715
    below = expit(scale * (x + cubic * x**3))
    return x * below, below + x * below * (1 - below) * scale * (1 + 3 * cubic * x * x)


@functools.cache
def _fit(approximate: bool) -> _Fit:
    """The polynomials, through Chebyshev's nodes."""
    of = _by_tanh if approximate else _by_erf
    turns = brentq(lambda x: of(x)[1], -1, -0.5, xtol=1e-15)
    least = of(turns)[0]

    def above(x: Any) -> Any:
        return np.sqrt(np.maximum(of(x)[0] - least, 0))

    def depth(x: Any) -> Any:
        return np.sqrt(-np.log(-of(x)[0]))

    def piece(variable: _Function, slope: _Function, start: float, end: float, degree: int) -> _Piece:
        low, high = sorted((float(variable(start)), float(variable(end))))
        nodes = chebyshev.chebpts1(degree + 1)
        wanted = low + (high - low) * (nodes + 1) / 2
        ends = min(start, end), max(start, end)
        x = np.array([brentq(lambda x, v=v: variable(x) - v, *ends, xtol=1e-15) for v in wanted])
        fitted = chebyshev.cheb2poly(chebyshev.chebfit(nodes, slope(x), degree))
        return _Piece(low, high, tuple(map(float, fitted)))

    def slope(x: Any) -> Any:
        return of(x)[1]

    def relative(x: Any) -> Any:
        return of(x)[1] / of(x)[0]

    return _Fit(
        turns,
        least,
        piece(above, slope, turns, -1.6, 8),
        (piece(depth, relative, -1.6, -3.2, 10), piece(depth, relative, -3.2, -10.0 if approximate else -13.0, 10)),
        tuple(piece(above, slope, a, b, 10) for a, b in ((turns, 1.2), (1.2, 2.6), (2.6, 5.8))),
    )
