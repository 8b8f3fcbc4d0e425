"""Memory of a scheduled program: what is where a donated argument was, and the most bytes of all else
(`BufferAssigner` in https://github.com/openxla/xla/blob/main/xla/service/buffer_assignment.cc).

XLA:TPU does not write a gathered result in the place of its argument but copies it there at the end, and what reads the
argument reads a copy that is made at the start. In between the place is free for others, one at a time:

    argument   arg arg . . . . . . . . result
    place      arg arg . grads grads . result
    heap       .   copy copy copy copy copy .

The largest choose first; the last place that holds a buffer is taken. The others get addresses in the order of the
program, and above them every tuple: of the results of an instruction, of a collective, of a copy onto the chip or from
there. What it reports as temporary memory is all that this takes and once more what is unused of it at the peak, not
counting there what has been through a loop or is gathered while it multiplies (`2 heap - counted`, seen in its buffer
assignments). XLA:GPU gives out addresses by size. Others are taken to need what is live.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

from unity_jax.xla.collective_combiner import post_order
from unity_jax.xla.heap_simulator import Heap, packed_bytes
from unity_jax.xla.live_ranges import LiveRanges
from unity_jax.xla.memory_space_assignment import fetching_tuples
from unity_jax.xla.module import Buffer, Module, by_number
from unity_jax.xla.op_classes import PRODUCTS

B = TypeVar("B", bound=Hashable)

_TUPLE = 2**14
"""Bytes from one tuple to the next in the memory of a TPU. None takes the place of another (libtpu 0.0.42: a thousand
in a BERT of two layers)."""


def buffer_assignment(module: Module) -> None:
    """Say which buffers lie where a donated argument was."""
    if not any(i.frees for i in module.schedule):
        return
    number = {i: n for n, i in enumerate(module.instructions)}
    after = [tuple(number[module.made(a)] for a in i.after) for i in module.instructions]
    order = post_order(after, [number[i] for i in module.ends()])
    rank = {module.instructions[i]: n for n, i in enumerate(order)}
    ranges: dict[Buffer, tuple[int, int]] = {}
    made_at: dict[Buffer, int] = {}
    for position, i in enumerate(module.schedule):
        for b in (*i.makes, *i.reads):
            ranges[b] = ranges.get(b, (position, 0))[0], position
            made_at.setdefault(b, rank[i])
    inside = sorted((b for b in ranges if not b.lasting), key=made_at.__getitem__)
    freeing = [(rank[i], position, i.frees) for position, i in enumerate(module.schedule) if i.frees]
    size = {b: b.temporary for b in inside}
    for b in placed({b: ranges[b] for b in inside}, size, [(at, nbytes) for _, at, nbytes in sorted(freeing)]):
        b.placed = True


def temporary_bytes(module: Module) -> tuple[int, list[Buffer]]:
    """The most bytes of buffers that are not results, as the compiler counts them, and what is live then."""
    ranges, buffers = _ranges(module)
    heap = Heap() if module.target.heap else None
    peak = ranges.run(heap)
    live = [buffers[b] for b in ranges.live(peak.position) if ranges.size[b]]
    if heap is not None:
        return 2 * (heap.size + _tuples(module) * _TUPLE) - peak.counted, live
    return packed_bytes(ranges.spans()) if module.target.packs else peak.bytes, live


def _ranges(module: Module) -> tuple[LiveRanges, list[Buffer]]:
    """The live ranges of a scheduled module, and its buffers."""
    steps, buffers = by_number(module.schedule)
    readers = [int(b.lasting) for b in buffers]
    for b in (b for step in steps for b in step.reads):
        readers[b] += 1
    bodies = {n: tuple(_ranges(b)[0] for b in i.bodies) for n, i in enumerate(module.schedule) if i.bodies}
    beside = _gathered_beside(module)
    marked = {n for n, b in enumerate(buffers) if b in beside} if beside else set[int]()
    return LiveRanges(steps, range(len(steps)), [b.temporary for b in buffers], readers, bodies, marked), buffers


def _tuples(module: Module) -> int:
    """Of instructions with several results, of collectives that run beside others, of arguments that are fetched, of
    what the chip had no room for; those of bodies included."""
    several = sum(len(i.makes) > 1 for i in module.instructions)
    starts = sum(i.start is not None for i in module.instructions)
    graph, storage = module.graph, module.storage
    read = [t for t in graph.inputs if graph.readers.get(t) and not module.looped]
    fetched = sum(fetching_tuples(storage.outside(t), storage.device) for t in read)
    inner = sum(_tuples(body) for i in module.instructions for body in i.bodies)
    return several + starts + fetched + module.tuples + inner


def _gathered_beside(module: Module) -> set[Buffer]:
    """What XLA:TPU gathers while it multiplies: those kernels send it on from device to device. Where no product comes
    between the start and the done of a gather, it is awaited at once (all but 2, in plans for v5e)."""
    starts, flying, found = {i.start for i in module.schedule}, set[Buffer](), set[Buffer]()
    for i in module.schedule:
        if i in starts:
            flying = {*i.makes}
        elif i.start is not None:
            flying = set()
        elif i.kernel is not None and i.kernel.root.name in PRODUCTS:
            found |= flying
    return found


def placed(ranges: Mapping[B, tuple[int, int]], size: Mapping[B, int], free: Sequence[tuple[int, float]]) -> set[B]:
    """The buffers that lie where an argument was.

    **Arguments:** `ranges`: of each buffer, the first and the last position in the program when it exists, in post
    order of what makes them; `size`: bytes of each buffer; `free`: of each place, also in post order, the position when
    its argument is read last, and its bytes.
    """
    found: set[B] = set()
    taken = [([(0, position)], nbytes) for position, nbytes in reversed(free)]
    for b in sorted(ranges, key=lambda b: -size[b]):
        first, last = ranges[b]
        for spans, nbytes in taken:
            if 0 < size[b] <= nbytes and all(z < first or last < a for a, z in spans):
                spans.append((first, last))
                found.add(b)
                break
    return found
