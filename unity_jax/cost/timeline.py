"""When everything in a step happens: an event simulation of its tasks on the streams of one device.

A device has one compute stream, one stream per level of its network and one per direction of host copies. A task starts
when all it waits for has ended and its streams are free; of those that could, the first in program order. So

* a collective starts as soon as its operand is there, and its first reader awaits it;
* collectives that cross no common level run at once, others one after the other;
* arithmetic that waits for a collective lets later arithmetic go first. XLA's latency-hiding schedulers do the same
  within their memory limits, which are not modelled: they reorder a program to fill such gaps.

Tasks that run at once slow each other as `device.contention` says. All collectives that run together count as one
there.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from unity_jax.cost.tasks import COLLECTIVES, COMPUTE, DEVICE_TO_HOST, HOST_TO_DEVICE, Task
from unity_jax.machine.contention import STREAMS
from unity_jax.machine.machine import Machine

_SIMULTANEOUS = 1e-12  # ends closer than this, relative to the time to the next, are one event


@dataclass(frozen=True, eq=False)
class Timeline:
    """One step of one device.

    **Fields:** `tasks`, and for each when it starts and ends, in seconds from the start of the step; `step_seconds`;
    `compute_seconds`, `communication_seconds` and `copy_seconds` (from the host and to it): the sums over tasks, loops
    included, of what each takes alone.
    """

    tasks: tuple[Task, ...]
    starts: tuple[float, ...]
    ends: tuple[float, ...]
    step_seconds: float
    compute_seconds: float
    communication_seconds: float
    copy_seconds: float

    @property
    def exposed_communication_seconds(self) -> float:
        """By how much communication, and copies from the host and to it, lengthen the step: its duration beyond that of
        its arithmetic alone. That is the
        time that arithmetic waits, and what it loses to collectives and copies beside it."""
        return max(0.0, self.step_seconds - self.compute_seconds)


def unhidden(machine: Machine) -> float:
    """The part of communication that lengthens a step however well it is hidden: `step >= compute + unhidden *
    communication`.

    All of it where no collective is asynchronous. Else what a collective takes from the arithmetic beside it, shared by
    those that may run at once, one per level.
    """
    if not machine.device.asynchronous:
        return 1.0
    return machine.device.contention.compute_by_collectives / machine.num_levels


def simulate(
    tasks: Sequence[Task], machine: Machine, inside: Callable[[Sequence[Task], Machine], Timeline] | None = None
) -> Timeline:
    """Run the tasks. Deterministic; a few microseconds per task.

    **Arguments:** `inside`: how the bodies of loops are run, if not like the tasks.
    """
    compute = communication = copies = 0.0
    alone = []
    for task in tasks:
        if task.body:
            inner = (inside or simulate)(task.body, machine)
            alone.append(task.runs * inner.step_seconds)
            compute += task.runs * inner.compute_seconds
            communication += task.runs * inner.communication_seconds
            copies += task.runs * inner.copy_seconds
        else:
            alone.append(task.seconds)
            compute += task.seconds if task.stream == COMPUTE else 0.0
            communication += task.seconds if task.stream == COLLECTIVES else 0.0
            copies += task.seconds if task.stream in (HOST_TO_DEVICE, DEVICE_TO_HOST) else 0.0
    run = _Run(tasks, alone)
    run.all(machine)
    return Timeline(tuple(tasks), tuple(run.starts), tuple(run.ends), run.now, compute, communication, copies)


def _resources(task: Task) -> int:
    """Bits of what a task occupies: one per stream but that of collectives, then one per network level."""
    own = 0 if task.stream == COLLECTIVES else 1 << task.stream
    return own | task.blocking << COMPUTE | task.levels << len(STREAMS)


class _Run:
    """The state of a simulation: what each task waits for, what is ready, what runs."""

    def __init__(self, tasks: Sequence[Task], alone: Sequence[float]) -> None:
        self.now = 0.0
        self.tasks, self.alone = tasks, alone
        self.needs = [_resources(task) for task in tasks]
        self.waits = [len(task.after) for task in tasks]
        self.next: list[list[int]] = [[] for _ in tasks]
        for i, task in enumerate(tasks):
            for j in task.after:
                self.next[j].append(i)
        self.starts, self.ends = [0.0] * len(tasks), [0.0] * len(tasks)
        self.ready: dict[int, list[int]] = {}  # by resources, the tasks that only wait for these, first one on top
        self.left: dict[int, float] = {}  # of each running task, the seconds it would still take alone
        self.busy = 0

    def all(self, machine: Machine) -> None:
        self._offer(i for i, n in enumerate(self.waits) if n == 0)
        self._start()
        while self.left:
            self._advance(machine)
            self._start()
        assert not any(self.waits), "tasks wait for each other"

    def _offer(self, found: Iterable[int]) -> None:
        """These tasks wait for nothing any more; those that take no time end at once, and with them what they held."""
        stack = list(found)
        while stack:
            i = stack.pop()
            if self.alone[i] > 0:
                heapq.heappush(self.ready.setdefault(self.needs[i], []), i)
            else:
                self.starts[i] = self.ends[i] = self.now
                stack += self._released(i)

    def _released(self, i: int) -> list[int]:
        found = []
        for j in self.next[i]:
            self.waits[j] -= 1
            if self.waits[j] == 0:
                found.append(j)
        return found

    def _start(self) -> None:
        """Start what can start, in program order; what must wait for a stream keeps the others it needs for itself."""
        taken = self.busy
        queues = {needs: queue for needs, queue in self.ready.items() if queue}
        while queues:
            needs = min(queues, key=lambda n: queues[n][0])
            queue = queues.pop(needs)  # what is behind the first needs the same streams
            if not needs & taken:
                i = heapq.heappop(queue)
                self.starts[i], self.left[i] = self.now, self.alone[i]
                self.busy |= needs
            taken |= needs

    def _advance(self, machine: Machine) -> None:
        """To the next end of a task."""
        work = [0.0] * len(STREAMS)
        for i, left in self.left.items():
            stream = self.tasks[i].stream
            work[stream] = max(work[stream], left)
        rates = machine.device.contention.rates(work)
        times = {i: left / rate for i, left in self.left.items() if (rate := rates[self.tasks[i].stream]) > 0}
        step = min(times.values())
        self.now += step
        ended = []
        for i in list(self.left):
            if i in times and times[i] <= step * (1 + _SIMULTANEOUS):
                del self.left[i]
                self.ends[i] = self.now
                self.busy &= ~self.needs[i]
                ended.append(i)
            else:
                self.left[i] -= step * rates[self.tasks[i].stream]
        for i in ended:
            self._offer(self._released(i))
