"""What XLA takes instructions for: its latency estimators.

dot_general   ->   dot_general  6.4 us
"""

from __future__ import annotations

from unity_jax.pcg.graph import trips
from unity_jax.xla.module import Module


def latency_estimates(module: Module) -> None:
    """How long each instruction takes
    (https://github.com/openxla/xla/blob/main/xla/service/gpu/model/sol_latency_estimator.cc)."""
    for i in module.instructions:
        if i.collectives:
            i.cost = module.estimator.collectives(i.collectives)
        elif i.kernel is not None:
            i.cost = module.estimator.kernel(i.kernel)


def memory_latencies(module: Module) -> None:
    """How long XLA:TPU's memory space assignment takes instructions for, and which gain from operands on the chip
    (https://github.com/openxla/xla/blob/main/xla/service/memory_space_assignment/cost_analysis.cc)."""
    bandwidth = module.storage.device.memory_bandwidth
    for i in module.instructions:
        if i.collectives:
            i.seconds = sum(b.size for b in (*i.reads, *i.makes)) / bandwidth
        elif i.bodies and i.kernel is not None:
            inner = [k for b in i.kernel.root.bodies for k in module.traffic.kernels[b]]
            seconds = sum(module.estimator.seconds(k)[0] for k in inner)
            i.seconds, i.streams = trips(i.kernel.root) * seconds, False
        elif i.kernel is not None:
            i.seconds, i.streams = module.estimator.seconds(i.kernel)
