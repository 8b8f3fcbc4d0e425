"""XLA:TPU copies what an instruction reads or makes in another layout than it has
(https://github.com/openxla/xla/blob/main/xla/service/layout_assignment.cc).

    dot_general reads b0   ->   copy of b0 to b1, which is padded otherwise;  dot_general reads b1

Scatters want rows: what they broadcast is part of an array with its long dimension last, the batch of products (DLRM's
plans). The rows of a table that is gathered from or scattered to are along the lanes inside of a program, and not in
its arguments and results. What is gathered of parts that are no whole tiles is put together by a copy.
"""

from __future__ import annotations

from unity_jax.ops.indexing import is_scatter
from unity_jax.pcg.graph import Tensor
from unity_jax.xla.copies import read_copy
from unity_jax.xla.fusion import Kernel
from unity_jax.xla.layout_constraints import is_partition
from unity_jax.xla.module import Buffer, Instruction, Module
from unity_jax.xla.op_classes import is_batched


def relayout(module: Module) -> None:
    """Copies of operands of scatters and of batched dots."""
    before, module.instructions = module.instructions, []
    for i in before:
        for t, size in _operands(module, i.kernel).items() if i.kernel is not None else ():
            read_copy(module, i, t, size)
        module.add(i)


def _operands(module: Module, kernel: Kernel) -> dict[Tensor, float]:
    """The operands that lie otherwise where they are read, and their bytes there."""
    root, graph, storage = kernel.root, module.graph, module.storage
    if root.name == "broadcast_in_dim" and any(
        is_scatter(op) and root.outputs[0] is op.inputs[2] for op in graph.readers.get(root.outputs[0], ())
    ):
        return {t: storage(t) for t in kernel.reads if t in module.of}
    found: dict[Tensor, float] = {}
    for t in root.inputs if is_batched(root) else ():
        made_by = graph.producer.get(t)
        while made_by in kernel.ops and (is_partition(made_by) or made_by.name == "transpose"):
            (t,) = made_by.inputs
            made_by = graph.producer.get(t)
        base, size = module.base.get(t, t), storage.multiplied(t)
        if base in kernel.reads and base in module.of and size > storage(base):
            found[base] = size
    return found


def table_relayout(module: Module) -> None:
    """Copies of tables: of arguments into rows, and of rows into results."""
    tables, before = module.storage.tables, module.instructions
    if not tables:
        return
    module.instructions = []
    for i in before:
        for t in i.kernel.reads if i.kernel is not None else ():
            if t in module.inputs and t.shape in tables:
                read_copy(module, i, t, module.storage.rows(t))
        module.add(i)
        if i.kernel is None or module.is_collective(i):
            continue
        for at, b in enumerate(i.makes):
            if b.tensor.shape in tables and b.tensor in module.outputs:
                i.makes[at] = Buffer(b.tensor, module.storage.rows(b.tensor))
                module.maker[b.tensor] = module.add(Instruction("copy", [i], [i.makes[at]], [b]))


def all_gather_relayout(module: Module) -> None:
    """Copies of what is gathered of parts that are no whole tiles."""
    before, module.instructions = module.instructions, []
    for i in before:
        module.add(i)
        if i.opcode == "combine" and i.kernel is not None and module.is_collective(i):
            root = i.kernel.root
            if root.move is not None and not module.storage.in_tiles(root.outputs[0], root.move):
                whole, i.makes = i.makes, [Buffer(b.tensor, module.storage(b.tensor)) for b in i.makes]
                for b in whole:
                    module.maker[b.tensor] = module.add(Instruction("copy", [i], i.makes, [b]))
