"""The passes of each compiler behind fusion, in their order: what a compiler does not do is not in its row.

for run in PIPELINES["gpu"]:
    run(module)
"""

from __future__ import annotations

from collections.abc import Callable

from unity_jax.xla.all_reduce_contiguous import all_reduce_contiguous
from unity_jax.xla.async_collective_creator import async_collective_creator
from unity_jax.xla.buffer_assignment import buffer_assignment
from unity_jax.xla.collective_combiner import collective_combiner
from unity_jax.xla.collective_pipeliner import collective_pipeliner
from unity_jax.xla.copy_insertion import copies_first, copy_insertion
from unity_jax.xla.gemm_rewriter import gemm_rewriter
from unity_jax.xla.horizontal_loop_fusion import horizontal_loop_fusion
from unity_jax.xla.latencies import (
    free_broadcasts,
    latency_estimates,
    loop_latencies,
    loop_sizes,
    memory_latencies,
)
from unity_jax.xla.latency_hiding_scheduler import latency_hiding_scheduler
from unity_jax.xla.list_scheduler import list_scheduler
from unity_jax.xla.loop_stacks import loop_stacks
from unity_jax.xla.memory_space_assignment import memory_space_assignment
from unity_jax.xla.module import Module
from unity_jax.xla.multi_output_fusion import multi_output_fusion
from unity_jax.xla.reduce_scatter_decomposer import reduce_scatter_decomposer
from unity_jax.xla.relayout import all_gather_relayout, relayout, table_relayout
from unity_jax.xla.softmax_rewriter import softmax_rewriter
from unity_jax.xla.tree_reduction_rewriter import tree_reduction_rewriter
from unity_jax.xla.while_loop_invariant_code_motion import while_loop_invariant_code_motion

Pass = Callable[[Module], None]

PIPELINES: dict[str, tuple[Pass, ...]] = {
    "cpu": (loop_stacks, multi_output_fusion, latency_estimates, list_scheduler),
    "gpu": (
        loop_stacks,
        collective_pipeliner,
        horizontal_loop_fusion,
        multi_output_fusion,
        softmax_rewriter,
        gemm_rewriter,
        latency_estimates,
        tree_reduction_rewriter,
        loop_sizes,
        async_collective_creator,
        collective_combiner,
        all_reduce_contiguous,
        list_scheduler,
        latency_hiding_scheduler,
    ),
    "tpu": (
        multi_output_fusion,
        reduce_scatter_decomposer,
        while_loop_invariant_code_motion,
        relayout,
        table_relayout,
        copy_insertion,
        all_gather_relayout,
        latency_estimates,
        loop_latencies,
        free_broadcasts,
        memory_latencies,
        async_collective_creator,
        collective_combiner,
        list_scheduler,
        latency_hiding_scheduler,
        copies_first,
        memory_space_assignment,
        buffer_assignment,
    ),
}


def compiled(module: Module) -> Module:
    """A module after all passes of the compiler of its device, as are its bodies."""
    for inner in list(module.walk()):
        for run in PIPELINES[module.storage.device.compiler]:
            run(inner)
    return module
