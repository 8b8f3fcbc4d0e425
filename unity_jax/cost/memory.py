"""Peak memory of a planned program: what is alive when its kernels run in the order that XLA would choose (`schedule`).

Arguments and results have memory for the whole step; a result takes that of a donated argument of its shape. What lies
between are `buffers`:

- XLA:TPU keeps what is needed again soon in the memory on the chip, as far as it goes (`chip`); what leaves it is
  copied to HBM as soon as it is made;
- where a donated argument was that has been copied there are other buffers (`places`);
- the others get their addresses in the order of the program (`heap`), and above them every tuple: of the results of a
  kernel, of a collective, of a copy onto the chip or from there;
- what it reports as temporary memory is all that this takes and once more what is unused of it at the peak, not
  counting there what has been through a loop or is gathered while it multiplies (`2 heap - counted`, seen in its buffer
  assignments);
- XLA:GPU gives out addresses by size (`packing`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from unity_jax.machine.machine import Machine
from unity_jax.pcg.graph import Graph, Tensor
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.xla.aliases import base_tensors
from unity_jax.xla.buffer_assignment import placed
from unity_jax.xla.buffers import Buffers
from unity_jax.xla.collective_combiner import post_order
from unity_jax.xla.heap_simulator import Heap, packed_bytes
from unity_jax.xla.layout_assignment import Storage
from unity_jax.xla.live_ranges import Lives
from unity_jax.xla.memory_space_assignment import away, fetching_tuples
from unity_jax.xla.scheduler import Schedule, Step
from unity_jax.xla.traffic import Traffic

_TUPLE = 2**14
"""Bytes from one tuple to the next in the memory of a TPU. None takes the place of another (libtpu 0.0.42: a thousand
in a BERT of two layers)."""


@dataclass(frozen=True)
class Memory:
    """Peak bytes per device, gaps between buffers included, and what is alive at the peak, largest first."""

    peak_bytes: int
    alive: tuple[tuple[Tensor, int], ...]


def memory(graph: Graph, traffic: Traffic, mesh: MeshAxes, machine: Machine, donated: Sequence[int]) -> Memory:
    """Peak memory of a planned graph on one device.

    **Arguments:** `traffic`: of this graph; `donated`: indices of inputs whose memory results may take.
    """
    storage = Storage(graph, traffic, mesh, machine.device)
    base = base_tensors(graph)
    kept = {t: storage.outside(t) for t in graph.inputs}
    free: dict[object, list[Tensor]] = {}
    for t in (graph.inputs[i] for i in donated):
        free.setdefault((t.shape, str(t.dtype), t.layout), []).append(t)
    replacing: dict[Tensor, Tensor] = {}
    for t in dict.fromkeys(base.get(t, t) for t in graph.outputs):
        key = (t.shape, str(t.dtype), t.layout)
        if free.get(key):
            replacing[t] = free[key].pop(0)
        elif t not in kept and t.literal is None:
            kept[t] = storage.outside(t)
    peak, alive = _peak(Buffers(graph, traffic, storage, machine, replacing))
    ranked = sorted([*kept.items(), *alive], key=lambda item: -item[1])
    return Memory(round(sum(kept.values()) + peak), tuple((t, round(n)) for t, n in ranked[:50]))


def _peak(buffers: Buffers) -> tuple[int, list[tuple[Tensor, int]]]:
    """The most bytes of buffers that are not results, as the compiler counts them, and what is alive then."""
    lives = _lives(buffers)
    heap = Heap() if buffers.target.heap else None
    peak = lives.run(heap)
    alive = [(buffers.tensors[b], lives.size[b]) for b in lives.alive(peak.position) if lives.size[b]]
    if heap is not None:
        return 2 * (heap.size + lives.tuples * _TUPLE) - peak.counted, alive
    return packed_bytes(lives.spans()) if buffers.target.packs else peak.bytes, alive


def _lives(buffers: Buffers, looped: bool = False) -> Lives:
    """The order of the steps of a program or of the body of a loop, and which buffers are in HBM."""
    steps, tuples = buffers.steps, 0
    size = [0 if out else round(n) for n, out in zip(buffers.size, buffers.outside, strict=True)]
    # XLA:TPU schedules results in place of donated arguments, XLA:GPU as new memory.
    order = Schedule(steps, buffers.size if buffers.target.counts_results else size).order()
    order.sort(key=lambda i: i not in buffers.left)
    if buffers.storage.device.chip_bytes:
        order, tuples = _leave_chip(buffers, order, size, looped)
    if buffers.left:
        for b in _placed(buffers, order, size):
            size[b] = 0
    readers = [0] * len(size)
    for b in (*buffers.lasting, *(b for step in steps for b in step.reads)):
        readers[b] += 1
    bodies = {i: tuple(_lives(b, looped=True) for b in inner) for i, inner in buffers.bodies.items()}
    tuples += _tuples(buffers, looped) + sum(body.tuples for inner in bodies.values() for body in inner)
    return Lives(steps, order, size, readers, bodies, _multiplied_beside(buffers, order), tuples)


def _tuples(buffers: Buffers, looped: bool) -> int:
    """Of kernels with several results, of collectives that run beside others, of arguments that are fetched."""
    several = sum(len(step.makes) > 1 for step in buffers.steps)
    starts = sum(step.start is not None for step in buffers.steps)
    graph, storage = buffers.graph, buffers.storage
    read = [t for t in graph.inputs if graph.readers.get(t) and not looped]
    return several + starts + sum(fetching_tuples(storage.outside(t), storage.device) for t in read)


def _placed(buffers: Buffers, order: Sequence[int], size: Sequence[int]) -> set[int]:
    """What is where a donated argument was."""
    rank = {i: n for n, i in enumerate(post_order(buffers.steps, buffers.ends()))}
    lives: dict[int, tuple[int, int]] = {}
    makers: dict[int, int] = {}
    for position, i in enumerate(order):
        for b in (*buffers.steps[i].makes, *buffers.steps[i].reads):
            lives[b] = lives.get(b, (position, 0))[0], position
            makers.setdefault(b, i)
    inside = sorted(lives.keys() - buffers.lasting, key=lambda b: (rank[makers[b]], b))
    free = [(order.index(i), buffers.left[i]) for i in sorted(buffers.left, key=rank.__getitem__)]
    return placed({b: lives[b] for b in inside}, size, free)


def _multiplied_beside(buffers: Buffers, order: Sequence[int]) -> set[int]:
    """What XLA:TPU gathers while it multiplies: those kernels send it on from device to device. Where no product comes
    between the start and the done of a gather, it is awaited at once (all but 2, in plans for v5e)."""
    steps, found = buffers.steps, set[int]()
    starts, flying = {steps[i].start for i in order}, set[int]()
    for i in order:
        if i in starts:
            flying = {*steps[i].makes}
        elif steps[i].start is not None:
            flying = set()
        elif i in buffers.products:
            found |= flying
    return found


def _leave_chip(buffers: Buffers, order: Sequence[int], size: list[int], looped: bool) -> tuple[list[int], int]:
    """Take from the sizes what is on the chip, and add what is copied from there to HBM: the order with these copies,
    which later steps read, and the tuples of copies."""
    steps, device = buffers.steps, buffers.storage.device
    accesses: dict[int, list[int]] = {}
    gains: defaultdict[int, float] = defaultdict(float)
    clock = [0.0]
    for position, i in enumerate(order):
        step = steps[i]
        clock.append(clock[-1] + step.seconds)
        for b in dict.fromkeys((*step.makes, *step.reads)):
            if size[b] and b not in buffers.lasting:
                accesses.setdefault(b, [position] if buffers.bodies.get(i) else []).append(position)
                gains[b] += step.streams * math.sqrt(size[b])
    for positions in accesses.values():
        if len(positions) == 1:  # nothing reads it
            positions *= 2
    absent = away(accesses, gains, size, clock, device)
    tuples = sum(gone.evicted + fetching_tuples(size[b], device, looped) for b, gone in absent.items())
    copies: dict[int, list[int]] = {}  # by the position that they follow
    for b, positions in accesses.items():
        if b not in absent:
            size[b] = 0
            continue
        first, last, evicted = absent[b]
        if evicted:
            copy = buffers.new(buffers.tensors[b], size[b])
            size.append(size[b])
            size[b] = 0
            copies.setdefault(positions[0], []).append(copy)
            for i in (order[p] for p in positions if first < p <= last):
                steps[i] = replace(steps[i], reads=(*steps[i].reads, copy))
        else:
            for i in (order[p] for p in positions if p > last):
                steps[i] = replace(steps[i], reads=tuple(r for r in steps[i].reads if r != b))
    found: list[int] = []
    for position, i in enumerate(order):
        found.append(i)
        if position in copies:
            found.append(buffers.add(Step((), (), tuple(copies[position]))))
    return found, tuples
