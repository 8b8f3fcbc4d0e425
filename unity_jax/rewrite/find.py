"""Where a rule's source occurs in a graph.

A name of the rule stands for the set of dimensions that ops name where it is named in the rule; what no op names is
bound by where it occurs: a dimension that exactly those variables have which the rule says. Further dimensions do no
harm, because every op of the language works on each index of a dimension that it does not name.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from unity_jax.pcg.graph import Op, Tensor
from unity_jax.rewrite.dims import Dims, Ids, Seen, Selection, Value
from unity_jax.rewrite.language import PARALLEL, Dim, Term
from unity_jax.rewrite.rule import Rule
from unity_jax.rewrite.view import View, names_of, seen_as

_Item = TypeVar("_Item")

COMMUTATIVE = frozenset({"dot", "add", "mul"})
_UNSEEN = PARALLEL | {"split", "merge", "onehot", "window", "zeros", "ones", "broadcast", "transpose"}
_FUSED = frozenset("add sub mul neg f g h convert".split())


@dataclass
class Match:
    """A rule's source found: what each variable, name, function and term stands for; `roots`: the results."""

    rule: Rule
    dims: Dims
    values: dict[str, Value | Selection] = field(default_factory=dict)
    names: dict[Dim, Ids] = field(default_factory=dict)
    symbols: dict[str, Op] = field(default_factory=dict)
    terms: dict[Term, tuple[Value, Seen]] = field(default_factory=dict)
    roots: tuple[Value, ...] = ()
    rest: tuple[Value, ...] = ()  # what is added to the one result: the source is some summands of a longer sum
    named: tuple[tuple[tuple[Dim, ...], Ids], ...] = ()  # names that stand for these dimensions together
    along: dict[Dim, int] = field(
        default_factory=dict
    )  # of a name for several dimensions, the one that is concatenated

    def copy(self) -> Match:
        return Match(
            self.rule,
            self.dims.copy(),
            dict(self.values),
            dict(self.names),
            dict(self.symbols),
            dict(self.terms),
            self.roots,
            self.rest,
            self.named,
        )

    @property
    def taken(self) -> list[Tensor]:
        """The tensors that the target is made from."""
        named = {t.name for r in self.rule.target for t in r.walk() if not t.op}
        found = [self.values[n] for n in self.values if n in named]
        tensors = (v.tensor if isinstance(v, Value) else v.indices and v.indices.tensor for v in (*found, *self.rest))
        return [t for t in tensors if t is not None and t.literal is None]

    def ids(self, name: Dim) -> frozenset[int]:
        return frozenset(self.dims.all(self.names[name]))


def is_applicable(rule: Rule) -> bool:
    """Whether the rule is about what a traced program holds: layouts, which the search chooses, are no part of it.

    Row numbers are taken as they are, and what XLA fuses anyway is left to it, side by side as well.
    """
    every = [t for side in (rule.source, rule.target) for r in side for t in r.walk()]
    numbers = [t for t in every if t.type.ids is not None]
    return (
        not rule.when
        and not rule.unbound
        and not any(t.op in _UNSEEN for t in every)
        and not any(t.op for t in numbers)
        and all(r.op for r in rule.source)
        and any(t.op and t.op not in _FUSED for t in every)
        and (len(rule.source) == 1 or not all(r.op in _FUSED for r in rule.source))
        and not all(r.op in COMMUTATIVE and not any(a.op for a in r.args) for r in (*rule.source, *rule.target))
    )


def both_ways(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """The rules of a library as they can be applied: from left to right, and back (`inverse`)."""
    found = []
    for rule in rules:
        found.append(rule)
        known = {t for r in rule.target for t in r.walk() if not t.op}
        if set(rule.given) <= known:
            found.append(dataclasses.replace(rule, name=inverse(rule.name), source=rule.target, target=rule.source))
    return tuple(r for r in found if is_applicable(r))


_BACK = ", back"


def inverse(name: str) -> str:
    """The name of a rule the other way round."""
    return name.removesuffix(_BACK) if name.endswith(_BACK) else name + _BACK


def matches(rule: Rule, root: Tensor, view: View) -> Iterator[Match]:
    """Every way in which `root` is the first result of the rule's source."""
    if view.source(root) is not root or not _may_be(rule.source[0], root, view):
        return  # relabelled values are found where they are made
    start = Match(rule, Dims())
    if len(rule.source) > 1 or rule.source[0].op != "add":
        every = _roots(rule.source, (), root, start, view)
    else:
        every = _summands(rule.source[0], root, start, view) if not view.is_summand(root) else iter(())
    yield from filter(_complete, every)


def _summands(term: Term, root: Tensor, match: Match, view: View) -> Iterator[Match]:
    """The ways in which a sum of two is two summands of a longer one, such as the gradients of two products between
    which that of a residual is added."""
    value = Value(root, tuple(match.dims.fresh(n) for n in root.shape))
    every = in_forward_order(view.summands(value, match.dims), view.maker[root].backward)
    for pair in itertools.combinations(range(len(every)), 2):
        chosen = tuple(every[i] for i in pair)
        for order in (chosen, chosen[::-1]):
            if not all(_may_be(a, v.tensor, view) for a, v in zip(term.args, order, strict=True)):
                continue
            found = match.copy()
            found.terms[term] = (value, Seen("add", order))
            found.roots, found.rest = (value,), tuple(v for i, v in enumerate(every) if i not in pair)
            yield from _arguments(term.args, order, found, view)


def _roots(terms: Sequence[Term], used: tuple[Tensor, ...], root: Tensor, match: Match, view: View) -> Iterator[Match]:
    value = Value(root, tuple(match.dims.fresh(n) for n in root.shape))
    for found in _match(terms[0], value, match, view):
        found.roots = (*found.roots, value)
        rest, taken = terms[1:], (*used, root)
        if not rest:
            yield found
            continue
        known = {v.tensor: None for v in found.values.values() if isinstance(v, Value) and v.tensor.literal is None}
        known |= {v.tensor: None for v, _ in found.terms.values()}
        near = {t: None for k in known for op in view.readers.get(k, ()) for t in op.outputs if view.source(t) is t}
        for other in in_forward_order(near, view.maker[root].backward):
            if other not in taken:
                yield from _roots(rest, taken, other, found.copy(), view)


def in_forward_order(items: Iterable[_Item], backward: bool) -> list[_Item]:
    """Differentiation turns the order of a program round: gradients are joined as what they are the gradients of, so
    that one concatenation serves several products."""
    return list(items)[::-1] if backward else list(items)


def _may_be(term: Term, t: Tensor, view: View) -> bool:
    """Whether the ops that make a tensor are those of a term, at a glance."""
    if not term.op:
        return True
    op = view.maker.get(view.source(t))
    if op is None or seen_as(term.op) not in names_of(op):
        return False
    return all(not a.op or any(_may_be(a, t, view) for t in view.operands(op)) for a in term.args)


def _match(term: Term, value: Value, match: Match, view: View) -> Iterator[Match]:
    """Extend a match (a copy that is ours) so that `term` is `value`."""
    value = view.value(value, match.dims)
    if not term.op:
        known = match.values.setdefault(term.name, value)
        if isinstance(known, Value) and _unite(known, value, match.dims):
            yield match
        return
    if term in match.terms:
        if _unite(match.terms[term][0], value, match.dims):
            yield match
        return
    for seen in view.seen(value, match.dims):
        if seen.op != seen_as(term.op):
            continue
        found = match.copy()
        found.terms[term] = (value, seen)
        if not _attributes(term, seen, found):
            continue
        args = [a for a in term.args if a.type.ids is None]
        orders = [seen.args]
        if term.op in COMMUTATIVE and args[0] != args[1]:
            orders.append(seen.args[::-1])
        for operands in orders:
            yield from _arguments(args, operands, found.copy(), view)


def _arguments(terms: Sequence[Term], values: Sequence[Value], match: Match, view: View) -> Iterator[Match]:
    if len(terms) != len(values):
        return
    if not terms:
        yield match
        return
    for found in _match(terms[0], values[0], match, view):
        yield from _arguments(terms[1:], values[1:], found, view)


def _each(results: Iterable[bool]) -> bool:
    """Whether all are true; none is left out, since each unites."""
    return all(list(results))


def _unite(a: Value, b: Value, dims: Dims) -> bool:
    if a.tensor is not b.tensor:
        same = a.tensor.literal is not None and b.tensor.literal is not None
        return same and not a.ids and not b.ids and bool(a.tensor.literal == b.tensor.literal)
    return _each(dims.unite(i, j) for i, j in zip(a.ids, b.ids, strict=True))


# Attributes


def _attributes(term: Term, seen: Seen, match: Match) -> bool:
    """Bind what an op names: dimensions, functions, selections."""
    if term.op in ("f", "g", "h", "fold", "convert"):
        known = match.symbols.setdefault(term.op, seen.symbol)
        return same_function(known, seen.symbol) and _reduced(term, seen, match)
    if term.op in ("take", "put", "scatter"):
        return _selection(term, seen, match)
    if term.op == "concat":
        whole, *parts = seen.attrs[0]
        named = term.attrs[0]
        assert isinstance(named, Dim)
        bound = zip((named, *named.parts), (whole, *parts), strict=len(parts) == len(named.parts))
        return len(parts) == len(named.parts) and all(_bind((n,), (i,), match) for n, i in bound)
    if term.op in ("slice", "pad"):
        (whole, part), which = seen.attrs
        named = term.attrs[0]
        assert isinstance(named, Dim)
        if which != term.attrs[1] or len(named.parts) != 2:
            return False
        return _bind((named,), (whole,), match) and _bind((named.parts[which],), (part,), match)
    if term.op == "unstack":
        return seen.attrs[1] == term.attrs[1] and _bind(term.attrs[:1], seen.attrs[0], match)
    return _reduced(term, seen, match)


def _reduced(term: Term, seen: Seen, match: Match) -> bool:
    """Attributes that name sets of dimensions: each its own, or all together one."""
    if len(term.attrs) == len(seen.attrs):
        return all(_bind((name,), ids, match) for name, ids in zip(term.attrs, seen.attrs, strict=True))
    return len(seen.attrs) == 1 and _bind(term.attrs, seen.attrs[0], match)


def _bind(names: Sequence[Dim | int], ids: Ids, match: Match) -> bool:
    """Note what names stand for here; whether they can is known when all operands are."""
    match.named = (*match.named, (tuple(n for n in names if isinstance(n, Dim)), ids))
    return bool(ids) or not names


def _selection(term: Term, seen: Seen, match: Match) -> bool:
    numbers = term.args[-1]
    if numbers.op or numbers.type.ids is None:
        return False
    *added, rows = seen.attrs
    if not _bind((numbers.type.ids,), rows, match):
        return False
    if added and not _reduced(term, seen._replace(attrs=tuple(added)), match):
        return False
    known = match.values.setdefault(numbers.name, seen.symbol)
    return isinstance(known, Selection) and _same_selection(known, seen.symbol, match.dims)


def _same_selection(a: Selection, b: Selection, dims: Dims) -> bool:
    if (a.kind, a.start, a.params, len(a.ids)) != (b.kind, b.start, b.params, len(b.ids)):
        return False
    if (a.indices is None) != (b.indices is None) or (
        a.indices and b.indices and a.indices.tensor is not b.indices.tensor
    ):
        return False
    return _each(dims.unite(i, j) for i, j in zip(a.ids, b.ids, strict=True))


_OF_SHAPES = ("axes", "sharding", "dimension_numbers")


def same_function(a: Op, b: Op) -> bool:
    """Whether two pointwise ops (or reductions) do the same to their operands, whatever the shapes."""
    constants = [[str(t.literal) for t in op.inputs if t.literal is not None] for op in (a, b)]
    params = [[(k, str(v)) for k, v in sorted(op.params.items()) if k not in _OF_SHAPES] for op in (a, b)]
    return (
        a.name == b.name and len(a.inputs) == len(b.inputs) and constants[0] == constants[1] and params[0] == params[1]
    )


# What no op names


def _complete(match: Match) -> bool:
    """Bind the names that are left, and check that dimensions occur where the rule says."""
    variables = [v for v in match.rule.given if v.name in match.values]
    if not _named(match) or not _convolved(match) or not _shared(match, variables):
        return False
    has = {v.name: match.dims.all(match.values[v.name].ids) for v in variables}
    if any(len(set(ids)) < len(ids) for ids in has.values()):
        return False  # a diagonal
    declared = {name: frozenset(v.name for v in variables if name in v.type.dims) for name in _names(variables)}
    occurs: dict[int, frozenset[str]] = {
        i: frozenset(n for n, ids in has.items() if i in ids) for i in itertools.chain(*has.values())
    }
    for names, ids in match.named:
        if len(names) != 1 and not _together(names, set(match.dims.all(ids)), declared, occurs, match):
            return False
    bound = {i for name in match.names for i in match.ids(name)}
    for name, where in declared.items():
        if name in match.names:
            if any(occurs.get(i, where) != where for i in match.ids(name)):
                return False
        else:
            match.names[name] = tuple(i for i, at in occurs.items() if at == where and i not in bound)
    return _reduces(match) and _concatenated(match, list(occurs))


def _reduces(match: Match) -> bool:
    """Whether every op of the target that names dimensions has one: one over none is no op, or an outer product."""
    named = (t.attrs for r in match.rule.target for t in r.walk() if t.op in ("dot", "sum", "fold", "put", "scatter"))
    return all(not attrs or any(match.names.get(a, a) for a in attrs if isinstance(a, Dim)) for attrs in named)


def _together(
    names: Sequence[Dim],
    ids: set[int],
    declared: Mapping[Dim, frozenset[str]],
    occurs: Mapping[int, frozenset[str]],
    match: Match,
) -> bool:
    """Distribute dimensions over the names that stand for them together, by the variables that have them."""
    known = {i for name in names if name in match.names for i in match.ids(name)}
    if not known <= ids:
        return False
    for name in names:
        if name not in match.names:
            match.names[name] = tuple(i for i in occurs if i in ids - known and occurs[i] == declared.get(name))
            known |= match.ids(name)
    return known == ids


def _named(match: Match) -> bool:
    """Whether each name stands for the same dimensions wherever an op names it alone; those that no operand joins are
    united in order."""
    alone = [(names[0], ids) for names, ids in match.named if len(names) == 1]
    for one_at_a_time in (True, False):
        for name, ids in alone:
            known = match.names.setdefault(name, ids)
            if len(known) != len(ids):
                return False
            if one_at_a_time and len(ids) > 1:
                continue
            sets = [set(match.dims.all(known)), set(match.dims.all(ids))]
            if sets[0] == sets[1]:
                continue
            if sets[0] & sets[1] or not _each(match.dims.unite(i, j) for i, j in zip(known, ids, strict=True)):
                return False
    return True


def _convolved(match: Match) -> bool:
    """Whether all convolutions slide in the same way; then the places of their results are the same."""
    every = [(value, seen.symbol) for value, seen in match.terms.values() if seen.op == "conv"]
    places = [[v.ids[d] for d in op.params["dimension_numbers"].out_spec[2:]] for v, op in every]
    for (_, op), other in zip(every[1:], places[1:], strict=True):
        if not same_function(every[0][1], op):
            return False
        if not _each(match.dims.unite(i, j) for i, j in zip(places[0], other, strict=True)):
            return False
    return True


def _names(variables: Sequence[Term]) -> list[Dim]:
    return list(dict.fromkeys(d for v in variables for d in v.type.dims))


def _shared(match: Match, variables: Sequence[Term]) -> bool:
    """Unite, in order, dimensions that variables of several results share by the rule, though no op joins them.

    Not those of variables that are concatenated: of these, `_concatenated` finds what is alike.
    """
    if len(match.rule.source) == 1:
        return True
    for a, b in itertools.combinations(variables, 2):
        if any(
            p in a.type.dims and q in b.type.dims
            for s in sums(match.rule)
            for p, q in itertools.permutations(s.parts, 2)
        ):
            continue
        ids = {v.name: match.dims.all(match.values[v.name].ids) for v in variables}
        bound = {i for name in match.names for i in match.ids(name)}
        for name in a.type.dims:
            where = {v.name for v in variables if name in v.type.dims}
            joined = set.intersection(*(set(ids[w]) for w in where)) - bound
            if b.name not in where or name in match.names or _only(joined, where, ids):
                continue
            left = [[i for i in ids[v.name] if i not in bound and i not in ids[w.name]] for v, w in ((a, b), (b, a))]
            if len(left[0]) != len(left[1]):
                return False
            if not _each(match.dims.unite(i, j) for i, j in zip(*left, strict=True)):
                return False
    return True


def _only(joined: set[int], where: set[str], ids: dict[str, Ids]) -> bool:
    """Whether one of these dimensions belongs to these variables and no other."""
    return any({v for v, have in ids.items() if i in have} == where for i in joined)


def _concatenated(match: Match, order: Sequence[int]) -> bool:
    """Of the dimensions that stand for the parts of a new sum, those along which to concatenate: the others begin, or
    end, all parts alike, and are united. Several (`groups, width` beside `width`) are concatenated as one.

    What is alike is taken from the front first: heads stay a dimension of their own, that devices can share.
    """
    for whole in sorted(sums(match.rule) - set(match.names), key=str):
        place = [match.dims.find(i) for i in order]
        parts = [sorted(match.ids(p), key=place.index) if p in match.names else [] for p in whole.parts]
        if not all(parts):
            return False
        common: list[int] = []
        for end in (0, -1):
            while all(len(p) > 1 for p in parts) and len({match.dims.size[p[end]] for p in parts}) == 1:
                first, *others = (p.pop(end) for p in parts)
                if not _each(match.dims.unite(first, i) for i in others):
                    return False
                common.append(first)
        match.along.update((name, match.dims.product(p)) for name, p in zip(whole.parts, parts, strict=True))
        match.along[whole] = match.dims.fresh(sum(match.dims.size[match.along[p]] for p in whole.parts))
        match.names[whole] = (match.along[whole], *common)
    return True


def sums(rule: Rule) -> set[Dim]:
    """The sums that a target concatenates."""
    every = (t.attrs[0] for r in rule.target for t in r.walk() if t.op == "concat")
    return {whole for whole in every if isinstance(whole, Dim)}
