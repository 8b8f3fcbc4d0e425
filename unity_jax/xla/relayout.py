"""XLA:TPU copies what an instruction reads or makes in another layout than it has
(https://github.com/openxla/xla/blob/main/xla/service/layout_assignment.cc).

    gather reads an argument   ->   copy of it to b0, which is padded otherwise;  gather reads b0

The rows of a table that is gathered from or scattered to are along the lanes inside of a program, and not in its
arguments and results. What is gathered of parts that are no whole tiles is put together by a copy.
"""

from __future__ import annotations

from unity_jax.xla.copies import read_copy
from unity_jax.xla.module import Buffer, Instruction, Module


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
        if i.kernel is None or i.collectives:
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
        if i.opcode == "combine" and i.kernel is not None:
            root = i.kernel.root
            if root.move is not None and not module.storage.in_tiles(root.outputs[0], root.move):
                whole, i.makes = i.makes, [Buffer(b.tensor, module.storage(b.tensor)) for b in i.makes]
                for b in whole:
                    module.maker[b.tensor] = module.add(Instruction("copy", [i], i.makes, [b]))
