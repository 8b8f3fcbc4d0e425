"""Copies of what an instruction reads: a tensor that takes so many bytes is copied once, before its first reader."""

from __future__ import annotations

from unity_jax.pcg.graph import Tensor
from unity_jax.xla.emission import argument
from unity_jax.xla.module import Buffer, Instruction, Module


def read_copy(module: Module, reader: Instruction, t: Tensor, size: float) -> Instruction:
    """Let an instruction read a copy of a tensor, which is added if there is none; the copy."""
    made = t in module.of
    if (t, size) not in module.copies:
        after: Tensor | Instruction = t if made else argument(module, t)
        module.copies[t, size] = module.add(
            Instruction("copy", [after], [module.of[t]] if made else [], [Buffer(t, size)])
        )
    copy, source = module.copies[t, size], module.arguments.get(t)
    reader.after = [*(a for a in reader.after if a is not t and a is not source), copy]
    if made:
        reader.reads = [b for b in reader.reads if b is not module.of[t]]
    reader.reads += copy.makes
    return copy
