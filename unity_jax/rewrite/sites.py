"""Where a program can be rewritten: matches of a library's rules, equal places together.

The layers of a model are alike, so a rule is tried once for each kind of place, and a step rewrites every place of that
kind. What a step is worth is estimated from the ops that come and go; the planner decides.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from unity_jax.pcg.graph import Graph, Op, Tensor, part
from unity_jax.rewrite.apply import rewritten, target_ops, unknown
from unity_jax.rewrite.bind import Match
from unity_jax.rewrite.dims import CannotEmit, Value
from unity_jax.rewrite.estimate import Seconds
from unity_jax.rewrite.find import in_forward_order, matches, matches_pair
from unity_jax.rewrite.rule import Rule
from unity_jax.rewrite.table import OPS
from unity_jax.rewrite.view import Outline, View, names_of, outline
from unity_jax.xla.op_classes import PRODUCTS

SELECTING = frozenset(name for name, op in OPS.items() if op.naming == "part" or "rows" in op.traits)
"""Ops of the language that choose rows, or put rows somewhere."""

DEPTH = 4
"""How many ops before a place must be equal for two places to be of one kind."""

AROUND = 2
"""How far from a place are the ops that decide what rules find there, those aside that only relabel: of 7,500 tries on
MLP, ViT and an associative scan all came out the same where these are."""


Vain = dict[object, set[object]]
"""The names of rules that find nothing, by what is around the tensors where they were tried; and the outlines of their
sources."""


@dataclass(frozen=True)
class Step:
    """A rule applied at some spots of a graph at once: for each, the position of the op and of its result there, and
    which of the rule's matches; where it has two results with nothing in common, also the position of the other."""

    rule: str
    spots: tuple[tuple[int, ...], ...]

    def applied(self, graph: Graph, rule: Rule) -> Graph:
        """The graph after the step. Raises `LookupError` or `CannotEmit` for a graph that it was not made for."""
        view = View(graph)
        found = []
        for op, result, which, *other in self.spots:
            first = graph.ops[op].outputs[result]
            if other:
                every = list(matches_pair(rule, (first, graph.ops[other[0]].outputs[other[1]]), view))
            else:
                every = list(matches(rule, first, view))
            found.append(every[which])
        return rewritten(graph, found, view)[0]


@dataclass(frozen=True, eq=False)
class Place:
    """All places of one kind in one graph where a rule applies.

    **Fields:** `which`: of each, which of the rule's matches it is; `gain`: what it saves, as estimated; `hope`: what
    it would save if nothing else needed what the rule looks through; `bytes`: of all that it makes or takes.
    """

    rule: Rule
    found: tuple[Match, ...]
    which: tuple[int, ...]
    gain: Seconds
    hope: Seconds

    @property
    def root(self) -> Tensor:
        """The first result of the first."""
        return self.found[0].roots[0].tensor

    @functools.cached_property
    def key(self) -> tuple[object, ...]:
        """Equal for the same step in another variant of the program, as far as types tell."""
        first = self.found[0]
        values = (v if isinstance(v, Value) else v.indices for v in first.values.values())
        types = (str(v.tensor) for v in (*first.roots, *values) if v is not None)
        return self.rule.name, len(self.found), *types

    @functools.cached_property
    def spots(self) -> tuple[object, ...]:
        """Equal for the same step at the same tensors in another variant of the program."""
        return self.rule.name, *(r.tensor for m in self.found for r in m.roots)

    @functools.cached_property
    def bytes(self) -> int:
        every = {v.tensor for m in self.found for v in (*m.values.values(), *m.roots) if isinstance(v, Value)}
        return sum(t.nbytes for t in every if t.literal is None)


class Finder:
    """Finds places in one graph.

    **Arguments:** `seconds`: what a graph takes, see `rewrite.estimate`; `kinds`: which places are alike; `emitted`:
    see `View`.
    """

    def __init__(
        self,
        graph: Graph,
        seconds: Callable[[Graph], Seconds],
        kinds: Kinds | None = None,
        emitted: dict[object, Graph | str] | None = None,
    ) -> None:
        self.graph, self.view, self.seconds = graph, View(graph, emitted), seconds
        self.kinds, self._near = kinds or Kinds(graph, {}), dict[Op, frozenset[Op]]()

    @functools.cached_property
    def position(self) -> dict[Op, int]:
        return {op: i for i, op in enumerate(self.graph.ops)}

    @functools.cached_property
    def results(self) -> frozenset[Tensor]:
        """What the graph returns."""
        return frozenset(self.graph.outputs)

    def places(
        self,
        rules: Sequence[Rule],
        near: Iterable[Op] | None = None,
        least: float = -math.inf,
        vain: Vain | None = None,
        changed: Iterable[Op] | None = None,
    ) -> Iterator[Place]:
        """Every place for these rules.

        **Arguments:** `near`: look only at what these ops make and what reads it; `least`: leave out a place if as many
        times the gain of its first spot as it has spots would be less, on one device; `vain`: leave out what saves no
        work, and note it there; `changed`: leave out kinds of places of which none is near these.
        """
        every = {name: self._by_kind(found) for name, found in _anchors(self.graph, self.view, near).items()}
        if changed is not None:
            fresh = {t for found in _anchors(self.graph, self.view, changed).values() for t in found}
            every = {name: [k for k in kinds if not fresh.isdisjoint(k)] for name, kinds in every.items()}
        known: set[object] = set()
        possible: dict[Outline, list[tuple[tuple[Tensor, ...], set[object]]]] = {}

        @functools.cache
        def tried(members: tuple[Tensor, ...]) -> set[object]:
            return set() if vain is None else vain.setdefault(self._surroundings(members), set())

        for rule in rules:
            made_as = outline(rule.source[0])
            if made_as not in possible:
                possible[made_as] = []
                for members in every.get(made_as.op, ()):
                    nothing = tried(members)
                    if made_as in nothing:
                        continue
                    if any(self.view.may_be(made_as, t) for t in members):
                        possible[made_as].append((members, nothing))
                    else:
                        nothing.add(made_as)
            for members, nothing in possible[made_as]:
                if rule.name in nothing:
                    continue
                place = self._place(rule, members, least, vain is not None)
                if place is None:
                    nothing.add(rule.name)
                    continue
                key = (rule.name, frozenset(r.tensor for m in place.found for r in m.roots))
                if key not in known:  # operands can often change sides
                    known.add(key)
                    yield place

    def _surroundings(self, members: tuple[Tensor, ...]) -> object:
        """Equal in graphs where a rule finds the same at tensors: the same ops around make the same results."""
        ops = last = {self.view.maker[t] for t in members}
        for _ in range(AROUND):
            ops = ops | (last := set[Op]().union(*map(self._neighbours, last)) - ops)
        return members, frozenset(ops), self.results.intersection(t for op in ops for t in op.outputs)

    def _neighbours(self, op: Op) -> frozenset[Op]:
        """What makes the operands of an op, and what reads these or its results, relabelled or not."""
        if op not in self._near:
            maker, readers, operands = self.view.maker, self.view.readers, {*map(self.view.source, op.inputs)}
            near = (readers.get(t, ()) for t in (*operands, *op.outputs))
            self._near[op] = frozenset(maker[t] for t in operands if t in maker).union(*near)
        return self._near[op]

    def _by_kind(self, tensors: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        """Tensors of one kind together. Where no other is by an op of the same signature, nothing is to be compared."""
        own = [(self.graph.producer[t].signature, _result(self.graph.producer[t], t)) for t in tensors]
        alike, kinds = Counter(own), dict[object, list[Tensor]]()
        for t, kind in zip(tensors, own, strict=True):
            kinds.setdefault(kind if alike[kind] == 1 else self.kinds[t], []).append(t)
        return list(map(tuple, kinds.values()))

    def place(self, rule: Rule, kind: int, near: Iterable[Op] | None = None) -> Place | None:
        """The place of a rule whose first results are of a kind; `near`: see `places`."""
        anchors = _anchors(self.graph, self.view, near).get(rule.source[0].op, ())
        members = [t for t in anchors if self.kinds[t] == kind]
        return self._place(rule, members) if members else None

    def again(self, place: Place) -> Place | None:
        """A place of a graph from which this one was made, as far as it is still there."""
        roots = (m.roots[0].tensor for m in place.found)
        return self._place(place.rule, [t for t in roots if t in self.view.maker])

    def above(self, ops: Collection[Op]) -> set[Op]:
        """Some ops and those that read what they make, as far as a rule looks down."""
        found = set(ops)
        for _ in range(DEPTH - 1):
            found |= {r for op in found for t in op.outputs for r in self.view.readers.get(self.view.source(t), ())}
        return found

    def _place(
        self, rule: Rule, members: Sequence[Tensor], least: float = -math.inf, saving: bool = False
    ) -> Place | None:
        found: list[Match] = []
        which: list[int] = []
        used: set[Tensor] = set()
        for t in members:
            for n, m in enumerate(matches(rule, t, self.view)) if t not in used else ():
                roots = {r.tensor for r in m.roots}
                if not roots & used and (not found or self._alike(m, found[0])):
                    found.append(m)
                    which.append(n)
                    used |= roots
                    break
            if not found:
                return None
            if len(found) == 1:
                come = functools.cache(functools.partial(self._come, found[0]))  # once for all that are alike
                first = self._gains(found, come) if len(members) > 1 else None
                if len(members) > 1 and (first is None or first[1].on(1) * len(members) < least):
                    return None
        gains = self._gains(found, come, saving)
        return None if gains is None else Place(rule, tuple(found), tuple(which), *gains)

    def _alike(self, a: Match, b: Match) -> bool:
        return all(self.kinds[r.tensor] == self.kinds[s.tensor] for r, s in zip(a.roots, b.roots, strict=True))

    def _gains(
        self, found: Sequence[Match], come: Callable[[], Seconds | None], saving: bool = False
    ) -> tuple[Seconds, Seconds] | None:
        """What the ops take which go, less what those take that come: as things are, and as is to be hoped, see
        `Place`; None where the target does not exist, or saves no work and is to (`saving`)."""
        goes = self._goes(found) if saving else []  # seconds op by op are known; what they come to is to be emitted
        if (saving and goes[0].work <= 0) or (each := come()) is None:
            return None
        goes = goes or self._goes(found)
        times = sum(m.roots[0].tensor.times for m in found) / found[0].roots[0].tensor.times
        if saving and goes[0].work <= times * each.work:
            return None
        return goes[0].less(each, times), goes[-1].less(each, times)

    def _come(self, match: Match) -> Seconds | None:
        """What the ops take that come for a match; None where its target does not exist."""
        try:
            made, results = target_ops(match, self.view)
        except CannotEmit:
            return None
        return self.seconds(part(unknown(made, self.view), results.values()))

    def _goes(self, found: Sequence[Match]) -> list[Seconds]:
        """What the ops take that go: as things are, and if nothing else needed what the rule looks through."""
        roots = {r.tensor: None for m in found for r in m.roots}
        inner = {v.tensor for m in found for v, _ in m.terms.values()}.difference(roots, self.graph.outputs)
        gone = [self._gone(found, {*roots}), self._gone(found, {*roots, *inner})]
        if len(gone[0]) == len(gone[1]):
            gone.pop()
        return [self.seconds(part(sorted(g, key=self.position.__getitem__), list(roots))) for g in gone]

    def _gone(self, found: Sequence[Match], roots: set[Tensor]) -> set[Op]:
        """The ops that nothing needs once these are made in another way, or not at all."""
        view, readers = self.view, self.graph.readers
        gone: set[Op] = set()
        needed = {t for m in found for t in m.taken}
        kept = needed.union(t for n in needed if (op := view.virtual(n)) is not None for t in op.inputs)
        waiting = [view.maker[t] for t in roots]
        while waiting:
            op = waiting.pop()
            if op in gone:
                continue
            left = (t for t in op.outputs if t not in roots)
            if not any(t in kept or t in self.results or not gone.issuperset(readers.get(t, ())) for t in left):
                gone.add(op)
                waiting += [self.graph.producer[t] for t in op.inputs if t in self.graph.producer]
        return gone


def rewrite(finder: Finder, place: Place) -> tuple[Graph, frozenset[Op], Step] | None:
    """The graph with a place rewritten, the ops to look at next, and what was done; None if it cannot be.

    Next are the ops that are new, and those that still need what the rule has no use for any more. Where the spots
    depend on each other, as many are rewritten as can be together.
    """
    n = len(place.found)
    while n:
        found = place.found[:n]
        try:
            graph, fresh = rewritten(finder.graph, found, finder.view)
        except CannotEmit:
            n //= 2
            continue
        inner = {value.tensor for m in found for value, _ in m.terms.values()} - {
            r.tensor for m in found for r in m.roots
        }
        readers = {op for op in graph.ops if not inner.isdisjoint(op.inputs)}
        roots = [m.roots[0].tensor for m in found]
        makers = [finder.graph.producer[t] for t in roots]
        spots = [
            (finder.position[op], op.outputs.index(t), w) for op, t, w in zip(makers, roots, place.which, strict=False)
        ]
        return graph, fresh | readers, Step(place.rule.name, tuple(spots))
    return None


def still(ops: Iterable[Op], graph: Graph) -> frozenset[Op]:
    """The ops of a rewritten graph that make what these made: of other operands, they are other ops."""
    made = {t for op in ops for t in op.outputs}
    return frozenset(op for op in graph.ops if not made.isdisjoint(op.outputs))


def counterparts(place: Place, view: View, graph: Graph) -> frozenset[Op]:
    """The selections of a rewritten graph that are from the user's lines of what was rewritten: rows that are chosen in
    the forward pass are put back in the backward one."""
    lines = {view.maker[r.tensor].source for m in place.found for r in m.roots}
    return frozenset(op for op in graph.ops if not SELECTING.isdisjoint(names_of(op)) and op.source in lines)


def _anchors(graph: Graph, view: View, near: Iterable[Op] | None) -> dict[str, list[Tensor]]:
    """Tensors by the op of the language that makes them, those of the backward pass in the order of the forward one."""
    chosen = None if near is None else _around(view, near)
    ops = [op for op in graph.ops if chosen is None or op in chosen]
    late = in_forward_order((op for op in ops if op.backward), True)
    found: dict[str, list[Tensor]] = {}
    for op in (*(op for op in ops if not op.backward), *late):
        for name in names_of(op):
            found.setdefault(name, []).extend(op.outputs)
    return found


def _around(view: View, near: Iterable[Op]) -> set[Op]:
    """Some ops and what reads their results; of products also those that read the same, and their readers: the
    gradients of a merged product can be merged as well."""
    chosen = set(near)
    for op in [op for op in chosen if op.name in PRODUCTS or op.name == "concatenate"]:
        chosen.update(r for t in op.inputs for r in view.readers.get(view.source(t), ()) if r.name in PRODUCTS)
    return chosen | {r for op in chosen for t in op.outputs for r in view.readers.get(t, ())}


class Kinds:
    """A number for each tensor of a graph, equal where the ops that lead to it are equal for `depth` steps.

    **Arguments:** `known`: the numbers so far, for graphs that are compared.
    """

    def __init__(self, graph: Graph, known: dict[object, int], depth: int = DEPTH) -> None:
        self.graph, self.known, self.depth = graph, known, depth
        self._found: dict[tuple[Tensor, int], int] = {}

    def __getitem__(self, t: Tensor) -> int:
        return self._kind(t, self.depth)

    def _kind(self, t: Tensor, depth: int) -> int:
        key = (t, depth)
        if key not in self._found:
            op = self.graph.producer.get(t)
            if op is None:
                own: object = (t.shape, str(t.dtype)) if t.literal is None else None
            else:
                own = (op.signature, _result(op, t))
                if depth:
                    before = (0 if i.enters or i.leaves else depth - 1 for i in op.inputs)  # layers of a folded program
                    own = (self._kind(t, 0), tuple(map(self._kind, op.inputs, before)))  # are alike
            self._found[key] = self.known.setdefault(own, len(self.known))
        return self._found[key]


def _result(op: Op, t: Tensor) -> int:
    """Which result of an op a tensor is; equal parts of one whole are alike."""
    return -1 if op.name in ("split", "unstack") else op.outputs.index(t)


def fingerprint(graph: Graph, known: dict[object, int]) -> tuple[int, ...]:
    """Equal for graphs that compute the same by the same ops. `known` numbers what was met before."""
    number = {t: known.setdefault(("input", i), len(known)) for i, t in enumerate(graph.inputs)}
    for op in graph.ops:
        bodies = tuple(fingerprint(b, known) for b in op.bodies)
        signature: object = op.signature  # which has the literals
        operands: tuple[object, ...] = tuple([number.get(t, -1) for t in op.inputs])
        if op.bodies:
            signature = op.name, len(op.outputs), *(None if t.literal is None else str(t.literal) for t in op.inputs)
        for i, t in enumerate(op.outputs):
            number[t] = known.setdefault((signature, bodies, operands, i), len(known))
    return tuple(number.get(t, -1) for t in graph.outputs)
