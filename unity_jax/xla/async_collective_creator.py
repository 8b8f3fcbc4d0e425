"""A collective that runs beside other instructions is two: its start, and its done, which is awaited
(https://github.com/openxla/xla/blob/main/xla/hlo/transforms/collectives/async_collective_creator.cc).

    combine reads b0, makes b1   ->   combine-start reads b0, makes b1;  combine-done reads b0 b1

What gathers or scatters needs its operand to the end; an all-reduce takes the place of it.
"""

from __future__ import annotations

from unity_jax.xla.module import Instruction, Module
from unity_jax.xla.schedule import BETWEEN


def async_collective_creator(module: Module) -> None:
    before, module.instructions = module.instructions, []
    for i in before:
        if i.collectives:
            module.add(started(i, i.opcode == "reduce"))
        module.add(i)


def started(i: Instruction, over: bool = False) -> Instruction:
    """The start of an instruction, which becomes the done. **Arguments:** `over`: its result takes the place of its
    operand."""
    start = Instruction(f"{i.opcode}-start", i.after, i.reads, i.makes, writes_over=over)
    i.opcode += "-done"
    i.after, i.start, i.latency = [start], start, i.cost
    i.cost, i.writes_over = BETWEEN, False
    i.reads = i.makes if over else [*i.reads, *i.makes]
    i.makes = []
    return start
