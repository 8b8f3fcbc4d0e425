"""What a loop carries is in one place before it, in it and behind it.

A `while` of XLA writes over its operands; what something else reads as well is copied for it
(https://github.com/openxla/xla/blob/main/xla/hlo/transforms/simplifiers/copy_insertion.cc).

    broadcast makes b1;  scan reads b1, makes b2   ->   broadcast makes b2;  scan reads b2
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from unity_jax.pcg.loops import Scan
from unity_jax.xla.module import Buffer, Module


def loop_carries(module: Module) -> None:
    readers = Counter(b for i in module.instructions for b in i.reads)
    makes = {b for i in module.instructions for b in i.makes}
    place = dict[Buffer, Buffer]()  # of what a loop is given, that of what this is at the end
    for loop in module.instructions:
        if loop.opcode != "scan" or loop.kernel is None:
            continue
        root = loop.kernel.root
        roles, given = Scan.of(root.params), [module.base.get(t, t) for t in root.inputs]
        for t, last in zip(given[roles.carried], root.outputs[roles.last], strict=True):
            before, after = module.of.get(t), module.of.get(last)
            if before not in makes or not readers[before] == given.count(t) == 1 or before.result:
                continue
            if after is None:
                loop.workspace -= before.size
            elif after in loop.makes and after.size == before.size:
                loop.makes.remove(after)
                place[before] = after
    for i in module.instructions if place else ():
        i.reads, i.makes = ([_final(b, place) for b in some] for some in (i.reads, i.makes))


def _final(b: Buffer, place: Mapping[Buffer, Buffer]) -> Buffer:
    while b in place:
        b = place[b]
    return b
