"""The order in which XLA runs the kernels of a program: first one that needs little memory, then one that hides
collectives.

A kernel is a step; a collective that runs beside others is two, its start and its done. What lies in memory between
steps is a buffer.

    step      0 gather   1 gather   2 dot
              start      done
    buffers   makes a    reads a    reads a, makes b

XLA orders them twice. `listed` frees as many bytes as it can at each step
(https://github.com/openxla/xla/blob/main/xla/hlo/transforms/simplifiers/hlo_memory_scheduler.cc). XLA also tries a
depth-first and a post-order, and takes the one that needs the least; that is the list for most programs, and the other
two are not modelled: they brought predicted memory no nearer (28 programs for v5e).

`hidden` then puts other steps between the start and the done of each collective, until they take as long as it,
whatever memory that takes
(https://github.com/openxla/xla/blob/main/xla/service/latency_hiding_scheduler.cc). So gradients that nothing waits for
are computed late, beside the collectives of others, and what they are made of lives until then.

Times are in microseconds, as the compiler estimates them (`estimates`). Arguments are steps, too, which run before all
others: of two kernels XLA prefers the one that is the only one to wait for more steps, and so the update of a parameter
and of its moments.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

BETWEEN = 1.0
"""Microseconds from one step to another that reads it, and of the start and of the done of a collective."""


@dataclass(frozen=True, eq=False)
class Step:
    """A kernel, or the start or the done of a collective, all by their numbers.

    **Fields:** `after`: the steps that must run before; `reads` and `makes`: buffers; `cost`: the microseconds it
    takes; `start` and `latency`: of a done, its start, and the microseconds from that to it; `workspace`: bytes that it
    needs while it runs; `writes_over`: whether a result may take the place of what it reads; `at_once`: whether XLA
    takes it for nothing, and runs it right before what reads it; `passes`: bytes that go through a loop, which XLA's
    list scheduler takes for made by it; `seconds`: the time that buffers wait for it on the chip (XLA:TPU), and
    `streams`: whether it would gain from what it reads and makes there.
    """

    after: tuple[int, ...]
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    cost: float = BETWEEN
    start: int | None = None
    latency: float = 0.0
    workspace: int = 0
    writes_over: bool = False
    at_once: bool = False
    passes: float = 0.0
    seconds: float = 0.0
    streams: bool = True

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

    def order(self) -> list[int]:
        """The steps as XLA runs them."""
        order = self.listed()
        return self.hidden(order) if any(step.start is not None for step in self.steps) else order

    def listed(self) -> list[int]:
        """XLA's list scheduler: of the steps that can run, first the one that frees the most bytes, net of what it
        makes, then the one with the most readers."""
        steps, size = self.steps, self.size
        left = [len(r) for r in self.readers]
        waits = [sum(not steps[j].is_argument for j in step.after) for step in steps]
        made = [step.passes + sum(size[b] for b in step.makes) for step in steps]
        done = [False] * len(steps)

        def key(i: int) -> tuple[float, int, int]:
            return made[i] - sum(size[b] for b in steps[i].reads if left[b] == 1), -len(self.next[i]), i

        ready = [key(i) for i, n in enumerate(waits) if n == 0 and not steps[i].is_argument]
        heapq.heapify(ready)
        order: list[int] = []
        while ready:
            first = heapq.heappop(ready)
            i = first[2]
            if done[i]:
                continue
            if first != (now := key(i)):
                heapq.heappush(ready, now)
                continue
            done[i] = True
            order.append(i)
            woken = set()
            for b in steps[i].reads:
                left[b] -= 1
                if left[b] == 1:
                    woken.update(r for r in self.readers[b] if waits[r] == 0 and not done[r])
            for j in self.next[i]:
                waits[j] -= 1
                if waits[j] == 0:
                    woken.add(j)
            for j in woken:
                heapq.heappush(ready, key(j))
        return order

    def hidden(self, order: Sequence[int]) -> list[int]:
        """XLA's latency-hiding scheduler, which goes from the last step to the first, with one collective in flight."""
        return _Backward(self, order).run()


class _Backward:
    """The state of the latency-hiding scheduler. Time runs backward from the end of the step."""

    def __init__(self, schedule: Schedule, order: Sequence[int]) -> None:
        steps = schedule.steps
        self.steps, self.next = steps, schedule.next
        self.by_position = order
        self.position = [0] * len(steps)
        self.depth = [0.0] * len(steps)  # latencies of the collectives on the longest path before a step, and its own
        for p, i in enumerate(order):
            self.position[i] = p
            before = max((self.depth[j] for j in steps[i].after), default=0.0)
            self.depth[i] = before + steps[i].latency
        self.unlocks = [any(steps[j].start is not None for j in step.after) for step in steps]
        self.is_start = [False] * len(steps)
        for step in steps:
            if step.start is not None:
                self.is_start[step.start] = True
        self.left = [len(n) for n in schedule.next]
        self.placed = [False] * len(steps)
        self.results = [self._several(step) for step in steps]
        self.takers: Counter[tuple[int, int]] = Counter()  # steps that wait for a result of another
        for step in steps:
            for j in step.after:
                self.takers.update((j, b) for b in step.reads if b in (self.results[j] or ()))
        self.ready_at = [0.0] * len(steps)
        self.now = 0.0
        self.flying = False  # a done has been placed, and not yet its start
        self.start: int | None = None  # of that one, once it can be placed
        self.at_once: list[int] = []  # steps that take no turn and can be placed
        self.dones: list[tuple[float, bool, int, int]] = []
        self.others: dict[float, dict[float, list[tuple[bool, int, int]]]] = {}  # by depth and cost

    def run(self) -> list[int]:
        for i in self.by_position:
            if self.left[i] == 0:
                self._offer(i)
        order = [self._place(self._pick()) for _ in self.by_position]
        return order[::-1]

    def _several(self, step: Step) -> frozenset[int] | None:
        """The results of a step that has several. All that goes through a loop is a result of it."""
        if step.passes:
            return frozenset((*step.reads, *step.makes))
        made = step.makes if step.start is None else self.steps[step.start].makes
        return frozenset(made) if len(made) > 1 else None

    def _offer(self, i: int) -> None:
        """A step whose readers are all placed."""
        if self.is_start[i]:
            self.start = i
            return
        if self.steps[i].at_once:
            if i not in self.at_once:
                self.at_once.append(i)
            return
        key = self._key(i)
        if self.steps[i].start is not None:
            heapq.heappush(self.dones, (-self.depth[i], *key))
        else:
            alike = self.others.setdefault(self.depth[i], {})
            heapq.heappush(alike.setdefault(self.steps[i].cost, []), key)

    def _forget_placed(self) -> None:
        """Bring one that is not placed yet to the front of each queue that may be looked at."""
        while self.others:
            deepest = max(self.others)
            alike = self.others[deepest]
            for cost, queue in list(alike.items()):
                while queue and self.placed[self.by_position[-queue[0][-1]]]:
                    heapq.heappop(queue)
                if not queue:
                    del alike[cost]
            if alike:
                return
            del self.others[deepest]

    def _opens(self, i: int, j: int) -> int:
        """How many steps a step makes ready: one that nothing else awaits, or what takes a result of several out."""
        if self.results[j] is None:
            return self.left[j] == 1
        return sum(self.takers[j, b] == 1 for b in self.steps[i].reads if b in self.results[j])

    def _key(self, i: int) -> tuple[bool, int, int]:
        opens = sum(self._opens(i, j) for j in self.steps[i].after)
        return not self.unlocks[i], -opens, -self.position[i]

    def _pick(self) -> int:
        """XLA's rules in its order: what it takes for nothing (`IsNopInstruction`); a done if none is in flight;
        nothing before its time; a start that another done waits for, but one that follows no collective as late as it
        gets; then what follows the most collectives, what fills best the time that is left, what opens the way to a
        done or to the most steps; last, the given order."""
        if self.at_once:
            return self.at_once.pop()
        if self.dones and not self.flying:
            return self.by_position[-heapq.heappop(self.dones)[-1]]
        self._forget_placed()
        if not self.others:
            assert self.start is not None
            return self.start
        deepest = max(self.others)
        alike = self.others[deepest]
        wait = self.ready_at[self.start] - self.now if self.start is not None else 0.0
        cost = min(alike, key=lambda c: (abs(wait - c) if wait > 0 else 0.0, alike[c][0]))
        if self.start is not None and wait <= 0:
            depth = self.depth[self.start]
            mine = -depth, not self.unlocks[self.start], 0, -self.position[self.start]
            if self.dones or (depth > 0 and mine < (-deepest, *alike[cost][0])):
                return self.start
        return self.by_position[-alike[cost][0][-1]]

    def _place(self, i: int) -> int:
        step = self.steps[i]
        self.placed[i] = True
        if step.start is not None:
            self.flying = True
        if self.is_start[i]:
            self.flying, self.start = False, None
        at = max([self.now, *(self.ready_at[j] + self._latency(i, j) for j in self.next[i])])
        self.ready_at[i] = at
        self.now = at + step.cost
        for j in step.after:
            last = self.left[j] == 2
            if self.results[j] is not None:
                taken = [b for b in step.reads if b in self.results[j]]
                self.takers.subtract((j, b) for b in taken)
                last = any(self.takers[j, b] == 1 for b in taken)
            self.left[j] -= 1
            if last:  # what else waits for it opens more now
                for k in self.next[j]:
                    if not self.placed[k] and self.left[k] == 0 and self.steps[k].start is None:
                        self._offer(k)
            if self.left[j] == 0 and not self.steps[j].is_argument:
                self.ready_at[j] = max([self.now, *(self.ready_at[k] + self._latency(j, k) for k in self.next[j])])
                self._offer(j)
        return i

    def _latency(self, i: int, reader: int) -> float:
        return self.steps[reader].latency if self.steps[reader].start == i else BETWEEN
