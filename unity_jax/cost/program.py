"""What a planned graph costs: time and collectives per device, by walking its kernels.

Costs of kernels add up. The same functions price the strategies of single ops inside the search.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from unity_jax.cost.communication import collective_seconds
from unity_jax.cost.compute import op_work, total
from unity_jax.cost.kernels import Counts, Kernel, Traffic
from unity_jax.cost.reshard import collective_kind, move_bytes
from unity_jax.machine.device import Device
from unity_jax.machine.machine import Machine
from unity_jax.ops.rule import Shard
from unity_jax.pcg.graph import Graph, Op, Tensor
from unity_jax.pcg.mesh import MeshAxes


@dataclass(frozen=True)
class Collective:
    """One collective of the plan.

    **Fields:** `kind`: all_gather, reduce_scatter, all_reduce, all_to_all or permute; `axes`: mesh axes; `bytes`: the
    larger of operand and result on one device; `count`: how often it stands in the program; `trips`: how often each
    runs in a step (more than once inside a loop); `seconds` of one run; `source`: the user's line it serves.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    count: int
    trips: int
    seconds: float
    source: str


@dataclass(frozen=True)
class ProgramCost:
    """Seconds of compute and communication in one step, and floating-point operations, per device."""

    compute_seconds: float
    communication_seconds: float
    flops: float


def trips(op: Op) -> int:
    """How often a body runs: the length of a scan; once for a branch, and for a while loop, whose count is unknown."""
    return int(op.params["length"]) if op.name == "scan" else 1


def local_bytes(tensor: Tensor, mesh: MeshAxes) -> int:
    """Bytes of one device's part of a planned tensor."""
    assert tensor.layout is not None
    return tensor.itemsize * math.prod(tensor.layout.local_shape(tensor.shape, mesh))


def shard_seconds(shard: Shard, machine: Machine, counts: Counts, launches: int) -> float:
    """Seconds of one op under one strategy, its own collectives included; `counts`, `launches`: as in `Traffic`."""
    seconds = op_work(shard, machine.device, counts, launches).seconds(machine.device)
    if shard.rule.inner is not None:
        inner = shard.rule.inner(shard)
        seconds += sum(collective_seconds(machine, shard.mesh, c.kind, c.bytes, c.axes) for c in inner)
    return seconds


def kernel_seconds(kernel: Kernel, device: Device) -> float:
    """Seconds of the local program of a planned kernel; nothing for a collective, a loop or a branch."""
    works = [op_work(op.shard, device, kernel.counts[op], 0) for op in kernel.ops if op.shard is not None]
    work = total(works)
    return work._replace(launches=1).seconds(device) if any(work) else 0.0


def program_cost(graph: Graph, mesh: MeshAxes, machine: Machine) -> ProgramCost:
    """The summed cost of a planned graph."""
    device = machine.device
    traffic = Traffic.of(graph, device.compiler)
    compute = communication = flops = 0.0
    for inner, repeat in graphs_repeated(graph):
        compute += repeat * sum(kernel_seconds(k, device) for k in traffic.kernels[inner])
        for op in inner.ops:
            communication += repeat * sum(c.seconds for c in op_collectives(op, mesh, machine))
            flops += repeat * op.shard.flops if op.shard is not None else 0.0
    return ProgramCost(compute, communication, flops)


def graphs_repeated(graph: Graph, repeat: int = 1) -> Iterator[tuple[Graph, int]]:
    """A graph and all its bodies, with how often each runs in a step."""
    yield graph, repeat
    for op in graph.ops:
        for body in op.bodies:
            yield from graphs_repeated(body, repeat * trips(op))


def op_collectives(op: Op, mesh: MeshAxes, machine: Machine, repeat: int = 1) -> Iterator[Collective]:
    """The collectives that one op issues (its bodies' not included)."""
    if (move := op.params.get("move")) is not None:
        kind = collective_kind(move)
        if kind is not None:
            t = op.inputs[0]
            nbytes = move_bytes(move, t.shape, t.dtype, mesh)
            yield Collective(
                kind, move.axes, nbytes, 1, repeat, collective_seconds(machine, mesh, kind, nbytes, move.axes), ""
            )
    elif op.shard is not None and op.shard.rule.inner is not None:
        for c in op.shard.rule.inner(op.shard):
            seconds = collective_seconds(machine, mesh, c.kind, c.bytes, c.axes)
            yield Collective(c.kind, c.axes, c.bytes, 1, repeat, seconds, op.source)


def collectives(graph: Graph, mesh: MeshAxes, machine: Machine) -> tuple[Collective, ...]:
    """Every collective of a planned graph, equal ones merged, in order of total time."""
    counts: dict[tuple[object, ...], list[Collective]] = {}
    for c in _all_collectives(graph, mesh, machine, 1):
        counts.setdefault((c.kind, c.axes, c.bytes, c.trips, c.source), []).append(c)
    merged = (
        Collective(c[0].kind, c[0].axes, c[0].bytes, len(c), c[0].trips, c[0].seconds, c[0].source)
        for c in counts.values()
    )
    return tuple(sorted(merged, key=lambda c: (-c.seconds * c.count * c.trips, c.kind, c.axes, c.bytes, c.source)))


def _all_collectives(graph: Graph, mesh: MeshAxes, machine: Machine, repeat: int) -> Iterator[Collective]:
    consumer: dict[Tensor, Op] = {}
    for op in reversed(graph.ops):
        consumer.update((t, op) for t in op.inputs)
    for op in graph.ops:
        for body in op.bodies:
            yield from _all_collectives(body, mesh, machine, repeat * trips(op))
        for c in op_collectives(op, mesh, machine, repeat):
            source, user = c.source, op
            while not source and user is not None:  # a move serves the op that reads its result, through other moves
                user = consumer.get(user.outputs[0]) if user.outputs else None
                source = user.source if user is not None else "output"
            yield Collective(c.kind, c.axes, c.bytes, c.count, c.trips, c.seconds, source)
