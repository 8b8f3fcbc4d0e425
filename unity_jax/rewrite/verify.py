"""The verdict on a rule: an exact test that finds counterexamples and missing conditions, then a proof for all sizes.

The test evaluates both sides modulo a large prime at random values, once for each of several assignments of sizes. Two
polynomials of degree d that differ agree at a random point with probability at most d / prime (Schwartz and Zippel),
so a test that passes says much about the sizes that were tried and nothing about others: only the proof makes a rule
`proved`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from unity_jax.rewrite.core import core, pieces
from unity_jax.rewrite.language import Dim, RuleError, Term
from unity_jax.rewrite.prove import Proof, Sizes, prove
from unity_jax.rewrite.rule import Rule, parse_dim
from unity_jax.rewrite.semantics import PRIME, Array, agrees, canonical, evaluate, shape, size

TRIALS = 4
"""Assignments of sizes a rule is tested at; all names differ in size, so that none holds by accident."""

ELEMENTS = 2**20
"""No tensor of a test is larger."""

MOST = 16
"""No dimension is taken apart into more elements."""

INSTALL = "pip install 'unity_jax[rules]'"


@dataclass(frozen=True)
class Verdict:
    """`proved` for all sizes, `conditional` on sizes, `false` with a counterexample, or `unproved` for a reason.

    `stated`: the condition is the rule's own, under which it is proved.
    """

    name: str
    verdict: Literal["proved", "conditional", "false", "unproved"]
    reason: str
    counterexample: Mapping[str, Any] | None = None
    condition: str | None = None
    stated: bool = False

    @property
    def holds(self) -> bool:
        """Whether the rule may be used as it is written."""
        return self.verdict == "proved" or self.stated

    def to_json(self) -> dict[str, Any]:
        found = {"name": self.name, "verdict": self.verdict, "reason": self.reason}
        if self.counterexample:
            found["counterexample"] = dict(self.counterexample)
        return found | ({"condition": self.condition} if self.condition else {})


def verify(rule: Rule, seed: int = 0) -> Verdict:
    """Whether both sides of a rule are equal, for all sizes that satisfy its conditions."""
    rng = np.random.default_rng(seed)
    if rule.unbound:
        return Verdict(rule.name, "unproved", f"unbound: the source does not mention {', '.join(rule.unbound)}")
    try:
        constraints = _Constraints.of(rule)
        trials = [constraints.sizes(rng) for _ in range(TRIALS)]
    except RuleError as error:
        return Verdict(rule.name, "unproved", str(error))
    if all(agrees(rule, sizes, rng) for sizes in trials):
        return _proof(rule, constraints)
    for condition in constraints.candidates():
        narrower = replace(rule, when=(*rule.when, condition))
        try:
            limits = _Constraints.of(narrower)
            if all(agrees(rule, limits.sizes(rng), rng) for _ in range(TRIALS)):
                found = _counterexample(rule, constraints, rng)
                return _narrower(narrower, condition, limits, found)
        except RuleError:
            continue
    found = _counterexample(rule, constraints, rng)
    return Verdict(rule.name, "false", _shown(found), found)


def _narrower(rule: Rule, condition: str, constraints: _Constraints, found: Mapping[str, Any]) -> Verdict:
    """The verdict on a rule that needs one more condition than it states."""
    proved = _proof(rule, constraints).stated
    reason = f"false unless {condition} ({'proved' if proved else 'tested'} then): {_shown(found)}"
    return Verdict(rule.name, "conditional", reason, found, " and ".join(rule.when))


def _proof(rule: Rule, constraints: _Constraints) -> Verdict:
    """The verdict on a rule that passed its test."""
    condition = " and ".join(rule.when)
    try:
        found = [_proved(rule, known) for known in constraints.known()]
    except ImportError:
        return Verdict(rule.name, "unproved", f"{_bound(rule)}; a proof needs egglog: {INSTALL}")
    except RuleError as error:
        return Verdict(rule.name, "unproved", f"{_bound(rule)}; no proof: {error}")
    if not all(p.found for p in found):
        rounds = max(p.rounds for p in found)
        return Verdict(rule.name, "unproved", f"{_bound(rule)}; no proof in {rounds} rounds of equality saturation")
    used = ", ".join(sorted({a for p in found for a in p.axioms})) or "definitions"
    if condition:
        return Verdict(rule.name, "conditional", f"given {condition}, by {used}", condition=condition, stated=True)
    return Verdict(rule.name, "proved", f"by {used}")


def _proved(rule: Rule, known: Sizes) -> Proof:
    translated: dict[Term, Term] = {}
    pairs = [
        pair
        for sides in zip(rule.source, rule.target, strict=True)
        for pair in zip(*(pieces(core(t, translated), known.number) for t in sides), strict=True)
    ]
    return prove(pairs, known)


def _bound(rule: Rule) -> str:
    """What the test says of a rule that passed."""
    degrees = [_degree(t) for t in (*rule.source, *rule.target)]
    tested = f"equal in {TRIALS} exact tests"
    if any(d is None for d in degrees):
        return tested
    chance = TRIALS * math.log10(max(1, *(d or 0 for d in degrees)) / PRIME)
    return f"{tested} (by chance at these sizes: below 1e{math.ceil(chance)})"


def _degree(t: Term) -> int | None:
    """The degree of the polynomial a term is, none if it has unknown functions."""
    if not t.op:
        return int(t.type.ids is None)
    if t.op in ("f", "g", "h", "convert", "fold"):
        return None
    inner = [_degree(a) for a in t.args]
    if any(d is None for d in inner):
        return None
    known = [d for d in inner if d is not None]
    return sum(known) if t.op in ("dot", "conv", "mul", "take", "put") else max(known, default=0)


# Sizes


@dataclass(frozen=True)
class _Constraints:
    """What a rule says of the sizes of its names: numbers, equal names, other equations, and least sizes."""

    names: tuple[str, ...]
    number: Mapping[str, int]
    same: Mapping[str, str]
    other: tuple[tuple[Dim, Dim | int], ...]
    least: Mapping[str, int]
    unions: tuple[Term, ...]

    @staticmethod
    def of(rule: Rule) -> _Constraints:
        """**Raises:** `RuleError` for a condition that cannot be read, or that names nothing."""
        terms = list(dict.fromkeys(t for r in (*rule.source, *rule.target) for t in r.walk()))
        names = tuple(sorted({n for t in terms for d in _mentioned(t) for n in d.names()}))
        number = {str(t.attrs[0]): len(t.args) for t in terms if t.op == "stack"}
        least: dict[str, int] = {}
        for t in terms:
            if t.op == "unstack":
                name = str(t.attrs[0])
                least[name] = max(least.get(name, 0), t.attrs[1] + 1)  # type: ignore[operator]
                if least[name] > MOST:
                    raise RuleError(f"{t}: more than {MOST} elements")
        same: dict[str, str] = {}
        other: list[tuple[Dim, Dim | int]] = []
        for left, right in (_condition(c) for c in rule.when):
            for d in (left, right):
                if isinstance(d, Dim) and not set(d.names()) <= set(names):
                    raise RuleError(f"{rule.name}: the condition {left} == {right} names no size of the rule")
            if left.parts or (isinstance(right, Dim) and right.parts):
                other.append((left, right))
            elif isinstance(right, int):
                number[left.name] = right
            else:
                a, b = (_root(same, d.name) for d in (left, right))
                same |= {a: b} if a != b else {}
        same = {n: _root(same, n) for n in same}
        for n, m in same.items():
            if n in number:
                number[m] = number[n]
            least[m] = max(least.get(m, 0), least.get(n, 0))
        return _Constraints(names, number, same, tuple(other), least, tuple(terms))

    def sizes(self, rng: np.random.Generator) -> dict[str, int]:
        """Sizes of which no two are equal or one, but as the conditions say.

        **Raises:** `RuleError` where none satisfy the conditions.
        """
        roots = [n for n in self.names if n not in self.same and n not in self.number]
        for attempt in range(1000):
            drawn = dict(zip(roots, (rng.permutation(len(roots) + 2 + attempt // 100) + 2).tolist(), strict=False))
            found = self.completed(drawn)
            if found and all(math.prod(shape(t.type, found)) <= ELEMENTS for t in self.unions):
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


def _condition(text: str) -> tuple[Dim, Dim | int]:
    left, equals, right = (part.strip() for part in text.partition("=="))
    if not equals:
        raise RuleError(f"{text!r} is not a condition, as n == o or n == 1")
    if right.isdigit() and not 0 < int(right) <= MOST:
        raise RuleError(f"{text!r}: numbers from 1 to {MOST}")
    return parse_dim(left), int(right) if right.isdigit() else parse_dim(right)


def _root(same: Mapping[str, str], name: str) -> str:
    while name in same:
        name = same[name]
    return name


# Counterexamples


def _counterexample(rule: Rule, constraints: _Constraints, rng: np.random.Generator) -> dict[str, Any]:
    """The first of the small assignments at which the sides differ, with small values of the variables."""
    ordinary = (constraints.sizes(rng) for _ in itertools.count())
    for sizes in itertools.chain(constraints.smallest(), ordinary):
        values = {
            v.name: rng.integers(size(v.type.ids, sizes) if v.type.ids else 10, size=shape(v.type, sizes))
            for v in rule.given
        }
        known: dict[Term, Array] = {}
        before, after = (evaluate(side, sizes, values, known=known) for side in (rule.source, rule.target))
        for i, (a, b) in enumerate(zip(rule.source, rule.target, strict=True)):
            x, y = canonical(a.type, before[i]), canonical(b.type, after[i])
            if (x != y).any():
                place = [int(p) for p in np.argwhere(x != y)[0]]
                order = sorted((*a.type.devices, *a.type.dims), key=lambda d: (d not in a.type.devices, str(d)))
                return {
                    "sizes": sizes,
                    "inputs": {n: v.tolist() for n, v in values.items()},
                    "result": i,
                    "place": {str(d): p for d, p in zip(order, place, strict=True)},
                    "source": _centred(x[tuple(place)]),
                    "target": _centred(y[tuple(place)]),
                }
    raise AssertionError("unreachable: sizes go on for ever")


def _centred(residue: Any) -> int:
    return int(residue) - PRIME if residue > PRIME // 2 else int(residue)


def _shown(found: Mapping[str, Any]) -> str:
    def listed(d: Mapping[str, int]) -> str:
        return ", ".join(f"{n}={v}" for n, v in d.items())

    where = f" at {listed(found['place'])}" if found["place"] else ""
    return f"with {listed(found['sizes'])}: result {found['result']}{where} is {found['source']}, not {found['target']}"
