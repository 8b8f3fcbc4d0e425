"""Which rules of a library rewrite traced programs, each way round, and why the others do not."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

from unity_jax.rewrite.language import Dim, Term
from unity_jax.rewrite.ops.reduction import SUM
from unity_jax.rewrite.ops.rows import PUT, TAKE
from unity_jax.rewrite.rule import Rule
from unity_jax.rewrite.table import OPS, has, naming


@functools.cache
def refusal(rule: Rule, towers: bool = False) -> str | None:
    """Why a rule, as it is written, does not rewrite traced programs: the first reason there is.

    **Arguments:** `towers`: whether only reasons count for which it could not, as of rules that stack towers.
    """
    if not towers and (impossible := refusal(rule, towers=True)) is not None:
        return impossible
    return next((reason for reason, holds in (_IMPOSSIBLE if towers else _USELESS) if holds(rule)), None)


def is_applicable(rule: Rule) -> bool:
    """Whether the rule is about what a traced program holds, and worth a try."""
    return refusal(rule) is None


@functools.cache
def _terms(rule: Rule) -> list[Term]:
    return list(dict.fromkeys(t for r in (*rule.source, *rule.target) for t in r.walk()))


def _has_unknown_size(rule: Rule) -> bool:
    """A size that only the target has; that of a stack is the number of its operands."""
    made = {str(t.attrs[0]) for t in _terms(rule) if naming(t) == "count"}
    return not set(_sizes(rule.target)) <= {*_sizes(rule.source), *made}


def _sizes(side: Sequence[Term]) -> Iterator[str]:
    for t in (t for r in side for t in r.walk()):
        for d in (*t.type.dims, *t.attrs, t.type.ids):
            yield from d.names() if isinstance(d, Dim) else ()


def _reduced_names(t: Term) -> set[Dim]:
    """The names that an op sums over; of a convolution, its features."""
    attrs = () if not has(t, "reduces") else t.attrs[:1] if naming(t) == "windows" else t.attrs
    return {a for a in attrs if isinstance(a, Dim)}


def _has_twins(rule: Rule) -> bool:
    """One name for two dimensions: one is summed over in an operand, and another operand still has the other."""
    for t in _terms(rule):
        inside = [{n for s in a.walk() if len(_reduced_names(s)) == 1 for n in _reduced_names(s)} for a in t.args]
        for a, b in itertools.permutations(range(len(t.args)), 2):
            if (inside[a] - set(t.args[a].type.dims)) & set(t.args[b].type.dims):
                return True
    return False


def _parts_a_sum(rule: Rule) -> bool:
    """A sum over names that the same variables have is taken apart: all of its dimensions belong to the first."""
    variables = [v for r in rule.source for v in r.walk() if not v.op]
    empty: set[Dim] = set()
    for t in (t for r in rule.source for t in r.walk()):
        met = set()
        for name in (a for a in t.attrs if a in _reduced_names(t)):
            having = frozenset(v.name for v in variables if name in v.type.dims)
            empty |= {name} if having in met else set()
            met.add(having)
    named = (_reduced_names(t) for r in rule.target for t in r.walk())
    return any(names and names <= empty for names in named)


def _has_groups(rule: Rule) -> bool:
    """A convolution of which both operands have a dimension besides its features, and one that there must be: that
    counts what is stacked, or is summed over elsewhere."""
    every = _terms(rule)
    needed = {t.attrs[0] for t in every if naming(t) in ("count", "counted")}.union(*map(_reduced_names, every))
    convs = (t for t in every if naming(t) == "windows")
    shared = (set(t.args[0].type.dims) & set(t.args[1].type.dims) - {t.attrs[0]} for t in convs)
    return any(names & needed for names in shared)


def _is_unseen(t: Term) -> bool:
    return bool(t.op) and not OPS[t.op].seen and not has(t, "parallel")


def _is_fused(t: Term) -> bool:
    return not t.op or has(t, "pointwise")


_IMPOSSIBLE: tuple[tuple[str, Callable[[Rule], bool]], ...] = (
    ("it is about layouts, which the search chooses", lambda r: any(has(t, "parallel") for t in _terms(r))),
    ("its ops are no ops of a view: what only relabels dimensions is looked through, and constants are not made",
     lambda r: any(map(_is_unseen, _terms(r)))),
    ("it computes row numbers, which are taken as they are", lambda r: any(t.op and t.type.ids for t in _terms(r))),
    ("it holds for some sizes alone", lambda r: bool(r.when)),
    ("its target has inputs of its own", lambda r: bool(r.unbound)),
    ("its source is an input", lambda r: not all(t.op for t in r.source)),
    ("its target has a size of its own", _has_unknown_size),
    ("it gives one name to two dimensions, of which a program does not say that they are equal", _has_twins),
    ("it takes a sum apart whose dimensions nothing tells apart", _parts_a_sum),
    ("it convolves in groups, which are no op of a view", _has_groups),
)  # fmt: skip
"""Why rules never match, or never make anything."""

_USELESS: tuple[tuple[str, Callable[[Rule], bool]], ...] = (
    ("the compiler fuses all of it anyway", lambda r: all(map(_is_fused, _terms(r)))),
    ("the compiler fuses it anyway, side by side",
     lambda r: len(r.source) > 1 and all(map(_is_fused, r.source))),
    ("it makes a reduction of what the compiler fuses",
     lambda r: all(_is_fused(t) for s in r.source for t in s.walk()) and r.target[0].op == SUM),
    ("it computes of all rows what its source computes of some",
     lambda r: any(t.op == PUT and any(s.op == TAKE for s in t.walk()) for side in r.source for t in side.walk())),
    ("it only turns operands round",
     lambda r: all(has(t, "commutes") and not any(a.op for a in t.args) for t in (*r.source, *r.target))),
)  # fmt: skip
"""Why rules are not tried at single places."""


def both_ways(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """The rules of a library as they can be applied: from left to right, and back (`inverse`) where that is another."""
    found = []
    for rule in rules:
        found.append(rule)
        known = {t for r in rule.target for t in r.walk() if not t.op}
        if set(rule.given) <= known and not rule.own_inverse:
            found.append(dataclasses.replace(rule, name=inverse(rule.name), source=rule.target, target=rule.source))
    return tuple(r for r in found if is_applicable(r))


_BACK = ", back"


def inverse(name: str) -> str:
    """The name of a rule the other way round."""
    return name.removesuffix(_BACK) if name.endswith(_BACK) else name + _BACK
