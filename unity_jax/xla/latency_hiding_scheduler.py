"""XLA's latency-hiding scheduler, which puts other steps between the start and the done of each collective
(https://github.com/openxla/xla/blob/main/xla/service/latency_hiding_scheduler.cc).

    a, start, done, b   ->   start, a, b, done

Until they take as long as it, whatever memory that takes. So gradients that nothing waits for are computed late, beside
the collectives of others, and what they are made of lives until then.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence

from unity_jax.xla.module import Module
from unity_jax.xla.schedule import BETWEEN, Schedule, Step


def latency_hiding_scheduler(module: Module) -> None:
    if any(i.start is not None for i in module.schedule):
        number = {i: n for n, i in enumerate(module.instructions)}
        order = hidden(module.numbered(), [number[i] for i in module.schedule])
        module.schedule = [module.instructions[i] for i in order]


def hidden(schedule: Schedule, order: Sequence[int]) -> list[int]:
    """The order of steps; it goes from the last step to the first, with one collective in flight."""
    return _Backward(schedule, order).run()


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
        self.dones: list[tuple[float, bool, int, int]] = []
        self.others: dict[float, dict[float, list[tuple[bool, int, int]]]] = {}  # by depth and cost

    def run(self) -> list[int]:
        for i in self.by_position:
            if self.left[i] == 0:
                self._offer(i)
        order = [self._place(self._pick()) for _ in self.by_position]
        return order[::-1]

    def _several(self, step: Step) -> frozenset[int] | None:
        """The results of a step that has several."""
        made = step.makes if step.start is None else self.steps[step.start].makes
        return frozenset(made) if len(made) > 1 else None

    def _offer(self, i: int) -> None:
        """A step whose readers are all placed."""
        if self.is_start[i]:
            self.start = i
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
        results = self.results[j]
        if results is None:
            return self.left[j] == 1
        return sum(self.takers[j, b] == 1 for b in self.steps[i].reads if b in results)

    def _key(self, i: int) -> tuple[bool, int, int]:
        opens = sum(self._opens(i, j) for j in self.steps[i].after)
        return not self.unlocks[i], -opens, -self.position[i]

    def _pick(self) -> int:
        """XLA's rules in its order: a done if none is in flight; nothing before its time; a start that another done
        waits for, but one that follows no collective as late as it gets; then what follows the most collectives, what
        fills best the time that is left, what opens the way to a done or to the most steps; last, the given order."""
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
            if (results := self.results[j]) is not None:
                taken = [b for b in step.reads if b in results]
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
