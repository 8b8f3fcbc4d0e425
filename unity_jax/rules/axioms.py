"""The axioms that rules are proved from, as rules in the language itself, and the side conditions they need.

An axiom names only the dimensions that its ops name; its tensors may have any others besides, and be constant along
any. That is sound because names, not positions, tie dimensions together: an op treats a dimension it does not name as a
batch. What an axiom does need is found by asking which of its instances have types (`Axiom.free`, `Axiom.distinct`):

    sum-mul: x[] y[k]    mul(x, sum(y; k)) = sum(mul(x, y); k)

has no type once `x` has the dimension `k`, so it is only used where `x` does not depend on `k`. Two axioms need more
and say so (`where y lacks h`). Every instance that is allowed is tested numerically.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from unity_jax.rewrite.language import Dim, RuleError, Term, Type, unified, variable
from unity_jax.rewrite.rule import Rule, make_rule, parse_dim
from unity_jax.rewrite.table import OPS, apply

RING = """
add-commutes: x[] y[]: add(x, y) = add(y, x)
add-associates: x[] y[] z[]: add(add(x, y), z) = add(x, add(y, z))
add-zero: x[]: add(x, zeros()) = x
add-negative: x[]: add(x, neg(x)) = zeros()
neg-neg: x[]: neg(neg(x)) = x
neg-add: x[] y[]: neg(add(x, y)) = add(neg(x), neg(y))
neg-zero: : neg(zeros()) = zeros()
mul-commutes: x[] y[]: mul(x, y) = mul(y, x)
mul-associates: x[] y[] z[]: mul(mul(x, y), z) = mul(x, mul(y, z))
mul-neg: x[] y[]: mul(x, neg(y)) = neg(mul(x, y))
mul-zero: x[]: mul(x, zeros()) = zeros()
mul-one: x[]: mul(x, ones()) = x
distributes: x[] y[] z[]: mul(x, add(y, z)) = add(mul(x, y), mul(x, z))
convert-zero: : convert(zeros()) = zeros()
"""

SUMS = """
sum-add: x[k] y[k]: sum(add(x, y); k) = add(sum(x; k), sum(y; k))
sum-neg: x[k]: sum(neg(x); k) = neg(sum(x; k))
sum-zero: : sum(zeros(; k); k) = zeros()
sum-mul: x[] y[k]: mul(x, sum(y; k)) = sum(mul(x, y); k)
sum-factor: x[] y[k]: sum(mul(x, y); k) = mul(x, sum(y; k))
sum-swap: x[k,l]: sum(sum(x; k); l) = sum(sum(x; l); k)
sum-parts: x[n+o]: sum(x; n+o) = add(sum(slice(x; n+o, 0); n), sum(slice(x; n+o, 1); o))
sum-blocks: x[p*n]: sum(x; p*n) = sum(sum(split(x; p*n); p); n)
sum-constant: x[]: sum(broadcast(x; k); k) = mul(x, sum(ones(; k); k))
sum-one: x[k]: broadcast(sum(x; k); k) = x where k == 1
"""

PARTS = """
slice-concat-0: x[n] y[o]: slice(concat(x, y; n+o); n+o, 0) = x
slice-concat-1: x[n] y[o]: slice(concat(x, y; n+o); n+o, 1) = y
split-merge: x[p,n]: split(merge(x; p*n); p*n) = x
take-parts: x[n+o] i[]<n+o: take(x, i) = take(concat(slice(x; n+o, 0), slice(x; n+o, 1); n+o), i)
take-blocks: x[p*n] i[]<p*n: take(x, i) = take(merge(split(x; p*n); p*n), i)
window-parts: x[n+o]: window(x; n+o, r) = window(concat(slice(x; n+o, 0), slice(x; n+o, 1); n+o); n+o, r)
window-blocks: x[p*n]: window(x; p*n, r) = window(merge(split(x; p*n); p*n); p*n, r)
"""

ROWS = """
take-put: x[v] i[]<v: take(x, i) = sum(mul(x, onehot(i)); v)
onehot-sum: x[] i[]<v: sum(mul(x, onehot(i)); v) = x
onehot-row: x[v] i[]<v: mul(x, onehot(i)) = mul(take(x, i), onehot(i))
onehot-itself: x[] i[]<v: mul(x, take(onehot(i), i)) = x
take-take: x[v,n] i[n]<v j[]<n: take(take(x, i), j) = take(take(x, j), take(i, j))
take-onehot: i[n]<v j[]<n: take(onehot(i), j) = onehot(take(i, j))
window-zero: : window(zeros(; h); h, r) = zeros(; h, r)
window-one: x[h]: window(x; h, r) = broadcast(x; r) where r == 1
window-mul-constant: x[h] y[]: window(mul(x, y); h, r) = mul(window(x; h, r), y) where y lacks h
window-take: x[h,v] i[]<v: take(window(x; h, r), i) = window(take(x, i); h, r) where i lacks h
"""

_SLICE_0, _SLICE_1, _SPLIT = "slice({}; n+o, 0)", "slice({}; n+o, 1)", "split({}; p*n)"

SELECTIONS = {  # the op, what its operand has, other operands, and how a constant loses or gains dimensions
    "slice-0": (_SLICE_0, "n+o", "", "broadcast(x; n)"),
    "slice-1": (_SLICE_1, "n+o", "", "broadcast(x; o)"),
    "split": (_SPLIT, "p*n", "", "broadcast(x; p, n)"),
    "take": ("take({}, i)", "v", "i[]<v", "x"),
}
"""Ops that choose or rearrange elements, whatever these are: they pass every op that treats elements alike."""

_OTHER = {"slice-0": "slice({}; a+b, 0)", "slice-1": "slice({}; a+b, 1)", "split": "split({}; a*b)"}


def _selections() -> Iterator[str]:
    """A selection passes all pointwise ops, and what goes on along other dimensions."""
    for name, (op, d, extra, constant) in SELECTIONS.items():
        s = op.format
        yield f"{name}-add: x[{d}] y[{d}] {extra}: {s('add(x, y)')} = add({s('x')}, {s('y')})"
        yield f"{name}-mul: x[{d}] y[{d}] {extra}: {s('mul(x, y)')} = mul({s('x')}, {s('y')})"
        yield f"{name}-neg: x[{d}] {extra}: {s('neg(x)')} = neg({s('x')})"
        yield f"{name}-f: x[{d}] {extra}: {s('f(x)')} = f({s('x')})"
        yield f"{name}-h: x[{d}] y[{d}] {extra}: {s('h(x, y)')} = h({s('x')}, {s('y')})"
        yield f"{name}-sum: x[{d},k] {extra}: {s('sum(x; k)')} = sum({s('x')}; k)"
        yield f"{name}-constant: x[] {extra}: {s(f'broadcast(x; {d})')} = {constant}"
    for name, (op, d, _, _) in SELECTIONS.items():
        s = op.format
        if name != "take":
            yield f"{name}-take: x[{d},v] i[{d}]<v: {s('take(x, i)')} = take({s('x')}, {s('i')})"
            yield f"{name}-onehot: i[{d}]<v: {s('onehot(i)')} = onehot({s('i')})"
            yield f"{name}-window: x[{d},h]: {s('window(x; h, r)')} = window({s('x')}; h, r)"
            for other, t in _OTHER.items():
                e = "a*b" if other == "split" else "a+b"
                yield f"{name}-{other}: x[{d},{e}]: {s(t.format('x'))} = {t.format(s('x'))}"


def _windows() -> Iterator[str]:
    """A window passes what keeps zero: it shows zeros beyond the ends."""
    s = "window({}; h, r)".format
    yield f"window-add: x[h] y[h]: {s('add(x, y)')} = add({s('x')}, {s('y')})"
    yield f"window-mul: x[h] y[h]: {s('mul(x, y)')} = mul({s('x')}, {s('y')})"
    yield f"window-neg: x[h]: {s('neg(x)')} = neg({s('x')})"
    yield f"window-sum: x[h,k]: {s('sum(x; k)')} = sum({s('x')}; k)"


@dataclass(frozen=True)
class Axiom:
    """An equation used from left to right. It needs `free`: variables that must not depend on a dimension, and
    `distinct`: dimensions that must differ."""

    rule: Rule
    free: tuple[tuple[str, Dim], ...]
    distinct: tuple[tuple[Dim, Dim], ...]

    @property
    def name(self) -> str:
        return self.rule.name

    def instances(self) -> Iterator[Rule]:
        """The axiom as it may be used, to be tested: with a dimension that every tensor has, with variables that
        depend on dimensions they may, and with dimensions that may coincide."""
        every: dict[str, tuple[Dim, ...]] = {v.name: (Dim("frame"),) for v in self.rule.given}
        forbidden = set(self.free)
        for v in self.rule.given:
            dims = (d for d in _dims(self.rule) if d not in v.type.dims and (v.name, d) not in forbidden)
            every[v.name] += tuple(dims)
        framed = _instance(self.rule, every, {}, frame=Dim("frame"))
        assert framed is not None, f"{self.name} has no type where it may be used"
        yield framed
        for pair in _pairs(self.rule):
            if pair not in self.distinct:
                names = unified(*pair) or {}
                same = _instance(self.rule, every, names, Dim("frame")) or _instance(self.rule, {}, names)
                assert same is not None
                yield same


def axioms() -> tuple[Axiom, ...]:
    written = [line for group in (RING, SUMS, PARTS, ROWS) for line in group.splitlines() if line]
    return tuple(a for line in (*written, *_selections(), *_windows()) for a in _axioms(line))


def _axioms(line: str) -> Iterator[Axiom]:
    """The axiom of a line, and those of its instances in which dimensions coincide that it could not be used for: the
    parts of `n+n`, where one operand has what the other must lack."""
    name, given, equation = (part.strip() for part in line.split(":", 2))
    equation, _, where = equation.partition(" where ")
    left, right = equation.split(" = ")
    v, lacks, d = where.partition(" lacks ")
    needs = {(v, parse_dim(d))} if lacks else set()
    axiom = _axiom(make_rule(name, given.split(), [left], [right], [where] if "==" in where else []), needs)
    yield axiom
    for a, b in _pairs(axiom.rule):
        names = unified(a, b) or {}
        same = _instance(replace(axiom.rule, name=f"{name} ({a} = {b})"), {}, names)
        has = {v.name: v.type.dims for v in same.given} if same else {}
        if same and any(d.renamed(names) in has[v] for v, d in axiom.free):
            yield _axiom(same, {(v, d.renamed(names)) for v, d in needs})


def _axiom(rule: Rule, needs: Collection[tuple[str, Dim]]) -> Axiom:
    """An axiom that needs this, and what its types imply."""
    lacking = [(v, d) for v, d in itertools.product(rule.given, _dims(rule)) if d not in v.type.dims]
    free = ((v.name, d) for v, d in lacking if (v.name, d) in needs or _instance(rule, {v.name: (d,)}, {}) is None)
    distinct = (pair for pair in _pairs(rule) if _instance(rule, {}, unified(*pair) or {}) is None)
    return Axiom(rule, tuple(free), tuple(distinct))


# Instances


def _dims(rule: Rule) -> tuple[Dim, ...]:
    """Every dimension an axiom mentions, parts included."""
    found: dict[Dim, None] = {}

    def visit(d: Dim) -> None:
        found[d] = None
        for part in d.parts:
            visit(part)

    for t in itertools.chain(*(s.walk() for s in (*rule.source, *rule.target))):
        for d in (*t.type.dims, *t.attrs, t.type.ids):
            if isinstance(d, Dim):
                visit(d)
    return tuple(found)


def _pairs(rule: Rule) -> Iterator[tuple[Dim, Dim]]:
    """Dimensions that might coincide when an axiom is used."""
    return (p for p in itertools.combinations(_dims(rule), 2) if unified(*p) is not None)


def _instance(
    rule: Rule, more: Mapping[str, Iterable[Dim]], names: Mapping[str, Dim], frame: Dim | None = None
) -> Rule | None:
    """The rule with more dimensions for some variables and dimensions renamed, if it has types. `frame`: a dimension
    that constants get."""
    made: dict[Term, Term] = {}

    def visit(t: Term) -> Term:
        if t not in made:
            if t.op:
                attrs = [a.renamed(names) if isinstance(a, Dim) else a for a in t.attrs]
                extra = [frame] if frame and OPS[t.op].arity == 0 else []
                made[t] = apply(t.op, *map(visit, t.args), attrs=[*attrs, *extra])
            else:
                dims = (*(d.renamed(names) for d in t.type.dims), *more.get(t.name, ()))
                ids = t.type.ids.renamed(names) if t.type.ids else None
                made[t] = variable(t.name, Type(dims, ids=ids))
        return made[t]

    try:
        given, source, target = (tuple(map(visit, side)) for side in (rule.given, rule.source, rule.target))
        return replace(rule, given=given, source=source, target=target)
    except RuleError:
        return None
