"""Loops, branches and gradients of sub-programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.numerics.programs.drawer import ENTRIES, FLOAT, Drawer, Skip, Value, entry, grow, kind_of
from tests.numerics.programs.elementwise import BINARY, COMPARE, UNARY


def weighted(names: Sequence[str]) -> list[str]:
    """What moves data three times as often as what is elementwise."""
    return [n for n in names for _ in range(1 if n in UNARY or n in BINARY or n in COMPARE else 3)]


def _sub(d: Drawer, structs: Sequence[Any], steps: int) -> Drawer:
    """A sub-program over inputs of these types, with some steps drawn."""
    inner = Drawer(d.rng, closed=True)
    for s in structs:
        inner.values.append(Value(len(inner.values), s.shape, s.dtype))
        inner.order.append(("input", len(inner.order)))
    grow(inner, steps, weighted([n for n in ENTRIES if n not in NESTED]))
    return inner


def _same_type(inner: Drawer, like: Value) -> Value:
    """A value of the sub-program with the type of `like`: the latest one, brought near 1."""
    found = [v for v in inner.values if (v.shape, v.dtype) == (like.shape, like.dtype)][-1]
    return inner.apply("settle", lambda x: lax.sin(x) if kind_of(x.dtype) == FLOAT else x, found)[0]


def _leaves(inner: Drawer, arguments: int) -> list[Value]:
    """The values that nothing reads."""
    read = {i for step in inner.steps for i in step.operands}
    return [v for v in inner.values[arguments:] if v.index not in read]


@entry("scan")
def scan(d: Drawer) -> None:
    length = d.choice((2, 3, 4, 6))
    carry, const = d.value(FLOAT, 1, 3), d.value(FLOAT, 0, 2)
    xs = d.value(FLOAT, shape=(length, *d.choice(((), carry.shape, carry.shape[-1:]))))
    inner = _sub(d, [carry, const, jax.ShapeDtypeStruct(xs.shape[1:], xs.dtype)], d.rng.randint(1, 4))
    mix = inner.apply("mix", lambda c, x: c + lax.sin(x).sum() * 0.1, inner.values[0], inner.values[2])[0]
    after = _same_type(inner, mix)
    outs = [v for v in _leaves(inner, 3) if v.index != after.index][-2:]
    step, back = inner.function([after, *outs], 3), d.flip(0.3)

    def fn(c: Any, k: Any, x: Any) -> Any:
        def body(c: Any, x: Any) -> Any:
            after, *ys = step(c, k, x)
            return after, ys

        return lax.scan(body, c, x, reverse=back)

    if d.flip(0.35) and not d.closed:
        floats = lambda *a: sum(jnp.sin(o).sum() for o in jax.tree.leaves(fn(*a)) if kind_of(o.dtype) == FLOAT)  # noqa: E731
        d.apply(f"grad(scan({_text(inner)}))", jax.grad(floats, (0, 1, 2)), carry, const, xs)
    else:
        d.apply(f"scan({_text(inner)})", fn, carry, const, xs)


@entry("while")
def while_(d: Drawer) -> None:
    carry, const, n = d.value(FLOAT, 1, 3), d.value(FLOAT, 0, 2), d.choice((1, 2, 3))
    inner = _sub(d, [carry, const], d.rng.randint(1, 3))
    step = inner.function([_same_type(inner, carry)], 2)
    d.apply(
        f"while({_text(inner)})",
        lambda c, k: lax.while_loop(
            lambda s: (s[0] < n) & (s[1].sum() < 1e6), lambda s: (s[0] + 1, step(s[1], k)[0]), (0, c)
        ),
        carry,
        const,
    )


@entry("while:batched")
def while_batched(d: Drawer) -> None:
    """A trip count for each example."""
    carry = d.value(FLOAT, 2, 3)
    counts = d.ids(carry.shape[:1], 0, 4)
    inner = _sub(d, [jax.ShapeDtypeStruct(carry.shape[1:], carry.dtype)], d.rng.randint(1, 3))
    step = inner.function([_same_type(inner, inner.values[0])], 1)

    def one(c: Any, n: Any) -> Any:
        return lax.while_loop(
            lambda s: (s[0] < n) & (s[1].sum() < 1e6), lambda s: (s[0] + 1, step(s[1])[0]), (jnp.zeros_like(n), c)
        )

    d.apply(f"vmap(while({_text(inner)}))", jax.vmap(one), carry, counts)


@entry("scan:empty")
def scan_empty(d: Drawer) -> None:
    fn = lambda c, k: lax.scan(lambda c, _: (c * k.sum(), None), lax.sin(c), None, length=0)[0]  # noqa: E731
    d.apply("scan of no length", fn, d.value(FLOAT, 1, 3), d.value(FLOAT, 0, 2))


@entry("cond")
def cond(d: Drawer) -> None:
    x, y = d.value(FLOAT, 1, 3), d.value(FLOAT, 0, 2)
    which = d.ids((), -1, 4)
    branches = []
    for _ in range(d.choice((2, 2, 3))):
        inner = _sub(d, [x, y], d.rng.randint(1, 3))
        total = inner.apply(
            "total", lambda a: jnp.cos(a).mean(), d.choice([v for v in inner.values if v.kind == FLOAT])
        )[0]
        branches.append((inner, inner.function([_same_type(inner, x), total], 2)))
    fn = lambda i, a, b: lax.switch(i, [f for _, f in branches], a, b)  # noqa: E731
    name = f"cond({'|'.join(_text(i) for i, _ in branches)})"
    if d.flip(0.35):
        d.apply(
            f"grad({name})",
            jax.grad(lambda a, b, i: (lambda o: jnp.sin(o[0]).sum() + o[1])(fn(i, a, b)), (0, 1)),
            x,
            y,
            which,
        )
    else:
        d.apply(name, fn, which, x, y)


@entry("grad")
def grad(d: Drawer) -> None:
    x, y = d.value(FLOAT, 1, 3), d.value(FLOAT, 0, 3)
    inner = _sub(d, [x, y], d.rng.randint(2, 5))
    outs = [v for v in _leaves(inner, 0) if v.kind == FLOAT]
    if not outs:
        raise Skip
    fn, remat = inner.function(outs, 2), d.flip(0.3)
    fn = jax.checkpoint(fn) if remat else fn
    loss = lambda a, b: sum(jnp.sin(o).sum() for o in fn(a, b))  # noqa: E731
    d.apply(f"{'remat-' * remat}grad({_text(inner)})", jax.value_and_grad(loss, (0, 1)), x, y)


NESTED = ("scan", "while", "while:batched", "cond", "grad")


def _text(inner: Drawer) -> str:
    return " ".join(s.name for s in inner.steps)
