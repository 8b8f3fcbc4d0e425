"""Plans whose state is on the host from step to step (`lower.host`), and on its device only while it is updated."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from unity_jax.cost.program import local_bytes
from unity_jax.network.reshard import Resharder
from unity_jax.residuals.record import Offload
from unity_jax.search.candidate import Candidate, finish
from unity_jax.search.following import followed
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
