"""A smaller problem with the same best solutions: what has one answer, or none, is decided before any search.

    small = reduced(problem)
    len(problem.unary), len(small.costs)  # 32894 nodes, of which 237 are left to decide
    small.original(x)                     # the strategies of all nodes that a choice for those left implies

Rules, until none applies:
1. a strategy that no strategy of a neighbour goes with, or that does not fit even if all others use least, is dropped;
2. a node whose strategy follows from a neighbour's (each of those goes with only one, or has one best answer) becomes a
   part of that neighbour: its costs, edges and usage are added there;
3. an edge whose costs are a sum of costs of its two nodes is paid at these;
4. a strategy is dropped if another one costs no more, whatever the neighbours choose, and never uses more.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from ..search.problem import Problem
from .liveness import ROUNDING, Liveness, Span, least, together

WIDEST = 64
"""The most strategies of a node that are compared with each other."""
GROWN = 50_000
"""The most table entries that come about as one node becomes a part of another."""


@dataclass(frozen=True, eq=False)
class Reduced:
    """What is left to decide, its nodes numbered anew.

    **Fields:** `costs`: per node and strategy; `tables`: per node and neighbour, (own strategies, the neighbour's), so
    each edge twice; `liveness`: what the nodes use, and what is left of the limit.
    """

    costs: list[np.ndarray]
    tables: list[dict[int, np.ndarray]]
    liveness: Liveness
    constant: float  # what the nodes that are decided cost
    nodes: list[int]  # of the original problem
    steps: list[tuple[int, int, np.ndarray]]  # see `_Work.steps`
    size: int  # nodes of the original problem

    def original(self, x: np.ndarray) -> np.ndarray:
        """Strategies of the original nodes."""
        found = np.zeros(self.size, np.int64)
        found[self.nodes] = x
        for v, leader, answer in reversed(self.steps):
            found[v] = answer[found[leader]]
        return found


def reduced(problem: Problem) -> Reduced | None:
    """The problem with its forced choices made; None if these show that nothing is allowed or nothing fits."""
    try:
        work = _Work(problem)
        while work.too_large() or work.dominated():
            pass
        return work.done()
    except _NothingLeft:
        return None


class _NothingLeft(Exception):
    """A node has no strategy that is allowed."""


class _Work:
    """The problem while it shrinks; nodes keep their numbers.

    `steps` tell how to undo it, the last one first: (v, u, answer) means that node v has the strategy `answer[x_u]`
    where u is another node, or v itself with some strategies dropped.
    """

    def __init__(self, problem: Problem) -> None:
        if problem.shared:
            raise ValueError("a problem with shared terms is for `unity_jax.search.solver`")
        self.limit = np.inf if problem.limit is None else problem.limit
        self.costs = [np.array(u, np.float64) for u in problem.unary]
        self.tables: list[dict[int, np.ndarray]] = [{} for _ in self.costs]
        self.spans: list[list[Span]] = [[] for _ in self.costs]
        self.left = dict.fromkeys(range(len(self.costs)))
        self.steps: list[tuple[int, int, np.ndarray]] = []
        self.queue: deque[tuple[int, int]] = deque()
        for u in problem.usage:
            if u.start < u.end:
                self.spans[u.node].append((u.start, u.end, np.asarray(u.bytes, np.float64)))
        for e in problem.edges:
            self._join(e.i, e.j, np.asarray(e.table, np.float64))
        for v, cost in enumerate(self.costs):
            self._keep(v, np.isfinite(cost))
        self._settle()

    def too_large(self) -> bool:
        """Drop strategies that do not fit even where all other nodes use least; whether there were any."""
        if np.isinf(self.limit):
            return False
        spare = self.limit * (1 + ROUNDING) - least([s for v in self.left for s in self.spans[v]])
        if spare.min() < 0:
            raise _NothingLeft
        found = False
        for v in list(self.left):
            fits = np.ones(len(self.costs[v]), bool)
            self.spans[v] = together(self.spans[v])
            if len(fits) > 1:
                for start, end, use in self.spans[v]:
                    fits &= use - use.min() <= spare[start:end].min()
            found |= self._keep(v, fits)
        self._settle()
        return found

    def dominated(self) -> bool:
        """Drop strategies that another one beats; whether there were any."""
        found = False
        for v in list(self.left):
            if v in self.left and 1 < len(self.costs[v]) <= WIDEST:
                found |= self._keep(v, self._undominated(v))
        self._settle()
        return found

    def done(self) -> Reduced:
        """What is left, as it is; nodes with one strategy only take their part of the limit."""
        nodes = [v for v in self.left if len(self.costs[v]) > 1]
        number = {v: n for n, v in enumerate(nodes)}
        self.steps += [(v, v, np.zeros(1, np.int64)) for v in self.left if v not in number]
        fixed = [s for v in self.left if v not in number for s in self.spans[v]]
        tables = [{number[w]: t for w, t in self.tables[v].items()} for v in nodes]
        liveness = Liveness.of([self.spans[v] for v in nodes], fixed, self.limit)
        constant = float(sum(self.costs[v][0] for v in self.left if v not in number))
        return Reduced([self.costs[v] for v in nodes], tables, liveness, constant, nodes, self.steps, len(self.costs))

    def _undominated(self, v: int) -> np.ndarray:
        """Which strategies no other one beats; of equal ones the first."""
        cost = self.costs[v]
        worse = cost[:, None] - cost  # [a, b]: how much more a costs than b, at least
        for table in self.tables[v].values():
            bounded = np.minimum(table, 1e30)
            more = bounded[:, None] - bounded
            more[:, :, np.isinf(table).all(axis=0)] = 0
            worse = worse + more.min(axis=2)
        beaten: np.ndarray = worse >= 0
        for use in {use.tobytes(): use for _, _, use in self.spans[v]}.values():
            beaten &= use[:, None] >= use
        equal = beaten & beaten.T
        return ~(beaten & (~equal | (np.arange(len(cost))[:, None] > np.arange(len(cost))))).any(axis=1)

    def _settle(self) -> None:
        """Apply the rules that look at one edge until none of them applies."""
        while self.queue:
            v, w = self.queue.popleft()
            if w in self.tables[v]:
                self._look(v, w)

    def _look(self, v: int, w: int) -> None:
        table = self.tables[v][w]
        allowed = np.isfinite(table)
        everything = bool(allowed.all())
        if everything and self._split(v, w):
            return
        if not everything:
            if self._keep(v, allowed.any(axis=1)) | self._keep(w, allowed.any(axis=0)):
                return
            ways = [(v, w, allowed), (w, v, allowed.T)]
            for a, b, of in sorted(ways, key=lambda way: len(self.tables[way[0]])):
                if (of.sum(axis=0) == 1).all() and self._grows(a, b) <= GROWN:
                    self._follow(a, b, of.argmax(axis=0))
                    return
        for a, b in (v, w), (w, v):
            if len(self.tables[a]) == 1 and all((use == use[0]).all() for _, _, use in self.spans[a]):
                self._follow(a, b, (self.tables[a][b] + self.costs[a][:, None]).argmin(axis=0))
                return

    def _split(self, v: int, w: int) -> bool:
        """Pay an edge at its nodes, if its costs are a sum of theirs."""
        table = self.tables[v][w]
        along = table[:, 0] - table[0, 0]
        if (table != along[:, None] + table[0]).any():
            return False
        self.costs[v] = self.costs[v] + along
        self.costs[w] = self.costs[w] + table[0]
        self._part(v, w)
        return True

    def _grows(self, v: int, w: int) -> int:
        more = len(self.costs[w]) - len(self.costs[v])
        return more * sum(len(self.costs[n]) for n in self.tables[v] if n != w) if more > 0 else 0

    def _follow(self, v: int, w: int, answer: np.ndarray) -> None:
        """Make v a part of w, with the strategy `answer` for each of w's."""
        self.costs[w] = self.costs[w] + self.costs[v][answer] + self.tables[v][w][answer, np.arange(len(answer))]
        self._part(v, w)
        for n, table in list(self.tables[v].items()):
            self._part(v, n)
            self._join(w, n, table[answer])
        self.spans[w] += [(start, end, use[answer]) for start, end, use in self.spans[v]]
        self.steps.append((v, w, answer))
        del self.left[v]

    def _join(self, v: int, w: int, table: np.ndarray) -> None:
        known = self.tables[v].get(w)
        self._put(v, w, table if known is None else known + table)

    def _put(self, v: int, w: int, table: np.ndarray) -> None:
        self.tables[v][w] = np.ascontiguousarray(table)
        self.tables[w][v] = self.tables[v][w].T
        self.queue.append((v, w))

    def _part(self, v: int, w: int) -> None:
        del self.tables[v][w], self.tables[w][v]
        for n in (v, w):
            if len(self.tables[n]) == 1:
                self.queue.extend((n, m) for m in self.tables[n])

    def _keep(self, v: int, kept: np.ndarray) -> bool:
        """Drop all other strategies; whether there were any."""
        if kept.all():
            return False
        if not kept.any():
            raise _NothingLeft
        at = np.flatnonzero(kept)
        self.costs[v] = self.costs[v][at]
        self.spans[v] = [(start, end, use[at]) for start, end, use in self.spans[v]]
        self.steps.append((v, v, at))
        for w in self.tables[v]:
            self._put(v, w, self.tables[v][w][at])
        return True
