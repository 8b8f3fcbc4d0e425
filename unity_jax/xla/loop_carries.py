"""What a loop carries is in one place before it, in it and behind it.

A `while` of XLA writes over its operands; what something else reads as well is copied for it
(https://github.com/openxla/xla/blob/main/xla/hlo/transforms/simplifiers/copy_insertion.cc).

    broadcast makes b1;  scan reads b1, makes b2   ->   broadcast makes b2;  scan reads b2
"""

from __future__ import annotations

from collections import Counter

from unity_jax.pcg.loops import Scan
from unity_jax.xla.module import Buffer, Instruction, Module


def loop_carries(module: Module) -> None:
    readers = Counter(b for i in module.instructions for b in i.reads)
    makers = {b: i for i in module.instructions for b in i.makes}
    for loop in module.instructions:
        if loop.opcode != "scan" or loop.kernel is None:
            continue
        root = loop.kernel.root
        roles, given = Scan.of(root.params), [module.base.get(t, t) for t in root.inputs]
        for t, last in zip(given[roles.carried], root.outputs[roles.last], strict=True):
            before = module.of.get(t)
            if before in makers and readers[before] == given.count(t) == 1 and not before.result:
                _in_place(loop, makers[before], before, module.of.get(last))


def _in_place(loop: Instruction, maker: Instruction, before: Buffer, after: Buffer | None) -> None:
    """Have a loop write over what it is given.

    **Arguments:** `maker`: of what the loop is given, `before`; `after`: what this is at the end, if that is read.
    """
    if after is None:
        loop.workspace -= before.size
    elif after in loop.makes and after.size == before.size:
        maker.makes[maker.makes.index(before)] = after
        loop.reads[loop.reads.index(before)] = after
        loop.makes.remove(after)
