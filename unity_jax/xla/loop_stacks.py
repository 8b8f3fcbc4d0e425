"""The stacks of loops are filled before them, by instructions of their own.

What a `scan` stacks of its iterations it writes into an array that is there before it, as any `while` of XLA does
(https://github.com/jax-ml/jax/blob/main/jax/_src/lax/control_flow/loops.py). XLA:TPU fills it where the loop begins.

    scan makes b1, b2   ->   broadcast makes b1;  scan reads b1, makes b2
"""

from __future__ import annotations

from unity_jax.pcg.loops import Scan
from unity_jax.xla.module import Instruction, Module


def loop_stacks(module: Module) -> None:
    before, module.instructions = module.instructions, []
    for loop in before:
        fill(module, loop)
        module.add(loop)


def fill(module: Module, loop: Instruction) -> None:
    """Add what fills the stacks of an instruction, if it is a scan."""
    if loop.opcode != "scan" or loop.kernel is None:
        return
    root = loop.kernel.root
    stacks = set(root.outputs[Scan.of(root.params).stacked])
    filled = [b for b in loop.makes if b.tensor in stacks]
    loop.makes = [b for b in loop.makes if b.tensor not in stacks]
    loop.after += [
        module.add(Instruction("broadcast", [], [], [b], cost=module.estimator.fill(b.size))) for b in filled
    ]
    loop.reads += filled
