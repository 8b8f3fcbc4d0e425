"""What the schedulers take instructions for: the latency estimator and the shape sizes of XLA.

dot_general   ->   dot_general  6.4 us
"""

from __future__ import annotations

from unity_jax.pcg.graph import trips
from unity_jax.xla.module import Module
from unity_jax.xla.op_classes import LOOPS, NOPS


def latency_estimates(module: Module) -> None:
    """How long each instruction takes
    (https://github.com/openxla/xla/blob/main/xla/service/gpu/model/sol_latency_estimator.cc)."""
    for i in module.instructions:
        if i.collectives:
            i.cost = module.estimator.collectives(i.collectives)
        elif i.kernel is not None:
            i.cost = module.estimator.kernel(i.kernel)


def loop_latencies(module: Module) -> None:
    """XLA:TPU takes a loop for as long as its iterations
    (https://github.com/openxla/xla/blob/main/xla/service/latency_hiding_scheduler.cc)."""
    for i in module.instructions:
        if i.bodies and i.kernel is not None:
            inner = [k for b in i.kernel.root.bodies for k in module.traffic.kernels[b]]
            i.cost = trips(i.kernel.root) * sum(map(module.estimator.kernel, inner))


def free_broadcasts(module: Module) -> None:
    """XLA:TPU takes broadcasts of their own for nothing, and runs them right before what reads them (`IsNopInstruction`
    in https://github.com/openxla/xla/blob/main/xla/service/latency_hiding_scheduler.cc)."""
    for i in module.instructions:
        i.at_once = i.kernel is not None and len(i.kernel.ops) == 1 and i.opcode in NOPS


def loop_sizes(module: Module) -> None:
    """XLA:GPU's list scheduler takes all that goes through a loop for made by it
    (https://github.com/openxla/xla/blob/main/xla/hlo/transforms/simplifiers/hlo_memory_scheduler.cc)."""
    for i in module.instructions:
        if i.kernel is not None and i.kernel.root.name in LOOPS:
            i.passes = sum(map(module.storage, (*i.kernel.reads, *i.kernel.root.outputs)))


def memory_latencies(module: Module) -> None:
    """How long XLA:TPU's memory space assignment takes instructions for, and which gain from operands on the chip
    (https://github.com/openxla/xla/blob/main/xla/service/memory_space_assignment/cost_analysis.cc)."""
    bandwidth = module.storage.device.memory_bandwidth
    for i in module.instructions:
        if module.is_collective(i):
            i.seconds = sum(b.size for b in (*i.reads, *i.makes)) / bandwidth
        elif i.bodies and i.kernel is not None:
            inner = [k for b in i.kernel.root.bodies for k in module.traffic.kernels[b]]
            seconds = sum(module.estimator.seconds(k)[0] for k in inner)
            i.seconds, i.streams = trips(i.kernel.root) * seconds, False
        elif i.kernel is not None:
            i.seconds, i.streams = module.estimator.seconds(i.kernel)
