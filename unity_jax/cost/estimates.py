"""What kernels and collectives take in the eyes of the compilers that order them, in microseconds.

XLA:GPU has an estimate for each on Hopper (`SolLatencyEstimator` in
https://github.com/openxla/xla/blob/main/xla/service/gpu/model/sol_latency_estimator.cc); ours stand for it. What
XLA:TPU estimates is not known: all kernels are alike, and five run beside a collective.
"""

from __future__ import annotations

from unity_jax.cost.kernels import Kernel
from unity_jax.cost.program import kernel_seconds, op_collectives
from unity_jax.machine.machine import Machine
from unity_jax.pcg.graph import Op
from unity_jax.pcg.mesh import MeshAxes

_UNKNOWN, _KERNEL, _COLLECTIVE = 0.01, 1000.0, 5000.0


def kernel_microseconds(kernel: Kernel, machine: Machine) -> float:
    """Of a kernel. XLA:GPU knows nothing of loops and of the convolutions of a library. Two digits, so that equal
    kernels are equal."""
    if machine.device.compiler == "tpu":
        return _KERNEL
    if kernel.root.bodies or (kernel.root.name == "conv_general_dilated" and machine.device.compiler == "gpu"):
        return _UNKNOWN
    return max(float(f"{1e6 * kernel_seconds(kernel, machine.device):.1e}"), _UNKNOWN)


def collective_microseconds(op: Op, mesh: MeshAxes, machine: Machine) -> float:
    """Of the collectives of an op, from their start to their end."""
    if machine.device.compiler == "tpu":
        return _COLLECTIVE
    return 1e6 * sum(c.seconds for c in op_collectives(op, mesh, machine))
