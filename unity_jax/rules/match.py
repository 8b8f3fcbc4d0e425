"""Where a side of a rule occurs among values, and what the other side is there.

A name of a dimension stands for any number of dimensions, none included: those that the same variables have and the
same ops sum over. So dimensions are matched by where they occur, not one by one; only those that are cut, joined or
counted in are matched one to one. Dimensions and device axes that every variable has and no op mentions are no part
of a rule: each op treats them as a batch. The parts of a sum may trade places, everywhere at once. What is cut and
joined may hold row numbers as well as values.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from unity_jax.rewrite.language import Attrs, Dim, Term, Type
from unity_jax.rewrite.ops.shape import TRANSPOSE
from unity_jax.rewrite.table import OPS, has, naming
from unity_jax.rules.values import Node, node


class Graph(Protocol):
    """Values by number, each with its type and the nodes that are known to make it."""

    @property
    def types(self) -> Sequence[Type]: ...

    @property
    def nodes(self) -> Sequence[Sequence[Node]]: ...

    def find(self, made: Node) -> int | None: ...


@dataclass(frozen=True)
class Found:
    """Values of the variables; single dimensions of the names that are cut, joined or counted in; sums whose parts
    trade places; lists of dimensions that must correspond; and, once solved, the dimensions that each name stands for.
    """

    values: Mapping[str, int] = field(default_factory=dict)
    single: Mapping[str, Dim] = field(default_factory=dict)
    turned: Mapping[Dim, bool] = field(default_factory=dict)
    lists: tuple[tuple[Attrs, Attrs], ...] = ()
    dims: Mapping[str, tuple[Dim, ...]] = field(default_factory=dict)

    def dim(self, d: Dim) -> tuple[Dim, ...]:
        """What a dimension of the rule is here; one that only the other side has is new, and may have any name."""
        if not d.parts:
            return (self.single[d.name],) if d.name in self.single else self.dims.get(d.name, (d,))
        parts = [one for part in d.parts for one in self.dim(part)]
        if len(parts) != len(d.parts):
            raise ValueError(f"{d} is of single dimensions")
        return (Dim(d.name, tuple(parts[::-1] if self.turned.get(d) else parts)),)


def matches(side: Sequence[Term], at: Sequence[Node], graph: Graph) -> Iterator[Found]:
    """The ways in which the results of a side of a rule make nodes."""
    every = [Found()]
    for r, n in zip(side, at, strict=True):
        every = [now for found in every for now in _node(r, n, graph, found)]
    for found in every:
        yield from _solved(found, _variables(tuple(side)), graph)


@functools.cache
def _variables(side: tuple[Term, ...]) -> tuple[Term, ...]:
    return tuple(dict.fromkeys(t for r in side for t in r.walk() if not t.op))


def build(side: Term, found: Found, graph: Graph) -> Node | int | None:
    """The node that a side of a rule makes where the other was found; a value, where it is a variable; None where the
    graph does not have it."""
    if not side.op:
        return found.values.get(side.name)
    args = []
    for a in side.args:
        made = build(a, found, graph)
        made = graph.find(made) if isinstance(made, Node) else made
        if made is None:
            return None
        args.append(made)
    try:
        attrs = _attrs_of(side, found, [graph.types[a] for a in args])
    except ValueError:
        return None
    if not attrs and naming(side) == "dims" and OPS[side.op].arity == 1 and side.op != TRANSPOSE:
        return None  # there is no such program
    turned = isinstance(side.attrs[0], Dim) and found.turned.get(side.attrs[0]) if side.attrs else False
    return node(side.op, attrs, args[::-1] if turned and OPS[side.op].arity is None else args)


def _attrs_of(side: Term, found: Found, types: Sequence[Type]) -> Attrs:
    if side.op == TRANSPOSE:
        return types[0].dims[::-1]
    if naming(side) == "dims":
        return tuple(one for d in side.attrs for one in found.dim(d))  # type: ignore[arg-type]
    attrs: list[Dim | int] = []
    for a in side.attrs:
        if isinstance(a, int):
            attrs.append(1 - a if found.turned.get(side.attrs[0]) else a)  # type: ignore[arg-type]
        else:
            (one,) = found.dim(a)
            attrs.append(one)
    return tuple(attrs)


def _value(side: Term, at: int, graph: Graph, found: Found) -> Iterator[Found]:
    if side.op:
        for n in graph.nodes[at]:
            if n.op == side.op:
                yield from _node(side, n, graph, found)
    elif found.values.get(side.name, at) == at and (side.type.ids is None or graph.types[at].ids is not None):
        yield _with(found, values={**found.values, side.name: at})


def _node(side: Term, at: Node, graph: Graph, found: Found) -> Iterator[Found]:
    if side.op != at.op or len(side.args) != len(at.args):
        return
    for now in _attributes(side, at.attrs, found):
        orders = [at.args]
        if OPS[side.op].arity is None:
            orders = [at.args[::-1]] if now.turned.get(side.attrs[0]) else orders  # type: ignore[arg-type]
        elif has(side, "commutes") and at.args[0] != at.args[1]:
            orders.append(at.args[::-1])
        for args in orders:
            yield from _args(side.args, args, graph, now)


def _args(sides: Sequence[Term], args: Sequence[int], graph: Graph, found: Found) -> Iterator[Found]:
    if not sides:
        yield found
        return
    for now in _value(sides[0], args[0], graph, found):
        yield from _args(sides[1:], args[1:], graph, now)


def _attributes(side: Term, attrs: Attrs, found: Found) -> Iterator[Found]:
    if side.op == TRANSPOSE:
        yield found
        return
    if naming(side) == "dims":
        yield _with(found, lists=(*found.lists, (side.attrs, attrs)))
        return
    if not side.attrs:
        yield found
        return
    for now in _unified(side.attrs[0], attrs[0], found, naming(side) in ("count", "counted")):  # type: ignore[arg-type]
        rest: Iterator[Found] | list[Found] = [now]
        for a, b in zip(side.attrs[1:], attrs[1:], strict=True):
            if isinstance(a, int):
                rest = [f for f in rest if (1 - a if f.turned.get(side.attrs[0]) else a) == b]  # type: ignore[arg-type]
            else:
                rest = [g for f in rest for g in _unified(a, b, f)]  # type: ignore[arg-type]
        yield from rest


def _unified(d: Dim, at: Dim, found: Found, stacked: bool = False) -> Iterator[Found]:
    """A dimension of the rule as one here."""
    if not d.parts:
        if found.single.get(d.name, at) == at:
            now = _with(found, single={**found.single, d.name: at})
            if stacked and d not in found.turned:
                yield from (_with(now, turned={**now.turned, d: turned}) for turned in (False, True))
            else:
                yield now
        return
    if d.name != at.name or len(d.parts) != len(at.parts):
        return
    turns = [found.turned[d]] if d in found.turned else [False, True] if d.name == "+" else [False]
    for turned in turns:
        now = [_with(found, turned={**found.turned, d: turned})]
        for a, b in zip(d.parts, at.parts[::-1] if turned else at.parts, strict=True):
            now = [g for f in now for g in _unified(a, b, f)]
        yield from now


def _with(
    found: Found,
    values: Mapping[str, int] | None = None,
    single: Mapping[str, Dim] | None = None,
    turned: Mapping[Dim, bool] | None = None,
    lists: tuple[tuple[Attrs, Attrs], ...] | None = None,
) -> Found:
    return Found(
        found.values if values is None else values,
        found.single if single is None else single,
        found.turned if turned is None else turned,
        found.lists if lists is None else lists,
    )


def _solved(found: Found, variables: Sequence[Term], graph: Graph) -> Iterator[Found]:
    """The dimensions that names stand for, by where they occur."""
    theirs: list[Sequence[Dim | int]] = [v.type.dims for v in variables] + [a for a, _ in found.lists]
    here: list[Sequence[Dim | int]] = [graph.types[found.values[v.name]].dims for v in variables]
    here += [b for _, b in found.lists]
    for now in _counted(found, variables, graph):
        for whole in _joined(now, theirs, here):
            if _on_devices(whole, variables, graph):
                for dims in _by_place(whole, theirs, here, len(variables)):
                    yield Found(whole.values, whole.single, whole.turned, whole.lists, dims)


def _counted(found: Found, variables: Sequence[Term], graph: Graph) -> Iterator[Found]:
    """Dimensions that row numbers count in."""
    now = [found]
    for v in variables:
        ids = graph.types[found.values[v.name]].ids
        if v.type.ids is not None and ids is not None:
            now = [g for f in now for g in _unified(v.type.ids, ids, f)]
    yield from now


def _joined(
    found: Found, theirs: Sequence[Sequence[Dim | int]], here: Sequence[Sequence[Dim | int]]
) -> Iterator[Found]:
    """Sums and multiples that no op of this side cuts or joins, but the other side may."""
    for dims, at in zip(theirs, here, strict=True):
        for d in dims:
            if isinstance(d, Dim) and d.parts and not set(d.names()) <= found.single.keys():
                for b in at:
                    for now in _unified(d, b, found):  # type: ignore[arg-type]
                        yield from _joined(now, theirs, here)
                return
    yield found


def _on_devices(found: Found, variables: Sequence[Term], graph: Graph) -> bool:
    """Device axes that no op mentions are the same for all variables."""
    rest = set()
    for v in variables:
        named = {found.single.get(p.name) for p in v.type.devices}
        at = set(graph.types[found.values[v.name]].devices)
        if not named <= at:
            return False
        rest.add(frozenset(at - named))
    return len(rest) <= 1


def _by_place(
    found: Found, theirs: Sequence[Sequence[Dim | int]], here: Sequence[Sequence[Dim | int]], variables: int
) -> Iterator[dict[str, tuple[Dim, ...]]]:
    """Names and dimensions in the same lists go together. Names that no list of this side tells apart share the
    dimensions between them in every way."""
    wanted, given = _places(theirs), _places(here)
    names: dict[tuple[int, ...], list[str]] = {}
    for d, places in wanted.items():
        if d.parts or d.name in found.single:
            if given.pop(found.dim(d)[0], None) != places:
                return
        else:
            names.setdefault(places, []).append(d.name)
    dims: dict[tuple[int, ...], list[Dim]] = {}
    for d, places in given.items():
        dims.setdefault(places, []).append(d)
    if any(p not in names and p != tuple(range(variables)) for p in dims):
        return
    choices = [_shared(among, sorted(dims.get(p, ()), key=str)) for p, among in names.items()]
    for chosen in itertools.product(*choices):
        yield {n: d for part in chosen for n, d in part.items()}


def _shared(names: Sequence[str], dims: Sequence[Dim]) -> Iterator[dict[str, tuple[Dim, ...]]]:
    for owners in itertools.product(names, repeat=len(dims)):
        yield {n: tuple(d for d, owner in zip(dims, owners, strict=True) if owner == n) for n in names}


def _places(lists: Sequence[Sequence[Dim | int]]) -> dict[Dim, tuple[int, ...]]:
    """In which lists each dimension occurs."""
    places: dict[Dim, tuple[int, ...]] = {}
    for i, dims in enumerate(lists):
        for d in dims:
            places[d] = (*places.get(d, ()), i)  # type: ignore[index,arg-type]
    return places
