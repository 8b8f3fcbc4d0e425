"""Reductions and cumulative operations."""

from __future__ import annotations

import math

import numpy as np
from jax import lax

from tests.numerics.programs.drawer import BOOL, ENTRIES, FLOAT, INT, Drawer, Entry, axes_of, distinct, small

REDUCTIONS = {
    "reduce_sum": (FLOAT, lambda x, axes: x.sum(axes) / math.sqrt(math.prod(x.shape[a] for a in axes))),
    "reduce_max": (FLOAT, lambda x, axes: x.max(axes)),
    "reduce_min": (FLOAT, lambda x, axes: x.min(axes)),
    "reduce_prod": (FLOAT, lambda x, axes: lax.cos(x).prod(axes)),
    "reduce_and": (BOOL, lambda x, axes: x.all(axes)),
    "reduce_or": (BOOL, lambda x, axes: x.any(axes)),
    "reduce_xor": (INT, lambda x, axes: lax.reduce(x, np.int32(0), lax.bitwise_xor, axes)),
    "reduce": (FLOAT, lambda x, axes: lax.reduce(small(x), 0.0, lambda a, b: a + b - a * b, axes)),
    "argmax": (FLOAT, lambda x, axes: lax.argmax(distinct(x), axes[0], np.int32)),
    "argmin": (FLOAT, lambda x, axes: lax.argmin(distinct(x), axes[0], np.int32)),
    "int sum": (INT, lambda x, axes: x.sum(axes)),
    "int max": (INT, lambda x, axes: x.max(axes)),
}
CUMULATIVE = {
    "cumsum": lambda x, axis, back: lax.cumsum(x, axis, back) / math.sqrt(x.shape[axis]),
    "cumprod": lambda x, axis, back: lax.cumprod(lax.cos(x), axis, back),
    "cummax": lambda x, axis, back: lax.cummax(distinct(x), axis, back),
    "cummin": lambda x, axis, back: lax.cummin(distinct(x), axis, back),
    "cumlogsumexp": lambda x, axis, back: lax.cumlogsumexp(x, axis, back) * 0.5,
}


def _reduction(name: str) -> Entry:
    def draw_(d: Drawer) -> None:
        kind, fn = REDUCTIONS[name]
        x = d.value(kind, 1, 4)
        axes = axes_of(d, x.rank)
        d.apply(name, lambda a: fn(a, axes), x)

    return draw_


def _cumulative(name: str) -> Entry:
    def draw_(d: Drawer) -> None:
        x = d.value(FLOAT, 1, 4)
        axis, back = d.rng.randint(0, x.rank - 1), d.flip()
        d.apply(name, lambda a: CUMULATIVE[name](a, axis, back), x)

    return draw_


ENTRIES |= {name: _reduction(name) for name in REDUCTIONS} | {name: _cumulative(name) for name in CUMULATIVE}
