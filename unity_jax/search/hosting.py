"""Plans that have state on the host from step to step (`lower.host`), on its device only while it is updated; or
activations, from the forward to the backward pass of the layer that made them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from unity_jax.cost.program import local_bytes
from unity_jax.network.reshard import Resharder
from unity_jax.pcg.graph import Op, Tensor, nested, trips
from unity_jax.residuals.change import made, positions
from unity_jax.residuals.pair import stacked
from unity_jax.residuals.record import Offload, Spill
from unity_jax.search.candidate import Candidate, finish
from unity_jax.search.following import followed, local
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
    graph, bytes_of, link = start.program.graph, local(start), start.machine.device.host_bandwidth
    runs = {op: n for _, inside, n in nested(graph) for op in inside.ops}
    makers = stacked(graph) if link else {}
    held = {t: t.times * bytes_of[t] for t in makers if t in bytes_of and t not in start.program.spilled}
    order = {t: i for i, t in enumerate(made(graph))}
    large = (t for t in held if held[t] > LEAF * max(held.values()))
    first = sorted(large, key=lambda t: (order.get(_stacked(makers[t], t), -1), order[t]))
    found = list[Spill]()
    for n in range(len(first)):
        some = first[: n + 1]
        seconds = 2 * sum(runs[makers[t]] * held[t] for t in some) / link
        count, nbytes = sum(trips(makers[t]) for t in some), sum(held[t] for t in some)
        largest = max(some, key=lambda t: held[t])
        maker = makers[largest].bodies[0].producer.get(_stacked(makers[largest], largest), makers[largest])
        found.append(Spill(positions(graph, some), maker.source, count, nbytes, seconds, seconds))
    return found


def _stacked(scan: Op, stack: Tensor) -> Tensor:
    """What a layer makes of a stack."""
    return scan.bodies[0].outputs[scan.outputs.index(stack)]


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
