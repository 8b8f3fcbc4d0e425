"""What an instruction reads: copies of it, and what it reads for one of its operands."""

from __future__ import annotations

from unity_jax.pcg.graph import Tensor
from unity_jax.xla.emission import argument
from unity_jax.xla.kernel import Kernel
from unity_jax.xla.module import Buffer, Instruction, Module


def read_copy(module: Module, reader: Instruction, t: Tensor, size: float) -> Instruction:
    """Let an instruction read a copy of a tensor that takes so many bytes, which is added before its first reader; the
    copy."""
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


def read_for(kernel: Kernel, t: Tensor) -> set[Tensor]:
    """What a kernel reads to compute a tensor."""
    made = {x: op for op in kernel.ops for x in op.outputs}
    every = [t]
    for x in every:  # grows
        every += made[x].inputs if x in made and x not in kernel.reads else ()
    return {*every}.intersection(kernel.reads)
