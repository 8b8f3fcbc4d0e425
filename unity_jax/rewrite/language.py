"""The language of rewrite rules: small programs over tensors whose sizes are symbols.

    merge-siblings: x[m,k] v[k,n] w[k,o]
      a = dot(x, v; k)
      b = dot(x, w; k)
    =>
      t = dot(x, concat(v, w; n+o); k)
      a = slice(t; n+o, 0)
      b = slice(t; n+o, 1)

A dimension is named by its size: equal names are equal dimensions, and operands are matched by name, not by position.
A name stands for any number of dimensions of a real tensor, or none (`m` of a Linear layer may be batch and sequence).
Sums are what a concatenation makes, `p*n` is `p` blocks of `n`. A tensor may also lie on device axes (`x[m,k]@p`): then
every device of `p` has a value of its own, and ops compute on each device; only parallel ops look across. The ops are
in `rewrite/ops`, one entry each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class RuleError(ValueError):
    """A term or rule that means nothing: the message says which part and why."""


class Dim(NamedTuple):
    """A symbolic size: a name, a sum (`n+o`) or a multiple (`p*n`; element i of block b is at b n + i)."""

    name: str
    parts: tuple[Dim, ...] = ()

    def __str__(self) -> str:
        inner = (f"({d})" if d.parts and (self.name == "*" or d.name == "+") else str(d) for d in self.parts)
        return self.name.join(inner) if self.parts else self.name

    def names(self) -> Iterator[str]:
        """The names in it, left to right."""
        if not self.parts:
            yield self.name
        for d in self.parts:
            yield from d.names()

    def renamed(self, names: Mapping[str, Dim]) -> Dim:
        """With other dimensions for some of its names."""
        return Dim(self.name, tuple(p.renamed(names) for p in self.parts)) if self.parts else names.get(self.name, self)


def unified(a: Dim, b: Dim) -> dict[str, Dim] | None:
    """The dimensions to put for names to make two dimensions the same, none if nothing does (J. A. Robinson, 1965)."""
    if a.parts and b.parts:
        if (a.name, len(a.parts)) != (b.name, len(b.parts)):
            return None
        made: dict[str, Dim] = {}
        for x, y in zip(a.parts, b.parts, strict=True):
            inner = unified(x.renamed(made), y.renamed(made))
            if inner is None:
                return None
            made = {n: d.renamed(inner) for n, d in made.items()} | inner
        return made
    if a.parts:
        a, b = b, a
    if a == b:
        return {}
    return None if a.name in b.names() else {a.name: b}


class Type(NamedTuple):
    """Dimensions in order, the device axes a value lies on, and, for row numbers, the dimension they count in."""

    dims: tuple[Dim, ...]
    devices: tuple[Dim, ...] = ()
    ids: Dim | None = None

    def __str__(self) -> str:
        text = f"[{','.join(map(str, self.dims))}]" + "".join(f"@{p}" for p in self.devices)
        return text + (f"<{self.ids}" if self.ids else "")


@dataclass(frozen=True)
class Term:
    """A variable (`op` is empty) or an op applied to terms. Equal terms are one value: a program shares them."""

    op: str
    args: tuple[Term, ...]
    attrs: tuple[Dim | int, ...]
    type: Type
    name: str = ""

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.op, self.args, self.attrs, self.type, self.name))

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        if not self.op:
            return self.name
        attrs = "; " + ", ".join(map(str, self.attrs)) if self.attrs else ""
        return f"{self.op}({', '.join(map(str, self.args))}{attrs})"

    def walk(self) -> Iterator[Term]:
        """Every distinct term in it, arguments first."""
        return iter(self._walked)

    @functools.cached_property
    def _walked(self) -> tuple[Term, ...]:
        return (*dict.fromkeys(t for a in self.args for t in a._walked), self)


def variable(name: str, type: Type) -> Term:
    return Term("", (), (), checked(type, lambda: name), name)


def checked(type: Type, where: Callable[[], str]) -> Type:
    """The type, if no dimension appears twice in it; `where` it was found."""
    for group in (type.dims, type.devices):
        if not all(isinstance(d, Dim) for d in group):
            raise RuleError(f"{where()}: a dimension has a name")
        if len({*group}) < len(group):
            twice = next(d for i, d in enumerate(group) if d in group[:i])
            raise RuleError(f"{where()}: dimension {twice} appears twice")
    return type


# What types of results are made of

Types = tuple[Type, ...]
Attrs = tuple[Dim | int, ...]


def need(condition: bool, message: str) -> None:
    if not condition:
        raise RuleError(message)


def place(x: Type, dim: Dim | int) -> int:
    """Which dimension it is."""
    need(dim in x.dims, f"{x} has no dimension {dim}")
    return x.dims.index(dim)


def replaced(x: Type, dim: Dim | int, by: Sequence[Dim | int]) -> Type:
    """The type with other dimensions for one."""
    at = place(x, dim)
    dims = (*x.dims[:at], *by, *x.dims[at + 1 :])
    need(len(set(dims)) == len(dims), f"{x} has {', '.join(map(str, by))} already")
    return x._replace(dims=dims)  # type: ignore[arg-type]


def are_values(*types: Type) -> None:
    for x in types:
        need(x.ids is None, f"{x} holds row numbers, which no arithmetic is for")


def parts_of(whole: Dim | int) -> tuple[Dim, ...]:
    """What a dimension is the sum of."""
    need(isinstance(whole, Dim) and whole.name == "+", f"{whole} is not a sum")
    return whole.parts  # type: ignore[union-attr]


def blocks_of(whole: Dim | int) -> tuple[Dim, ...]:
    """How many blocks a dimension has, and how long they are."""
    need(isinstance(whole, Dim) and whole.name == "*", f"{whole} is not a multiple")
    return whole.parts  # type: ignore[union-attr]
