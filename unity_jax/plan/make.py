"""From a candidate of the search to the plan that stands for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from unity_jax.cost.layers import simulated
from unity_jax.cost.program import local_bytes, program_flops
from unity_jax.cost.tasks import DEVICE_TO_HOST, HOST_TO_DEVICE, Task
from unity_jax.machine.device import differences
from unity_jax.machine.machine import Machine
from unity_jax.network.collectives import collectives
from unity_jax.pcg.graph import Op, Tensor, with_layout
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.plan.plan import Plan
from unity_jax.plan.record import to_record
from unity_jax.plan.value import Leaf, Predicted
from unity_jax.plan.whole import replicated
from unity_jax.residuals.record import Offload, Saving, Spill
from unity_jax.rewrite.packing import Group, apart
from unity_jax.search.candidate import Candidate, Pins
from unity_jax.search.following import local

Copied = Offload | Spill

ROUNDING = 1e-6
"""The part by which sums of the same seconds in different orders may differ."""


def make_plan(mesh: Any, machine: Machine, limit: float, found: Candidate, pins: Pins, margin: int = 0) -> Plan:
    """The plan that a candidate of the search stands for.

    **Arguments:** `limit` in bytes per device, and `margin` of it that the compiler needs beyond the prediction.
    """
    stored, axes, graph, timeline = found.program, found.mesh, found.graph, found.timeline
    program = stored.unpacked or stored
    predicted = Predicted(
        timeline.step_seconds,
        timeline.compute_seconds,
        timeline.exposed_communication_seconds,
        found.memory.peak_bytes,
        program_flops(graph),
        collectives(graph, axes, machine),
        # The bound counts ops alone that cost nothing in the kernel that they are part of: of a program of a few tiny
        # ops it may say too much, and then nothing is said.
        found.lower_bound if found.lower_bound <= (1 + ROUNDING) * timeline.step_seconds else 0.0,
    )
    makers = {t: op for op in graph.walk() for t in op.outputs}
    return Plan(
        mesh,
        machine.name,
        float(limit),
        predicted,
        _leaves(axes, program.input_names, program.graph.inputs, graph.inputs, stored.entering),
        _leaves(axes, program.out_paths, program.graph.outputs, graph.outputs, stored.leaving),
        tuple((_describe(t, makers), size) for t, size in found.memory.alive[:10]),
        found.label,
        replicated(graph, machine.device),
        program.hash,
        program.name,
        to_record(stored.graph, found.decisions),
        axes.order,
        differences(machine.devices),
        program.rewrites,
        stored.packed,
        found.searched,
        machine.hash,
        _savings(found),
        margin,
        program.implementations,
        program=program,
        stored=stored,
        graph=graph,
        priced_on=machine,
        pins=pins,
    )


def _savings(found: Candidate) -> tuple[Saving, ...]:
    """What was done to need less memory; what is copied from the host and back as it is in this plan."""
    if not found.program.hosted and not found.program.spilled:
        return found.program.savings
    without = simulated(_without_copies(found.timeline.tasks), found.machine).step_seconds
    done = [_copying(found, how) for how in found.program.savings]
    part = max(0.0, found.seconds - without) / sum(how.seconds for how in done if isinstance(how, Copied))
    return tuple(replace(how, exposed=part * how.seconds) if isinstance(how, Copied) else how for how in done)


def _copying(found: Candidate, how: Saving) -> Saving:
    """What is on the host, with the bytes and the seconds of its copies."""
    if isinstance(how, Offload):
        nbytes = sum(local_bytes(found.graph.inputs[i], found.mesh) for i in how.hosted)
        return replace(how, bytes=nbytes, seconds=2 * nbytes / found.machine.device.host_bandwidth)
    if isinstance(how, Spill):
        bytes_of, program = local(found), found.program
        nbytes = sum(t.times * bytes_of[t] for t in program.spilled)
        part = nbytes / sum(other.bytes for other in program.savings if isinstance(other, Spill))
        return replace(how, bytes=round(part * how.bytes), seconds=part * how.seconds)
    return how


def _without_copies(tasks: Sequence[Task]) -> tuple[Task, ...]:
    """Tasks, those of loops too, as if copies from the host and to it took no time."""
    copies = (HOST_TO_DEVICE, DEVICE_TO_HOST)
    quick = (replace(t, seconds=0.0) if t.stream in copies else t for t in tasks)
    return tuple(replace(t, body=_without_copies(t.body)) if t.body else t for t in quick)


def _leaves(
    axes: MeshAxes, paths: Sequence[str], tensors: Sequence[Tensor], planned: Sequence[Tensor], groups: Sequence[Group]
) -> tuple[Leaf, ...]:
    """The caller's leaves, of which the plan holds groups as one; then nothing is on the host."""
    layouts = apart([x for t in planned if (x := t.layout) is not None], groups, [t.shape for t in tensors], axes)
    hosted = [False] * len(tensors) if groups else [t.on_host for t in planned]
    return tuple(
        Leaf(path, t.shape, str(t.dtype), layout, local_bytes(with_layout(t, layout), axes), on_host)
        for path, t, layout, on_host in zip(paths, tensors, layouts, hosted, strict=True)
    )


def _describe(t: Tensor, makers: dict[Tensor, Op]) -> str:
    if t.name:
        return f"{t.name}: {t}"
    op = makers.get(t)
    return f"{op.label} {t} ({op.source})" if op is not None else str(t)
