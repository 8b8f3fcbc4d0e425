"""Ops that move elements."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.numerics.programs.drawer import BOOL, FLOAT, INT, Drawer, Skip, axes_of, entry


@entry("reshape")
def reshape(d: Drawer) -> None:
    x = d.value(d.choice((FLOAT, FLOAT, INT)), 1, 4)
    primes = [p for n in x.shape for p in _primes(n)]
    if d.flip(0.3):
        primes = [primes[i] for i in d.permutation(len(primes))]
    shape: list[int] = []
    for p in primes:
        if shape and len(shape) < 4 and d.flip(0.5):
            shape[-1] *= p
        elif len(shape) < 4:
            shape.append(p)
        else:
            shape[-1] *= p
    if d.flip(0.2):
        shape.insert(d.rng.randint(0, len(shape)), 1)
    d.apply("reshape", lambda a: a.reshape(shape), x)


def _primes(n: int) -> list[int]:
    return [n] if n < 4 or n in (5, 7) else [p := next(p for p in (2, 3, 5, 7, n) if n % p == 0), *_primes(n // p)]


@entry("transpose")
def transpose(d: Drawer) -> None:
    x = d.value(d.choice((FLOAT, INT, BOOL)), 2, 4)
    order = d.permutation(x.rank)
    d.apply("transpose", lambda a: lax.transpose(a, order), x)


@entry("broadcast_in_dim", "squeeze")
def broadcast(d: Drawer) -> None:
    x = d.value(d.choice((FLOAT, FLOAT, INT, BOOL)), 0, 3)
    lead = d.shape(0, 2)
    ones = d.rng.randint(0, x.rank)
    if d.variant("broadcast", "squeeze") == "broadcast":
        d.apply(
            "broadcast",
            lambda a: jnp.broadcast_to(jnp.expand_dims(a, ones), (*lead, *a.shape[:ones], 3, *a.shape[ones:])),
            x,
        )
    else:
        d.apply("squeeze", lambda a: lax.squeeze(jnp.expand_dims(a, ones), (ones,)), x)


@entry("pad")
def pad(d: Drawer) -> None:
    x = d.value(FLOAT, 1, 3)
    config = [d.choice(((0, 0, 0), (0, 0, 0), (1, 2, 0), (0, 1, 1), (-1, 2, 0), (2, 0, 2))) for _ in x.shape]
    if d.flip():
        d.apply("pad", lambda a: lax.pad(a, np.float64(0), config), x)
    else:
        d.apply("pad", lambda a, v: lax.pad(a, v, config), x, d.value(FLOAT, 0, 0))


@entry("slice")
def slice_(d: Drawer) -> None:
    x = d.value(d.choice((FLOAT, FLOAT, INT)), 1, 4)
    index = []
    for n in x.shape:
        start = d.rng.randint(0, n - 1) if d.flip(0.4) else 0
        stop = d.rng.randint(start + 1, n) if d.flip(0.4) else n
        index.append(slice(start, stop, d.choice((1, 1, 2))))
    d.apply("slice", lambda a: a[tuple(index)], x)


@entry("concatenate")
def concatenate(d: Drawer) -> None:
    x = d.value(FLOAT, 1, 3)
    axis, more = d.rng.randint(0, x.rank - 1), d.choice((1, 2, 4))
    y = d.value(FLOAT, shape=tuple(more if i == axis else n for i, n in enumerate(x.shape)))
    d.apply("concatenate", lambda *xs: lax.concatenate(xs, axis), *((x, y) if d.flip() else (x, y, x)))


@entry("split")
def split(d: Drawer) -> None:
    x = d.value(FLOAT, 1, 3)
    axis = d.rng.randint(0, x.rank - 1)
    if x.shape[axis] < 2:
        raise Skip
    at = d.rng.randint(1, x.shape[axis] - 1)
    d.apply("split", lambda a: lax.split(a, (at, a.shape[axis] - at), axis), x)


@entry("stack", "unstack", "tile")
def stack(d: Drawer) -> None:
    x = d.value(FLOAT, 1, 3)
    axis, reps = d.rng.randint(0, x.rank - 1), tuple(d.choice((1, 2, 3)) for _ in x.shape)
    how = d.variant("stack", "unstack", "tile")
    fns = {
        "stack": lambda a: jnp.stack([a, lax.sin(a)], axis),
        "unstack": lambda a: jnp.unstack(a, axis=axis)[:3],
        "tile": lambda a: jnp.tile(a, reps),
    }
    d.apply(how, fns[how], x)


@entry("rev")
def rev(d: Drawer) -> None:
    x = d.value(d.choice((FLOAT, INT)), 1, 4)
    axes = axes_of(d, x.rank)
    d.apply("rev", lambda a: lax.rev(a, axes), x)


@entry("iota")
def iota(d: Drawer) -> None:
    shape = d.shape(1, 3)
    axis, dtype = d.rng.randint(0, len(shape) - 1), d.choice((np.int32, np.float64))
    d.apply("iota", lambda: lax.broadcasted_iota(dtype, shape, axis) % 3)


@entry("empty", "empty2")
def empty(d: Drawer) -> None:
    shape = d.shape(1, 3)
    d.apply("empty", lambda x: jnp.full(shape, x) * 0.3, d.value(FLOAT, 0, 0))


@entry("dynamic_slice", "dynamic_update_slice")
def dynamic(d: Drawer) -> None:
    x = d.value(FLOAT, 1, 3)
    sizes = tuple(d.rng.randint(1, n) if d.flip() else n for n in x.shape)
    starts = [d.ids((), -1, n + 1) for n in x.shape]
    if d.variant("slice", "update") == "slice":
        d.apply("dynamic_slice", lambda a, *s: lax.dynamic_slice(a, s, sizes), x, *starts)
    else:
        update = d.value(FLOAT, shape=sizes)
        d.apply("dynamic_update_slice", lambda a, u, *s: lax.dynamic_update_slice(a, u, s), x, update, *starts)
