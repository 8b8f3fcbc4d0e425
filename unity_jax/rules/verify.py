"""The verdict on a rule: an exact test that finds counterexamples and missing conditions, then a proof for all sizes.

The test evaluates both sides modulo a large prime at random values, once for each of several assignments of sizes. Two
polynomials of degree d that differ agree at a random point with probability at most d / prime (Schwartz and Zippel),
so a test that passes says much about the sizes that were tried and nothing about others: only the proof makes a rule
`proved`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from unity_jax.rewrite.language import RuleError, Term
from unity_jax.rewrite.meaning import PRIME, Array, shape, size
from unity_jax.rewrite.rule import Rule
from unity_jax.rewrite.table import has
from unity_jax.rules.constraints import Constraints
from unity_jax.rules.core import core, pieces
from unity_jax.rules.prove import Proof, Sizes, prove
from unity_jax.rules.semantics import agrees, canonical, evaluate

TRIALS = 4
"""Assignments of sizes a rule is tested at; all names differ in size, so that none holds by accident."""

INSTALL = "pip install 'unity_jax[rules]'"


Answer = Literal["proved", "conditional", "false", "unproved"]


@dataclass(frozen=True)
class Verdict:
    """`proved` for all sizes, `conditional` on sizes, `false` with a counterexample, or `unproved` for a reason.

    `stated`: the condition is the rule's own, under which it is proved.
    """

    name: str
    verdict: Answer
    reason: str
    counterexample: Mapping[str, Any] | None = None
    condition: str | None = None
    stated: bool = False

    @property
    def holds(self) -> bool:
        """Whether the rule may be used as it is written."""
        return self.verdict == "proved" or self.stated

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"name": self.name, "verdict": self.verdict, "reason": self.reason}
        if self.counterexample:
            found["counterexample"] = dict(self.counterexample)
        return found | ({"condition": self.condition} if self.condition else {})


def verify(rule: Rule, seed: int = 0) -> Verdict:
    """Whether both sides of a rule are equal, for all sizes or else for those that satisfy its conditions."""
    rng = np.random.default_rng(seed)
    if rule.unbound:
        return Verdict(rule.name, "unproved", f"unbound: the source does not mention {', '.join(rule.unbound)}")
    try:
        constraints = Constraints.of(rule)
        trials = [constraints.sizes(rng) for _ in range(TRIALS)]
    except RuleError as error:
        return Verdict(rule.name, "unproved", str(error))
    if rule.when and (general := verify(replace(rule, when=()), seed)).verdict == "proved":
        return general
    if all(agrees(rule, sizes, rng) for sizes in trials):
        return _proof(rule, constraints)
    for condition in constraints.candidates():
        narrower = replace(rule, when=(*rule.when, condition))
        try:
            limits = Constraints.of(narrower)
            if all(agrees(rule, limits.sizes(rng), rng) for _ in range(TRIALS)):
                found = _counterexample(rule, constraints, rng)
                return _narrower(narrower, condition, limits, found)
        except RuleError:
            continue
    found = _counterexample(rule, constraints, rng)
    return Verdict(rule.name, "false", _shown(found), found)


def _narrower(rule: Rule, condition: str, constraints: Constraints, found: Mapping[str, Any]) -> Verdict:
    """The verdict on a rule that needs one more condition than it states."""
    proved = _proof(rule, constraints).stated
    reason = f"false unless {condition} ({'proved' if proved else 'tested'} then): {_shown(found)}"
    return Verdict(rule.name, "conditional", reason, found, " and ".join(rule.when))


def _proof(rule: Rule, constraints: Constraints) -> Verdict:
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
    if has(t, "unknown"):
        return None
    inner = [_degree(a) for a in t.args]
    if any(d is None for d in inner):
        return None
    known = [d for d in inner if d is not None]
    return sum(known) if has(t, "multiplies") else max(known, default=0)


# Counterexamples


def _counterexample(rule: Rule, constraints: Constraints, rng: np.random.Generator) -> dict[str, Any]:
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
