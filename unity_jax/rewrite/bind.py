"""What the names of a rule stand for, once its ops are found in a graph.

A name stands for the dimensions that ops name where it is named in the rule; what no op names is bound by where it
occurs: a dimension that exactly those variables have which the rule says. What is put into rows may lack dimensions of
the row numbers: it is the same for all of them (the gradient of each row of a bag). Any may lack one of size one.
Further dimensions do no harm, because every op of the language works on each index of a dimension that it does not
name.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from unity_jax.pcg.graph import Op, Tensor
from unity_jax.rewrite.dims import Dims, Ids, Seen, Selection, Value
from unity_jax.rewrite.language import Dim, Term
from unity_jax.rewrite.rule import Rule
from unity_jax.rewrite.table import naming


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
    first: bool = False  # whether that is the first one, which counts towers

    def copy(self) -> Match:
        """One to be extended by itself, before it is complete."""
        found = object.__new__(Match)
        found.__dict__.update(self.__dict__)
        found.dims, found.values, found.names = self.dims.copy(), dict(self.values), dict(self.names)
        found.symbols, found.terms, found.along = dict(self.symbols), dict(self.terms), {}
        return found

    @property
    def taken(self) -> list[Tensor]:
        """The tensors that the target is made from."""
        named = {t.name for r in self.rule.target for t in r.walk() if not t.op}
        found = [self.values[n] for n in self.values if n in named]
        tensors = (v.tensor if isinstance(v, Value) else v.indices and v.indices.tensor for v in (*found, *self.rest))
        return [t for t in tensors if t is not None and t.literal is None]

    def ids(self, name: Dim) -> frozenset[int]:
        return frozenset(self.dims.all(self.names[name]))


def complete(match: Match) -> bool:
    """Bind the names that are left, and check that dimensions occur where the rule says."""
    variables = [v for v in match.rule.given if v.name in match.values]
    if not _named(match) or not _whole(match) or not _convolved(match) or not _shared(match, variables):
        return False
    if match.first and not _stacked(match):
        return False
    has = {v.name: match.dims.all(match.values[v.name].ids) for v in variables}
    inner = (match.dims.all(value.ids) for value, _ in match.terms.values())
    if any(len(set(ids)) < len(ids) for ids in itertools.chain(has.values(), inner)):
        return False  # a diagonal: two dimensions of one array were united
    declared = {name: frozenset(v.name for v in variables if name in v.type.dims) for name in _names(variables)}
    occurs: dict[int, frozenset[str]] = {
        i: frozenset(n for n, ids in has.items() if i in ids) for i in itertools.chain(*has.values())
    }
    for names, ids in match.named:
        if len(names) != 1 and not _together(names, set(match.dims.all(ids)), declared, occurs, match):
            return False
    bound = {i for name in match.names for i in match.ids(name)}
    rows = {i for s in match.values.values() if isinstance(s, Selection) for i in match.dims.all(s.ids)}
    for name, where in declared.items():
        if name in match.names:
            if not all(_occurs(match, i, occurs.get(i), where, rows) for i in match.ids(name)):
                return False
        else:
            match.names[name] = tuple(i for i, at in occurs.items() if at == where and i not in bound)
    return _reduces(match) and _concatenated(match, list(occurs))


def _occurs(match: Match, i: int, at: frozenset[str] | None, where: frozenset[str], rows: Collection[int]) -> bool:
    """Whether a dimension is one of those variables that the rule says; of size one, it is so of any."""
    return at is None or at == where or (at < where and (i in rows or match.dims.size[i] == 1))


def _reduces(match: Match) -> bool:
    """Whether every op of the target that names dimensions has one: one over none is no op, or an outer product."""
    named = (t.attrs for r in match.rule.target for t in r.walk() if naming(t) == "dims")
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
            if sets[0] & sets[1] or not each(match.dims.unite(i, j) for i, j in zip(known, ids, strict=True)):
                return False
    return True


def _whole(match: Match) -> bool:
    """Whether the parts of each sum that the source names, where all are bound, are as large as the sum."""
    size = {name: math.prod(match.dims.size[i] for i in match.ids(name)) for name in match.names}
    every = [name for name in size if name.parts and size.keys() >= set(name.parts)]
    return all(size[name] == sum(size[part] for part in name.parts) for name in every)


def _convolved(match: Match) -> bool:
    """Whether all convolutions slide in the same way; then the places of their results are the same."""
    every = [(value, seen.symbol) for t, (value, seen) in match.terms.items() if naming(t) == "windows"]
    places = [[v.ids[d] for d in op.params["dimension_numbers"].out_spec[2:]] for v, op in every]
    for (_, op), other in zip(every[1:], places[1:], strict=True):
        if not same_function(every[0][1], op):
            return False
        if not each(match.dims.unite(i, j) for i, j in zip(places[0], other, strict=True)):
            return False
    return True


def _names(variables: Sequence[Term]) -> list[Dim]:
    return list(dict.fromkeys(d for v in variables for d in v.type.dims))


def _shared(match: Match, variables: Sequence[Term]) -> bool:
    """Unite, in order, dimensions that variables of several results share by the rule, though no op joins them.

    Not those of variables that are concatenated: of these, `_concatenated` finds what is alike. Of towers, which are
    concatenated along the first dimension, what each alone has is united here.
    """
    if len(match.rule.source) == 1:
        return True
    for a, b in itertools.combinations(variables, 2):
        parts = [
            (p, q)
            for s in sums(match.rule)
            for p, q in itertools.permutations(s.parts, 2)
            if p in a.type.dims and q in b.type.dims
        ]
        later = bool(parts)
        if later and not match.first:
            continue
        counted = any(all(sum(d in v.type.dims for v in variables) == 1 for d in pair) for pair in parts)
        ids = {v.name: match.dims.all(match.values[v.name].ids) for v in variables}
        bound = {i for name in match.names for i in match.ids(name)}
        for name in a.type.dims:
            where = {v.name for v in variables if name in v.type.dims}
            joined = set.intersection(*(set(ids[w]) for w in where)) - bound
            if b.name not in where or name in match.names or _only(joined, where, ids):
                continue
            left = []
            for v, w in ((a, b), (b, a)):
                others = {i for n in (ids.keys() - {v.name} if later else {w.name}) for i in ids[n]}
                left.append([i for i in ids[v.name] if i not in bound and i not in others])
            if counted:  # what counts towers comes first, and is joined
                left = [ids[1:] for ids in left]
            if len(left[0]) != len(left[1]):
                return False
            if not each(match.dims.unite(i, j) for i, j in zip(*left, strict=True)):
                return False
    return True


def _stacked(match: Match) -> bool:
    """Unite, in order, what variables that the target stacks have besides the dimensions that ops name."""
    for term in {t for root in match.rule.target for t in root.walk() if naming(t) == "count"}:
        if any(a.op for a in term.args):
            continue
        bound = {i for name in match.names for i in match.ids(name)}
        each_ids = [match.dims.all(match.values[a.name].ids) for a in term.args]
        first, *others = ([i for i in ids if i not in bound] for ids in each_ids)
        for other in others:
            if len(first) != len(other) or not each(match.dims.unite(i, j) for i, j in zip(first, other, strict=True)):
                return False
    return True


def _only(joined: set[int], where: set[str], ids: dict[str, Ids]) -> bool:
    """Whether one of these dimensions belongs to these variables and no other."""
    return any({v for v, have in ids.items() if i in have} == where for i in joined)


def _concatenated(match: Match, order: Sequence[int]) -> bool:
    """Of the dimensions that stand for the parts of a new sum, those along which to concatenate: the others begin, or
    end, all parts alike, and are united. Several (`groups, width` beside `width`) are concatenated as one.

    What is alike is taken from the front first: heads stay a dimension of their own, that devices can share. Of towers
    the first dimension counts them: it is what is joined.
    """
    for whole in sorted(sums(match.rule) - set(match.names), key=str):
        place = [match.dims.find(i) for i in order]
        parts = [sorted(match.ids(p), key=place.index) if p in match.names else [] for p in whole.parts]
        if not all(parts):
            return False
        common: list[int] = []
        for end in (-1, 0) if match.first else (0, -1):
            while all(len(p) > 1 for p in parts) and len({match.dims.size[p[end]] for p in parts}) == 1:
                first, *others = (p.pop(end) for p in parts)
                if not each(match.dims.unite(first, i) for i in others):
                    return False
                common.append(first)
        match.along.update((name, match.dims.product(p)) for name, p in zip(whole.parts, parts, strict=True))
        match.along[whole] = match.dims.fresh(sum(match.dims.size[match.along[p]] for p in whole.parts))
        match.names[whole] = (match.along[whole], *common)
    return True


def sums(rule: Rule) -> set[Dim]:
    """The sums that a target concatenates."""
    every = (t.attrs[0] for r in rule.target for t in r.walk() if naming(t) == "whole")
    return {whole for whole in every if isinstance(whole, Dim)}


def each(results: Iterable[bool]) -> bool:
    """Whether all are true; none is left out, since each unites."""
    return all(list(results))


_OF_SHAPES = ("axes", "sharding", "dimension_numbers")


def same_function(a: Op, b: Op) -> bool:
    """Whether two pointwise ops (or reductions) do the same to their operands, whatever the shapes."""
    constants = [[str(t.literal) for t in op.inputs if t.literal is not None] for op in (a, b)]
    params = [[(k, str(v)) for k, v in sorted(op.params.items()) if k not in _OF_SHAPES] for op in (a, b)]
    return (
        a.name == b.name and len(a.inputs) == len(b.inputs) and constants[0] == constants[1] and params[0] == params[1]
    )
