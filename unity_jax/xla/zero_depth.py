"""XLA:TPU gathers arguments, which waits for nothing, at the start of the program or of an iteration: its
latency-hiding scheduler goes backward and delays what follows no collective as long as it can (`kStartAtZeroDepth` in
https://github.com/openxla/xla/blob/main/xla/service/latency_hiding_scheduler.cc).

    sort makes b0;  combine makes b1;  add reads b0 b1   ->   combine makes b1;  sort makes b0;  add reads b0 b1
"""

from __future__ import annotations

from unity_jax.xla.module import Module


def start_at_zero_depth(module: Module) -> None:
    arguments = {*module.arguments.values()}
    module.schedule.sort(key=lambda i: not (i.opcode == "combine" and arguments.issuperset(map(module.made, i.after))))
