"""What a rule says of its sizes, and sizes to test it at."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from unity_jax.rewrite.language import Dim, RuleError, Term
from unity_jax.rewrite.meaning import shape, size
from unity_jax.rewrite.rule import Rule, parse_dim
from unity_jax.rewrite.table import naming
from unity_jax.rules.prove import Sizes

ELEMENTS = 2**20
"""No tensor of a test is larger."""

MOST = 16
"""No dimension is taken apart into more elements."""


@dataclass(frozen=True)
class Constraints:
    """What a rule says of the sizes of its names: numbers, equal names, other equations, and least sizes."""

    names: tuple[str, ...]
    number: Mapping[str, int]
    same: Mapping[str, str]
    other: tuple[tuple[Dim, Dim | int], ...]
    least: Mapping[str, int]
    terms: tuple[Term, ...]

    @staticmethod
    def of(rule: Rule) -> Constraints:
        """**Raises:** `RuleError` for a condition that cannot be read, or that names nothing."""
        terms = tuple(dict.fromkeys(t for r in (*rule.given, *rule.source, *rule.target) for t in r.walk()))
        names = tuple(sorted({n for t in terms for d in _mentioned(t) for n in d.names()}))
        same: dict[str, str] = {}
        number: dict[str, int] = {}
        least: dict[str, int] = {}
        other: list[tuple[Dim, Dim | int]] = []
        conditions = [_condition(c, names) for c in rule.when]
        for left, right in conditions:
            if left.parts or (isinstance(right, Dim) and right.parts):
                other.append((left, right))
            elif isinstance(right, Dim) and (a := _root(same, left.name)) != (b := _root(same, right.name)):
                same[a] = b
        numbers = [(d.name, n) for d, n in conditions if isinstance(n, int) and not d.parts]
        for name, n in (*numbers, *((str(t.attrs[0]), len(t.args)) for t in terms if naming(t) == "count")):
            if number.setdefault(_root(same, name), n) != n:
                raise RuleError(f"{name} is both {number[_root(same, name)]} and {n}")
        for t in terms:
            if naming(t) == "counted":
                name, end = _root(same, str(t.attrs[0])), int(t.attrs[1]) + 1  # type: ignore[arg-type]
                least[name] = max(least.get(name, 0), end)
                if end > MOST:
                    raise RuleError(f"{t}: more than {MOST} elements")
        same = {n: _root(same, n) for n in same}
        number |= {n: number[m] for n, m in same.items() if m in number}
        return Constraints(names, number, same, tuple(other), least, terms)

    def sizes(self, rng: np.random.Generator) -> dict[str, int]:
        """Sizes of which no two are equal or one, but as the conditions say.

        **Raises:** `RuleError` where none satisfy the conditions.
        """
        roots = [n for n in self.names if n not in self.same and n not in self.number]
        for attempt in range(1000):
            drawn = dict(zip(roots, (rng.permutation(len(roots) + 2 + attempt // 100) + 2).tolist(), strict=False))
            found = self.completed(drawn)
            if found and all(math.prod(shape(t.type, found)) <= ELEMENTS for t in self.terms):
                return found
        raise RuleError("no small sizes satisfy the conditions")

    def completed(self, drawn: Mapping[str, int]) -> dict[str, int] | None:
        """Sizes of all names, if they satisfy the conditions."""
        found = {**drawn, **self.number}
        found |= {n: found[m] for n, m in self.same.items()}
        fits = all(found[n] >= least for n, least in self.least.items())
        holds = all(size(a, found) == (b if isinstance(b, int) else size(b, found)) for a, b in self.other)
        return {n: found[n] for n in self.names} if fits and holds else None

    def smallest(self) -> Iterator[dict[str, int]]:
        """Sizes from one to three, few elements first."""
        roots = [n for n in self.names if n not in self.same and n not in self.number]
        few = itertools.product((1, 2, 3) if len(roots) < 7 else (1, 2), repeat=len(roots))
        for values in sorted(few, key=lambda v: (math.prod(v), v)):
            found = self.completed(dict(zip(roots, values, strict=True)))
            if found:
                yield found

    def candidates(self) -> Iterator[str]:
        """Conditions under which a rule might hold, the weakest first."""
        roots = [n for n in self.names if n not in self.same and n not in self.number]
        yield from (f"{a} == {b}" for a, b in itertools.combinations(roots, 2))
        yield from (f"{n} == {i}" for n in roots for i in (1, 2, 3))

    def known(self) -> Iterator[Sizes]:
        """What a proof may assume, case by case: dimensions that are taken apart end there, or go on.

        **Raises:** `RuleError` for conditions that no proof uses.
        """
        if self.other:
            raise RuleError("conditions on sums and products are not used by proofs")
        open_ended = [n for n, i in self.least.items() if i and n not in self.number and n not in self.same]
        for exact in itertools.product((True, False), repeat=len(open_ended)):
            ends = {n for n, e in zip(open_ended, exact, strict=True) if e}
            number = {**self.number, **{n: self.least[n] for n in ends}}
            yield Sizes(number, self.same, {n: self.least[n] for n in open_ended if n not in ends})


def _mentioned(t: Term) -> Iterator[Dim]:
    yield from (*t.type.dims, *t.type.devices, *(a for a in t.attrs if isinstance(a, Dim)))
    if t.type.ids:
        yield t.type.ids


def _condition(text: str, names: tuple[str, ...]) -> tuple[Dim, Dim | int]:
    """`n == o`, `n == 2`."""
    left, equals, right = (part.strip() for part in text.partition("=="))
    if not equals:
        raise RuleError(f"{text!r} is not a condition, as n == o or n == 1")
    sides = (parse_dim(left), int(right) if right.isdigit() else parse_dim(right))
    for side in sides:
        if isinstance(side, int) and not 0 < side <= MOST:
            raise RuleError(f"{text!r}: numbers from 1 to {MOST}")
        if isinstance(side, Dim) and not set(side.names()) <= set(names):
            raise RuleError(f"{text!r} names no size of the rule")
    return sides


def _root(same: Mapping[str, str], name: str) -> str:
    while name in same:
        name = same[name]
    return name
