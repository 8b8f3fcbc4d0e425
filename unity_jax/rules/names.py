"""Names of rules that say what they do, from their two sides.

    neg(sum(s; q)) => sum(neg(s); q)                    neg-of-sum-to-sum-of-neg
    concat(slice(u; n+o, 0), slice(u; n+o, 1)) => u     concat-of-slices-cancels
    dot(x, w; k), dot(y, w; k) => slice(dot(concat(x, y), w)), ...
                                                        concat-dot-siblings-sharing-one

An op comes with those of its operands that are made by ops: which operand it is is said where that matters, and row
numbers come with `by`. A rule of two results is named by what joins their operands, and which operand they share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from unity_jax.rewrite.language import Term
from unity_jax.rewrite.rule import Rule
from unity_jax.rewrite.table import OPS, has

OPERANDS = ("first", "second", "third")


def named(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """The rules with their names; of those that only differ in dimensions, all but the first have a number as well."""
    seen: Counter[str] = Counter()
    found = []
    for rule in rules:
        name = name_of(rule)
        seen[name] += 1
        found.append(replace(rule, name=name if seen[name] == 1 else f"{name}-{seen[name]}"))
    return tuple(found)


def name_of(rule: Rule) -> str:
    """What a rule does."""
    if len(rule.source) > 1:
        return _siblings(rule)
    before, after = phrase(rule.source[0]), phrase(rule.target[0])
    if not after:
        return f"{before}-cancels"
    return f"{before}-to-{after}" if before != after else f"{before}-in-another-order"


def _siblings(rule: Rule) -> str:
    """Two results of one op, which are parts of that op on operands joined."""
    first, second = rule.source
    joins = next(t.op for t in rule.target[0].args[0].args if t.op)
    shared = [_place(first, i) for i, (a, b) in enumerate(zip(first.args, second.args, strict=True)) if a == b]
    return f"{joins}-{phrase(first)}-siblings" + "".join(f"-sharing-{which or 'one'}" for which in shared)


def phrase(term: Term) -> str:
    """A term in words; empty for a variable."""
    return "-of-".join(_words(term, "")) if term.op else ""


def _words(term: Term, place: str) -> list[str]:
    """An op and what it is of: `place` says which operand of another it is."""
    head = "-".join(filter(None, (term.op, place)))
    made = [(_place(term, i), a) for i, a in enumerate(term.args) if a.op]
    values = [(where, a) for where, a in made if where != "rows"]
    if len(values) == sum(a.type.ids is None for a in term.args) > 1 and len({phrase(a) for _, a in values}) == 1:
        first, *rest = _words(values[0][1], "")
        inner = ["-of-".join((f"{first}s", *rest))]
    else:
        inner = ["-of-".join(_words(a, "" if len(values) > 1 else where)) for where, a in values]
    by = "".join(f"-by-{phrase(a)}" for where, a in made if where == "rows")
    return [head, "-and-".join(inner) + by] if inner else [head + by]


def _place(term: Term, i: int) -> str:
    """Which operand of a term one is, where that matters."""
    if term.args[i].type.ids is not None and has(term, "rows"):
        return "rows"
    values = sum(a.type.ids is None for a in term.args)
    return "" if values < 2 or has(term, "commutes") or OPS[term.op].arity is None else OPERANDS[i]
