"""XLA:TPU gathers no result in the place of a donated argument
(https://github.com/openxla/xla/blob/main/xla/service/copy_insertion.cc).

    dot reads p;  combine makes p'   ->   copy of p to b0;  dot reads b0;  combine makes b1, which lasts

What reads the argument reads a copy of it, made at the start of the step, and the gathered array is copied to its place
at the end. In between the place is free for others (`buffer_assignment`).
"""

from __future__ import annotations

from unity_jax.pcg.graph import Tensor
from unity_jax.xla.copies import read_copy
from unity_jax.xla.module import Module


def copy_insertion(module: Module) -> None:
    replaced = {a: t for t, a in module.replacing.items() if _is_gathered(module, t)}
    if not replaced:
        return
    read = {module.arguments[t]: t for t in replaced if t in module.arguments}
    before, module.instructions = module.instructions, []
    for i in before:
        for t in [read[a] for a in i.after if a in read]:
            copy = read_copy(module, i, t, module.storage(t))
            copy.frees = module.storage.outside(t)
        module.add(i)
    for t in replaced.values():
        module.of[t].result, module.of[t].lasting = False, True


def copies_first(module: Module) -> None:
    """Copies of donated arguments are made at the start of the step."""
    module.schedule.sort(key=lambda i: not i.frees)


def _is_gathered(module: Module, t: Tensor) -> bool:
    made_by = module.graph.producer.get(t)
    return made_by is not None and made_by.move is not None and made_by.move.kind == "combine"
