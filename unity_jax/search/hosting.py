"""Plans that have state on the host from step to step (`lower.host`), on its device only while it is updated; or
activations, from the forward to the backward pass of the layer that made them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from unity_jax.cost.program import local_bytes
from unity_jax.network.reshard import Resharder
from unity_jax.pcg.graph import Tensor
from unity_jax.residuals.change import made
from unity_jax.residuals.pair import in_layer, stacked
from unity_jax.residuals.record import Offload, Spill
from unity_jax.search.candidate import Candidate, finish
from unity_jax.search.following import Follow, followed, local
from unity_jax.search.rule_cache import RuleCache

LEAF = 1 / 64
"""Leaves of no more than this part of the largest one stay on the device: a copy of them takes mostly its start."""


def hostable(start: Candidate) -> list[Offload]:
    """The state of a plan that only its update reads, ever more of it, the largest leaves first."""
    program = start.program
    early = {t for op in program.graph.ops if not op.backward for t in op.inputs}
    free = [i for i in {*program.ties.values()} - program.hosted if program.graph.inputs[i] not in early]
    inputs = start.graph.inputs
    link = start.machine.device.host_bandwidth
    held = {i: inputs[i].times * local_bytes(inputs[i], start.mesh) for i in free if link}
    largest = sorted((i for i in held if held[i] > LEAF * max(held.values())), key=lambda i: (-held[i], i))
    return [_offload(start, largest[: n + 1]) for n in range(len(largest))]


def stacks(start: Candidate) -> list[Offload]:
    """The same, updated layer by layer."""
    every = [dataclasses.replace(how, by_layer=True) for how in hostable(start)]
    return every if every and every[-1].applied(start.program.graph).origin else []


def spillable(start: Candidate) -> list[Spill]:
    """What layers of a plan stack for the backward pass, ever more of it, first what a layer has first: a copy of that
    runs beside the rest of the layer, forward and backward."""
    graph, link = start.program.graph, start.machine.device.host_bandwidth
    makers, bytes_of = stacked(graph) if link else {}, stack_bytes(start)
    held = {t: bytes_of[t] for t in makers if t in bytes_of and t not in start.program.spilled}
    order = {t: i for i, t in enumerate(made(graph))}
    large = (t for t in held if held[t] > LEAF * max(held.values()))
    first = sorted(large, key=lambda t: (order.get(in_layer(makers[t], t), -1), order[t]))
    return [Spill.of(graph, {t: makers[t] for t in first[: n + 1]}, held, link) for n in range(len(first))]


def offloaded(start: Candidate, follow: Follow) -> Candidate:
    """The plan that has on the host what the user's `jax.checkpoint` would have there, as far as it is stacked still,
    and there is a link to it."""
    program, link = start.program, start.machine.device.host_bandwidth
    away = {t: scan for t, scan in stacked(program.graph).items() if t in program.offloads - program.spilled}
    if not away or not link:
        return start
    return followed(start, [Spill.of(program.graph, away, stack_bytes(start), link)], follow)


def stack_bytes(start: Candidate) -> dict[Tensor, int]:
    """Bytes on a device of what each tensor of a program stands for, as a plan holds it."""
    return {t: t.times * nbytes for t, nbytes in local(start).items()}


def _offload(start: Candidate, hosted: Sequence[int]) -> Offload:
    """These inputs on the host, for a plan."""
    inputs, mesh = [start.graph.inputs[i] for i in sorted(hosted)], start.mesh
    nbytes = sum(t.times * local_bytes(t, mesh) for t in inputs)
    seconds = 2 * nbytes / start.machine.device.host_bandwidth
    return Offload(tuple(sorted(hosted)), False, sum(t.times for t in inputs), nbytes, seconds, seconds)


def hosting(found: Candidate, hosted: Sequence[int]) -> Candidate:
    """The plan with these inputs on the host besides, where another function has them."""
    if not (new := set(hosted) - found.program.hosted):
        return found
    resharder = Resharder(found.machine, found.mesh)
    return followed(
        found,
        [_offload(found, [*new])],
        lambda plan, program, _: finish(program, plan.decisions, resharder, RuleCache(), plan.label, plan.lower_bound),
    )
