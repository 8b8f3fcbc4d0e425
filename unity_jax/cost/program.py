"""What planned ops and kernels cost: seconds and operations per device.

The same functions price the strategies of single ops inside the search; `timeline` puts the kernels together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from unity_jax.cost.compute import Work, op_work, total
from unity_jax.machine.device import Device
from unity_jax.machine.machine import Machine
from unity_jax.network.communication import collective_seconds
from unity_jax.ops.rule import Shard
from unity_jax.pcg.graph import Graph, Tensor, nested
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.xla.kernel import Kernel, Use
from unity_jax.xla.op_classes import KERNELS, PRODUCTS


def local_bytes(tensor: Tensor, mesh: MeshAxes) -> int:
    """Bytes of one device's part of a planned tensor."""
    assert tensor.layout is not None
    return tensor.itemsize * math.prod(tensor.layout.local_shape(tensor.shape, mesh))


def host_seconds(tensors: Iterable[Tensor], mesh: MeshAxes, device: Device) -> float:
    """Seconds to copy planned tensors from the host, or to it."""
    return sum(local_bytes(t, mesh) for t in tensors) / device.host_bandwidth


def strategy_seconds(shard: Shard, machine: Machine, use: Use) -> tuple[float, float]:
    """Seconds of one op under one strategy: its own collectives and its arithmetic; and those that it adds at least to
    any step: all of a matmul or of a kernel of ours, elsewhere the memory traffic, which no other part of the
    device does meanwhile for the ops of the same kernel; nothing where it rides along with a matmul.

    Which ops share a kernel, its start, and how arrays lie depends on the plan.
    """
    inner = shard.rule.inner(shard) if shard.rule.inner is not None else ()
    communication = sum(collective_seconds(machine, shard.mesh, c.kind, c.bytes, c.axes) for c in inner)
    work = op_work(shard, machine.device, use)
    least = op_work(shard, machine.device, use._replace(rows=())) if use.rows else work
    if shard.op.name in PRODUCTS | KERNELS:
        sure = least._replace(swept=0.0, turned=0.0).seconds(machine.device)
    else:
        sure = 0.0 if use.rides else least.memory
    return work.seconds(machine.device) + communication, sure


def kernel_work(kernel: Kernel, device: Device) -> Work:
    """The work of the local program of a planned kernel; none for a collective, a loop or a branch. What needs no
    operand is written ahead, and takes no start of its own."""
    work = total(op_work(op.shard, device, kernel.use(op, 0)) for op in kernel.ops if op.shard is not None)
    return work._replace(launches=int(bool(kernel.reads) and any(work)))


def kernel_seconds(kernel: Kernel, device: Device) -> float:
    """Seconds of the local program of a planned kernel (`kernel_work`)."""
    return kernel_work(kernel, device).seconds(device)


def program_flops(graph: Graph) -> float:
    """Floating-point operations of one step on one device."""
    return sum(
        repeat * op.shard.flops
        for _, inner, repeat in nested(graph)
        for op in inner.ops
        if op.shard is not None and not op.bodies
    )
