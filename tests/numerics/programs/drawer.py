"""A random program under construction: its values, the steps that made them, and the table of what can be applied."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

SIZES = (2, 3, 4, 5, 6, 7, 8, 8, 12, 16)
LIMIT = 3000  # elements of a value
FLOAT, INT, BOOL, KEY = "float", "int", "bool", "key"


@dataclass(frozen=True)
class Value:
    """A value of the program under construction."""

    index: int
    shape: tuple[int, ...]
    dtype: Any

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def kind(self) -> str:
        return kind_of(self.dtype)


def kind_of(dtype: Any) -> str:
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return KEY
    return {"f": FLOAT, "i": INT, "u": "word", "b": BOOL, "c": "complex"}[np.dtype(dtype).kind]


class Skip(Exception):
    """No application here: wrong sizes, too large, no derivative."""


@dataclass(frozen=True)
class Step:
    name: str
    fn: Callable[..., Any]
    operands: tuple[int, ...]
    results: int


@dataclass(eq=False)
class Program:
    """A function and arguments for it."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    steps: tuple[str, ...]
    donate: tuple[int, ...] = ()

    def __str__(self) -> str:
        return " ".join(self.steps)


@dataclass(eq=False)
class Drawer:
    """A program under construction: values so far, the steps that made them, and choices yet to be made."""

    rng: random.Random
    values: list[Value] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    inputs: list[Any] = field(default_factory=list)  # concrete arrays; none in sub-programs
    order: list[tuple[str, int]] = field(default_factory=list)  # ("input" or "step", position), in order of values
    closed: bool = False
    fresh: float = 0.35
    turns: dict[tuple[str, ...], int] | None = None  # if given, variants of an entry take turns

    # Choices

    def choice(self, options: Sequence[Any]) -> Any:
        return options[self.rng.randint(0, len(options) - 1)]

    def variant(self, *options: str) -> str:
        """Which form of its primitives an entry applies."""
        if self.turns is None:
            return self.choice(options)
        self.turns[options] = self.turns.get(options, -1) + 1
        return options[self.turns[options] % len(options)]

    def flip(self, probability: float = 0.5) -> bool:
        return self.rng.randint(0, 99) < probability * 100

    def shape(self, low: int, high: int) -> tuple[int, ...]:
        rank = self.rng.randint(low, high)
        sizes = [1 if self.turns is None and self.flip(0.06) else self.choice(SIZES) for _ in range(rank)]
        while math.prod(sizes) > LIMIT // 2:
            sizes[sizes.index(max(sizes))] = 2
        return tuple(sizes)

    def permutation(self, n: int) -> list[int]:
        left, found = list(range(n)), []
        while left:
            found.append(left.pop(self.rng.randint(0, len(left) - 1)))
        return found

    # Values

    def value(self, kind: str, low: int = 0, high: int = 4, shape: tuple[int, ...] | None = None) -> Value:
        """A value of these ranks (of this `shape`), existing or a new input."""
        fits = [
            v for v in self.values
            if v.kind == kind and (v.shape == shape if shape is not None else low <= v.rank <= high)
        ]  # fmt: skip
        if fits and (self.closed or not self.flip(self.fresh)):
            return self.choice(fits[-6:])
        wanted = self.shape(low, high) if shape is None else shape
        if not self.closed:
            return self.new(kind, wanted)
        return self.made(kind, wanted)

    def new(self, kind: str, shape: tuple[int, ...], low: int = 0, high: int = 10) -> Value:
        """A new input."""
        rng = np.random.default_rng([len(self.inputs), *shape])
        if kind == FLOAT:
            x = rng.normal(size=shape)
        elif kind == INT:
            x = rng.integers(low, high, shape).astype(np.int32)
        elif kind == "word":
            x = rng.integers(0, 2**32, shape).astype(np.uint32)
        elif kind == BOOL:
            x = rng.random(shape) < 0.5
        else:
            x = jax.random.split(jax.random.key(len(self.inputs)), shape) if shape else jax.random.key(len(self.inputs))
        x = jnp.asarray(x)
        self.inputs.append(x)
        value = Value(len(self.values), x.shape, x.dtype)
        self.values.append(value)
        self.order.append(("input", len(self.inputs) - 1))
        return value

    def made(self, kind: str, shape: tuple[int, ...]) -> Value:
        """A value computed from nothing but constants (inside sub-programs)."""
        data = np.random.default_rng([len(self.values), *shape]).normal(size=shape)
        if kind == FLOAT:
            return self.apply("constant", lambda: jnp.sin(jnp.full(shape, 0.7)) + jnp.asarray(data))[0]
        if kind == INT:
            return self.apply("constant", lambda: lax.iota(np.int32, math.prod(shape)).reshape(shape) % 5)[0]
        if kind == BOOL:
            return self.apply("constant", lambda: jnp.asarray(data > 0))[0]
        raise Skip

    def ids(self, shape: tuple[int, ...], low: int, high: int) -> Value:
        """Indices in `[low, high)`."""
        if not self.closed:
            return self.new(INT, shape, low, high)
        n = math.prod(shape)
        return self.apply("constant", lambda: (lax.iota(np.int32, n).reshape(shape) * 7) % (high - low) + low)[0]

    def apply(self, name: str, fn: Callable[..., Any], *operands: Value) -> list[Value]:
        """Add a step, if JAX accepts it and its results are of bearable size."""
        structs = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in operands]
        try:
            results = jax.tree.leaves(jax.eval_shape(fn, *structs))
        except (TypeError, ValueError, NotImplementedError) as e:
            raise Skip(f"{name}: {e}") from e
        if not results or any(math.prod(r.shape) > LIMIT or 0 in r.shape or len(r.shape) > 5 for r in results):
            raise Skip(f"{name}: {results}")
        found = [Value(len(self.values) + i, r.shape, r.dtype) for i, r in enumerate(results)]
        self.values += found
        self.order += [("step", len(self.steps))] * len(found)
        self.steps.append(Step(name, fn, tuple(v.index for v in operands), len(found)))
        return found

    def function(self, outputs: Sequence[Value], arguments: int) -> Callable[..., Any]:
        """The program so far: from its first `arguments` values (inputs of a sub-program) or from its inputs."""
        steps, order, inputs_at = list(self.steps), list(self.order), {}
        for i, (what, position) in enumerate(order):
            if what == "input":
                inputs_at[i] = position
        wanted = [v.index for v in outputs]

        def run(*args: Any) -> tuple[Any, ...]:
            env: list[Any] = []
            done = 0
            while len(env) < len(order):
                at = len(env)
                if at < arguments or at in inputs_at:
                    env.append(args[at if at < arguments else inputs_at[at]])
                    continue
                step = steps[done]
                done += 1
                env += jax.tree.leaves(step.fn(*(env[i] for i in step.operands)))
            return tuple(env[i] for i in wanted)

        return run


Entry = Callable[[Drawer], None]
ENTRIES: dict[str, Entry] = {}


def entry(*names: str) -> Callable[[Entry], Entry]:
    """Make the decorated function draw applications of these primitives."""

    def add(fn: Entry) -> Entry:
        ENTRIES.update(dict.fromkeys(names, fn))
        return fn

    return add


def distinct(x: Any) -> Any:
    """`x` moved by small random offsets, so that no two elements tie unless they differ by noise alone."""
    return x + np.random.default_rng(x.shape).normal(size=x.shape) * 0.3


def small(x: Any) -> Any:
    return lax.tanh(x)


def positive(x: Any) -> Any:
    return lax.abs(x) + 0.5


def ignore(_: Any) -> None:
    return None


def grow(d: Drawer, steps: int, names: Sequence[str]) -> None:
    """Add about `steps` applications."""
    done = 0
    for _ in range(4 * steps):
        if done >= steps:
            return
        try:
            ENTRIES[d.choice(names)](d)
            done += 1
        except Skip:
            continue


def axes_of(d: Drawer, rank: int) -> tuple[int, ...]:
    axes = tuple(i for i in range(rank) if d.flip())
    return axes or (d.rng.randint(0, rank - 1),)
