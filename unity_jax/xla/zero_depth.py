"""XLA:TPU gathers what waits for no other collective, an argument or what is made of arguments alone, at the start of
the program or of an iteration: its latency-hiding scheduler goes backward and delays what follows no collective as long
as it can (`kStartAtZeroDepth` in https://github.com/openxla/xla/blob/main/xla/service/latency_hiding_scheduler.cc).

Not followed is that beyond half of its memory limit it goes by memory first (`MemoryPressurePolicy` there): what is
predicted of a plan that nearly fills a chip is too much.

    sort makes b0;  combine makes b1;  add reads b0 b1   ->   combine makes b1;  sort makes b0;  add reads b0 b1
"""

from __future__ import annotations

from unity_jax.xla.module import Instruction, Module


def start_at_zero_depth(module: Module) -> None:
    zero, first = {*module.arguments.values()}, set[Instruction]()
    for i in module.schedule:
        if all(a in zero and not a.collectives for a in map(module.made, i.after)):
            zero.add(i)
    for i in reversed(module.schedule):
        if i in first or (i in zero and i.opcode == "combine"):
            first.update((i, *map(module.made, i.after)))
    module.schedule.sort(key=lambda i: i not in first)
