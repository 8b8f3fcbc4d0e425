"""Arrays in the memory of the host: how they cross the boundary of a program, and what compilers make of them.

    NamedSharding(mesh, P("x"), memory_kind="pinned_host")     what an argument or a result there has
    jax.device_put(x, jax.memory.Space.Device)                 inside the `shard_map`, where it is read

Seen in what is compiled with jaxlib 0.10.2 and libtpu 0.0.42 for H100 and v5e: donated arguments there give their
memory to results there, but what a loop stacks there is another array of the host until the loop ends. XLA:GPU makes no
copy of an argument: the kernels that read it do so through the link, as they run; results are copied beside other
kernels. XLA:TPU copies both ways beside other instructions, and begins as early as its memory allows. So that not most
of the state is on the device at once, barriers hold it back (`search.in_turn`). XLA:CPU runs all this, in one memory.
"""

from __future__ import annotations

from typing import Any

from jax.sharding import Mesh, NamedSharding

from unity_jax.errors import PlanError
from unity_jax.pcg.layout import Layout

KIND = "pinned_host"
"""JAX's name for memory of the host that devices can read."""


def sharding(mesh: Any, layout: Layout, on_host: bool = False) -> NamedSharding:
    """How an array lies that enters or leaves a program. Raises `PlanError` where it is on the host, and the devices of
    the mesh cannot reach the memory there."""
    if not on_host:
        return NamedSharding(mesh, layout.spec())
    kinds = {m.kind for m in mesh.devices.flat[0].addressable_memories()} if isinstance(mesh, Mesh) else set()
    if kinds and KIND not in kinds:  # devices that are not there may not say
        raise PlanError(
            f"the plan keeps state in the memory of the host ({KIND}), which {mesh.devices.flat[0]} has no access to "
            f"(only to {', '.join(sorted(kinds))}): plan again for a machine= with host_bandwidth=0"
        )
    return NamedSharding(mesh, layout.spec(), memory_kind=KIND)
