"""Bytes alive at each time step, of many nodes at once, and what they cost at prices per byte and step.

    live = Liveness.of([[(0, 2, np.array([4.0, 1.0]))]], fixed=[(1, 3, np.array([3.0]))], limit=8.0)
    live.spare                   # [5.0]: between steps that only add to what is alive before, one is enough
    live.used([0])               # [4.0]
    live.charges(0, prices)      # what each strategy of node 0 pays

Steps where nothing can exceed the limit, or where all that is alive is alive at another kept step too, are left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

Span = tuple[int, int, np.ndarray]
"""The steps `start <= t < end` and the bytes that each strategy keeps alive then."""

ROUNDING = 1e-12
"""The part of the limit that sums may be wrong by: less than a byte of 100 GB."""


def together(spans: Iterable[Span]) -> list[Span]:
    """The same usage with spans of the same steps added up."""
    found: dict[tuple[int, int], np.ndarray] = {}
    for start, end, use in spans:
        known = found.get((start, end))
        found[start, end] = use if known is None else known + use
    return [(start, end, use) for (start, end), use in found.items()]


def least(spans: Sequence[Span], at_most: bool = False) -> np.ndarray:
    """The fewest bytes alive at each step (or the most), if every span were chosen by itself."""
    change = np.zeros(2 + max((end for _, end, _ in spans), default=0))
    for start, end, use in spans:
        value = use.max() if at_most else use.min()
        change[start] += value
        change[end] -= value
    return np.cumsum(change)[:-1]


@dataclass(frozen=True, eq=False)
class Liveness:
    """The usage of nodes at the steps that matter.

    **Fields:** `spare`: bytes that the nodes may use, per step; per node `starts`, `ends` and `bytes`: of its spans, by
    step, (spans, strategies) bytes.
    """

    spare: np.ndarray
    starts: list[np.ndarray]
    ends: list[np.ndarray]
    bytes: list[np.ndarray]

    @staticmethod
    def of(nodes: Sequence[Sequence[Span]], fixed: Sequence[Span], limit: float) -> Liveness:
        """The usage of nodes beside `fixed` spans, of one strategy each, under a limit."""
        spans = [_leveled(together(of)) for of in nodes]
        varying = [s for node, _ in spans for s in node]
        constant = [*fixed, *(s for _, node in spans for s in node)]
        length = 2 + max((end for _, end, _ in [*varying, *constant]), default=0)
        always, most = (_padded(a, length) for a in (least(constant), least(varying, at_most=True)))
        spare = limit * (1 + ROUNDING) - always
        kept = np.flatnonzero(most > spare) if np.isfinite(limit) else np.zeros(0, np.int64)
        kept = kept[_maximal(varying, kept, spare)]
        starts, ends, uses = [], [], []
        for node, _ in spans:
            inside = together((int(s), int(e), use) for s, e, use in _at(node, kept) if s < e)
            starts.append(np.array([s for s, _, _ in inside], np.int64))
            ends.append(np.array([e for _, e, _ in inside], np.int64))
            uses.append(np.array([use for _, _, use in inside]))
        return Liveness(spare[kept], starts, ends, uses)

    def used(self, x: Sequence[int] | np.ndarray) -> np.ndarray:
        """Bytes of the nodes at each step."""
        return self.added(range(len(self.starts)), x)

    def added(self, nodes: Iterable[int], x: Sequence[int] | np.ndarray) -> np.ndarray:
        """Bytes of some nodes at each step; `x` has their strategies."""
        change = np.zeros(len(self.spare) + 1)
        for v, a in zip(nodes, x, strict=True):
            if len(self.starts[v]):
                use = self.bytes[v][:, a]
                np.add.at(change, self.starts[v], use)
                np.subtract.at(change, self.ends[v], use)
        return np.cumsum(change[:-1])

    def charges(self, v: int, summed: np.ndarray) -> np.ndarray | float:
        """What each strategy of a node pays; `summed[t]`: the prices of all steps before t."""
        if not len(self.starts[v]):
            return 0.0
        return (summed[self.ends[v]] - summed[self.starts[v]]) @ self.bytes[v]


def summed(prices: np.ndarray) -> np.ndarray:
    """The prices of all steps before each, and of all."""
    return np.concatenate([[0.0], np.cumsum(prices)])


def _leveled(spans: Sequence[Span]) -> tuple[list[Span], list[Span]]:
    """What strategies use beyond what all of them use, and that."""
    over = [(start, end, use - use.min()) for start, end, use in spans]
    return [s for s in over if s[2].any()], [(start, end, use[use.argmin()][None]) for start, end, use in spans]


def _padded(a: np.ndarray, length: int) -> np.ndarray:
    return np.concatenate([a, np.zeros(length - len(a))])


def _at(spans: Sequence[Span], kept: np.ndarray) -> list[Span]:
    """Spans by the place of their steps among those kept."""
    starts = np.searchsorted(kept, [start for start, _, _ in spans])
    ends = np.searchsorted(kept, [end for _, end, _ in spans])
    return [(int(s), int(e), use) for s, e, (_, _, use) in zip(starts, ends, spans, strict=True)]


def _maximal(varying: Sequence[Span], kept: np.ndarray, spare: np.ndarray) -> np.ndarray:
    """Which of the kept steps are not implied by the one before or after: there the same is alive, or more, and no
    more is spare."""
    left = np.ones(len(kept), bool)
    born: dict[int, int] = defaultdict(int)
    died: dict[int, int] = defaultdict(int)
    for start, end, _ in _at(varying, kept):
        if start < end:
            born[start] += 1
            died[end] += 1
    last = -1  # the kept step before
    arrived = departed = 0
    for t in range(len(kept)):
        arrived, departed = arrived + born[t], departed + died[t]
        if last >= 0:
            if not arrived and spare[kept[last]] <= spare[kept[t]]:  # all alive now was alive then
                left[t] = False
                continue
            if not departed and spare[kept[t]] <= spare[kept[last]]:  # all alive then still is
                left[last] = False
        last, arrived, departed = t, 0, 0
    return left
