"""The form of a rule: what a match of it looks at, whatever its names are.

    f(slice(u; n+o, 0)) => slice(f(u); n+o, 0)      of parts
    f(take(u, i)) => take(f(u), i)                  the same of rows (`as_rows`), which says it of any part

A match binds the dimensions that ops name, by which variables have them; what else a variable has does no harm
(`bind`). So rules that differ in such dimensions alone, in names, or in the order of operands that may trade places,
find the same places and make the same of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from unity_jax.rewrite.language import Dim, RuleError, Term, Type, variable
from unity_jax.rewrite.ops.rows import PUT, TAKE
from unity_jax.rewrite.rule import Rule
from unity_jax.rewrite.table import apply, has, naming


def as_rows(rule: Rule) -> Rule | None:
    """A rule of one result about one part of each dimension that is cut, said of rows; None of any other rule.

    A slice or one of an unstack takes rows, a pad puts them among zeros.
    """
    which: dict[Dim, set[int]] = {}
    for t in (t for side in (rule.source, rule.target) for r in side for t in r.walk()):
        if naming(t) in _PARTS:
            whole, at = t.attrs
            assert isinstance(whole, Dim) and isinstance(at, int)
            which.setdefault(whole, set()).add(at)
    if not which or len(rule.source) > 1 or any(len(every) > 1 for every in which.values()):
        return None
    counted = {whole: Dim(f"rows{n}") for n, whole in enumerate(which)}
    numbers = {
        whole: variable(f"numbers_{counted[whole]}", Type(whole.parts[at : at + 1], (), counted[whole]))
        for whole, every in which.items()
        for at in every
    }

    def term(t: Term) -> Term:
        if not t.op:
            return variable(t.name, Type(tuple(counted.get(d, d) for d in t.type.dims), t.type.devices, t.type.ids))
        args = map(term, t.args)
        if naming(t) not in _PARTS:
            return apply(t.op, *args, attrs=[counted.get(a, a) if isinstance(a, Dim) else a for a in t.attrs])
        rows = numbers[t.attrs[0]]  # type: ignore[index]
        is_put = t.attrs[0] in t.type.dims
        return apply(PUT, *args, rows, attrs=rows.type.dims) if is_put else apply(TAKE, *args, rows)

    try:
        given = (*map(term, rule.given), *numbers.values())
        return Rule(rule.name, given, tuple(map(term, rule.source)), tuple(map(term, rule.target)))
    except RuleError:  # it joins parts of what it cuts, which rows do not say
        return None


_PARTS = ("part", "counted")


def distinct(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """Without rules of the same form as an earlier one, or which another one says of rows: a view shows every part as
    rows, whichever it is, and the rules of parts are about the first one or the last."""
    by_ops: dict[tuple[str, ...], list[Rule]] = {}
    for rule in rules:
        by_ops.setdefault(_ops(rule), []).append(rule)

    def is_said(rule: Rule) -> bool:
        same = by_ops[_ops(rule)]
        rows = as_rows(rule)
        earlier = any(is_same(rule, other) for other in same[: same.index(rule)])
        return earlier or (rows is not None and any(is_same(rows, other) for other in by_ops.get(_ops(rows), ())))

    return tuple(rule for rule in rules if not is_said(rule))


def _ops(rule: Rule) -> tuple[str, ...]:
    """The ops of both sides: equal for rules of one form."""
    return tuple(" ".join(sorted(t.op for r in side for t in r.walk())) for side in (rule.source, rule.target))


def is_same(a: Rule, b: Rule) -> bool:
    """Whether two rules have the same form."""
    sides = [((*r.source, *r.target), _having(r)) for r in (a, b)]
    (terms, having), (others, wanted) = sides
    if len(terms) != len(others) or len(a.given) != len(b.given):
        return False
    return any(
        all({names[v] for v in having[d]} == wanted[names[d]] for d in having)
        for names in _renamings(terms, others, {})
    )


def _having(rule: Rule) -> dict[object, set[str]]:
    """The variables that have each dimension that an op names."""
    every = [t for side in (rule.source, rule.target) for r in side for t in r.walk()]
    named = {a for t in every for a in t.attrs if isinstance(a, Dim)} | {t.type.ids for t in every if t.type.ids}
    named |= {part for d in named for part in d.parts}
    return {d: {t.name for t in every if not t.op and d in t.type.dims} for d in named}


_Names = Mapping[object, object]


def _renamings(terms: Sequence[Term], others: Sequence[Term], names: _Names) -> Iterator[_Names]:
    """The ways to rename variables and dimensions by which terms become others."""
    if not terms:
        yield names
        return
    for found in _of_one(terms[0], others[0], names):
        yield from _renamings(terms[1:], others[1:], found)


def _of_one(term: Term, other: Term, names: _Names) -> Iterator[_Names]:
    if (term.op, len(term.args), len(term.attrs)) != (other.op, len(other.args), len(other.attrs)):
        return
    if not term.op:
        pairs: list[tuple[object, object]] = [(term.name, other.name)]
        if (term.type.ids is None) != (other.type.ids is None):
            return
        pairs += [(term.type.ids, other.type.ids)] if term.type.ids else []
        found = _paired(pairs, names)
        yield from () if found is None else (found,)
        return
    every = [other.args, other.args[::-1]] if has(term, "commutes") else [other.args]
    orders = itertools.permutations(other.attrs) if naming(term) == "dims" else [other.attrs]
    for attrs, args in itertools.product(orders, every):
        pairs = [pair for a, b in zip(term.attrs, attrs, strict=True) for pair in _dims(a, b)]
        found = _paired(pairs, names)
        if found is not None:
            yield from _renamings(term.args, args, found)


def _dims(a: Dim | int, b: Dim | int) -> Iterator[tuple[object, object]]:
    """The dimensions that stand for one another where one stands for the other."""
    if not isinstance(a, Dim) or not isinstance(b, Dim):
        yield (a, b)
        return
    yield a, b
    if a.name == b.name and len(a.parts) == len(b.parts):
        for p, q in zip(a.parts, b.parts, strict=True):
            yield from _dims(p, q)


def _paired(pairs: Sequence[tuple[object, object]], names: _Names) -> _Names | None:
    """The names with these as well; None where one would stand for two, or two for one."""
    found = dict(names)
    taken = {b: a for a, b in found.items()}
    for a, b in pairs:
        if isinstance(a, int) or isinstance(b, int):
            if a != b:
                return None
        elif found.setdefault(a, b) != b or taken.setdefault(b, a) != a:
            return None
    return found
