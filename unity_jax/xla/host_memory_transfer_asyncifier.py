"""A copy from the host or to it runs beside other instructions: it is two, its start, and its done, which is awaited
(https://github.com/openxla/xla/blob/main/xla/service/host_memory_transfer_asyncifier.cc).

    from_host makes b0;  add reads b0, makes b1 in place   ->   from_host-start makes b0;  from_host-done reads b0;
                                                                add reads b0, makes b1

Copies are slow: a compiler that hides latencies computes all else meanwhile, so that every gradient is there before the
first weight is updated from a state on the host. XLA:TPU writes no result over what came so: of the fusion that updates
a weight only the weight itself is among the `aliasing_operands` (libtpu 0.0.42), and the new state is beside the old.
"""

from __future__ import annotations

from unity_jax.pcg.parallel import HOST
from unity_jax.xla.async_collective_creator import started
from unity_jax.xla.module import Buffer, Module


def host_memory_transfer_asyncifier(module: Module) -> None:
    before, module.instructions = module.instructions, []
    came: set[Buffer] = set()
    for i in before:
        if i.opcode in HOST:
            came.update(i.makes if i.opcode == "from_host" else ())
            i.cost = 1e6 * sum(b.size for b in (*i.reads, *i.makes)) / module.machine.device.host_bandwidth
            i.late = True
            module.add(started(i))
        elif not came.isdisjoint(i.reads):
            i.writes_over = False
        module.add(i)
