"""What a folded program takes, of which a layer stands for several: that of one more such layer, as many times.

    seconds of L layers = seconds + (L - 1) x (seconds with the layer twice - seconds)

In the tasks of a step the layer is repeated behind itself: what its tasks wait for of the layer before, their
counterparts wait for of its own. Of its buffers those are live as many times at once that outlive the layer and the
next one: what the backward pass needs, gradients that wait for the update.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from graphlib import TopologicalSorter

import numpy as np

from unity_jax.cost.tasks import Task
from unity_jax.cost.timeline import Timeline, simulate
from unity_jax.machine.machine import Machine
from unity_jax.xla.buffer_assignment import temporary
from unity_jax.xla.module import Buffer, Module

_APART = 8
"""Instructions of other layers that may be scheduled among those of one."""


def simulated(tasks: Sequence[Task], machine: Machine) -> Timeline:
    """One step of a device, all layers that tasks stand for included in the sums, but not in the tasks themselves."""
    once = simulate(tasks, machine, simulated)
    step, compute = once.step_seconds, once.compute_seconds
    communication, copies = once.communication_seconds, once.copy_seconds
    for times in sorted({task.times for task in tasks} - {1}):
        twice = simulate(repeated(tasks, times), machine, simulated)
        step += (times - 1) * max(0.0, twice.step_seconds - once.step_seconds)
        compute += (times - 1) * (twice.compute_seconds - once.compute_seconds)
        communication += (times - 1) * (twice.communication_seconds - once.communication_seconds)
        copies += (times - 1) * (twice.copy_seconds - once.copy_seconds)
    return dataclasses.replace(
        once, step_seconds=step, compute_seconds=compute, communication_seconds=communication, copy_seconds=copies
    )


def repeated(tasks: Sequence[Task], times: int) -> list[Task]:
    """The tasks, with those that stand for so many once more: each behind its like, and what reads the layer behind
    both."""
    mine = [task.times == times for task in tasks]
    first, again = list[int](), list[int]()  # of each task its new number, and that of its repetition
    for repeats in mine:
        first.append(again[-1] + 1 if again else 0)
        again.append(first[-1] + repeats)
    turn = _passes([task.after for task in tasks], mine)
    made = defaultdict[int, list[int]](list)  # what leaves the layer
    for i, task in enumerate(tasks):
        for number in task.leaves if mine[i] else ():
            made[number].append(i)
    found = []
    for i, task in enumerate(tasks):
        if not mine[i]:
            both = (n for j in task.after for n in (first[j], again[j]))
            found.append(dataclasses.replace(task, after=tuple(dict.fromkeys(both))))
            continue
        found.append(dataclasses.replace(task, after=tuple(first[j] for j in task.after)))
        waits = [again[j] for j in task.after]
        waits += (first[j] for number in task.enters for j in made[number] if turn[j] <= turn[i])
        found.append(dataclasses.replace(_part(task, times), after=tuple(dict.fromkeys(waits))))
    return found


def _passes(after: Sequence[Sequence[int]], mine: Sequence[bool]) -> list[int]:
    """Of each step how often its layer has been left before: forward, backward, update. What a layer waits for of the
    one before is of no later pass: else they could wait for each other, as where what enters is computed again.

    **Arguments:** `after`: the steps that each one waits for; `mine`: which are of such a layer.
    """
    found = [0] * len(after)
    for i in TopologicalSorter(dict(enumerate(after))).static_order():
        found[i] = max((found[j] + (mine[j] and not mine[i]) for j in after[i]), default=0)
    return found


def _part(task: Task, times: int) -> Task:
    """Of collectives that are combined those that stand for so many."""
    parts = tuple(p for p in task.parts if p.times == times)
    if len(parts) == len(task.parts):
        return task
    whole = sum(p.seconds for p in task.parts)
    return dataclasses.replace(task, seconds=task.seconds * sum(p.seconds for p in parts) / whole, parts=parts)


def more_bytes(module: Module) -> int:
    """By how much the most bytes that are live at once grow with the layers that a scheduled module stands for."""
    begins, ends, after = dict[Buffer, int](), dict[Buffer, int](), list[list[int]]()
    for position, i in enumerate(module.schedule):
        after.append([begins[b] for b in i.reads if b in begins])
        for b in (*i.makes, *i.reads):
            begins.setdefault(b, position)
            ends[b] = position
    loops = {position: i.bodies for position, i in enumerate(module.schedule) if i.bodies}
    within = {position: max(map(more_bytes, bodies)) for position, bodies in loops.items()}
    layer = np.array(sorted({begins[b] for b in begins if b.tensor.times > 1}))
    if not layer.size:
        return max(within.values(), default=0)
    mine = [any(b.tensor.times > 1 for b in i.makes) for i in module.schedule]
    turn = _passes(after, mine)
    first = np.concatenate([[0], 1 + np.flatnonzero(np.diff(layer) > _APART)])
    starts, stops = layer[first], np.concatenate([layer[first[1:] - 1], layer[-1:]])
    run = [int(np.searchsorted(starts, position, side="right")) - 1 for position in range(len(module.schedule))]
    back = [i.kernel is not None and i.kernel.root.backward for i in module.schedule]
    later = set[Buffer]()  # of what a layer reads what was not made in this pass of it, nor computed again for it
    for position, i in enumerate(module.schedule):
        for b in i.reads if mine[position] else ():
            at = begins[b]
            again = back[at] and run[at] == run[position]
            if at < position and (not mine[at] or (turn[at] < turn[position] and not again)):
                later.add(b)
    once, every = np.zeros((2, len(module.schedule) + 1))
    for b, begin in begins.items():
        size, times = b.temporary, b.tensor.times
        if size and times > 1:
            at = run[begin]
            beyond = ends[b] - stops[at] > max(_APART, stops[at] - starts[at])
            times = times if beyond or b in later else 1
        once[[begin, ends[b] + 1]] += size, -size
        every[[begin, ends[b] + 1]] += times * size, -times * size
    once, every = np.cumsum(once), np.cumsum(every)
    for position, bodies in loops.items():
        needs = max(temporary(body).bytes for body in bodies) if within[position] else 0
        once[position] += needs
        every[position] += needs + within[position]
    return round(every.max() - once.max())
