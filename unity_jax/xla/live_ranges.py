"""What is live while the steps of a program run, one after the other.

A buffer is live from the step that makes it to the last one that reads it; a result may take the place of an operand
that nothing reads any more. A loop or a branch runs the steps of its bodies within its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from unity_jax.xla.heap_simulator import Heap
from unity_jax.xla.schedule import Step


class Peak(NamedTuple):
    """The most bytes that are live at once, and at which position."""

    bytes: int
    position: int


@dataclass(frozen=True, eq=False)
class LiveRanges:
    """Steps in the order in which they run, and the buffers between them.

    **Fields:** `size`: bytes of each buffer; `readers`: how many steps read it; `bodies`: of steps, what runs inside.
    """

    steps: Sequence[Step]
    order: Sequence[int]
    size: Sequence[int]
    readers: Sequence[int]
    bodies: Mapping[int, Sequence[LiveRanges]]

    def run(self, heap: Heap | None = None) -> Peak:
        """The most that is live at once; takes the memory from a heap on the way."""
        size, left, address = self.size, list(self.readers), [0] * len(self.size)
        now = most = where = 0
        for position, i in enumerate(self.order):
            step = self.steps[i]
            over = _over(step, size, left)
            if heap is not None:
                for b in step.makes:
                    address[b] = address[over[b]] if b in over else heap.take(size[b])
                workspace = heap.take(step.workspace)
            grown = sum(size[b] for b in step.makes if b not in over) + step.workspace
            inner = [body.run(heap) for body in self.bodies.get(i, ())]
            grown += max((p.bytes for p in inner), default=0)
            if now + grown > most:
                most, where = now + grown, position
            gone = self._read(step, left)
            now += sum(size[b] for b in step.makes) - sum(size[b] for b in gone)
            if heap is not None:
                heap.give(workspace, step.workspace)
                for b in set(gone).difference(over.values()):
                    heap.give(address[b], size[b])
        return Peak(most, where)

    def spans(self) -> list[tuple[int, int, int]]:
        """Of each buffer the first and the last time when it is in memory, and its bytes. Bodies have their own."""
        found: list[list[int]] = []
        self._add_spans(found, 0)
        return [(first, last, size) for first, last, size in found]

    def _add_spans(self, found: list[list[int]], now: int) -> int:
        """Add the buffers of a run that begins at a time, and tell when it ends."""
        left, span = list(self.readers), [0] * len(self.size)
        for i in self.order:
            step = self.steps[i]
            over = _over(step, self.size, left)
            for b in step.makes:
                span[b] = span[over[b]] if b in over else len(found)
                if b not in over:
                    found.append([now, now, self.size[b]])
            workspace = [now, now, step.workspace]
            found.append(workspace)
            for body in self.bodies.get(i, ()):
                now = body._add_spans(found, now)
            workspace[1] = now
            for b in (*step.makes, *step.reads):
                found[span[b]][1] = now
            self._read(step, left)
            now += 1
        return now

    def changes(self) -> Iterator[tuple[list[int], list[int], list[int]]]:
        """Of each step in the order in which they run: the buffers that come for it, and those that go behind it and
        come in the place of others that do."""
        left = list(self.readers)
        for i in self.order:
            step = self.steps[i]
            over = _over(step, self.size, left)
            gone = self._read(step, left)
            there = [b for b in over if b not in gone]
            yield [b for b in step.makes if b not in over], list({*gone, *over.values()}.difference(over)), there

    def live(self, position: int) -> list[int]:
        """The buffers that exist while a step runs."""
        left = list(self.readers)
        found: dict[int, None] = {}
        for p, i in enumerate(self.order[: position + 1]):
            found.update(dict.fromkeys(self.steps[i].makes))
            if p < position:
                for b in self._read(self.steps[i], left):
                    del found[b]
        return list(found)

    def _read(self, step: Step, left: list[int]) -> list[int]:
        """The buffers that nothing reads after a step; `left`, how many steps will read each, is brought up to date."""
        for b in step.reads:
            left[b] -= 1
        return [b for b in dict.fromkeys((*step.makes, *step.reads)) if left[b] == 0]


def _over(step: Step, size: Sequence[int], left: Sequence[int]) -> dict[int, int]:
    """The results that are written over operands which nothing else will read, with these."""
    over: dict[int, int] = {}
    if step.over:
        dying: dict[int, list[int]] = {}
        for b in step.over:
            if left[b] == 1:
                dying.setdefault(size[b], []).append(b)
        over.update((b, dying[size[b]].pop()) for b in step.makes if dying.get(size[b]))
    return over
