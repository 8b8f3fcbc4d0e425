"""Values with the identity of each of their dimensions; a dimension may be known to be several, major to minor.

A reshape that splits `(heads width)` into `heads, width` says that one dimension is two. So an identity is either one
dimension of its own or the product of others, and what rules bind are those that are no product (`Dims.all`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from unity_jax.pcg.graph import Op, Tensor

Ids = tuple[int, ...]


class Value(NamedTuple):
    """A tensor, with the identity of each of its dimensions."""

    tensor: Tensor
    ids: Ids


@dataclass(frozen=True)
class Selection:
    """How rows are chosen: by numbers in a tensor (`indices`, with identities), or as `size` rows from `start` on.

    `params` are those of the gather or scatter.
    """

    kind: str  # "gather", "slice" or "dynamic_slice"
    ids: Ids
    indices: Value | None = None
    start: int = 0
    params: tuple[tuple[str, Any], ...] = ()


class Seen(NamedTuple):
    """The operands of an op of the language, and the dimensions that its attributes name, each a tuple of identities.

    `symbol`: the op of the program; of a selection, how rows are chosen.
    """

    args: tuple[Value, ...]
    attrs: tuple[Any, ...] = ()
    symbol: Any = None


class Named(NamedTuple):
    """A tensor that is made, with the identity of each of its dimensions."""

    array: Tensor
    ids: Ids


class CannotEmit(ValueError):
    """What a rule makes does not exist for these tensors: dtypes or dimensions do not fit."""


class Dims:
    """Identities of dimensions: their sizes, which have turned out to be the same, and which are products of others."""

    def __init__(self) -> None:
        self.size: dict[int, int] = {}
        self._same: dict[int, int] = {}
        self._parts: dict[int, Ids] = {}
        self._next = itertools.count()

    def copy(self) -> Dims:
        found = Dims.__new__(Dims)
        found.size, found._same, found._parts = dict(self.size), dict(self._same), dict(self._parts)
        found._next = self._next
        return found

    def fresh(self, size: int) -> int:
        i = next(self._next)
        self.size[i] = int(size)
        return i

    def find(self, i: int) -> int:
        while i in self._same:
            i = self._same[i]
        return i

    def all(self, ids: Sequence[int]) -> Ids:
        """The dimensions that are no product, in order."""
        if not self._parts:
            return tuple(map(self.find, ids))
        found: list[int] = []
        for i in map(self.find, ids):
            found += self.all(self._parts[i]) if i in self._parts else (i,)
        return tuple(found)

    def parts(self, i: int) -> Ids:
        """What a dimension is known to be a product of, if anything."""
        return self._parts.get(self.find(i), ())

    def product(self, ids: Sequence[int]) -> int:
        """The identity of several dimensions as one."""
        if len(ids) == 1:
            return ids[0]
        whole = self.fresh(math.prod(self.size[self.find(i)] for i in ids))
        self._parts[whole] = tuple(ids)
        return whole

    def split(self, i: int, sizes: Sequence[int]) -> Ids | None:
        """One dimension as several of these sizes; None if it is known to be a product that they do not fit."""
        if len(sizes) == 1:
            return (i,)
        parts = tuple(map(self.fresh, sizes))
        return parts if self.unite(i, self.product(parts)) else None

    def unite(self, a: int, b: int) -> bool:
        """Say that two dimensions are one. False if their sizes, or those of their parts, do not agree."""
        a, b = self.find(a), self.find(b)
        if a == b or (a not in self._parts and b not in self._parts and self.size[a] == self.size[b]):
            if a != b:
                self._same[max(a, b)] = min(a, b)
            return True
        left, right = list(self.all((a,))), list(self.all((b,)))
        if math.prod(self.size[i] for i in left) != math.prod(self.size[i] for i in right):
            return False
        while left and right:
            i, j = left.pop(0), right.pop(0)
            if i == j:
                continue
            if self.size[i] < self.size[j]:
                i, j, left, right = j, i, right, left
            if self.size[i] > self.size[j]:  # the larger begins with the smaller
                if self.size[i] % self.size[j]:
                    return False
                self._parts[i] = (j, self.fresh(self.size[i] // self.size[j]))
                left.insert(0, self._parts[i][1])
            else:
                self._same[max(i, j)] = min(i, j)
        return not left and not right


def values(op: Op, ids: Sequence[Sequence[int]]) -> tuple[Value, ...]:
    """The operands of an op, with these identities."""
    return tuple(Value(t, tuple(i)) for t, i in zip(op.inputs, ids, strict=True))


def put_at(ids: Ids, at: int, new: int) -> Ids:
    return (*ids[:at], new, *ids[at + 1 :])
