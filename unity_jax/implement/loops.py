"""What a loop computes one step at a time and need not, once for all steps.

    for each of 35 steps: x, h              xw = xs W                             [35, 20, 6144]
        h = cell(x W + h V)                 for each of 35 steps: xw, h
    for each of 35 steps, backwards   ->        h = cell(xw + h V)
        dh = dg V^T                         for each of 35 steps, backwards
        dx = dg W^T                             dh = dg V^T
        dV = dV + h^T dg                    dxs = dgs W^T
                                            dV = dV + hs^T dgs                    over all steps and rows

A recurrent cell reads its weights again in each step, and adds to their gradients, of a few rows each: one product has
the rows of all steps (EcoRNN, https://arxiv.org/abs/1805.08899; cuDNN, https://arxiv.org/abs/1604.01946). Exact up to
the order of sums.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from unity_jax import _compat
from unity_jax.implement.stages import BARRIER, Stages, can_be_cut
from unity_jax.implement.steps import Steps
from unity_jax.pcg.graph import Graph, Op, Tensor, trips
from unity_jax.pcg.loops import Scan
from unity_jax.trace import has_effects, without_dead_code


def batchable(graph: Graph) -> list[Op]:
    """The scans of a graph, and of its loops and branches, of which something can leave the loop."""
    return [op for op in graph.walk() if can_be_cut(op) and Stages(op).moves]


def batched(graph: Graph, scans: Collection[Op]) -> Graph:
    """The graph with what need not be in these scans before and after them; the same object if there is nothing.

    **Arguments:** `scans`: of the graph, or of its loops and branches.
    """
    ops, replaced = list[Op](), dict[Tensor, Tensor]()
    for op in graph.ops:
        bodies = tuple(batched(body, scans) for body in op.bodies)
        now = op
        if bodies != op.bodies or not replaced.keys().isdisjoint(op.inputs):
            now = dataclasses.replace(op, inputs=tuple(replaced.get(t, t) for t in op.inputs), bodies=bodies)
        made = _divided(now, {t: o for o in ops for t in o.outputs}) if op in scans else None
        if made is None:
            ops.append(now)
        else:
            ops += made.ops
            replaced |= made.results
    if ops == graph.ops:
        return graph
    return without_dead_code(Graph(graph.inputs, tuple(replaced.get(t, t) for t in graph.outputs), ops))


def widened(scan: Op) -> float:
    """How many bytes there are of arrays of all steps that there were not before, those together that the loop slices
    and stacks, or the largest one outside of it if that is more: as a multiple of what the loop slices and stacks as it
    is. Infinite where a step then needs nothing of the step before: a loss by chunks, or gradients that a user adds up
    over microbatches, are loops so that such arrays are not there."""
    made, roles = _divided(scan, {}), Scan.of(scan.params)
    if made is None:
        return 0.0
    carried = [t for op in made.loop for t in op.bodies[0].inputs[Scan.of(op.params).carried]]
    if not any(t.rank and _compat.is_float(t.dtype) for t in carried):
        return math.inf
    return made.nbytes / sum(t.nbytes for t in (*scan.inputs[roles.sliced], *scan.outputs[roles.stacked]))


class _Divided(NamedTuple):
    """A scan, divided.

    **Fields:** `ops`: all in place of it; `loop`: the scan among them, or none if nothing is left of it; `results`:
    what is in place of its results that it does not make any more; `nbytes`: of new arrays, see `widened`.
    """

    ops: Sequence[Op]
    loop: Sequence[Op]
    results: Mapping[Tensor, Tensor]
    nbytes: int


def _divided(scan: Op, makers: Mapping[Tensor, Op]) -> _Divided | None:
    """A scan with what is before and after it; None where nothing can leave it.

    **Arguments:** `makers`: the ops around it by what they make.
    """
    stages = Stages(scan) if can_be_cut(scan) else None
    if stages is None or not stages.moves:
        return None
    steps, outputs, starts = Steps(stages), stages.graph.outputs, stages.scan.inputs[stages.roles.carried]
    steps.compute(stages.before)
    loop, stacks = _rest(stages, steps.outer)
    steps.outer = {**{t: stack for t, stack in stacks.items() if not stages.is_fixed(t)}, **steps.outer}
    left = [loop] if loop.outputs or any(map(has_effects, loop.bodies[0].walk())) else []
    steps.ops += left
    steps.compute(outputs[i] for i in stages.moved)
    results = {scan.outputs[i]: starts[i] for i in stages.handed_on}
    results |= {scan.outputs[i]: steps.outer[outputs[i]] for i in stages.moved}
    results |= {scan.outputs[i]: steps.added_up(starts[i], found, makers) for i, found in stages.sums.items()}
    every = {x for t, x in steps.outer.items() if not stages.is_fixed(t)}
    new = every.difference(scan.inputs, scan.outputs, results.values())
    across = sum(x.nbytes for x in new.intersection((*loop.inputs, *loop.outputs)))
    return _Divided(steps.ops, left, results, max([across, *(x.nbytes for x in new)]))


def _rest(stages: Stages, outer: Mapping[Tensor, Tensor]) -> tuple[Op, dict[Tensor, Tensor]]:
    """What is left of a loop, and of what it makes that it stacks, the stacks.

    **Arguments:** `outer`: see `Steps`.
    """
    scan, roles, (body,) = stages.scan, stages.roles, stages.scan.bodies
    gone = {*stages.sums, *stages.handed_on, *stages.moved}
    kept = [i for i in range(len(body.outputs)) if i not in gone]
    stacks = {body.outputs[i]: scan.outputs[i] for i in kept if i >= roles.stacked.start}
    new = {t: Tensor((trips(scan), *t.shape), t.dtype) for t in stages.stacked if t not in stacks}
    before = {side: [t for t in stages.before if (t in stages.fixed) is side] for side in (True, False)}
    handed_on = [body.inputs[roles.carried][i] for i in stages.handed_on]
    starts = dict(zip(body.inputs, scan.inputs, strict=True))
    outputs = (*(body.outputs[i] for i in kept), *new)
    inside = without_dead_code(Graph((), outputs, _without(body.ops, set(stages.before))))
    read = {t for op in inside.ops for t in op.inputs}.union(outputs)
    constants = [t for t in (*body.inputs[roles.constants], *handed_on, *before[True]) if t in read]
    carried = [t for i, t in enumerate(body.inputs[roles.carried]) if i not in gone]
    sliced = [t for t in (*body.inputs[roles.sliced], *before[False]) if t in read]
    inputs = (*constants, *carried, *sliced)
    loop = dataclasses.replace(
        scan,
        inputs=tuple(starts[t] if t in carried else outer[t] for t in inputs),
        outputs=(*(scan.outputs[i] for i in kept), *new.values()),
        params={**scan.params, "num_consts": len(constants), "num_carry": len(carried)},
        bodies=(Graph(inputs, outputs, inside.ops),),
    )
    return loop, stacks | new


def _without(ops: Iterable[Op], given: Collection[Tensor]) -> list[Op]:
    """Ops without those that make what is given instead."""
    found = []
    for op in ops:
        if op.name == BARRIER:
            pairs = [pair for pair in zip(op.inputs, op.outputs, strict=True) if pair[1] not in given]
            op = dataclasses.replace(op, inputs=tuple(a for a, _ in pairs), outputs=tuple(b for _, b in pairs))
        if not any(t in given for t in op.outputs):
            found.append(op)
    return found
