"""XLA:GPU finds the gradient of a maximum over windows in two steps: which of its window each is, a number for each
dimension, and a scatter
(https://github.com/openxla/xla/blob/main/xla/service/select_and_scatter_expander.cc).

    select_and_scatter_add reads b1, b2, makes b3   ->   reduce_window reads b2, makes b4;  scatter reads b1, b4
"""

from __future__ import annotations

import math

from unity_jax.pcg.graph import Tensor
from unity_jax.xla.copies import read_for
from unity_jax.xla.kernel import Kernel
from unity_jax.xla.module import Buffer, Instruction, Module

INDEX = 4
"""Bytes of a number."""


def select_and_scatter_expander(module: Module) -> None:
    before, module.instructions = module.instructions, []
    for i in before:
        if i.opcode == "select_and_scatter_add" and i.kernel is not None:
            _expand(module, i, i.kernel)
        module.add(i)


def _expand(module: Module, scatter: Instruction, kernel: Kernel) -> None:
    """Add what finds the numbers, which the scatter reads in place of what they are found in."""
    source, operand = kernel.root.inputs
    needed, kept = read_for(kernel, operand), read_for(kernel, source)
    after: list[Tensor | Instruction] = [t for t in scatter.after if t in needed]
    after += [module.arguments[t] for t in needed if t in module.arguments]
    size = INDEX * math.prod(module.storage.local(source))
    numbers = [Buffer(source, size) for _ in range(source.rank)]
    found = [b for b in scatter.reads if b.tensor in needed]
    cost = module.estimator.fill(size * source.rank)
    scatter.after.append(module.add(Instruction("reduce_window", after, found, numbers, cost=cost)))
    scatter.reads = [*(b for b in scatter.reads if b.tensor in kept or b.tensor not in needed), *numbers]
