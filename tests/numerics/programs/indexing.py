"""Gathers, scatters, sorts and searches."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tests.numerics.programs.drawer import BOOL, ENTRIES, FLOAT, INT, SIZES, Drawer, Entry, distinct, entry

MODES = ("clip", "fill", "promise_in_bounds")


@entry("gather")
def gather(d: Drawer) -> None:
    x = d.value(d.choice((FLOAT, FLOAT, FLOAT, INT, BOOL)), 1, 3)
    how = d.variant("rows", "embedding gradient", "along", "slices", "two")
    axis, mode = d.rng.randint(0, x.rank - 1), d.choice(MODES)
    far = 0 if mode == "promise_in_bounds" else 2
    n = x.shape[axis]
    if how == "along":
        ids = d.ids(tuple(d.choice((2, 4, 5)) if i == axis else m for i, m in enumerate(x.shape)), 0, n)
        d.apply("gather:along", lambda a, i: jnp.take_along_axis(a, i, axis, mode=mode), x, ids)
    elif how == "slices":
        ids, width = d.ids((d.choice(SIZES), 1), -far, n + far), d.rng.randint(1, n)
        window = tuple(width if i == axis else m for i, m in enumerate(x.shape))
        numbers = lax.GatherDimensionNumbers(tuple(range(1, x.rank + 1)), (), (axis,))
        mode = "clip" if mode == "promise_in_bounds" else mode
        d.apply("gather:slices", lambda a, i: lax.gather(a, i, numbers, window, mode=mode), x, ids)
    elif how == "two" and x.rank >= 2:
        ids = [d.ids((d.choice(SIZES),), 0, m) for m in x.shape[:2]]
        d.apply("gather:two", lambda a, i, j: a.at[i, :][:, j].get(mode=mode), x, *ids)
    elif how == "embedding gradient" and x.kind == FLOAT:
        ids = d.ids(d.shape(1, 2), -far, n + far)
        d.apply("gather:gradient", jax.grad(lambda a, i: jnp.sin(jnp.take(a, i, axis, mode="clip")).mean()), x, ids)
    else:
        ids = d.ids(d.shape(0, 2), -far, n + far)
        d.apply("gather", lambda a, i: jnp.take(a, i, axis, mode=mode), x, ids)


SCATTERS = {
    "scatter-add": lambda a, i, u: a.at[i].add(u * 0.3),
    "scatter-sub": lambda a, i, u: a.at[i].subtract(u * 0.3),
    "scatter-mul": lambda a, i, u: a.at[i].mul(lax.cos(u)),
    "scatter-max": lambda a, i, u: a.at[i].max(u),
    "scatter-min": lambda a, i, u: a.at[i].min(u),
    "scatter": lambda a, i, u: a.at[i].set(u, unique_indices=True),
    "scatter:same": lambda a, i, u: a.at[i].set(u),
}


def _scatter(name: str) -> Entry:
    def draw_(d: Drawer) -> None:
        x = d.value(FLOAT, 1, 3)
        shape = d.shape(1, 2) if name != "scatter" else (d.rng.randint(1, x.shape[0]),)
        ids = d.ids(shape, -2, x.shape[0] + 2)
        u = d.value(FLOAT, shape=(*shape, *x.shape[1:]))
        if name == "scatter":  # every row at most once
            d.apply(name, lambda a, i, v: SCATTERS[name](a, (jnp.arange(i.shape[0]) + i[0]) % a.shape[0], v), x, ids, u)
        elif name == "scatter:same":  # which of several updates of a row comes last is not defined: all are equal
            d.apply(name, lambda a, i, v: SCATTERS[name](a, i, jnp.broadcast_to(v[(0,) * i.ndim], v.shape)), x, ids, u)
        else:
            d.apply(name, SCATTERS[name], x, ids, u)

    return draw_


ENTRIES |= {name: _scatter(name) for name in SCATTERS}


@entry("scatter-add:along")
def scatter_along(d: Drawer) -> None:
    x = d.value(FLOAT, 2, 3)
    ids = d.ids((*x.shape[:-1], d.choice((2, 3, 4))), 0, x.shape[-1])
    d.apply("scatter-add:along", jax.grad(lambda a, i: jnp.cos(jnp.take_along_axis(a, i, -1)).sum()), x, ids)


@entry("sort")
def sort(d: Drawer) -> None:
    x = d.value(FLOAT, 1, 3)
    axis = d.rng.randint(0, x.rank - 1)
    if d.flip():
        d.apply("sort", lambda a: lax.sort(distinct(a), axis), x)
    else:
        y = d.value(FLOAT, shape=x.shape)
        d.apply("sort", lambda a, b: lax.sort((distinct(a), b), axis, num_keys=1), x, y)


@entry("searchsorted")
def searchsorted(d: Drawer) -> None:
    x, y = d.value(FLOAT, 1, 1), d.value(FLOAT, 1, 2)
    method = d.variant("scan", "compare_all", "sort")
    d.apply("searchsorted", lambda a, v: jnp.searchsorted(jnp.sort(distinct(a)), distinct(v), method=method), x, y)


@entry("top_k", "approx_top_k")
def top_k(d: Drawer) -> None:
    x = d.value(FLOAT, 1, 3)
    k = min(d.choice((1, 2, 3)), x.shape[-1])
    if d.variant("exact", "approximate") == "exact":
        d.apply("top_k", lambda a: lax.top_k(distinct(a), k), x)
    else:
        d.apply("approx_top_k", lambda a: lax.approx_max_k(distinct(a), k), x)
