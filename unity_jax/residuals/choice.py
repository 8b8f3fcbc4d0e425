"""Which values the backward pass should compute again: those that free most memory for the seconds they cost.

    x, x W                   kept      x @ W             134 MB, recomputed in 0.9 ms
    tanh(x W)                          tanh(x W)         134 MB, recomputed in 0.1 ms: first

Equal values of all layers are one choice. Each frees bytes from its last reader in the forward pass to its first one in
the backward pass, and counts if the step needs most memory between the two. It is computed from what is kept, through
whatever is not; what has been chosen before is there again (greedy by bytes for a second: Checkmate,
https://arxiv.org/abs/1910.02653, finds the optimum of such problems; Mist, https://arxiv.org/abs/2503.19050, chooses
whole layers).
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from unity_jax.pcg.graph import Graph, Op, Tensor, part
from unity_jax.residuals.recompute import can_repeat
from unity_jax.rewrite.estimate import Seconds
from unity_jax.rewrite.sites import Kinds
from unity_jax.xla.traffic import Traffic

NEGLIGIBLE = 2**-10
"""The part of the largest value that is kept below which nothing is worth computing again: seeds, statistics."""


@dataclass(frozen=True)
class Choice:
    """Values that are computed again together.

    **Fields:** `freed`: of them those that are in memory now; `values`: with what lies between these and what is kept;
    `bytes`: by how much less is live at once, of whole arrays; `seconds` on one device.
    """

    freed: frozenset[Tensor]
    values: frozenset[Tensor]
    bytes: float
    seconds: float


def choices(graph: Graph, traffic: Traffic, seconds: Callable[[Graph], Seconds], devices: int) -> Iterator[Choice]:
    """Ever more values, as long as that lowers the peak.

    **Arguments:** `traffic`: of the graph; `seconds`: what a graph takes, see `rewrite.estimate`; `devices`: how many
    share the work.
    """
    residuals = Residuals.of(graph, traffic)
    if not residuals.spans:
        return
    kinds, found = Kinds(graph, {}), defaultdict[int, list[Tensor]](list)
    for t in residuals.spans:
        found[kinds[t]].append(t)
    search = _Greedy(residuals, list(found.values()), lambda g: seconds(g).on(devices) / devices)
    before = residuals.peak
    while (members := search.next()) is not None:
        search.take(members)
        yield Choice(frozenset(search.freed), frozenset(search.values()), before - residuals.peak, search.spent)


@dataclass(eq=False)
class Residuals:
    """What is in memory from the forward to the backward pass.

    **Fields:** `spans`: of each value the kernels between which nothing reads it; `lives`: those that make it and read
    it last; `profile`: bytes of all that is live while each kernel runs, arguments aside.
    """

    graph: Graph
    spans: dict[Tensor, tuple[int, int]]
    lives: dict[Tensor, tuple[int, int]]
    profile: np.ndarray

    @staticmethod
    def of(graph: Graph, traffic: Traffic) -> Residuals:
        kernels = traffic.kernels[graph]
        late = [k.root.backward for k in kernels]
        born = {t: i for i, k in enumerate(kernels) for t in k.writes}
        reads = defaultdict[Tensor, list[int]](list)
        for i, k in enumerate(kernels):
            for t in k.reads:
                if t in born:
                    reads[t].append(i)
        change, ends = np.zeros(len(kernels) + 1), set(graph.outputs)
        spans, lives = {}, {}
        for t, first in born.items():
            last = len(kernels) - 1 if t in ends else max(reads[t], default=first)
            early, after = ([i for i in reads[t] if late[i] == side] for side in (False, True))
            crosses = not late[first] and bool(after)
            size = t.nbytes * (t.times if crosses else 1)
            change[first] += size
            change[last + 1] -= size
            if crosses and t not in ends and can_repeat(graph.producer[t]):
                spans[t], lives[t] = (max(early, default=first), min(after)), (first, last)
        return Residuals(graph, spans, lives, np.cumsum(change)[:-1])

    @property
    def peak(self) -> float:
        return float(self.profile.max(initial=0.0))

    @property
    def busiest(self) -> int:
        return int(np.argmax(self.profile))

    def free(self, t: Tensor) -> None:
        """Count a value no more between its readers in both passes, and that of one layer only beside these."""
        (last, first), (born, dead) = self.spans[t], self.lives[t]
        self.profile[last + 1 : first] -= t.nbytes
        self.profile[born : dead + 1] -= t.nbytes * (t.times - 1)


class _Greedy:
    """Chooses one kind of values after the other. **Fields:** `freed`: chosen so far; `spent`: their seconds."""

    def __init__(self, residuals: Residuals, kinds: Sequence[list[Tensor]], seconds: Callable[[Graph], float]) -> None:
        self.residuals, self.graph, self.left = residuals, residuals.graph, list(kinds)
        self.freed: set[Tensor] = set()
        self.spent = 0.0
        self._done: set[Op] = set()
        self._seconds = functools.cache(lambda ops, t: seconds(part(list(ops), [t])))
        self._position = {op: i for i, op in enumerate(self.graph.ops)}
        self._least = NEGLIGIBLE * max(t.nbytes for t in residuals.spans)
        self._outputs = set(self.graph.outputs)

    def next(self) -> list[Tensor] | None:
        """The kind of values that frees most for a second of those that are live at the peak."""
        rates = [(self._rate(members), -i) for i, members in enumerate(self.left)]
        rate, at = max(rates, default=(0.0, 0))
        return self.left[-at] if rate > 0 else None

    def take(self, members: list[Tensor]) -> None:
        self.spent += self._cost(members) or 0.0
        self.left.remove(members)
        self.freed.update(members)
        for t in members:
            self.residuals.free(t)
        self._done = {self.graph.producer[t] for t in self.values()}

    def _rate(self, members: list[Tensor]) -> float:
        at, spans = self.residuals.busiest, self.residuals.spans
        there = sum(t.nbytes * t.times for t in members if spans[t][0] < at < spans[t][1])
        if not there or members[0].nbytes < self._least:
            return 0.0
        cost = self._cost(members)
        return 0.0 if cost is None else there / max(cost, 1e-12)

    def _cost(self, members: list[Tensor]) -> float | None:
        """Seconds to compute all members of a kind again; None where one needs another one: then all of a chain of
        layers would be computed, and kept, at once."""
        one = max(members, key=lambda t: t.times)
        freed = self.freed.union(members)
        ops = self._leading_to(one, freed)
        made = {t for op in ops for t in op.outputs}
        if any(t is not one and t in made for t in members):
            return None
        new = tuple(sorted(ops - self._done, key=self._position.__getitem__))
        return self._seconds(new, one) / one.times * sum(t.times for t in members)

    def _leading_to(self, t: Tensor, freed: set[Tensor]) -> set[Op]:
        """The ops that compute a value from what is kept while these values are not."""
        found: set[Op] = set()
        waiting = [t]
        while waiting:
            op = self.graph.producer[waiting.pop()]
            if op not in found:
                found.add(op)
                waiting += [u for u in op.inputs if not self._is_kept(u, freed)]
        return found

    def _is_kept(self, t: Tensor, freed: set[Tensor]) -> bool:
        made_by = self.graph.producer.get(t)
        if t in freed:
            return False
        if made_by is None or t in self.residuals.spans or not can_repeat(made_by) or t in self._outputs:
            return True
        return t.nbytes < self._least

    def values(self) -> set[Tensor]:
        """All that the backward pass computes again: what it reads that depends on the values that are not kept, and
        what this is made of."""
        lost = set(self.freed)
        read = {t for op in self.graph.ops if op.backward for t in op.inputs}
        for op in self.graph.ops:
            if not op.backward and not lost.isdisjoint(op.inputs):
                lost.update(t for t in op.outputs if not self._is_kept(t, self.freed))
        found: set[Tensor] = set()
        waiting = [t for t in read if t in lost]
        while waiting:
            t = waiting.pop()
            if t not in found:
                found.add(t)
                waiting += [u for u in self.graph.producer[t].inputs if not self._is_kept(u, self.freed)]
        return found
