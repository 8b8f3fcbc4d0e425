"""A program by numbers: steps to be ordered, and the buffers between them.

A kernel is a step; a collective that runs beside others is two, its start and its done. What lies in memory between
steps is a buffer.

    step      0 gather   1 gather   2 dot
              start      done
    buffers   makes a    reads a    reads a, makes b

Times are in microseconds, as the compiler estimates them (`cost.estimates`). Arguments are steps, too, which run before
all others: of two kernels XLA prefers the one that is the only one to wait for more steps, and so the update of a
parameter and of its moments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

BETWEEN = 1.0
"""Microseconds from one step to another that reads it, and of the start and of the done of a collective."""


class Step(NamedTuple):
    """A kernel, or the start or the done of a collective, all by their numbers.

    **Fields:** `after`: the steps that must run before; `reads` and `makes`: buffers; `cost`: the microseconds it
    takes; `start` and `latency`: of a done, its start, and the microseconds from that to it; `workspace`: bytes that it
    needs while it runs; `over`: what it reads whose place a result may take; `late`: whether all else that can run goes
    first.
    """

    after: tuple[int, ...]
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    cost: float = BETWEEN
    start: int | None = None
    latency: float = 0.0
    workspace: int = 0
    over: tuple[int, ...] = ()
    late: bool = False

    @property
    def is_argument(self) -> bool:
        """Whether it stands for an argument, which is there before all steps."""
        return not (self.after or self.reads or self.makes)


@dataclass(eq=False)
class Schedule:
    """Steps to be ordered, and `size`: the bytes of each buffer that count when steps are chosen."""

    steps: Sequence[Step]
    size: Sequence[float]
    next: list[list[int]] = field(init=False)
    readers: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.next = [[] for _ in self.steps]
        self.readers = [[] for _ in self.size]
        for i, step in enumerate(self.steps):
            for j in step.after:
                self.next[j].append(i)
            for b in step.reads:
                self.readers[b].append(i)
