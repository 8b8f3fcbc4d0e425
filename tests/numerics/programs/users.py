"""What users call, and JAX writes as many primitives: scans by halves, histograms, permutations, derivatives."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.numerics.programs.drawer import FLOAT, INT, Drawer, distinct, entry, small
from tests.numerics.programs.reduction import CUMULATIVE


@entry("associative_scan")
def associative_scan(d: Drawer) -> None:
    x = d.value(FLOAT, 1, 2)
    axis, back = d.rng.randint(0, x.rank - 1), d.flip()
    if d.variant("sum", "product") == "sum":
        d.apply("associative_scan", lambda a: lax.associative_scan(jnp.add, small(a), back, axis), x)
    else:
        d.apply("associative_scan", lambda a: lax.associative_scan(jnp.multiply, lax.cos(a), back, axis), x)


@entry("grad of a cumulative op")
def cumulative_gradient(d: Drawer) -> None:
    name, x = d.variant(*CUMULATIVE), d.value(FLOAT, 1, 2)
    axis, back = d.rng.randint(0, x.rank - 1), d.flip()
    d.apply(f"grad({name})", jax.grad(lambda a: jnp.sin(CUMULATIVE[name](a, axis, back)).sum()), x)


@entry("histogram")
def histogram(d: Drawer) -> None:
    d.apply("histogram", lambda a: jnp.histogram(distinct(a), bins=5, range=(-3.0, 3.0))[0], d.value(FLOAT, 1, 2))


@entry("unique")
def unique(d: Drawer) -> None:
    x = d.value(INT, 1, 2)
    d.apply("unique", lambda a: jnp.unique(a % 7, size=4, fill_value=-1, return_counts=True), x)


@entry("permutation", "choice")
def permutation(d: Drawer) -> None:
    key, x = jax.random.key(7), d.value(FLOAT, 1, 3)
    if d.variant("permutation", "choice") == "permutation":
        d.apply("permutation", lambda a: jax.random.permutation(key, a), x)
    else:
        d.apply("choice", lambda a: jax.random.choice(key, a, (3,), replace=True), x)


@entry("fori_loop")
def fori_loop(d: Drawer) -> None:
    """A number of rounds that is not known before it runs."""
    x, n = d.value(FLOAT, 1, 3), d.ids((), 0, 4)
    d.apply("fori_loop", lambda a, n: lax.fori_loop(0, n, lambda i, s: lax.sin(s) + i * s.mean(), a), x, n)


@entry("jvp")
def jvp(d: Drawer) -> None:
    x = d.value(FLOAT, 1, 3)
    tangent = d.value(FLOAT, shape=x.shape)

    def fn(a: Any) -> Any:
        return jnp.tanh(a) * jax.nn.logsumexp(a, axis=-1, keepdims=True)

    d.apply("jvp", lambda a, t: jax.jvp(fn, (a,), (t,)), x, tangent)


@entry("number")
def number(d: Drawer) -> None:
    """Python's numbers and arrays of the host beside arrays."""
    x = d.value(FLOAT, 0, 3)
    d.apply("number", lambda a: a * 3 + np.float32(0.5) - True, x)
