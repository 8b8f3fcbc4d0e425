"""Addresses of the buffers of a program
(https://github.com/openxla/xla/blob/main/xla/service/heap_simulator/heap_simulator.cc).

XLA:TPU gives them in the order in which the program runs: each buffer goes into the smallest gap that holds it, or else
to the end (`Heap`, XLA's `LazyBestFitHeap`). Gaps between long live ranges stay unused, so that more memory is taken
than is ever live. XLA:GPU knows all live ranges and gives the largest buffer its address first (`packed_bytes`).

    alive    a a a a a .        taken    b b . d d d
             b b . d d d                 a a a a a .
             . . c c c c                 . . c c c c
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np


class Heap:
    """Addresses of what is alive, and `size`: the bytes up to the highest address that was ever used."""

    def __init__(self) -> None:
        self.size = 0
        self._gaps: list[tuple[int, int]] = []  # bytes, address; smallest first
        self._starts: dict[int, int] = {}  # of gaps: address to bytes
        self._ends: dict[int, int] = {}  # of gaps: end to address

    def take(self, size: int) -> int:
        """The address of a new buffer."""
        if not size:
            return 0
        at = bisect_left(self._gaps, (size, 0))
        if at < len(self._gaps):
            gap, start = self._gaps[at]
            self._remove(start, gap)
            if gap > size:
                self._add(start + size, gap - size)
            return start
        start = self._ends.get(self.size, self.size)
        if start < self.size:
            self._remove(start, self.size - start)
        self.size = start + size
        return start

    def give(self, start: int, size: int) -> None:
        """Make a gap of a buffer, together with the gaps beside it."""
        if not size:
            return
        if start + size in self._starts:
            after = self._starts[start + size]
            self._remove(start + size, after)
            size += after
        if start in self._ends:
            before = self._ends[start]
            self._remove(before, start - before)
            size += start - before
            start = before
        self._add(start, size)

    def _add(self, start: int, size: int) -> None:
        insort(self._gaps, (size, start))
        self._starts[start] = size
        self._ends[start + size] = start

    def _remove(self, start: int, size: int) -> None:
        del self._gaps[bisect_left(self._gaps, (size, start))], self._starts[start], self._ends[start + size]


Range = tuple[int, int, int]
"""The first and the last time when a buffer exists, and its bytes."""


def packed_bytes(ranges: Sequence[Range]) -> int:
    """The bytes up to the highest address that XLA:GPU uses: it knows all live ranges and takes the largest buffer
    first. Each goes into the smallest gap between those that are there at the same time, or else above them
    (`GlobalDecreasingSizeBestFitHeap`)."""
    order = sorted((r for r in ranges if r[2]), key=lambda r: (-r[2], r[0]))
    first, last, size = np.array(order, np.int64).reshape(-1, 3).T
    at = np.zeros_like(size)
    for i in range(len(order)):
        near = np.flatnonzero((first[:i] <= last[i]) & (last[:i] >= first[i]))
        if near.size:
            near = near[np.argsort(at[near], kind="stable")]
            free_from = np.maximum.accumulate(at[near] + size[near])
            starts = np.concatenate(([0], free_from))
            gaps = at[near] - starts[:-1]
            fits = np.flatnonzero(gaps >= size[i])
            at[i] = starts[fits[np.argmin(gaps[fits])]] if fits.size else free_from[-1]
    return int((at + size).max(initial=0))
