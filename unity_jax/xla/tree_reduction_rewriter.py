"""XLA:GPU takes two kernels for what it reduces too much for one
(https://github.com/openxla/xla/blob/main/xla/service/gpu/transforms/tree_reduction_rewriter.h).

    reduce_sum reads b0, makes b1   ->   reduce reads b0, makes b2;  reduce_sum reads b2, makes b1
"""

from __future__ import annotations

import math

from unity_jax.pcg.graph import Op
from unity_jax.xla.layout_assignment import Storage
from unity_jax.xla.module import Buffer, Instruction, Module
from unity_jax.xla.op_classes import REDUCTIONS
from unity_jax.xla.schedule import BETWEEN


def tree_reduction_rewriter(module: Module) -> None:
    before, module.instructions = module.instructions, []
    for i in before:
        if i.kernel is not None and (size := part_bytes(i.kernel.root, module.storage)):
            ends = {*i.kernel.root.outputs}
            part = Buffer(i.kernel.root.outputs[0], size)
            beside = [b for b in i.makes if b.tensor not in ends]
            first = Instruction("reduce", i.after, i.reads, [part, *beside], None, i.cost, writes_over=i.writes_over)
            module.maker.update(dict.fromkeys((t for t in i.kernel.writes if t not in ends), module.add(first)))
            i.after, i.reads, i.makes, i.cost = [first], [part], [b for b in i.makes if b.tensor in ends], BETWEEN
        module.add(i)


def part_bytes(root: Op, storage: Storage) -> float:
    """Bytes of what the first kernel of a reduction makes; 0 for what one kernel reduces."""
    if root.name not in REDUCTIONS or not root.params.get("axes"):
        return 0.0
    (operand, *_), result = root.inputs, root.outputs[0]
    last = operand.rank - 1 in root.params["axes"]
    kept = math.prod(storage.local(result))
    reduced = math.prod(storage.local(operand)) / max(kept, 1)
    return kept * math.sqrt(reduced) * result.itemsize if reduced > (2**14 if last else 2**12) else 0.0
