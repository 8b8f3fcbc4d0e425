"""What a planned graph costs: time, collectives and peak memory per device, by walking its ops.

Costs of ops add up; memory is peak liveness. The same per-op functions price strategies inside the search.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from unity_jax.cost.communication import collective_seconds
from unity_jax.cost.compute import op_seconds
from unity_jax.cost.reshard import collective_kind, move_bytes
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


Mask = tuple[bool, ...]
"""Per operand and result of an op: whether it reaches memory."""


def written_mask(op: Op, written: set[Tensor]) -> Mask:
    """Which operands and results of a traced op are in `written`."""
    return tuple(t in written for t in (*op.inputs, *op.outputs))


def shard_seconds(shard: Shard, machine: Machine, mask: Mask) -> float:
    """Seconds of one op's local program, one thing after the other: its own collectives, then its arithmetic."""
    inner = shard.rule.inner(shard) if shard.rule.inner is not None else ()
    communication = sum(collective_seconds(machine, shard.mesh, c.kind, c.bytes, c.axes) for c in inner)
    return compute_seconds(shard, machine, mask) + communication


def compute_seconds(shard: Shard, machine: Machine, mask: Mask) -> float:
    """Seconds of one op's arithmetic; only tensors in the mask cost memory traffic."""
    op, mesh = shard.op, shard.mesh
    if op.outputs and all(t.rank == 0 for t in (*op.inputs, *op.outputs)):
        return 0.0  # scalar arithmetic: far below a kernel's launch, and fused
    if shard.rule.bytes is not None:
        nbytes = shard.rule.bytes(shard)
    else:
        tensors, layouts = (*op.inputs, *op.outputs), (*shard.operand_layouts, *shard.result_layouts)
        nbytes = 0.0
        for t, layout, counted in zip(tensors, layouts, mask, strict=True):
            if counted:
                nbytes += t.itemsize * math.prod(layout.local_shape(t.shape, mesh))
    if not nbytes:
        return 0.0
    return op_seconds(machine, shard.flops, nbytes, op.outputs[0].dtype if op.outputs else "float32")


def program_cost(graph: Graph, mesh: MeshAxes, machine: Machine, written: set[Tensor]) -> ProgramCost:
    """The summed cost of a planned graph."""
    known: dict[tuple[Shard, Mask], float] = {}
    compute = communication = flops = 0.0
    for op, repeat in walk_repeated(graph):
        if op.shard is not None and op.traced is not None:
            key = (op.shard, written_mask(op.traced, written))
            if key not in known:
                known[key] = compute_seconds(op.shard, machine, key[1])
            compute += repeat * known[key]
            flops += repeat * op.shard.flops
        if not op.bodies:
            communication += repeat * sum(c.seconds for c in op_collectives(op, mesh, machine))
    return ProgramCost(compute, communication, flops)


def walk_repeated(graph: Graph, repeat: int = 1) -> Iterator[tuple[Op, int]]:
    """Every op, those of bodies included, with how often it runs in a step."""
    for op in graph.ops:
        for body in op.bodies:
            yield from walk_repeated(body, repeat * trips(op))
        yield op, repeat


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
    served = serves(graph)
    for op in graph.ops:
        for body in op.bodies:
            yield from _all_collectives(body, mesh, machine, repeat * trips(op))
        for c in op_collectives(op, mesh, machine, repeat):
            user = served.get(op, op)
            source = c.source or (user.source if user is not None else "output")
            yield Collective(c.kind, c.axes, c.bytes, c.count, c.trips, c.seconds, source)


def serves(graph: Graph) -> dict[Op, Op | None]:
    """The op that each move is there for: the first that reads its result, through other ops without a line; None if
    the result leaves the graph."""
    reader: dict[Tensor, Op] = {}
    found: dict[Op, Op | None] = {}
    for op in reversed(graph.ops):
        if op.eqn is None:
            user = reader.get(op.outputs[0]) if op.outputs else None
            found[op] = found.get(user, user) if user is not None else None
        reader.update((t, op) for t in op.inputs)
    return found


@dataclass(frozen=True)
class Memory:
    """Peak bytes per device, and what is alive at the peak, largest first."""

    peak_bytes: int
    alive: tuple[tuple[Tensor, int], ...]


def memory(graph: Graph, mesh: MeshAxes, written: set[Tensor], donated: Sequence[int]) -> Memory:
    """Peak liveness of a planned graph.

    **Arguments:** `donated`: indices of inputs whose memory may be reused after their last use; others live throughout.
    """
    sizes: dict[Tensor, int] = {t: local_bytes(t, mesh) for t in graph.inputs}
    last: dict[Tensor, int] = {}
    for i, op in enumerate(graph.ops):
        last.update((t, i) for t in op.inputs)
    end = len(graph.ops)
    last.update((t, end) for t in graph.outputs)
    last.update((t, end) for i, t in enumerate(graph.inputs) if i not in set(donated))
    dying: dict[int, list[Tensor]] = {}
    for t, i in last.items():
        dying.setdefault(i, []).append(t)
    alive = dict(sizes)
    for t in graph.inputs:
        if t not in last:
            alive.pop(t, None)
    total = sum(alive.values())
    peak, at_peak = total, dict(alive)
    for i, op in enumerate(graph.ops):
        for t, twin in zip(op.outputs, _twins(op), strict=True):
            if twin not in written and op.shard is not None:
                continue
            if op.name == "optimization_barrier" or (op.params.get("move") and op.params["move"].kind == "partition"):
                continue  # an alias, or a slice that fuses into its consumer
            alive[t] = local_bytes(t, mesh)
            total += alive[t]
        inside = max((_inside(body, mesh, written) for body in op.bodies), default=0)
        if total + inside > peak:
            peak, at_peak = total + inside, dict(alive)
        for t in dying.get(i, ()):
            total -= alive.pop(t, 0)
    ranked = sorted(at_peak.items(), key=lambda item: -item[1])
    return Memory(peak, tuple(ranked[:50]))


def _twins(op: Op) -> Sequence[Tensor]:
    """The traced tensors that a planned op's results stand for."""
    return op.traced.outputs if op.traced is not None else op.outputs


def _inside(body: Graph, mesh: MeshAxes, written: set[Tensor]) -> int:
    """Bytes that a body needs beyond its operands, which its caller holds."""
    inputs = sum(local_bytes(t, mesh) for t in body.inputs)
    return memory(body, mesh, written, ()).peak_bytes - inputs
