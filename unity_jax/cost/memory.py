"""Peak memory of a planned program: what is alive when its kernels run in an order that XLA would choose.

Arguments and results have memory for the whole step; a result takes that of a donated argument of its shape. What lies
between lives from the kernel that writes it to the last that reads it. XLA does not keep the order of the program: it
tries several and takes the one that needs least (`ListMemoryScheduler` and others in
https://github.com/openxla/xla/blob/main/xla/hlo/transforms/simplifiers/hlo_memory_scheduler.cc), of which two are here.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from unity_jax.cost.compute import stored_bytes
from unity_jax.cost.kernels import Kernel, Traffic, base_tensors
from unity_jax.machine.device import Device
from unity_jax.pcg.graph import Graph, Tensor
from unity_jax.pcg.mesh import MeshAxes

_OWN_BUFFER = frozenset("dot_general conv_general_dilated gather sort all_to_all".split())
"""Kernels that cannot write over what they read."""


@dataclass(frozen=True)
class Memory:
    """Peak bytes per device, and what is alive at the peak, largest first."""

    peak_bytes: int
    alive: tuple[tuple[Tensor, int], ...]


def memory(graph: Graph, traffic: Traffic, mesh: MeshAxes, device: Device, donated: Sequence[int]) -> Memory:
    """Peak memory of a planned graph on one device.

    **Arguments:** `traffic`: of this graph; `donated`: indices of inputs whose memory results may take.
    """
    sizes = _Sizes(mesh, device)
    base = base_tensors(graph)
    kept = {t: sizes(t) for t in graph.inputs}
    free = Counter((t.shape, str(t.dtype), t.layout) for t in (graph.inputs[i] for i in donated))
    for t in dict.fromkeys(base.get(t, t) for t in graph.outputs):
        key = (t.shape, str(t.dtype), t.layout)
        if free[key]:
            free[key] -= 1
        elif t not in kept and t.literal is None:
            kept[t] = sizes(t)
    peak, alive = _between(graph, traffic, sizes)
    ranked = sorted([*kept.items(), *alive.items()], key=lambda item: -item[1])
    return Memory(round(sum(kept.values()) + peak), tuple((t, round(n)) for t, n in ranked[:50]))


class _Sizes:
    """Bytes of one device's part of a tensor."""

    def __init__(self, mesh: MeshAxes, device: Device) -> None:
        self.mesh, self.device = mesh, device

    def __call__(self, t: Tensor) -> float:
        assert t.layout is not None
        return stored_bytes(self.device, t.layout.local_shape(t.shape, self.mesh), t.itemsize)


def _between(graph: Graph, traffic: Traffic, sizes: _Sizes) -> tuple[float, dict[Tensor, float]]:
    """The largest sum of values that are neither inputs nor outputs of a graph, and those values."""
    base = base_tensors(graph)
    outside = {*graph.inputs, *(base.get(t, t) for t in graph.outputs)}
    every = traffic.kernels[graph]
    inside = [_inside(k, traffic, sizes) for k in every]
    life = _Life(every, {t: sizes(t) for k in every for t in k.writes if t not in outside})
    return min((life.peak(order, inside) for order in (range(len(every)), life.saving())), key=lambda found: found[0])


def _inside(kernel: Kernel, traffic: Traffic, sizes: _Sizes) -> float:
    """What a loop or branch needs beside what it reads and writes: one body's values, and carries that nobody reads."""
    bodies = [_between(b, traffic, sizes)[0] for b in kernel.root.bodies]
    unread = (t for t in kernel.root.outputs if t not in kernel.writes)
    return max(bodies) + sum(map(sizes, unread)) if bodies else 0.0


class _Life:
    """Kernels and the values between them, with their bytes."""

    def __init__(self, every: Sequence[Kernel], size: dict[Tensor, float]) -> None:
        self.size = size
        self.writes = [[t for t in k.writes if t in size] for k in every]
        self.reads = [[t for t in k.reads if t in size] for k in every]
        self.own = [k.root.name in _OWN_BUFFER or k.root.bodies or "move" in k.root.params for k in every]
        makers = {t: i for i, k in enumerate(every) for t in k.writes}
        self.before = [len({makers[t] for t in (*k.reads, *k.waits) if t in makers}) for k in every]
        self.after: list[set[int]] = [set() for _ in every]
        self.readers: dict[Tensor, list[int]] = {}
        for i, k in enumerate(every):
            for t in (*k.reads, *k.waits):
                if t in makers:
                    self.after[makers[t]].add(i)
            for t in k.reads:
                if t in size:
                    self.readers.setdefault(t, []).append(i)

    def saving(self) -> list[int]:
        """An order in which, of the kernels that can run, the one goes first that frees the most bytes."""
        left = {t: len(r) for t, r in self.readers.items()}
        waits, order, done = list(self.before), [], set()

        def grows(i: int) -> float:
            return sum(self.size[t] for t in self.writes[i]) - sum(self.size[t] for t in self.reads[i] if left[t] == 1)

        ready = [(grows(i), i) for i, n in enumerate(waits) if n == 0]
        heapq.heapify(ready)
        while ready:
            growth, i = heapq.heappop(ready)
            if i in done:
                continue
            if growth != (now := grows(i)):
                heapq.heappush(ready, (now, i))
                continue
            done.add(i)
            order.append(i)
            woken = set()
            for t in self.reads[i]:
                left[t] -= 1
                if left[t] == 1:
                    woken.update(r for r in self.readers[t] if waits[r] == 0 and r not in done)
            for j in self.after[i]:
                waits[j] -= 1
                if waits[j] == 0:
                    woken.add(j)
            for j in sorted(woken):
                heapq.heappush(ready, (grows(j), j))
        return order

    def peak(self, order: Sequence[int], inside: Sequence[float]) -> tuple[float, dict[Tensor, float]]:
        """The most bytes alive in this order, and what they are; `inside`: what each kernel needs within itself."""
        left = {t: len(r) for t, r in self.readers.items()}
        alive: dict[Tensor, float] = {}
        now = most = 0.0
        where = -1
        for step, i in enumerate(order):
            grown = sum(self.size[t] for t in self.writes[i]) - sum(self._over(i, left))
            if now + grown + inside[i] > most:
                most, where = now + grown + inside[i], step
            now += sum(self.size[t] for t in self.writes[i] if t in left)
            for t in self.reads[i]:
                left[t] -= 1
                now -= self.size[t] if left[t] == 0 else 0.0
        left = {t: len(r) for t, r in self.readers.items()}
        for i in order[: where + 1]:
            alive.update((t, self.size[t]) for t in self.writes[i])
            for t in self.reads[i] if i != order[where] else ():
                left[t] -= 1
                if left[t] == 0:
                    alive.pop(t)
        return most, alive

    def _over(self, i: int, left: dict[Tensor, int]) -> Iterator[float]:
        """Bytes of results that are written over operands which nothing reads any more."""
        if self.own[i]:
            return
        dying = Counter(self.size[t] for t in self.reads[i] if left[t] == 1)
        for t in self.writes[i]:
            if dying[self.size[t]]:
                dying[self.size[t]] -= 1
                yield self.size[t]
