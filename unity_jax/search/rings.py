"""Which collectives of a plan to run as rings: those with which the simulated step is faster.

An estimate proposes: each kind of place, such as the same projection of all layers, is simulated by itself, as
collective and contraction and as a ring, and weighed by how much of the collective nothing hides in the plan. A
simulation of the whole plan decides.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from unity_jax.cost.tasks import COMPUTE, tasks
from unity_jax.cost.timeline import Timeline, simulate
from unity_jax.machine.machine import Machine
from unity_jax.network.collectives import op_collectives, serves
from unity_jax.pcg.graph import Graph, Op, nested, part
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.program import Program
from unity_jax.search.candidate import Candidate
from unity_jax.search.decompose import Match, Place, decompose, matches
from unity_jax.search.limits import LIMITS
from unity_jax.xla.traffic import Traffic


@dataclass(frozen=True)
class Proposal:
    """Places of one kind, and the seconds of a step that rings there are estimated to save."""

    places: frozenset[Place]
    seconds: float


def with_rings(
    found: Sequence[Candidate],
    now: Candidate,
    limit: float,
    make: Callable[[Candidate, frozenset[Place]], Candidate],
) -> Candidate:
    """The fastest candidate that fits, with rings or without. `now`: the fastest of `found` that fits; `make`: one of
    them with rings.

    Tried are the best plan of each variant of the program, and what promises more, in the order of the estimates: all
    that is proposed for one at once, then one kind after the other, of which those stay that help.
    """
    known: dict[object, float] = {}
    # Rings hide communication: no candidate becomes faster than its arithmetic. Several seeds may have led to one plan.
    open_to = [c for c in found if c.timeline.compute_seconds < _less(now.seconds)]
    differ = {(c.program, c.mesh, c.seconds, c.timeline.compute_seconds): c for c in reversed(open_to)}
    proposed = [(c, proposals(c, known)) for c in reversed(differ.values())]
    saved = [sum(p.seconds for p in kinds) for _, kinds in proposed]
    left, first = float(LIMITS.ring_ops), dict[Program, Candidate]()
    for c in sorted((c for c, _ in proposed), key=lambda c: c.seconds):
        if c.program not in first and c.fits(limit):
            first[c.program] = c
    for i in sorted(range(len(proposed)), key=lambda i: proposed[i][0].seconds - saved[i]):
        base, kinds = proposed[i]
        is_first = base is first.get(base.program)
        if not kinds or not (is_first or (base.seconds - saved[i] < _less(now.seconds) and base.fits(limit))):
            continue
        everything = frozenset(place for p in kinds for place in p.places)
        steps = [everything, *(p.places for p in kinds)] if len(kinds) > 1 else [everything]
        least, taken = base.seconds, frozenset[Place]()
        for places in steps:
            if left <= 0:
                return now
            made = make(base, taken | places)
            left -= len(made.graph.ops)
            if made.fits(limit) and made.seconds < _less(least) and places is not everything:
                least, taken = made.seconds, taken | places
            if made.fits(limit) and made.seconds < _less(now.seconds):
                now = made
    return now


def _less(seconds: float) -> float:
    """What is less by enough."""
    return seconds * (1 - LIMITS.saves)


def proposals(base: Candidate, known: dict[object, float]) -> list[Proposal]:
    """The kinds of places where rings are estimated to be faster, best first; each contraction in one of them.

    **Arguments:** `known`: what a ring of each kind saves by itself, as far as it was simulated already.
    """
    exposed = exposures(base.timeline)
    saved: dict[object, float] = defaultdict(float)
    places: dict[object, list[Place]] = defaultdict(list)
    for _, graph, repeat in nested(base.graph):
        served = serves(graph)
        for match in matches(graph, base.mesh):
            (c,) = op_collectives(match.collective, base.mesh, base.machine)
            waits = exposed.get((served[match.collective], c.kind, c.axes, c.bytes), 0.0)
            if waits * repeat > LIMITS.saves**2 * base.seconds:
                kind = _kind(match)
                if (kind, base.mesh) not in known:
                    known[kind, base.mesh] = _gain(match, base.mesh, base.machine)
                saved[kind] += repeat * (waits - c.seconds + known[kind, base.mesh])
                places[kind] += match.places
    found: list[Proposal] = []
    taken: set[Op] = set()
    for kind in sorted(saved, key=lambda k: -saved[k]):
        ops = {op for op, _ in places[kind]}
        if saved[kind] > LIMITS.saves * base.seconds and taken.isdisjoint(ops):
            taken |= ops
            found.append(Proposal(frozenset(places[kind]), saved[kind]))
    return found


def exposures(timeline: Timeline) -> dict[tuple[Op | None, str, tuple[str, ...], int], float]:
    """Seconds of each collective in which no arithmetic runs: by the op that it serves, kind, axes and bytes; of loops
    in their first iteration. Combined ones share the time of one. The mean, where there are several."""
    times = zip(timeline.tasks, timeline.starts, timeline.ends, strict=True)
    computing = [(start, end) for t, start, end in times if t.stream == COMPUTE and end > start]
    starts, ends = np.sort(np.reshape(computing, (-1, 2)), axis=0).T  # they follow each other
    before = np.concatenate([[0.0], np.cumsum(ends - starts)])  # seconds of arithmetic until each begins

    def busy(time: float) -> float:
        n = int(np.searchsorted(starts, time, side="right"))
        return float(before[n] - max(0.0, ends[n - 1] - time)) if n else 0.0

    found: dict[tuple[Op | None, str, tuple[str, ...], int], list[float]] = defaultdict(list)
    for t, start, end in zip(timeline.tasks, timeline.starts, timeline.ends, strict=True):
        waits = end - start - (busy(end) - busy(start))
        apart = sum(of.seconds for of in t.parts) or t.seconds
        for of in t.parts or (t,):
            if (c := of.collective) is not None:
                found[of.op, c.kind, c.axes, c.bytes].append(waits * of.seconds / apart)
    return {key: sum(waits) / len(waits) for key, waits in found.items()}


def _kind(match: Match) -> object:
    """Equal for matches whose rings take equally long."""
    moved = match.collective
    products = tuple((op.traced.signature, op.shard.strategy, side) for op, side in match.products if op.traced)
    return moved.move, moved.inputs[0].shape, str(moved.inputs[0].dtype), products


def _gain(match: Match, mesh: MeshAxes, machine: Machine) -> float:
    """Seconds that a ring saves where nothing else runs."""
    products = [op for op, _ in match.products]
    first = match.collective.name == "combine"
    ops = [match.collective, *products] if first else [*products, match.collective]
    whole = part(ops, [op.outputs[0] for op in (products if first else [match.collective])])

    def seconds(graph: Graph) -> float:
        return simulate(tasks(graph, Traffic.of(graph, machine.device.compiler), mesh, machine), machine).step_seconds

    return seconds(whole) - seconds(decompose(whole, match.places, mesh, machine))
