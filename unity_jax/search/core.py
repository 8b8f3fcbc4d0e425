"""The hard part of a network: variables that are cheap to eliminate are gone, strategies that cannot win are dropped.

    core = Core(net)
    core.condense(10_000)          # eliminate while no table passes 10,000 entries; equal layers cost once
    core.restrict({7: positions})  # keep only some values of variable 7
    x = core.expand(y)             # an assignment of the core as one of the whole network

Every step is remembered, so that `expand` can undo it in reverse.
"""

from __future__ import annotations

import heapq
from math import log2

import numpy as np

from .eliminate import Order, conditional, eliminated, order
from .network import Factor, Network


class Core:
    """A network that shrinks; `values[v]` are the positions, in the network's domain of v, that are left."""

    def __init__(self, net: Network) -> None:
        self.net = Network(net.store, list(net.sizes), list(net.factors), net.constant)
        self.values = {v: np.arange(net.sizes[v]) for v in sorted({v for scope, _ in net.factors for v in scope})}
        self._trail: list[tuple[int, list[Factor] | np.ndarray]] = []

    @property
    def variables(self) -> tuple[int, ...]:
        """What is left, ascending."""
        return tuple(self.values)

    def order(self) -> Order:
        """How to eliminate all that is left."""
        return order(self.net.sizes, [scope for scope, _ in self.net.factors])

    def condense(self, entries: float) -> None:
        """Eliminate variables, smallest resulting table first, while it has at most so many entries."""
        net, store = self.net, self.net.store
        factors = dict(enumerate(net.factors))
        around: dict[int, set[int]] = {v: set() for v in self.values}
        for f, (scope, _) in factors.items():
            for v in scope:
                around[v].add(f)

        def score(v: int) -> float:
            return sum(log2(net.sizes[n]) for n in {n for f in around[v] for n in factors[f][0]} - {v})

        heap = [(score(v), v) for v in self.values]
        heapq.heapify(heap)
        fresh = len(factors)
        while heap and 2.0 ** heap[0][0] <= entries + 0.5:
            s, v = heapq.heappop(heap)
            if v not in around:
                continue
            now = score(v)
            if now > s + 1e-9:
                heapq.heappush(heap, (now, v))
                continue
            group = [factors.pop(f) for f in sorted(around.pop(v))]
            scope, table, least = eliminated(store, group, v, net.sizes, entries)
            net.constant += least
            self._trail.append((v, group))
            del self.values[v]
            for n in scope:
                around[n] = {f for f in around[n] if f in factors}
            if table is not None and scope:
                factors[fresh] = (scope, table)
                for n in scope:
                    around[n].add(fresh)
                fresh += 1
            for n in scope:
                heapq.heappush(heap, (score(n), n))
        net.factors = list(factors.values())

    def restrict(self, kept: dict[int, np.ndarray]) -> None:
        """Keep only the given positions (in `values[v]`) of some variables."""
        store = self.net.store
        names = {v: store.add(np.asarray(k, np.int64)) for v, k in kept.items() if len(k) < len(self.values[v])}
        for v, k in names.items():
            self._trail.append((v, store[k]))
            self.values[v] = self.values[v][store[k]]
            self.net.sizes[v] = len(store[k])
        self.net.factors = [
            (scope, store.taken(table, *(names.get(v) for v in scope))) if any(v in names for v in scope) else (scope, table)
            for scope, table in self.net.factors
        ]

    def copy(self) -> Core:
        """A core that can shrink by itself."""
        other = Core(self.net)
        other.values, other._trail = dict(self.values), list(self._trail)
        return other

    def expand(self, assignment: np.ndarray) -> np.ndarray:
        """An assignment of the core's variables, completed for the least cost."""
        x = np.array(assignment, np.int64)
        for v, step in reversed(self._trail):
            if isinstance(step, np.ndarray):
                x[v] = step[x[v]]
            else:
                x[v] = int(np.argmin(conditional(self.net.store, step, v, x)))
        return x

