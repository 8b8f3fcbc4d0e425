"""Small programs that are easily got wrong: loops that stop for each example by itself or never start, arrays without
elements, floats of 8 bits, decompositions, long scans. Each is planned and run, and compared with `jax.jit`."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import unity_jax as unity
from tests.numerics.harness import Case, errors

Row = tuple[str, Callable[..., Any], tuple[Any, ...]]

NARROW = [d for name in dir(jnp) if name.startswith(("float8", "float4")) and (d := getattr(jnp, name))]
F8, GRADIENT = jnp.float8_e4m3fn, jnp.float8_e5m2


def normal(*shape: int, dtype: Any = np.float32) -> Any:
    return jnp.asarray(np.random.default_rng(shape).normal(size=shape).astype(np.float32)).astype(dtype)


def definite(*shape: int) -> Any:
    x = normal(*shape)
    return x @ jnp.swapaxes(x, -1, -2) + shape[-1] * jnp.eye(shape[-1])


# Loops


def newton(x: Any, n: Any) -> Any:
    """As many steps as each example asks for, with a product over all of its numbers in each."""

    def body(s: Any) -> Any:
        return s[0] + 1, s[1] @ W * 1.3 + 0.1

    return jax.vmap(lambda x, n: lax.while_loop(lambda s: (s[0] < n) & (s[1].sum() < 40), body, (0, x)))(x, n)


def nested(x: Any, n: Any) -> Any:
    """Two batches, of which the loop's condition knows one."""
    inner = jax.vmap(lambda x, n: lax.fori_loop(0, n, lambda i, c: jnp.tanh(c + i), x), (0, None))
    return jax.vmap(inner)(x, n)


def keyed(x: Any, n: Any) -> Any:
    """A loop that carries keys."""

    def body(s: Any) -> Any:
        key, x, i = s
        key, now = jax.random.split(key)
        return key, x + jax.random.uniform(now, x.shape), i + 1

    return jax.vmap(lambda x, n: lax.while_loop(lambda s: s[2] < n, body, (jax.random.key(3), x, 0))[1])(x, n)


def never(w: Any, x: Any) -> Any:
    """A scan of no length, its stacked results and its gradient."""
    body = lambda c, k: (c @ w, (c * k, k, jax.random.key(1)))  # noqa: E731
    loss = lambda w: lax.scan(lambda c, _: (c @ w, None), x, None, length=0)[0].sum()  # noqa: E731
    carry, (a, b, keys) = lax.scan(body, x, jnp.zeros((0,)))
    return carry, a, b, jax.random.key_data(keys), jax.grad(loss)(w)


W = np.random.default_rng(0).normal(size=(6, 6)).astype(np.float32) / 3
TRIPS = np.array([0, 3, 1, 7, 2, 0, 5, 4, 1, 1, 2, 6], np.int32)

LOOPS: list[Row] = [
    ("while with a count for each example", newton, (normal(12, 6), TRIPS)),
    ("fori_loop with a count for each example", nested, (normal(12, 4, 6), TRIPS)),
    ("while with keys and a count for each example", keyed, (normal(12, 6), TRIPS)),
    ("scan of length 0", never, (normal(6, 6), normal(12, 6))),
    ("fori_loop of length 0", lambda x: lax.fori_loop(0, 0, lambda i, c: c @ c, x), (normal(8, 8),)),
]

# Arrays without elements

EMPTY: list[Row] = [
    ("product over nothing", lambda x, w: (x @ w, jnp.tanh(x @ w).sum()), (normal(8, 0), normal(0, 16))),
    ("product of nothing", lambda x, w: x @ w, (normal(0, 8), normal(8, 16))),
    ("gradient of a product over nothing", jax.grad(lambda x, w: (x @ w).sum(), (0, 1)), (normal(8, 0), normal(0, 6))),
    ("sums and scans of nothing", lambda x: (x.sum(1), jnp.cumsum(x, 1), jnp.sort(x, 1)), (normal(8, 0),)),
    ("nothing looked up and added", lambda x, i, u: (x[i], x.at[i].add(u)), (normal(8, 6), TRIPS[:0], normal(0, 6))),
]

# Floats of 8 bits


def dot8(x: Any, w: Any, dtype: Any = F8, dims: Any = (((1,), (0,)), ((), ()))) -> Any:
    return lax.dot_general(x.astype(dtype), w.astype(F8), dims, preferred_element_type=jnp.float32)


@jax.custom_vjp
def dense8(x: Any, w: Any) -> Any:
    return dot8(x, w)


def _backward(saved: Any, g: Any) -> Any:
    x, w = saved
    return dot8(g, w, GRADIENT, (((1,), (1,)), ((), ()))), dot8(g, x, GRADIENT, (((0,), (0,)), ((), ()))).T


dense8.defvjp(lambda x, w: (dense8(x, w), (x, w)), _backward)


def there_and_back(dtype: Any) -> Callable[..., Any]:
    return lambda x: (x.astype(dtype), x.astype(dtype).astype(x.dtype))


def step8(w: Any, x: Any) -> Any:
    """A train step with products of 8 bits, forward and backward, scaled by the greatest magnitude."""

    def loss(w: Any) -> Any:
        scale = lax.stop_gradient(jnp.abs(w).max() / 448)
        return jnp.mean(dense8(jax.nn.relu(dense8(x, w / scale) * scale), w / scale) ** 2) * scale**2

    value, grad = jax.value_and_grad(loss)(w)
    return w - 0.1 * grad, value


def reduced8(x: Any) -> Any:
    y = x.astype(F8)
    return y.max(0), y.min(1), y.sum(0), jnp.cumsum(y, 1), y[jnp.arange(3)], y.T @ y


BYTES: list[Row] = [
    *((f"casts of {d.dtype.name}", there_and_back(d), (abs(normal(16, 6)) + 0.5,)) for d in NARROW),
    *((f"{d.dtype.name} to bfloat16", lambda x: x.astype(jnp.bfloat16) * 2, (abs(normal(16, 6, dtype=d)),))
      for d in (F8, GRADIENT)),
    ("a product of 8 bits", dot8, (normal(16, 8), normal(8, 12))),
    ("reductions of 8 bits", reduced8, (normal(8, 6),)),
    ("a train step with 8 bits", step8, (normal(24, 24) / 5, normal(48, 24))),
]  # fmt: skip

# Linear algebra, transforms and searches


def system(a: Any, b: Any) -> Any:
    return jax.value_and_grad(lambda a, b: jnp.sin(jnp.linalg.solve(a, b)).sum(), (0, 1))(a, b)


def rebuilt(x: Any) -> Any:
    """What does not depend on the signs of singular vectors."""
    u, s, v = jnp.linalg.svd(x, full_matrices=False)
    q, r = jnp.linalg.qr(x)
    return s, (u * s[..., None, :]) @ v, q @ r, jnp.linalg.pinv(x)


def spectrum(a: Any) -> Any:
    values, vectors = jnp.linalg.eigh(a)
    return values, abs(vectors), jax.grad(lambda a: jnp.linalg.slogdet(a)[1].sum())(a), jnp.linalg.cholesky(a)


ALGEBRA: list[Row] = [
    ("solve and its gradient", system, (definite(12, 4, 4), normal(12, 4, 3))),
    ("svd, qr and pinv", rebuilt, (normal(12, 6, 4),)),
    ("eigh, slogdet and cholesky", spectrum, (definite(14, 4, 4),)),
    ("one system for many", lambda a, b: jax.scipy.linalg.cho_solve((a, True), b), (definite(6, 6), normal(6, 14))),
    ("fft", lambda x: (jnp.abs(jnp.fft.fft(x, axis=0)), jnp.fft.irfft2(jnp.fft.rfft2(x))), (normal(7, 12, 6),)),
    ("searchsorted", lambda a, v: jnp.searchsorted(jnp.sort(a), v), (normal(42), normal(56))),
    ("histogram", lambda x: jnp.histogram(x, 8, (-2.0, 2.0)), (normal(84),)),
    ("long scans", lambda x: (jnp.cumsum(x), lax.cummax(x, reverse=True), lax.cumlogsumexp(x)), (normal(1680),)),
    ("random choices", lambda k, x: (jax.random.permutation(k, x), jax.random.choice(k, x, (6,), replace=False)),
     (jax.random.key(0), normal(42))),
    ("gamma and unique", lambda k, x: (jax.random.gamma(k, abs(x[:4])), jnp.unique(x.astype(jnp.int32), size=6)),
     (jax.random.key(0), normal(42))),
    ("a product of primes", lambda x, w: x @ w, (normal(31, 37), normal(37, 41))),
    ("a callback", lambda x: jax.pure_callback(np.cumsum, x, x, vmap_method="expand_dims"), (normal(12),)),
]  # fmt: skip

TABLE = [*LOOPS, *EMPTY, *BYTES, *ALGEBRA]
UNEVEN = [*LOOPS, *EMPTY[:1], *BYTES[-3:], *ALGEBRA]
TOLERANCE = 2e-5
"""Of float32; floats of fewer bits and integers are compared bit by bit."""


@pytest.mark.parametrize(
    ("devices", "fn", "args"),
    [pytest.param(8, *row[1:], id=f"{row[0]}-8") for row in TABLE]
    + [pytest.param(6 + i % 2, *row[1:], id=f"{row[0]}-{6 + i % 2}") for i, row in enumerate(UNEVEN)],
)
def test_as_jit(devices, fn, args):
    got, want = unity.auto_shard(fn, mesh=jax.devices()[:devices])(*args), jax.jit(fn)(*args)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(want)]
    found = errors(paths, jax.tree.leaves(want), jax.tree.leaves(got), floor=1e-3)
    assert [d for d in found if not d.error <= TOLERANCE] == []


@pytest.mark.parametrize("sizes", [(2, 3), (7,), (2, 4)], ids=str)
@pytest.mark.parametrize(("fn", "args"), [pytest.param(*row[1:], id=row[0]) for row in [*LOOPS, *ALGEBRA[:4]]])
def test_any_plan(fn, args, sizes):
    with jax.enable_x64(True):
        wide = [x.astype(np.float64) if x.dtype == np.float32 else x for x in args]
        case = Case.of(fn, wide)
        for seed in range(2):
            plan = case.sample(sizes, random.Random(str(sizes)).randint(0, 99) + seed)
            assert case.differences(case.run(plan), floor=1.0) == [], f"{plan.graph}"
