"""Memory of a scheduled program: the most bytes of what is neither argument nor result
(`BufferAssigner` in https://github.com/openxla/xla/blob/main/xla/service/buffer_assignment.cc).

XLA:TPU gives out addresses in the order of the program, and above them every tuple: of the results of an instruction,
of a copy onto the chip or from there. All that this takes must fit (`aot.allocated`). XLA:GPU gives out addresses by
size. Others are taken to need what is live.
"""

from __future__ import annotations

from typing import NamedTuple

from unity_jax.xla.heap_simulator import Heap, packed_bytes
from unity_jax.xla.live_ranges import LiveRanges
from unity_jax.xla.memory_space_assignment import fetching_tuples
from unity_jax.xla.module import Buffer, Module, by_number

_TUPLE = 2**14
"""Bytes from one tuple to the next in the memory of a TPU. None takes the place of another (libtpu 0.0.42: a thousand
in a BERT of two layers)."""


class Temporary(NamedTuple):
    """Bytes of buffers that are not results.

    **Fields:** `bytes`: the most that they take; `live`: what is live then.
    """

    bytes: int
    live: list[Buffer]


def temporary(module: Module) -> Temporary:
    """What a scheduled module needs besides arguments and results."""
    ranges, buffers = live_ranges(module)
    heap = Heap() if module.target.heap else None
    peak = ranges.run(heap)
    live = [buffers[b] for b in ranges.live(peak.position) if ranges.size[b]]
    if heap is not None:
        return Temporary(heap.size + _tuples(module) * _TUPLE, live)
    return Temporary(packed_bytes(ranges.spans()) if module.target.packs else peak.bytes, live)


def live_ranges(module: Module) -> tuple[LiveRanges, list[Buffer]]:
    """The live ranges of a scheduled module, and its buffers."""
    steps, buffers = by_number(module.schedule)
    readers = [0] * len(buffers)
    for b in (b for step in steps for b in step.reads):
        readers[b] += 1
    bodies = {n: tuple(live_ranges(b)[0] for b in i.bodies) for n, i in enumerate(module.schedule) if i.bodies}
    return LiveRanges(steps, range(len(steps)), [b.temporary for b in buffers], readers, bodies), buffers


def _tuples(module: Module) -> int:
    """Of instructions with several results, of arguments that are fetched, of what the chip had no room for; those of
    bodies included."""
    several = sum(len(i.makes) > 1 for i in module.instructions)
    graph, storage = module.graph, module.storage
    read = [t for t in graph.inputs if graph.readers.get(t) and not module.looped]
    fetched = sum(fetching_tuples(storage.outside(t), storage.device) for t in read)
    inner = sum(_tuples(body) for i in module.instructions for body in i.bodies)
    return several + fetched + module.tuples + inner
