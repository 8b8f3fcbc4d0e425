"""Where XLA:TPU puts the buffers of a program.

It gives them addresses in the order in which the program runs: each goes into the smallest gap that holds it, or else
to the end. Gaps between long lives stay unused, so that more memory is taken than is ever alive
(`LazyBestFitHeap` in https://github.com/openxla/xla/blob/main/xla/service/heap_simulator/heap_simulator.cc).

    alive    a a a a a .        taken    b b . d d d
             b b . d d d                 a a a a a .
             . . c c c c                 . . c c c c
"""

from __future__ import annotations

from bisect import bisect_left, insort


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
