"""Make an assignment fit the memory limit, and improve one that does: the true peak decides, not prices.

fitted(model, ledger, x)        # cheapest seconds per byte saved first, until the peak fits
improved(model, ledger, x)      # single changes that are cheaper and still fit
joined(model, ledger, x, y)     # whole connected parts of y that make x cheaper and still fit
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .limits import LIMITS
from .local import Local
from .model import Model
from .problem import Problem


@dataclass(frozen=True)
class Ledger:
    """Who uses memory when: per node its (bytes per strategy, start, end)."""

    usage: list[list[tuple[np.ndarray, int, int]]]
    horizon: int
    limit: float

    @staticmethod
    def of(problem: Problem) -> Ledger:
        """The ledger of a problem with a limit."""
        usage: list[list[tuple[np.ndarray, int, int]]] = [[] for _ in problem.unary]
        for u in problem.usage:
            if u.start < u.end:
                usage[u.node].append((u.bytes, u.start, u.end))
        return Ledger(usage, max((u.end for u in problem.usage), default=0) + 1, problem.limit * (1 + 1e-9))

    def profile(self, assignment: np.ndarray) -> np.ndarray:
        """Bytes alive at each time step."""
        change = np.zeros(self.horizon)
        for node, entries in enumerate(self.usage):
            for weights, start, end in entries:
                change[start] += weights[assignment[node]]
                change[end] -= weights[assignment[node]]
        return np.cumsum(change)

    def shift(self, profile: np.ndarray, node: int, old: int, new: int) -> None:
        """Change a profile in place as one node changes."""
        for weights, start, end in self.usage[node]:
            profile[start:end] += weights[new] - weights[old]

    def allows(self, profile: np.ndarray, node: int, old: int, new: int) -> bool:
        """Whether the node's own times stay within the limit after a change."""
        more = [(s, e) for w, s, e in self.usage[node] if w[new] > w[old]]
        if not more:
            return True
        trial = profile.copy()
        self.shift(trial, node, old, new)
        return all(trial[s:e].max() <= self.limit for s, e in more)

    def saved(self, node: int, time: int) -> np.ndarray | float:
        """Bytes that each strategy keeps alive at a time step."""
        return sum((w for w, s, e in self.usage[node] if s <= time < e), 0.0)


def fitted(model: Model, ledger: Ledger, assignment: np.ndarray) -> np.ndarray:
    """Change nodes alive at the worst time step, cheapest per byte first, until the peak fits or nothing helps."""
    here = Local(model, assignment)
    profile = ledger.profile(here.x)
    for _ in range(ledger.horizon):
        time = int(np.argmax(profile))
        if profile[time] <= ledger.limit or not _lower(here, ledger, profile, time):
            break
    return here.x


def _lower(here: Local, ledger: Ledger, profile: np.ndarray, time: int) -> bool:
    """Bring one time step under the limit; False if that cannot be done by single changes."""
    alive = [n for n in range(len(here.x)) if any(s <= time < e for _, s, e in ledger.usage[n])]

    def offer(node: int) -> tuple[float, int, int] | None:
        weights = np.asarray(ledger.saved(node, time))
        gain = weights[here.x[node]] - weights if weights.ndim else np.zeros(1)
        fewer = np.flatnonzero(gain > 0)
        if not len(fewer):
            return None
        costs = here.costs(node)
        now = costs[here.x[node]]
        extra = costs[fewer] - (now if np.isfinite(now) else 0.0)
        ratio = np.where(extra > 0, extra / gain[fewer], extra)
        pick = int(np.argmin(ratio))
        return (float(ratio[pick]), node, int(fewer[pick])) if np.isfinite(ratio[pick]) else None

    heap = [o for o in map(offer, alive) if o is not None]
    heapq.heapify(heap)
    members, steps = set(alive), LIMITS.repairs * len(alive)
    while heap and profile[time] > ledger.limit and steps:
        _, node, _ = heapq.heappop(heap)
        again = offer(node)
        if again is None:
            continue
        if heap and again > heap[0]:
            steps -= 1
            heapq.heappush(heap, again)
            continue
        steps -= 1
        ledger.shift(profile, node, int(here.x[node]), again[2])
        here.move(node, again[2])
        for n in (node, *here.near(node)):
            more = offer(n) if n in members else None
            if more is not None:
                heapq.heappush(heap, more)
    return bool(profile[time] <= ledger.limit)


def improved(model: Model, ledger: Ledger, assignment: np.ndarray) -> np.ndarray:
    """Single changes that are cheaper and fit, until there is none."""
    here = Local(model, assignment)
    profile = ledger.profile(here.x)

    def allowed(node: int, strategy: int) -> bool:
        if not ledger.allows(profile, node, int(here.x[node]), strategy):
            return False
        ledger.shift(profile, node, int(here.x[node]), strategy)
        return True

    here.descend(allowed=allowed)
    return here.x


def joined(model: Model, ledger: Ledger, assignment: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Take over connected groups of nodes from another assignment where that is cheaper and fits."""
    here = Local(model, assignment)
    profile = ledger.profile(here.x)
    cost = here.total()
    for group in _groups(here, other):
        before = here.x[group].copy()
        _take(here, ledger, profile, group, other[group])
        now = here.total()
        if now < cost and profile.max() <= ledger.limit:
            cost = now
        else:
            _take(here, ledger, profile, group, before)
    return here.x


def _take(here: Local, ledger: Ledger, profile: np.ndarray, nodes: Sequence[int], strategies: np.ndarray) -> None:
    for n, a in zip(nodes, strategies, strict=True):
        ledger.shift(profile, n, int(here.x[n]), int(a))
        here.move(n, int(a))


def _groups(here: Local, other: np.ndarray) -> list[list[int]]:
    """The connected groups of nodes where two assignments differ."""
    differ = [int(n) for n in np.flatnonzero(here.x != other)]
    left, groups = set(differ), []
    for start in differ:
        if start in left:
            left.discard(start)
            group = [start]
            for node in group:
                fresh = [n for n in here.near(node) if n in left]
                left.difference_update(fresh)
                group += fresh
            groups.append(sorted(group))
    return groups
