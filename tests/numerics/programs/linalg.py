"""Decompositions, solves and Fourier transforms of batches.

Results are what rounding noise does not turn over: singular values and not the signs of singular vectors, products of
factors and not the factors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.numerics.programs.drawer import ENTRIES, FLOAT, Drawer, Entry, Value, entry, small


def _definite(x: Any) -> Any:
    x = small(x)
    return x @ jnp.swapaxes(x, -1, -2) / x.shape[-1] + jnp.diag(jnp.arange(1.0, x.shape[-1] + 1))


def _lower(x: Any) -> Any:
    return jnp.tril(_definite(x))


def _again(q: Any, middle: Any) -> Any:
    return q @ middle @ jnp.swapaxes(q, -1, -2)


def _rebuilt(x: Any) -> Any:
    n = x.shape[-1]
    u, s, v = lax.linalg.svd(small(x) / n + jnp.diag(jnp.arange(2.0, 2 * n + 1, 2)), full_matrices=False)
    return s, (u * s[..., None, :]) @ v


def _spectrum(x: Any) -> Any:
    v, w = lax.linalg.eigh(_definite(x))
    return w, (v * w[..., None, :]) @ jnp.swapaxes(v, -1, -2)


def _product(x: Any) -> Any:
    q, r = lax.linalg.qr(_definite(x))
    return q @ r, abs(jnp.diagonal(r, axis1=-2, axis2=-1))


def _reflected(x: Any) -> Any:
    q = lax.linalg.householder_product(small(x), jnp.sin(x[..., 0, :]) + 1.0)
    return q / math.prod(x.shape[-2:])


def _permuted(x: Any) -> Any:
    """The pivots of a matrix that needs many."""
    _, pivots, order = lax.linalg.lu(jnp.flip(_definite(x), -2))
    return order, lax.linalg.lu_pivots_to_permutation(pivots, x.shape[-1] + 1)


SQUARE: dict[str, Callable[[Any], Any]] = {
    "geqrf": lambda x: jax.scipy.linalg.qr_multiply(_definite(x), small(x), mode="right"),
    "geqp3": lambda x: jax.scipy.linalg.qr_multiply(_definite(x), small(x), mode="left", pivoting=True),
    "cholesky": lambda x: lax.linalg.cholesky(_definite(x)),
    "lu": lambda x: lax.linalg.lu(_definite(x))[0],
    "lu_pivots_to_permutation": _permuted,
    "qr": _product,
    "householder_product": _reflected,
    "svd": _rebuilt,
    "eigh": _spectrum,
    "eig": lambda x: lax.linalg.eig(_definite(x))[0].sum(-1).real,
    "schur": lambda x: (lambda t, q: _again(q, t))(*lax.linalg.schur(_definite(x))),
    "hessenberg": lambda x: abs(lax.linalg.hessenberg(_definite(x))[0]),
    "tridiagonal": lambda x: lax.linalg.tridiagonal(_definite(x))[1],
    "symmetric_product": lambda x: lax.linalg.symmetric_product(small(x), _definite(x), beta=0.5),
    "det": lambda x: jnp.linalg.slogdet(_definite(x))[1],
    "inv": lambda x: jnp.linalg.inv(_definite(x)),
}


def _matrices(d: Drawer, *last: int) -> Value:
    n = d.choice((2, 3, 4, 5))
    return d.value(FLOAT, shape=(*d.shape(0, 2), *(last or (n, n))))


def _square(name: str) -> Entry:
    def draw_(d: Drawer) -> None:
        d.apply(name, SQUARE[name], _matrices(d))

    return draw_


ENTRIES |= {name: _square(name) for name in SQUARE}


@entry("cholesky_update")
def cholesky_update(d: Drawer) -> None:
    n = d.choice((3, 4, 5))
    x, w = d.value(FLOAT, shape=(n, n)), d.value(FLOAT, shape=(n,))
    d.apply("cholesky_update", lambda a, b: lax.linalg.cholesky_update(_lower(a).T, b), x, w)


@entry("triangular_solve", "solve")
def solve(d: Drawer) -> None:
    x = _matrices(d)
    left, n = d.flip(), d.choice((1, 3, 6, 8))
    b = d.value(FLOAT, shape=(*x.shape[:-1], n) if left else (*x.shape[:-2], n, x.shape[-1]))
    how = d.variant("triangular", "general", "gradient")
    if how == "triangular":
        d.apply(how, lambda a, b: lax.linalg.triangular_solve(_lower(a), b, left_side=left, lower=True), x, b)
        return
    fn = lambda a, b: jnp.linalg.solve(_definite(a), b if left else jnp.swapaxes(b, -1, -2))  # noqa: E731
    if how == "gradient":
        d.apply("grad(solve)", jax.grad(lambda a, b: jnp.sin(fn(a, b)).sum(), (0, 1)), x, b)
    else:
        d.apply("solve", fn, x, b)


@entry("tridiagonal_solve")
def tridiagonal_solve(d: Drawer) -> None:
    b = _matrices(d, d.choice((4, 5, 7)), d.choice((1, 3, 8)))
    x = d.value(FLOAT, shape=b.shape[:-1])
    inner = lambda a: small(a).at[..., 0].set(0.0).at[..., -1].set(0.0)  # noqa: E731
    d.apply("tridiagonal_solve", lambda a, b: lax.linalg.tridiagonal_solve(inner(a), small(a) + 4, inner(a), b), x, b)


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "fft": lambda x, axes: jnp.fft.fftn(x, axes=axes).real,
    "ifft": lambda x, axes: jnp.fft.ifftn(lax.complex(x, lax.cos(x)), axes=axes).imag,
    "rfft": lambda x, axes: (lambda y: y.real + y.imag)(jnp.fft.rfftn(x, axes=axes)),
    "irfft": lambda x, axes: jnp.fft.irfftn(lax.complex(x, lax.sin(x)), axes=axes),
}


@entry("fft")
def fft(d: Drawer) -> None:
    x = d.value(FLOAT, 1, 3)
    axes = tuple(np.sort(d.permutation(x.rank)[: d.choice((1, 1, 2))]))
    how = d.variant(*TRANSFORMS)
    scale = math.sqrt(math.prod(x.shape[a] for a in axes))
    d.apply(how, lambda a: TRANSFORMS[how](a, axes) / scale, x)
