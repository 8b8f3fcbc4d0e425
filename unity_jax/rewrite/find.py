"""Where a rule's source occurs in a graph: op by op, from a result down; `bind` then says what its names stand for."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from unity_jax.pcg.graph import Tensor
from unity_jax.rewrite.bind import Match, complete, each, same_function
from unity_jax.rewrite.dims import Dims, Ids, Seen, Selection, Value
from unity_jax.rewrite.language import Dim, Term
from unity_jax.rewrite.ops.elementwise import ADD
from unity_jax.rewrite.rule import Rule
from unity_jax.rewrite.table import has, naming
from unity_jax.rewrite.view import View, outline

_Item = TypeVar("_Item")


def matches(rule: Rule, root: Tensor, view: View) -> Iterator[Match]:
    """Every way in which `root` is the first result of the rule's source."""
    if view.source(root) is not root or not view.may_be(outline(rule.source[0]), root):
        return  # relabelled values are found where they are made
    if rule.repeats and not view.has_repeated(root, rule.repeats):
        return
    start = Match(rule, Dims())
    if len(rule.source) > 1 or rule.source[0].op != ADD:
        every = _roots(rule.source, (), root, start, view)
    else:
        every = _summands(rule.source[0], root, start, view) if not view.is_summand(root) else iter(())
    yield from filter(complete, every)


def matches_pair(rule: Rule, roots: tuple[Tensor, Tensor], view: View) -> Iterator[Match]:
    """Every way in which two tensors, which need not have anything in common, are the results of the rule's source.

    What the rule joins, it joins along the first dimension.
    """
    first, second = roots
    made_by = [outline(term) for term in rule.source]
    if not all(view.source(t) is t and view.may_be(o, t) for o, t in zip(made_by, roots, strict=True)):
        return
    start = Match(rule, Dims(), first=True)
    for found in _roots(rule.source[:1], (), first, start, view):
        yield from filter(complete, _roots(rule.source[1:], (first,), second, found.copy(), view))


def _summands(term: Term, root: Tensor, match: Match, view: View) -> Iterator[Match]:
    """The ways in which a sum of two is two summands of a longer one, such as the gradients of two products between
    which that of a residual is added."""
    value = Value(root, tuple(match.dims.fresh(n) for n in root.shape))
    every = in_forward_order(view.summands(value, match.dims), view.maker[root].backward)
    for pair in itertools.combinations(range(len(every)), 2):
        chosen = tuple(every[i] for i in pair)
        for order in (chosen, chosen[::-1]):
            if not _may_be(term.args, order, view):
                continue
            found = match.copy()
            found.terms[term] = (value, Seen(order))
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
        made_as = outline(rest[0])
        for other in in_forward_order(near, view.maker[root].backward):
            if other not in taken and view.may_be(made_as, other) and _takes_known(rest[0], other, found, view):
                yield from _roots(rest, taken, other, found.copy(), view)


def _takes_known(term: Term, root: Tensor, match: Match, view: View) -> bool:
    """Whether what makes a tensor takes those operands of a term that are bound already, at a glance."""
    if naming(term) == "whole":  # of a longer concatenation the view makes operands
        return True
    taken = {view.source(t) for t in view.maker[root].inputs}
    bound = (match.values.get(a.name) for a in term.args if not a.op)
    known = (v.tensor for v in bound if isinstance(v, Value) and v.tensor.literal is None)
    return all(view.source(t) in taken for t in known)


def in_forward_order(items: Iterable[_Item], backward: bool) -> list[_Item]:
    """Differentiation turns the order of a program round: gradients are joined as what they are the gradients of, so
    that one concatenation serves several products."""
    return list(items)[::-1] if backward else list(items)


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
    args = [a for a in term.args if a.type.ids is None]
    for seen in view.seen(value, match.dims, term.op):
        orders = [seen.args]
        if has(term, "commutes") and args[0] != args[1]:
            orders.append(seen.args[::-1])
        orders = [operands for operands in orders if _may_be(args, operands, view)]
        if not orders:
            continue
        found = match.copy()
        found.terms[term] = (value, seen)
        if not _attributes(term, seen, found):
            continue
        for operands in orders:
            yield from _arguments(args, operands, found.copy() if len(orders) > 1 else found, view)


def _may_be(terms: Sequence[Term], values: Sequence[Value], view: View) -> bool:
    """Whether values are as many as terms, and made by their ops, at a glance."""
    if len(terms) != len(values):
        return False
    return all(not a.op or view.may_be(outline(a), v.tensor) for a, v in zip(terms, values, strict=True))


def _arguments(terms: Sequence[Term], values: Sequence[Value], match: Match, view: View) -> Iterator[Match]:
    if not terms:
        yield match
        return
    for found in _match(terms[0], values[0], match, view):
        yield from _arguments(terms[1:], values[1:], found, view)


def _unite(a: Value, b: Value, dims: Dims) -> bool:
    if a.tensor is not b.tensor:
        same = a.tensor.literal is not None and b.tensor.literal is not None
        return same and not a.ids and not b.ids and bool(a.tensor.literal == b.tensor.literal)
    return each(dims.unite(i, j) for i, j in zip(a.ids, b.ids, strict=True))


# Attributes


def _attributes(term: Term, seen: Seen, match: Match) -> bool:
    """Bind what an op names: dimensions, functions, selections."""
    if has(term, "unknown"):
        known = match.symbols.setdefault(term.op, seen.symbol)
        return same_function(known, seen.symbol) and _reduced(term, seen, match)
    if has(term, "rows"):
        return _selection(term, seen, match)
    if naming(term) == "whole":
        whole, *parts = seen.attrs[0]
        named = term.attrs[0]
        assert isinstance(named, Dim)
        bound = zip((named, *named.parts), (whole, *parts), strict=len(parts) == len(named.parts))
        return len(parts) == len(named.parts) and all(_bind((n,), (i,), match) for n, i in bound)
    if naming(term) == "part":
        (whole, part), which = seen.attrs
        named = term.attrs[0]
        assert isinstance(named, Dim)
        if which != term.attrs[1] or len(named.parts) != 2:
            return False
        return _bind((named,), (whole,), match) and _bind((named.parts[which],), (part,), match)
    if naming(term) == "counted":
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
    return each(dims.unite(i, j) for i, j in zip(a.ids, b.ids, strict=True))
