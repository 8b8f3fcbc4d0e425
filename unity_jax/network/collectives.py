"""The collectives of a planned graph: what each op issues, and all of a step with the user's lines they serve."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from unity_jax.machine.machine import Machine
from unity_jax.network.communication import collective_seconds
from unity_jax.network.reshard import move_bytes
from unity_jax.pcg.graph import Graph, Op, Tensor, trips
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.pcg.parallel import Shift


@dataclass(frozen=True)
class Collective:
    """One collective of the plan.

    **Fields:** `kind`: all_gather, reduce_scatter, all_reduce, all_to_all or permute; `axes`: mesh axes; `bytes`: the
    larger of operand and result on one device; `count`: how often it stands in the program; `trips`: how often each
    runs in a step (more than once inside a loop); `seconds` of one run by itself, though the compiler may combine
    several (`combining`); `source`: the user's line it serves; `of`: the collective that is decomposed into permutes of
    which this is one.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    count: int
    trips: int
    seconds: float
    source: str
    of: str = ""


def op_collectives(op: Op, mesh: MeshAxes, machine: Machine, repeat: int = 1) -> Iterator[Collective]:
    """The collectives that one op issues (its bodies' not included)."""
    if (move := op.move) is not None:
        kind = move.collective
        if kind is not None:
            t = op.inputs[0]
            nbytes = move_bytes(move, t.shape, t.dtype, mesh)
            of, ways = (move.of, move.ways) if isinstance(move, Shift) else ("", 1)
            # Passes in different directions share the time of one.
            seconds = collective_seconds(machine, mesh, kind, nbytes / ways, move.axes)
            yield Collective(kind, move.axes, nbytes, 1, repeat, seconds, "", of)
    elif op.shard is not None and op.shard.rule.inner is not None:
        for c in op.shard.rule.inner(op.shard):
            seconds = collective_seconds(machine, mesh, c.kind, c.bytes, c.axes)
            yield Collective(c.kind, c.axes, c.bytes, 1, repeat, seconds, op.source)


def collectives(graph: Graph, mesh: MeshAxes, machine: Machine) -> tuple[Collective, ...]:
    """Every collective of a planned graph, equal ones merged, in order of total time."""
    counts: dict[tuple[object, ...], list[Collective]] = {}
    for c in _all_collectives(graph, mesh, machine, 1):
        counts.setdefault((c.kind, c.axes, c.bytes, c.trips, c.source, c.of, c.seconds), []).append(c)
    merged = (replace(c[0], count=len(c)) for c in counts.values())
    return tuple(sorted(merged, key=lambda c: (-c.seconds * c.count * c.trips, c.kind, c.axes, c.bytes, c.source)))


def _all_collectives(graph: Graph, mesh: MeshAxes, machine: Machine, repeat: int) -> Iterator[Collective]:
    served = serves(graph)
    for op in graph.ops:
        for body in op.bodies:
            yield from _all_collectives(body, mesh, machine, repeat * trips(op))
        for c in op_collectives(op, mesh, machine, repeat):
            user = served.get(op, op)
            source = c.source or (user.source if user is not None else "output")
            yield replace(c, source=source)


def serves(graph: Graph) -> dict[Op, Op | None]:
    """The op that each move is there for: the first that reads its result, through other ops without a line; None if
    the result leaves the graph."""
    reader: dict[Tensor, Op] = {}
    found: dict[Op, Op | None] = {}
    for op in reversed(graph.ops):
        if op.eqn is None:
            user = reader.get(op.outputs[0]) if op.outputs else None
            found[op] = found.get(user, user) if user is not None else None
        for t in op.inputs:
            reader[t] = op
    return found
