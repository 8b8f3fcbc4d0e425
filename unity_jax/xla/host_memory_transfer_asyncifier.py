"""A copy from the host or to it runs beside other instructions: it is two, its start, and its done, which is awaited
(https://github.com/openxla/xla/blob/main/xla/service/host_memory_transfer_asyncifier.cc).

    from_host makes b0   ->   from_host-start makes b0;  from_host-done reads b0

Copies are slow: a compiler that hides latencies computes all else meanwhile, so that every gradient is there before the
first weight is updated from a state on the host.
"""

from __future__ import annotations

from unity_jax.pcg.parallel import HOST
from unity_jax.xla.async_collective_creator import started
from unity_jax.xla.module import Module


def host_memory_transfer_asyncifier(module: Module) -> None:
    before, module.instructions = module.instructions, []
    for i in before:
        if i.opcode in HOST:
            i.cost = 1e6 * sum(b.size for b in (*i.reads, *i.makes)) / module.machine.device.host_bandwidth
            i.late = True
            module.add(started(i))
        module.add(i)
