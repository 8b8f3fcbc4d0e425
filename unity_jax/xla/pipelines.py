"""The passes of each compiler behind fusion, in their order.

for run in PIPELINES["gpu"]:
    run(module)

A pass of XLA is in a row if it brings predicted memory nearer to what is compiled of the validation programs
(`experiments.tables.passes`). XLA:TPU hides latencies as well, but nearly in the order of its list scheduler
predictions are nearer: how far its latency-hiding scheduler reorders follows from details of fusions and of its
estimates, and beyond half of a memory limit it first keeps below that (`MemoryPressurePolicy` in
https://github.com/openxla/xla/blob/main/xla/service/latency_hiding_scheduler.cc). XLA:GPU combines collectives,
pipelines those of loops and gives cuBLAS memory as well; without that predictions are nearer.
"""

from __future__ import annotations

from collections.abc import Callable

from unity_jax.xla.async_collective_creator import async_collective_creator
from unity_jax.xla.collective_combiner import collective_combiner
from unity_jax.xla.horizontal_loop_fusion import horizontal_loop_fusion
from unity_jax.xla.host_memory_transfer_asyncifier import host_memory_transfer_asyncifier
from unity_jax.xla.host_offloader import host_offloader
from unity_jax.xla.latencies import latency_estimates, memory_latencies
from unity_jax.xla.latency_hiding_scheduler import latency_hiding_scheduler
from unity_jax.xla.list_scheduler import list_scheduler
from unity_jax.xla.loop_carries import loop_carries
from unity_jax.xla.loop_stacks import loop_stacks
from unity_jax.xla.memory_space_assignment import memory_space_assignment
from unity_jax.xla.module import Module
from unity_jax.xla.multi_output_fusion import multi_output_fusion
from unity_jax.xla.relayout import all_gather_relayout, table_relayout
from unity_jax.xla.select_and_scatter_expander import select_and_scatter_expander
from unity_jax.xla.space_to_batch_converter import space_to_batch_converter
from unity_jax.xla.tuple_elements import tuple_elements
from unity_jax.xla.while_loop_invariant_code_motion import while_loop_invariant_code_motion
from unity_jax.xla.zero_depth import start_at_zero_depth

Pass = Callable[[Module], None]

PIPELINES: dict[str, tuple[Pass, ...]] = {
    "cpu": (host_offloader, loop_stacks, loop_carries, multi_output_fusion, list_scheduler),
    "gpu": (
        select_and_scatter_expander,
        host_offloader,
        loop_stacks,
        loop_carries,
        horizontal_loop_fusion,
        multi_output_fusion,
        latency_estimates,
        async_collective_creator,
        host_memory_transfer_asyncifier,
        tuple_elements,
        list_scheduler,
        latency_hiding_scheduler,
    ),
    "tpu": (
        space_to_batch_converter,
        host_offloader,
        loop_carries,
        while_loop_invariant_code_motion,
        table_relayout,
        all_gather_relayout,
        memory_latencies,
        collective_combiner,
        host_memory_transfer_asyncifier,
        list_scheduler,
        start_at_zero_depth,
        memory_space_assignment,
    ),
}


def compiled(module: Module) -> Module:
    """A module after all passes of the compiler of its device, as are its bodies."""
    for run in PIPELINES[module.storage.device.compiler]:
        for inner in list(module.walk()):
            run(inner)
    return module
