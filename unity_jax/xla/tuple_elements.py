"""XLA:GPU writes nothing in the place of an element of a tuple: what reads that reads a `get-tuple-element`, and a
buffer is shared only with an instruction that reads the one which makes it (`HeapSimulator::RunComputation` in
https://github.com/openxla/xla/blob/main/xla/service/heap_simulator/heap_simulator.cc).

    dot makes b1;  tanh reads b1, in place   ->   tanh has a buffer of its own

Tuples are made by fusions of several results, by cuBLAS, which returns its workspace, by collectives that run beside
others, and by loops. Convolutions return theirs, too, but cuDNN computes what follows of a bias and a rectifier. What a
scatter adds to is its result, wherever it comes from (`GetInPlaceInputOutputPairs` in
https://github.com/openxla/xla/blob/main/xla/hlo/analysis/alias_info.cc).
"""

from __future__ import annotations

from unity_jax.ops.numbers import is_scatter
from unity_jax.xla.module import Instruction, Module


def tuple_elements(module: Module) -> None:
    for i in module.instructions:
        if _is_tuple(i):
            for b in i.makes:
                b.in_tuple = True
    for i in module.instructions:
        if i.kernel is not None and is_scatter(i.kernel.root):
            total = i.kernel.root.inputs[0]
            for b in i.reads:
                b.in_tuple &= b.tensor is not module.base.get(total, total)


def _is_tuple(i: Instruction) -> bool:
    is_dot = i.kernel is not None and i.kernel.root.name == "dot_general"
    return len(i.makes) > 1 or bool(i.bodies) or is_dot or i.opcode.endswith("-start")
