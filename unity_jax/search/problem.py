"""The planning problem as plain numbers: pick one strategy per node, pay per node, per edge and per shared reshard.

A `Problem` is a pairwise min-sum model (a weighted constraint network) with two additions: `Shared` terms, where
several consumers of one tensor pay once for each layout that they want, and `Usage`, bytes alive during some steps.

    two = Problem([np.array([1.0, 3.0]), np.array([0.0, 0.0])], [Edge(0, 1, np.array([[5.0, 0.0], [0.0, 5.0]]))])
    two.cost([0, 1])  # 1 + 0 + 0 = 1 second

Nothing here knows of JAX: published instances load as well as a train step.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

Assignment = Sequence[int] | np.ndarray


@dataclass(frozen=True, eq=False)
class Edge:
    """Seconds paid for each pair of strategies of nodes `i` and `j`; `inf` forbids the pair."""

    i: int
    j: int
    table: np.ndarray  # (k_i, k_j)


@dataclass(frozen=True, eq=False)
class Shared:
    """One tensor resharded for the consumers of one live range: each distinct target layout is paid once.

    **Example:** a producer that makes layout 0, two consumers that both want layout 1: `cost[0, 1]`, not twice that.
    """

    producer: int
    consumers: tuple[int, ...]  # a node may appear several times (two operands)
    source: np.ndarray  # (k_producer,) the layout that each strategy of the producer makes
    targets: tuple[np.ndarray, ...]  # per consumer, (k_consumer,) the layout that each of its strategies needs
    cost: np.ndarray  # (layouts, layouts) seconds, zero on the diagonal

    def of(self, assignment: Assignment) -> float:
        """The sum over distinct wanted layouts of the cost to make them."""
        made = self.source[assignment[self.producer]]
        wanted = {int(t[assignment[c]]) for c, t in zip(self.consumers, self.targets, strict=True)}
        return float(sum(self.cost[made, t] for t in sorted(wanted)))


@dataclass(frozen=True, eq=False)
class Usage:
    """Bytes that each strategy of `node` keeps alive at the time steps `start <= t < end`."""

    node: int
    bytes: np.ndarray  # (k_node,)
    start: int
    end: int


class _Flat(NamedTuple):
    """Usage as arrays. **Fields:** of each usage the node, the `first` of its `bytes`, and when these are alive."""

    usage: Sequence[Usage]
    node: np.ndarray
    first: np.ndarray
    bytes: np.ndarray
    start: np.ndarray
    end: np.ndarray

    @staticmethod
    def of(usage: Sequence[Usage]) -> _Flat:
        some = [u for u in usage if u.start < u.end]
        node, start, end = (np.array([of(u) for u in some], np.int64) for of in (_NODE, _START, _END))
        first = np.cumsum([0, *(len(u.bytes) for u in some)])[:-1]
        return _Flat(usage, node, first, np.concatenate([np.zeros(0), *(u.bytes for u in some)]), start, end)

    def profile(self, assignment: np.ndarray) -> np.ndarray:
        """Bytes alive at each time step."""
        steps = 1 + int(max(self.end, default=0))
        alive = self.bytes[self.first + assignment[self.node]]
        return np.cumsum(np.bincount(self.start, alive, steps) - np.bincount(self.end, alive, steps))


_NODE, _START, _END = map(operator.attrgetter, ("node", "start", "end"))


@dataclass
class Problem:
    """Everything the solver knows. `limit` bounds the bytes alive at every time step."""

    unary: list[np.ndarray]
    edges: list[Edge] = field(default_factory=list)
    shared: list[Shared] = field(default_factory=list)
    usage: list[Usage] = field(default_factory=list)
    limit: float | None = None
    _flat: _Flat | None = field(default=None, init=False, repr=False, compare=False)

    def cost(self, assignment: Assignment) -> float:
        """Seconds of a full assignment (one strategy index per node)."""
        total = float(sum(u[a] for u, a in zip(self.unary, assignment, strict=True)))
        total += float(sum(e.table[assignment[e.i], assignment[e.j]] for e in self.edges))
        return total + sum(s.of(assignment) for s in self.shared)

    def profile(self, assignment: Assignment) -> np.ndarray:
        """Bytes alive at each time step."""
        if self._flat is None or self._flat.usage is not self.usage:
            self._flat = _Flat.of(self.usage)
        return self._flat.profile(np.asarray(assignment))

    def peak(self, assignment: Assignment) -> float:
        """The most bytes alive at any time step."""
        return float(self.profile(assignment).max())

    def fits(self, assignment: Assignment) -> bool:
        """Whether the peak is within the limit (to a part in a billion)."""
        return self.limit is None or self.peak(assignment) <= self.limit * (1 + 1e-9)

    def rank(self, assignment: Assignment) -> tuple[float, float, float]:
        """Less is better: allowed and fitting first, by cost; of the others the one with the least peak."""
        cost = self.cost(assignment)
        if self.fits(assignment):
            return (0.0, cost, 0.0) if np.isfinite(cost) else (2.0, 0.0, 0.0)
        return (1.0 if np.isfinite(cost) else 2.0, self.peak(assignment), cost)


@dataclass(frozen=True)
class Solution:
    """The best assignment found, with proof of how good it can be.

    `lower_bound` holds for every assignment (that fits the limit, if there is one); `largest_table` is the number of
    entries of the largest table that the solver made.
    """

    assignment: np.ndarray
    cost: float
    lower_bound: float
    peak: float
    feasible: bool
    largest_table: int

    @property
    def gap(self) -> float:
        """How much of the cost is unproved: 0.0 for a proved optimum."""
        if self.cost <= self.lower_bound:
            return 0.0
        return (self.cost - self.lower_bound) / abs(self.cost) if np.isfinite(self.cost) else float("inf")
