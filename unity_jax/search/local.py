"""Local search: what each strategy of one node costs when all others stay, and descent by single changes.

    here = Local(model, assignment)
    here.costs(3)      # seconds (in units) of node 3's terms, per strategy
    here.descend()     # change one node at a time while that is cheaper

Shared reshards are priced as they are: a layout that another consumer makes anyway costs nothing.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable

import numpy as np

from .model import Model
from .reshard import Rest


class Local:
    """An assignment (positions in the model's domains) and the terms around every node."""

    def __init__(self, model: Model, assignment: np.ndarray) -> None:
        self.model = model
        store = model.store
        self.unary = [store[u] for u in model.unary]
        self.pairs: list[list[tuple[int, np.ndarray]]] = [[] for _ in model.domains]
        self.rests: list[list[tuple[Rest, int]]] = [[] for _ in model.domains]
        for (i, j), t in model.pairs.items():
            self.pairs[i].append((j, store[t].T))
            self.pairs[j].append((i, store[t]))
        for rest in model.rests:
            for position, node in enumerate(rest.nodes):
                self.rests[node].append((rest, position))
        self._start(assignment)

    def at(self, assignment: np.ndarray) -> Local:
        """The same terms around another assignment."""
        other = copy.copy(self)
        other._start(assignment)
        return other

    def _start(self, assignment: np.ndarray) -> None:
        self.x = np.array(assignment, np.int64)
        self.wanted = {id(r): self._count(r) for r in self.model.rests}

    def _count(self, rest: Rest) -> np.ndarray:
        store = self.model.store
        return sum([store[w][self.x[n]] for n, w in zip(rest.nodes, rest.wants, strict=True)], np.zeros((), np.int64))

    def costs(self, node: int) -> np.ndarray:
        """The node's own terms and all shared ones around it, per strategy."""
        total = self.alone(node)
        for other, table in self.pairs[node]:
            total = total + table[self.x[other]]
        return total

    def alone(self, node: int) -> np.ndarray:
        """The same without the edges."""
        store, total = self.model.store, self.unary[node]
        for rest, position in self.rests[node]:
            wants, cost = store[rest.wants[position]], store[rest.cost]
            others = self.wanted[id(rest)] - wants[self.x[node]] > 0
            rows = cost if position == 0 else cost[self.x[rest.nodes[0]]]
            total = total + np.where(wants | others, rows, 0.0).sum(axis=1)
        return total

    def move(self, node: int, strategy: int) -> None:
        """Change one node."""
        store = self.model.store
        for rest, position in self.rests[node]:
            wants = store[rest.wants[position]]
            count = self.wanted[id(rest)]
            count += wants[strategy]
            count -= wants[self.x[node]]
        self.x[node] = strategy

    def near(self, node: int) -> list[int]:
        """The nodes that share a term with this one."""
        return sorted({j for j, _ in self.pairs[node]} | {n for r, _ in self.rests[node] for n in r.nodes} - {node})

    def total(self) -> float:
        """The cost of the whole assignment, in units."""
        store = self.model.store
        value = float(sum(u[a] for u, a in zip(self.unary, self.x, strict=True)))
        value += float(sum(store[t][self.x[i], self.x[j]] for (i, j), t in self.model.pairs.items()))
        for rest in self.model.rests:
            value += float(np.where(self.wanted[id(rest)] > 0, store[rest.cost][self.x[rest.nodes[0]]], 0.0).sum())
        return value

    def descend(self, allowed: Callable[[int, int], bool] | None = None) -> None:
        """Single changes that are cheaper (and allowed), until there is none."""
        queue = deque(range(len(self.x)))
        waiting = set(queue)
        while queue:
            node = queue.popleft()
            waiting.discard(node)
            if len(self.unary[node]) == 1:
                continue
            costs = self.costs(node)
            now = costs[self.x[node]]
            better = np.flatnonzero(costs < now)
            for a in better[np.argsort(costs[better], kind="stable")]:
                if allowed is None or allowed(node, int(a)):
                    self.move(node, int(a))
                    for n in self.near(node):
                        if n not in waiting:
                            waiting.add(n)
                            queue.append(n)
                    break
