"""Which values the backward pass should compute again: those that free most memory for the seconds they cost.

    x, x W                   kept      x @ W             134 MB, recomputed in 0.9 ms
    tanh(x W)                          tanh(x W)         134 MB, recomputed in 0.1 ms: first

Equal values of all layers, unrolled or scanned, are one choice. Each is computed from what is kept, through whatever is
not, and frees bytes from its last reader in the forward pass until the backward pass needs it: for itself, or for what
is computed of it, so that of a chain of layers nothing is freed. It counts if the step needs most memory in between. Of
few kinds of values all subsets are tried. Of more, one is chosen after the other, by bytes for a second, with those
there again that have been chosen before (Checkmate, https://arxiv.org/abs/1910.02653, finds the optimum of such
problems; Mist, https://arxiv.org/abs/2503.19050, chooses whole layers).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from unity_jax.pcg.graph import Graph, Op, Tensor, part
from unity_jax.residuals.flat import Flat
from unity_jax.residuals.recompute import can_repeat, is_constant
from unity_jax.rewrite.estimate import Seconds
from unity_jax.rewrite.sites import Kinds
from unity_jax.xla.traffic import Traffic

NEGLIGIBLE = 2**-10
"""The part of the largest value that is kept below which nothing is worth computing again: seeds, statistics."""

FEW = 8
"""Of how many kinds of values at most all subsets are tried."""


@dataclass(frozen=True)
class Choice:
    """Values that are computed again together.

    **Fields:** `freed`: of them those that are in memory now, and of how many layers; `values`: with what lies between
    these and what is kept; `bytes`: by how much less is live at once, of whole arrays; `seconds` on one device.
    """

    freed: Mapping[Tensor, int]
    values: frozenset[Tensor]
    bytes: float
    seconds: float


def choices(graph: Graph, traffic: Traffic, seconds: Callable[[Graph], Seconds], devices: int) -> Iterator[Choice]:
    """Ever more bytes, as long as there are values that lower the peak further, in ever more seconds.

    **Arguments:** `traffic`: of the graph; `seconds`: what a graph takes, see `rewrite.estimate`; `devices`: how many
    share the work.
    """
    flat = Flat(graph)
    residuals = Residuals.of(flat, traffic)
    if not residuals.spans:
        return
    kind, found = Kinds(flat.graph, {}), defaultdict[int, list[Tensor]](list)
    for t in residuals.spans:
        found[kind[t]].append(t)
    repeating, before = Repeating(residuals), float(residuals.profile.max())
    kinds = [members for members in found.values() if any(t.nbytes >= repeating.least for t in members)]
    chosen = _every if len(kinds) <= FEW else _greedy
    for some in chosen(repeating, kinds, timed_by(seconds, devices)):
        values = frozenset(flat.origin.get(t, t) for t in repeating.values(some.freed))
        freed = {flat.origin.get(t, t): t.times for t in some.freed}
        yield Choice(freed, values, before - some.peak, some.seconds)


class Span(NamedTuple):
    """When a value is in memory, in kernels: from the one that makes it (`born`) to the last that reads it (`dead`);
    between the `last` that reads it in the forward pass and the `first` in the backward pass nothing does."""

    born: int
    last: int
    first: int
    dead: int


@dataclass(frozen=True, eq=False)
class Residuals:
    """What is in memory from the forward to the backward pass.

    Arguments and results have memory for the whole step. So a kernel that makes nothing but results, as the update of a
    weight, runs as soon as what it reads is there, and one that reads nothing but arguments, as their cast, when what
    it makes is wanted: compilers keep no gradient for the end of the step, and cast no weight at its beginning.

    **Fields:** `spans`; `profile`: bytes of all else that is live while each kernel runs; `runs`: the first kernel that
    each op is part of; `layers`: the first kernel in the backward pass of a layer that stands for several.
    """

    graph: Graph
    spans: Mapping[Tensor, Span]
    profile: np.ndarray
    runs: Mapping[Op, int]
    layers: int

    @staticmethod
    def of(flat: Flat, traffic: Traffic) -> Residuals:
        graph, kernels = flat.graph, flat.kernels(traffic)
        late, ends = [k.root.backward for k in kernels], set(graph.outputs)
        born = {t: i for i, k in enumerate(kernels) for t in k.writes}
        reads = defaultdict[Tensor, list[int]](list)
        for i, k in enumerate(kernels):
            soon = max((born[t] for t in k.reads if t in born), default=i) if ends.issuperset(k.writes) else i
            for t in k.reads:
                reads[t].append(soon)
        for k in kernels:
            if born.keys().isdisjoint(k.reads):
                born.update((t, min(reads[t])) for t in k.writes if reads[t])
        change, spans = np.zeros(len(kernels) + 1), dict[Tensor, Span]()
        for t, first in born.items():
            dead = max(reads[t], default=first)
            early, after = ([i for i in reads[t] if late[i] == side] for side in (False, True))
            crosses = not late[first] and bool(after)
            if t not in ends:
                size = t.nbytes * (t.times if crosses else 1)  # of others one layer's is there at a time
                change[first] += size
                change[dead + 1] -= size
            made_by = graph.producer.get(t)
            repeats = made_by is not None and not made_by.backward and can_repeat(made_by) and not is_constant(made_by)
            if crosses and t not in ends and repeats:
                spans[t] = Span(first, max(early, default=first), min(after), dead)
        runs = {op: i for i, k in reversed(list(enumerate(kernels))) for op in k.ops}
        layers = next((i for i, k in enumerate(kernels) if late[i] and k.root.times > 1), 0)
        return Residuals(graph, spans, np.cumsum(change)[:-1], runs, layers)


class Repeating:
    """What the backward pass computes again if some residuals are not kept, and what is live then."""

    def __init__(self, residuals: Residuals) -> None:
        self.residuals, self.graph = residuals, residuals.graph
        self.least = NEGLIGIBLE * max(t.nbytes for t in residuals.spans)
        self._forward = [op for op in self.graph.ops if not op.backward]
        self._outputs = set(self.graph.outputs)
        self._read = dict[Tensor, int]()  # by the backward pass, and when first
        for op in self.graph.ops:
            for t in op.inputs if op.backward else ():
                now = residuals.runs.get(op, len(residuals.profile))
                self._read[t] = min(self._read.get(t, now), now)

    def leading_to(self, t: Tensor, freed: Set[Tensor]) -> set[Op]:
        """The ops that compute a value from what is kept while these values are not."""
        found: set[Op] = set()
        waiting = [t]
        while waiting:
            op = self.graph.producer[waiting.pop()]
            if op not in found:
                found.add(op)
                waiting += [u for u in op.inputs if not self._is_kept(u, freed)]
        return found

    def values(self, freed: Set[Tensor]) -> set[Tensor]:
        """All that the backward pass computes again: what it reads that depends on the values that are not kept, and
        what this is made of."""
        lost = set(freed)
        for op in self._forward:
            if not lost.isdisjoint(op.inputs):
                lost.update(t for t in op.outputs if not self._is_kept(t, freed))
        found: set[Tensor] = set()
        waiting = [t for t in self._read if t in lost]
        while waiting:
            t = waiting.pop()
            if t not in found:
                found.add(t)
                waiting += [u for u in self.graph.producer[t].inputs if not self._is_kept(u, freed)]
        return found

    def profile(self, freed: Set[Tensor]) -> np.ndarray:
        """Bytes that are live while each kernel runs, without these values where they are not there."""
        found, needed = self.residuals.profile.copy(), self._needed(self.values(freed))
        for t in freed:
            born, last, first, dead = self.residuals.spans[t]
            first = needed.get(t, first)
            alone = first >= self.residuals.layers  # that of one layer is there at a time
            found[last + 1 : first] -= t.nbytes
            found[born : dead + 1 if alone else first] -= t.nbytes * (t.times - 1)
        return found

    def _needed(self, values: Set[Tensor]) -> dict[Tensor, int]:
        """When the backward pass first needs each value, for itself or for another one."""
        found = {t: self._read[t] for t in values if t in self._read}
        never = len(self.residuals.profile)
        for op in reversed(self._forward):
            if not values.isdisjoint(op.outputs):
                now = min(found.get(t, never) for t in op.outputs)
                found.update((t, min(now, found.get(t, never))) for t in op.inputs if t in values)
        return found

    def _is_kept(self, t: Tensor, freed: Set[Tensor]) -> bool:
        made_by = self.graph.producer.get(t)
        if t in freed or (made_by is not None and is_constant(made_by)):
            return False
        if made_by is None or t in self.residuals.spans or not can_repeat(made_by) or t in self._outputs:
            return True
        return t.nbytes < self.least


class _Some(NamedTuple):
    """Values that are not kept, the most that is live then, and the seconds to compute them again."""

    freed: frozenset[Tensor]
    peak: float
    seconds: float


Timed = Callable[[tuple[Op, ...]], float]
"""The seconds of some ops of a graph, in its order, as far as the backward pass needs them."""


def timed_by(seconds: Callable[[Graph], Seconds], devices: int) -> Timed:
    """Told by an estimate of what graphs take, for devices that share the work."""
    return functools.cache(lambda ops: seconds(part(ops, _late(ops))).on(devices) / devices)


def _every(repeating: Repeating, kinds: Sequence[list[Tensor]], timed: Timed) -> Iterator[_Some]:
    """Of all subsets those than which none needs less memory in as few seconds."""
    most, found = float(repeating.residuals.profile.max()), list[_Some]()
    for some in (some for n in range(len(kinds)) for some in itertools.combinations(kinds, n + 1)):
        freed = frozenset(itertools.chain(*some))
        peak = float(repeating.profile(freed).max())
        if peak < most:
            ops = set().union(*(repeating.leading_to(t, freed) for t in freed))
            found.append(_Some(freed, peak, added_seconds(repeating.graph, ops, freed, timed)))
    found.sort(key=lambda some: (some.peak, some.seconds))
    least = itertools.accumulate((some.seconds for some in found), min, initial=math.inf)
    yield from reversed([some for some, before in zip(found, least, strict=False) if some.seconds < before])


def _greedy(repeating: Repeating, kinds: Sequence[list[Tensor]], timed: Timed) -> Iterator[_Some]:
    """Ever more values, one kind after the other."""
    search = _Greedy(repeating, kinds, timed)
    while search.step():
        yield _Some(frozenset(search.freed), float(search.profile.max()), search.spent)


class _Greedy:
    """Chooses one kind of values after the other. **Fields:** `freed`: chosen so far; `spent`: their seconds;
    `profile`: what is live then."""

    def __init__(self, repeating: Repeating, kinds: Sequence[list[Tensor]], timed: Timed) -> None:
        self.repeating, self.left, self._timed = repeating, list(kinds), timed
        self.profile = repeating.residuals.profile
        self.freed: set[Tensor] = set()
        self.spent = 0.0
        self._done: set[Op] = set()

    def step(self) -> bool:
        """Take the kind of values that frees most for a second of what is live at the peak; whether there is one."""
        busiest, costs = int(np.argmax(self.profile)), [self._cost(members) for members in self.left]
        there = (self._there(members, busiest) for members in self.left)
        hopes = [n / max(cost, _INSTANT) for n, cost in zip(there, costs, strict=True)]
        most, chosen = 0.0, -1
        after = self.profile
        for i in sorted(range(len(hopes)), key=lambda i: -hopes[i]):
            if hopes[i] <= most:
                break
            profile = self.repeating.profile(self.freed.union(self.left[i]))
            rate = float(self.profile[busiest] - profile[busiest]) / max(costs[i], _INSTANT)
            if rate > most and profile.max() <= self.profile.max():
                most, chosen, after = rate, i, profile
        if chosen < 0:
            return False
        self.freed.update(self.left.pop(chosen))
        self.spent += costs[chosen]
        self.profile = after
        self._done = {self.repeating.graph.producer[t] for t in self.repeating.values(self.freed)}
        return True

    def _there(self, members: Sequence[Tensor], at: int) -> int:
        """Bytes of a kind that are live at a kernel and not read nearby, or of other layers, as far as they are worth a
        choice."""
        found = 0
        for t in (t for t in members if t.nbytes >= self.repeating.least):
            born, last, first, dead = self.repeating.residuals.spans[t]
            found += t.nbytes * ((last < at < first) + (born <= at <= dead) * (t.times - 1))
        return found

    def _cost(self, members: Sequence[Tensor]) -> float:
        """Seconds to compute all members of a kind again, beside what is computed again already."""
        one = max(members, key=lambda t: t.times)
        ops = self.repeating.leading_to(one, self.freed.union(members)) - self._done
        return added_seconds(self.repeating.graph, ops, {one}, self._timed) / one.times * sum(t.times for t in members)


def added_seconds(graph: Graph, ops: Set[Op], values: Set[Tensor], timed: Timed) -> float:
    """Seconds that ops take which compute values again: as part of what reads these, which need not read them then."""
    readers = {op for t in values for op in graph.readers.get(t, ()) if op.backward and not op.bodies}
    before, after = (tuple(op for op in graph.ops if op in some) for some in (readers, ops | readers))
    return max(0.0, timed(after) - timed(before))


def _late(ops: Iterable[Op]) -> Iterator[Tensor]:
    return (t for op in ops if op.backward for t in op.outputs)


_INSTANT = 1e-12
"""Seconds that anything takes at least."""
