"""XLA:GPU makes constant arrays of one shape by one kernel, at the start, the stacks of loops among them
(https://github.com/openxla/xla/blob/main/xla/service/gpu/transforms/horizontal_loop_fusion.cc).

    broadcast makes b1;  ...;  broadcast makes b2   ->   broadcast makes b1, b2
"""

from __future__ import annotations

from unity_jax.xla.module import Instruction, Module


def horizontal_loop_fusion(module: Module) -> None:
    first: dict[object, Instruction] = {}
    joined: dict[Instruction, Instruction] = {}
    for fill in module.instructions:
        if _is_constant(fill):
            (b,) = fill.makes
            one = first.setdefault((module.storage.local(b.tensor), str(b.tensor.dtype)), fill)
            if one is fill:
                fill.opcode, fill.kernel, fill.writes_over = "broadcast", None, False
            else:
                one.makes.append(b)
                joined[fill] = one
            one.cost = module.estimator.fill(sum(b.size for b in one.makes))
    module.replace(joined)


def _is_constant(i: Instruction) -> bool:
    if i.kernel is None:
        return i.opcode == "broadcast"
    return i.opcode == "broadcast_in_dim" and not i.kernel.reads and len(i.makes) == 1
