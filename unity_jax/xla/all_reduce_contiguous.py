"""XLA:GPU copies what one all-reduce sums to one array before, and out of it after
(https://github.com/openxla/xla/blob/main/xla/service/all_reduce_contiguous.cc).

    all-reduce of b0 b1   ->   concatenate b0 b1 to b2;  all-reduce of b2 to b3;  slices of b3 to b0' b1'
"""

from __future__ import annotations

from unity_jax.xla.module import Buffer, Instruction, Module


def all_reduce_contiguous(module: Module) -> None:
    sliced: dict[Buffer, Instruction] = {}  # what copies a result
    dones: set[Instruction] = set()
    for done in module.combined:
        start = done.start
        if start is None or not done.sums:
            continue
        made, nbytes = start.makes, sum(b.size for b in start.makes)
        whole, summed = Buffer(made[0].tensor, nbytes), Buffer(made[0].tensor, nbytes)
        joined = module.add(Instruction("concatenate", start.after, start.reads, [whole]))
        start.after, start.reads, start.makes, done.reads = [joined], [whole], [summed], [summed]
        sliced.update((b, module.add(Instruction("slice", [done], [summed], [b]))) for b in made)
        dones.add(done)
    late = {*sliced.values()}
    for i in module.instructions:
        if i not in late and not dones.isdisjoint(i.after):
            i.after = list(dict.fromkeys((*i.after, *(sliced[b] for b in i.reads if b in sliced))))
