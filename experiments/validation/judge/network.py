"""How long a collective of a compiled program takes, from its replica groups and bytes alone.

Rings, as NCCL and XLA:TPU run them ("StrategyRing", "1DAllGather" in the text that XLA:TPU writes beside collectives):
of n devices each sends n-1 of n parts along the ring for an all-gather or a reduce-scatter, twice that for an
all-reduce. An all-to-all sends each of its parts straight to where it belongs. All groups run at once.

Here the network of TPUs, a mesh of links, where the load of the busiest link counts; `nccl` has that of GPUs.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

Groups = tuple[tuple[int, ...], ...]
Pairs = Sequence[Sequence[int]]

STEPS = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2}
"""How often the parts go around a ring."""
FEW = 8
"""Of so many members a ring may have any order."""


class Network(Protocol):
    def seconds(self, kind: str, groups: Groups, nbytes: float) -> float:
        """Of a collective: `nbytes` is the whole array of one group, gathered or unreduced; of an all-to-all what a
        device has."""

    def permute_seconds(self, pairs: Pairs, nbytes: float) -> float:
        """Of a collective-permute that sends `nbytes` from the first to the second of each pair."""


@dataclass(frozen=True)
class Mesh2D:
    """TPU chips in rows and columns without wraparound; device i is at row `i // columns`.

    https://jax-ml.github.io/scaling-book/tpus/: 4.5e10 B/s per link and direction on v5e, whose axes wrap around only
    when they have 16 chips; https://jax-ml.github.io/scaling-book/sharding/: about a microsecond from chip to chip.
    """

    rows: int
    columns: int
    link: float = 4.5e10
    hop: float = 1e-6

    def seconds(self, kind: str, groups: Groups, nbytes: float) -> float:
        n = len(groups[0])
        if kind == "all-to-all":
            load, hops = self._load(pair for group in groups for pair in itertools.permutations(group, 2))
            return hops * self.hop + load * nbytes / n / self.link
        load, hops = self._ring(groups)
        # Both directions of the ring carry half of each part.
        return STEPS[kind] * (n - 1) * (hops * self.hop + load / 2 * nbytes / n / self.link)

    def permute_seconds(self, pairs: Pairs, nbytes: float) -> float:
        load, hops = self._load(pairs)
        return hops * self.hop + load * nbytes / self.link

    @functools.cache  # noqa: B019
    def _ring(self, groups: Groups) -> tuple[int, int]:
        """Of the best order of the members: how many messages of one step, both directions together, the busiest link
        has, and the hops of the longest."""

        def step(order: Sequence[int]) -> tuple[int, int]:
            rings = [[group[i] for i in order] for group in groups]
            forth = [pair for ring in rings for pair in zip(ring, [*ring[1:], ring[0]], strict=True)]
            return self._load([*forth, *((b, a) for a, b in forth)])

        return min(map(step, _orders([self._at(device) for device in groups[0]])))

    def _load(self, pairs: Iterable[Sequence[int]]) -> tuple[int, int]:
        """Messages over the busiest link in its busier direction, and the hops of the longest way: along the row of
        the sender, then along the column."""
        links: Counter[tuple[tuple[int, int], tuple[int, int]]] = Counter()
        hops = 0
        for source, target in pairs:
            way = [self._at(source)]
            (row, column), (last_row, last_column) = way[0], self._at(target)
            step = 1 if last_column > column else -1
            way += [(row, c) for c in range(column + step, last_column + step, step)] if last_column != column else []
            step = 1 if last_row > row else -1
            way += [(r, last_column) for r in range(row + step, last_row + step, step)] if last_row != row else []
            links.update(itertools.pairwise(way))
            hops = max(hops, len(way) - 1)
        return max(links.values(), default=0), hops

    def _at(self, device: int) -> tuple[int, int]:
        return divmod(device, self.columns)


def _orders(places: Sequence[tuple[int, int]]) -> Iterator[Sequence[int]]:
    """Orders in which a ring may join members at these places, as their positions: all of them, or of many as they are
    given and as closed ways through the grid that they fill, along its rows and along its columns."""
    if len(places) <= FEW:
        yield from ((0, *order) for order in itertools.permutations(range(1, len(places))))
        return
    yield range(len(places))
    rows, columns = (sorted({place[i] for place in places}) for i in (0, 1))
    if len(rows) * len(columns) == len(places):
        at = {place: position for position, place in enumerate(places)}
        yield [at[rows[i], columns[j]] for i, j in _closed(len(rows), len(columns))]
        yield [at[rows[i], columns[j]] for j, i in _closed(len(columns), len(rows))]


def _closed(rows: int, columns: int) -> list[tuple[int, int]]:
    """A way through all places of a grid that comes back to its first: of one row by every second place and back by
    the others, of several through all columns but the first to and fro, and back along the first."""
    if rows == 1:
        return [(0, j) for j in (*range(0, columns, 2), *reversed(range(1, columns, 2)))]
    snake = [(i, j) for i in range(rows) for j in (range(1, columns) if i % 2 == 0 else range(columns - 1, 0, -1))]
    return [*snake, *((i, 0) for i in reversed(range(rows)))]
