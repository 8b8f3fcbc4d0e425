"""How long a collective of a compiled program takes, from its replica groups and bytes alone.

Rings, as NCCL and XLA:TPU run them ("StrategyRing", "1DAllGather" in the text that XLA:TPU writes beside collectives):
of n devices each sends n-1 of n parts along the ring for an all-gather or a reduce-scatter, twice that for an
all-reduce. An all-to-all sends each of its parts straight to where it belongs. All groups run at once.

The network of GPUs is a switch, where each device has a port; that of TPUs a mesh of links, where the load of the
busiest link counts.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

Groups = tuple[tuple[int, ...], ...]
Pairs = Sequence[Sequence[int]]

STEPS = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2}
"""How often the parts go around a ring."""


class Network(Protocol):
    def seconds(self, kind: str, groups: Groups, nbytes: float) -> float:
        """Of a collective: `nbytes` is the whole array of one group, gathered or unreduced; of an all-to-all what a
        device has."""

    def permute_seconds(self, pairs: Pairs, nbytes: float) -> float:
        """Of a collective-permute that sends `nbytes` from the first to the second of each pair."""


@dataclass(frozen=True)
class NvSwitch:
    """GPUs of one node, through NCCL's own model of itself: the fastest of three protocols, each a latency of its own,
    a latency per step and a bandwidth.

    https://github.com/NVIDIA/nccl/blob/v2.28.7-1/src/graph/tuning.cc: base latencies and latencies per step over NVLink
    of a ring (LL, LL128, Simple), what LL and LL128 reach of the bandwidth. Its topo.h: 20.6e9 B/s per NVLink of a
    Hopper chip, which has 18.
    """

    port: float = 18 * 20.6e9  # bytes per second in each direction

    @property
    def protocols(self) -> tuple[tuple[float, float, float], ...]:
        """Seconds, seconds per step, bytes per second."""
        return (
            (6.6e-6, 0.6e-6, min(141e9, self.port / 2)),
            (14e-6, 1.9e-6, self.port * 120 / 128),
            (8.4e-6, 3.4e-6, self.port),
        )

    def seconds(self, kind: str, groups: Groups, nbytes: float) -> float:
        n = len(groups[0])
        if kind == "all-to-all":
            return self._fastest(1, nbytes * (n - 1) / n)
        return self._fastest(STEPS[kind] * (n - 1), STEPS[kind] * nbytes * (n - 1) / n)

    def permute_seconds(self, pairs: Pairs, nbytes: float) -> float:
        return self._fastest(1, nbytes)

    def _fastest(self, steps: int, sent: float) -> float:
        return min(base + steps * latency + sent / bandwidth for base, latency, bandwidth in self.protocols)


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

        first, *others = range(len(groups[0]))
        return min(step((first, *order)) for order in itertools.permutations(others))

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
