"""XLA:TPU gathers what waits for no other collective, an argument or what is made of arguments alone, at the start of
the program or of an iteration: its latency-hiding scheduler goes backward and delays what follows no collective as long
as it can (`kStartAtZeroDepth` in https://github.com/openxla/xla/blob/main/xla/service/latency_hiding_scheduler.cc).

As long as what is live at that point takes no more than half of the memory beside arguments: beyond that it goes by
memory first (`MemoryPressurePolicy` there), so those that are wanted last come to the start as far as that has room.

    sort makes b0;  combine makes b1;  add reads b0 b1   ->   combine makes b1;  sort makes b0;  add reads b0 b1
"""

from __future__ import annotations

from unity_jax.xla.buffer_assignment import live_ranges
from unity_jax.xla.module import Instruction, Module


def start_at_zero_depth(module: Module) -> None:
    zero, first = {*module.arguments.values()}, set[Instruction]()
    for i in module.schedule:
        if all(a in zero and not a.collectives for a in map(module.made, i.after)):
            zero.add(i)
    gathers = [i for i in module.schedule if i in zero and i.opcode == "combine"]
    room = _room(module) if gathers else 0.0
    for i in reversed(gathers):
        room -= sum(b.temporary for b in i.makes)
        if room >= 0:
            first.add(i)
    for i in reversed(module.schedule):
        if i in first:
            first.update(map(module.made, i.after))
    module.schedule.sort(key=lambda i: i not in first)


def _room(module: Module) -> float:
    """Half of the memory beside arguments, less the most that is live now."""
    storage = module.storage
    beside = storage.device.memory_bytes - sum(map(storage, module.graph.inputs))
    return beside / 2 - live_ranges(module)[0].run().bytes
