"""Time of one op on one device (the slowest): the roofline of arithmetic and memory traffic, plus a kernel's start."""

from __future__ import annotations

from typing import Any

from unity_jax.machine.machine import Machine


def op_seconds(machine: Machine, flops: float, nbytes: float, dtype: Any) -> float:
    """Seconds of an op with `flops` operations in `dtype` that moves `nbytes` through device memory.

    Williams, Waterman, Patterson: Roofline (https://doi.org/10.1145/1498765.1498785): the slower of the two binds.
    """
    device = machine.device
    return device.kernel_overhead + max(flops / device.flops_per_second(dtype), nbytes / device.memory_bandwidth)
