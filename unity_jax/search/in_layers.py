"""Plans of which the first layers need less memory than the others: those that do as in one plan all of whose layers
fit, and the others as in a faster one that does not.

    recomputes Block.__call__ (more in 10 of 40 layers, 7.6 GiB)
    keeps 400 activations (more of 13 of 40 layers, 16 GiB) on the host for the backward pass
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import NamedTuple

from unity_jax.pcg.graph import Graph, Tensor
from unity_jax.program import Program
from unity_jax.residuals.change import at, made, positions
from unity_jax.residuals.ranges import Layers, cut, early, layer_count
from unity_jax.residuals.record import Offload, Recompute, Spill
from unity_jax.search.candidate import Candidate
from unity_jax.search.following import Follow, apart, by_sections, fewest, followed, saved, some_layers
from unity_jax.search.limits import LIMITS

LEAST = 0.5
"""The part of what does not fit that values must free: what frees less fits by chance, and only all of it is tried."""

TOLD = 4
"""How many numbers of layers are told from what others need; then the middle is tried."""


def fewest_layers(
    start: Candidate,
    ways: Sequence[Recompute | Offload | Spill],
    limit: float,
    follow: Follow,
    fastest: float,
    saves_time: bool = False,
) -> Iterator[Candidate]:
    """Plans of a program that needs less memory in one of some ways, each of which frees more `bytes` than the one
    before: in search of the first with which it fits, and then of the fewest layers that do so.

    **Arguments:** `fastest`: seconds of the best plan so far, if it fits; `saves_time`: whether more of it may take
    less time: then the fastest is searched.
    """
    excess, tried = start.memory.peak_bytes - limit, dict[int, Candidate]()
    ways = [how for how in ways if how.bytes >= LEAST * excess] or ways[-1:]
    count, first = len(ways), sum(how.bytes < excess for how in ways)

    def make(i: int) -> Candidate:
        return followed(start, [ways[i]], follow)

    for i, plan in by_sections(count, make, limit) if saves_time else fewest(count, make, limit, first, fastest):
        tried[i] = plan
        yield plan
    if some := [how for how in ways if isinstance(how, Recompute | Spill)]:
        yield from in_layers(start, some, tried, follow, limit, fastest)


def in_layers(
    start: Candidate,
    ways: Sequence[Recompute | Spill],
    made: Mapping[int, Candidate],
    follow: Follow,
    limit: float,
    fastest: float,
) -> Iterator[Candidate]:
    """Plans of which the first layers save as much as fits if all do, and the others less.

    **Arguments:** `ways`: one kind of saving, of ever more values; `made`: of these, those that have been tried;
    `fastest`: seconds of the best plan so far, if it fits.
    """
    graph = start.program.graph
    sets = [frozenset(at(graph, how.values)) for how in ways]

    def partly(less: int, more: int, layers: Layers) -> Candidate:
        part, of = Part.of(start, sets[less] if less >= 0 else frozenset(), sets[more], layers), ways[more]
        few = ways[less] if less >= 0 else dataclasses.replace(of, count=0, bytes=0, seconds=0.0)
        share = layers.first / layers.of
        how = dataclasses.replace(
            of,
            values=positions(part.graph, part.values),
            count=few.count + round(share * (of.count - few.count)),
            bytes=few.bytes + round(share * (of.bytes - few.bytes)),
            seconds=few.seconds + share * (of.seconds - few.seconds),
            layers=layers,
        )
        return follow(start, *saved(part.program, part.found, [how]))

    yield from by_layers(start, sets, {-1: start, **made}, partly, limit, fastest)


class Part(NamedTuple):
    """Values of a program whose first layers are apart. **Fields:** `program`: folded so, and `found`: what it has in
    place of its tensors without that; `graph`: whose scans are cut, too, and `like`: the same of that."""

    program: Program
    found: Mapping[Tensor, Tensor]
    graph: Graph
    values: frozenset[Tensor]
    like: Mapping[Tensor, Tensor]

    @staticmethod
    def of(start: Candidate, less: Set[Tensor], more: Set[Tensor], layers: Layers) -> Part:
        """Of a plan's program: `less` of all layers, and `more` of the first ones."""
        program, found = apart(start.program, layers)
        ranges = cut(program.graph, layers)
        origins = {t: o for t, o in ranges.origin.items() if isinstance(o, Tensor)}
        every = [*ranges.graph.inputs, *made(ranges.graph)]
        like = {t: found.get(origins.get(t, t), origins.get(t, t)) for t in every}
        first = early(ranges.graph, (t for t in every if like[t] in more and like[t] not in less), layers)
        return Part(program, found, ranges.graph, first.union(t for t in every if like[t] in less), like)


def by_layers(
    start: Candidate,
    ways: Sequence[Set[Tensor]],
    made: Mapping[int, Candidate],
    make: Callable[[int, int, Layers], Candidate],
    limit: float,
    fastest: float,
) -> Iterator[Candidate]:
    """Plans of which the first layers save what fits if all layers do, and the others what does not, which is less: in
    search of the fewest layers. What these need and take is about linear between both, which tells what less
    is best: what saves most for its bytes. It ends where what fewer layers could still save is not worth a plan.

    **Arguments:** `ways`: the values that are saved, ever more; `made`: of these, plans so far, and that of none as -1;
    `make`: the plan all of whose layers do as one of these, and the first as another; `fastest`: seconds of the best
    plan so far, if it fits.
    """
    i = min((i for i, plan in made.items() if plan.fits(limit)), key=lambda i: made[i].seconds, default=-1)
    faster = [j for j, plan in made.items() if j < i and not plan.fits(limit) and _is_faster(plan, made[i])]
    parts, apart = start.program.parts, some_layers(start.program.savings) is not None
    if not faster or apart or (parts is None and any(op.times > 1 for op in start.program.graph.ops)):
        return  # layers are apart once; what is folded has them as one

    def share(below: Candidate, above: Candidate) -> float:
        """The part of the layers that compute again what `above` does, so that it fits."""
        return (below.memory.peak_bytes - limit) / max(below.memory.peak_bytes - above.memory.peak_bytes, 1)

    def told(below: Candidate, above: Candidate) -> float:
        """Seconds of such a plan."""
        return below.seconds + share(below, above) * (above.seconds - below.seconds)

    for less in sorted(faster, key=lambda j: told(made[j], made[i])):
        more = ways[i] if less < 0 else ways[i] - ways[less]
        count = parts.count if parts else layer_count(start.program.graph, more)
        few, enough, below, above = {0: made[less]}, {count: made[i]}, made[less], made[i]
        most = (1 + LIMITS.recomputed) * fastest  # what plans really take tells better what the next ones do
        while min(enough) - max(few) > 1 and told(below, above) < most:
            layers = Layers(fewest_told(few, enough, limit), count)
            plan = make(less, i, layers)
            yield plan
            (enough if plan.fits(limit) else few)[layers.first] = plan
            below, above = few[max(few)], enough[min(enough)]
            fastest = min(fastest, (1 - LIMITS.saves) * plan.seconds) if plan.fits(limit) else fastest
            most = fastest


def fewest_told(few: Mapping[int, Candidate], enough: Mapping[int, Candidate], limit: float) -> int:
    """How many layers may be the fewest with which a plan fits: by the line through the last two that do not, whose
    layers are apart, or else through what is around it; by halves where such lines have told too many, or too often.

    **Arguments:** `few`: plans that do not fit, by their layers; `enough`: those that do.
    """
    low, high = max(few), min(enough)
    if len(enough) > len(few) or len(few) > TOLD:
        return (low + high) // 2
    *_, near, _ = (0, *sorted(few))
    other, by = (near, few[near]) if near else (high, enough[high])
    slope = (few[low].memory.peak_bytes - by.memory.peak_bytes) / (other - low)
    more = (few[low].memory.peak_bytes - limit) / slope if slope > 0 else math.inf
    return low + math.ceil(min(max(more, 1), high - 1 - low))


def _is_faster(a: Candidate, b: Candidate) -> bool:
    """By so much that it matters."""
    return a.seconds < (1 - LIMITS.saves) * b.seconds
