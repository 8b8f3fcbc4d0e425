"""What XLA:TPU keeps in the memory on the chip, and when the rest of it is in HBM.

It takes the buffers one by one, first those whose traffic gains most from the chip over the square root of their size.
A buffer stays there from one access to the next if there is room and not too much time passes. Else it goes to HBM, and
comes back for the next access:

    position    0 makes   1 reads   2         3         4 reads   5 reads
    on chip     x         x                             x         x
    HBM                             x         x

(https://github.com/openxla/xla/tree/main/xla/service/memory_space_assignment; libtpu runs it with
`alternate_memory_benefit_scaling_factor_for_large_buffers = SQRT` and `max_overlap_to_mem_size_async_copy_ratio = 8`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np

from unity_jax.machine.device import Device
from unity_jax.ops.persistent import NAME
from unity_jax.xla.module import Buffer, Instruction, Module

B = TypeVar("B", bound=Hashable)

_SLICED, _SLICES = 2**21, 4
"""An array of that many bytes and more comes onto the chip in so many parts, outside of loops (plans for v5e)."""
_COPIES = 20
"""How long a buffer may wait on the chip, in times that a copy of all that it holds takes. XLA's own limit is 8 of
them in its own estimate of time; this is what buffers wait in its cycles (libtpu 0.0.42: 1.7 ms and more, never 3)."""


class Away(NamedTuple):
    """The positions from which and to which a buffer is in HBM, and whether it has been on the chip before."""

    first: int
    last: int
    evicted: bool


def memory_space_assignment(module: Module) -> None:
    """Say which buffers are on the chip; what leaves it is copied to HBM as soon as it is made."""
    device = module.storage.device
    if not device.chip_bytes:
        return
    accesses: dict[Buffer, list[int]] = {}
    gains: defaultdict[Buffer, float] = defaultdict(float)
    size: dict[Buffer, int] = {}
    clock = [0.0]
    linked = {b for i in module.schedule if i.late for b in i.reads}  # copies from the host and to it are of HBM
    linked.update(b for i in module.schedule if i.opcode == NAME for b in (*i.makes, *i.reads))  # as are those of loops
    for position, i in enumerate(module.schedule):
        clock.append(clock[-1] + i.seconds)
        for b in dict.fromkeys((*i.makes, *i.reads)):
            if b not in size:
                size[b] = 0 if b in linked else b.temporary
            if size[b]:
                accesses.setdefault(b, [position] if i.bodies else []).append(position)
                gains[b] += i.streams * math.sqrt(size[b])
    for positions in accesses.values():
        if len(positions) == 1:  # nothing reads it
            positions *= 2
    absent = away(accesses, gains, size, clock, device)
    module.tuples += sum(a.evicted + fetching_tuples(size[b], device, module.looped) for b, a in absent.items())
    copies: dict[int, list[Buffer]] = {}  # by the position that they follow
    for b, positions in accesses.items():
        b.on_chip = b not in absent or absent[b].evicted
        if b not in absent:
            continue
        first, last, evicted = absent[b]
        if evicted:
            copies.setdefault(positions[0], []).append(copy := Buffer(b.tensor, size[b]))
            for i in (module.schedule[p] for p in positions if first < p <= last):
                i.reads = [*i.reads, copy]
        else:
            for i in (module.schedule[p] for p in positions if p > last):
                i.reads = [r for r in i.reads if r is not b]
    before, module.schedule = module.schedule, []
    for position, i in enumerate(before):
        module.schedule.append(i)
        if position in copies:
            module.schedule.append(module.add(Instruction("copy-to-hbm", [], [], copies[position])))


def fetching_tuples(nbytes: float, device: Device, looped: bool = False) -> int:
    """How many tuples XLA:TPU makes to copy an array onto the chip: of the copy, or of each part and what it is of."""
    if nbytes > device.chip_bytes:
        return 0
    return 2 * _SLICES if nbytes >= _SLICED and not looped else 1


def away(
    accesses: Mapping[B, Sequence[int]],
    gains: Mapping[B, float],
    size: Mapping[B, int],
    clock: Sequence[float],
    device: Device,
) -> dict[B, Away]:
    """When buffers are in HBM; those that are not told never are.

    **Arguments:** `accesses`: of each buffer, the positions in the program that make and read it, in order, two or more
    (a loop makes and reads what it returns); `gains`: what its place on the chip is worth; `clock`: the seconds before
    each position and after the last.
    """
    found: dict[B, Away] = {}
    longest = _COPIES * device.chip_bytes / device.memory_bandwidth
    used = np.zeros(len(clock))
    for b in sorted(accesses, key=lambda b: (-gains[b], accesses[b][0])):
        kept = False  # on the chip up to the first position of a pair
        for i, (first, last) in enumerate(pairwise(accesses[b])):
            held = used[first + kept : last + 1]
            waits = clock[last] - clock[first + 1] if last > first else 0.0
            kept = waits < longest and held.max() + size[b] <= device.chip_bytes
            if kept:
                held += size[b]
            elif b in found:
                found[b] = found[b]._replace(last=last)
            else:
                found[b] = Away(first, last, i > 0)
    return found
