"""The stacks of loops are filled before them, by instructions of their own.

What a `scan` stacks of its iterations it writes into an array that is there before it, as any `while` of XLA does
(https://github.com/jax-ml/jax/blob/main/jax/_src/lax/control_flow/loops.py). XLA:TPU fills it where the loop begins.

    scan makes b1, b2   ->   broadcast makes b1;  scan reads b1, makes b2

Those of the backward pass wait for what the loop carries and slices (`lower.fills`).
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
    root, roles = loop.kernel.root, Scan.of(loop.kernel.root.params)
    stacks, given = set(root.outputs[roles.stacked]), (*root.inputs[roles.carried], *root.inputs[roles.sliced])
    awaited = {module.base.get(t, t) for t in given} if root.backward else set()
    after = [t for t in loop.after if t in awaited]
    filled = [b for b in loop.makes if b.tensor in stacks]
    loop.makes = [b for b in loop.makes if b.tensor not in stacks]
    loop.after += [
        module.add(Instruction("broadcast", [*after], [], [b], cost=module.estimator.fill(b.size))) for b in filled
    ]
    loop.reads += filled
