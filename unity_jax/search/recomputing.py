"""What the backward pass of a plan could compute again, and what it does by `jax.checkpoint` and need not."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import NamedTuple

from unity_jax import progress
from unity_jax.machine.device import Device
from unity_jax.pcg.graph import Graph, Tensor
from unity_jax.pcg.mesh import WHOLE
from unity_jax.program import Program
from unity_jax.residuals.change import at, made, positions
from unity_jax.residuals.choice import Choice, choices
from unity_jax.residuals.keep import Rematerialized
from unity_jax.residuals.pair import innermost
from unity_jax.residuals.ranges import Layers, cut, early, layer_count
from unity_jax.residuals.record import Keep, Microbatch, NeedsWholeBatchError, Recompute, Saving
from unity_jax.rewrite.estimate import Seconds, by_kernels
from unity_jax.search.candidate import Candidate, best, sparing
from unity_jax.search.following import Follow, apart, fewest, followed, local, saved
from unity_jax.search.hosting import spillable
from unity_jax.search.limits import LIMITS
from unity_jax.search.rule_cache import RuleCache
from unity_jax.xla.traffic import Traffic

FEW = 8
"""How many ways are all tried."""

AGAIN = 3
"""For how many programs that keep more in all layers other plans are made, and that others follow; and of how many that
keep more than fits some of that goes to the host."""

WRONG = 2.0
"""By what factor an estimate of what is saved may be too low."""

INTERPOLATED = 2
"""How many numbers of layers are told from what fewer and more need; then the middle is tried."""


class Rivals(NamedTuple):
    """What else is planned beside what keeps more. **Fields:** `beside`: other plans of the program of one, nearly as
    fast, that keep what the best one keeps, too, and the nearest of them what is best for it; `anew`: plans of the
    program of one that take less than so many seconds; `settle`: makes the best one once more, with care for where what
    it keeps lies; `seconds` of a plan that there is already."""

    beside: Callable[[Candidate], Sequence[Candidate]]
    anew: Callable[[Candidate, float], Sequence[Candidate]]
    settle: Follow
    seconds: float = math.inf


def keeping(
    start: Candidate,
    limit: float,
    follow: Follow,
    microbatches: Callable[[Candidate], Iterable[Microbatch]] = lambda _: (),
    rivals: Rivals | None = None,
    spare: float = 0.0,
) -> Candidate:
    """A plan, or where memory is left a faster one, whose backward pass does not compute again by the user's
    `jax.checkpoint` what there is memory for, in all layers or in the last ones; the same where that has been chosen
    before.

    **Arguments:** `microbatches`: ever more of them that a plan may have: each keeps what a whole batch could not;
    `rivals`: what else is planned beside what keeps more; None if nothing is; `spare`: bytes that are rather left, see
    `sparing`.
    """
    if not start.fits(limit) or any(isinstance(how, Keep) for how in start.program.savings):
        return start
    more = _More(start, follow)
    if not more.again.values:
        return start
    progress.stage("what jax.checkpoint would recompute, and there is memory for")
    found = _within(more, limit, microbatches, rivals)
    if found.fits(limit - spare) or not start.fits(limit - spare):
        return found
    return sparing([found, _within(more, limit - spare, microbatches, rivals)], limit, spare)


def _within(
    more: _More,
    limit: float,
    microbatches: Callable[[Candidate], Iterable[Microbatch]],
    rivals: Rivals | None,
) -> Candidate:
    """The same, of a plan that fits, with nothing to spare."""
    start, follow = more.start, more.follow
    most = WRONG * max(more.gain(choice, limit) for choice in (more.whole, *more.choices))
    if most < LIMITS.saves * start.seconds:
        return start
    free, count = more.kept(more.whole), len(more.choices)
    if rivals and start.seconds - most > rivals.seconds:
        return best([start, free], limit).noting(searched=start.searched)
    made = {-1: free, **dict(by_sections(count, lambda i: more.kept(more.choices[i]), limit)), count: start}
    every = [*more.ways, more.again.originals]
    partly = by_layers(start, every, made, functools.partial(more.partly, every), limit, start.seconds)
    found = best([start, *made.values(), *partly], limit)
    fits = sorted((c for c in made.values() if c.fits(limit) and c is not start), key=lambda c: c.seconds)
    if rivals and fits:
        found = best([found, *_rivalling(start, fits, limit, follow, rivals)], limit)
    beyond = (c for c in {free, *made.values()} if not c.fits(limit) and _is_faster(c, found))
    for plan in sorted(beyond, key=lambda c: c.seconds)[:AGAIN]:
        some = fewest(plan, spillable(plan), limit, follow, found.seconds)
        found = best([found, *(c for _, c in some)], limit)
    wanted = min((free, *made.values()), key=lambda c: c.seconds)
    with contextlib.suppress(NeedsWholeBatchError):
        for how in microbatches(start) if not wanted.fits(limit) else ():
            few = followed(start, [how], follow)
            if few.seconds - (start.seconds - wanted.seconds) >= found.seconds:
                break
            other = keeping(few, limit, follow)
            if other.seconds >= found.seconds:
                break
            found = other
    return found.noting(searched=start.searched)


class _More:
    """What a plan could keep of what `jax.checkpoint` computes again. **Fields:** `again`: that."""

    def __init__(self, start: Candidate, follow: Follow) -> None:
        self.start, self.follow = start, follow
        self.again, self._local = self._checkpoints(start.program.graph), local(start)
        self._kept = dict[int, Candidate]()  # by identity: choices are those below

    @functools.cached_property
    def whole(self) -> Choice | None:
        """All of it."""
        return self.again.keeping()

    @functools.cached_property
    def ways(self) -> list[frozenset[Tensor]]:
        """What would still be computed again, ever more of it, where all is kept that can be."""
        free = self.kept(self.whole)
        return [frozenset(at(free.program.graph, how.values)) for how in recomputable(free)]

    @functools.cached_property
    def choices(self) -> list[Choice | None]:
        """What is kept then."""
        return [self.again.keeping(way) for way in self.ways]

    def _checkpoints(self, graph: Graph) -> Rematerialized:
        device, devices = self.start.machine.device, self.start.machine.num_devices
        return Rematerialized(innermost(graph), Traffic.of(graph, device.compiler), _estimate(device), devices)

    def kept(self, choice: Choice | None) -> Candidate:
        """The plan that keeps so much, made once."""
        if choice is None:
            return self.start
        if id(choice) not in self._kept:
            how = Keep.of(self.start.program.graph, choice, _share(choice, self._local))
            self._kept[id(choice)] = followed(self.start, [how], self.follow)
        return self._kept[id(choice)]

    def gain(self, choice: Choice | None, limit: float) -> float:
        """Seconds that it saves, in as many layers as there is memory for within a limit, by estimates."""
        room = limit - self.start.memory.peak_bytes
        return 0.0 if choice is None else choice.seconds * min(1.0, room / max(_share(choice, self._local), 1.0))

    def partly(self, ways: Sequence[Set[Tensor]], less: int, more: int, layers: Layers) -> Candidate:
        """The plan that keeps in its first layers what one of these ways leaves, and in the others what another does,
        see `by_layers`."""
        part = Part.of(self.start, ways[less] if less >= 0 else frozenset(), ways[more], layers)
        choice = self._checkpoints(part.graph).keeping(part.values)
        if choice is None:
            return self.start
        near = {t: self._local[of] for t, of in part.like.items() if of in self._local}
        how = Keep.of(part.graph, choice, _share(choice, near), layers)
        return self.follow(self.start, *saved(part.program, part.found, [how]))


def _rivalling(
    start: Candidate, fits: Sequence[Candidate], limit: float, follow: Follow, rivals: Rivals
) -> Iterator[Candidate]:
    """What else is planned beside what keeps more (`fits`, the fastest first)."""
    first, more = fits[0], _since(start, fits[0])
    found = [first, followed(start, more, rivals.settle)]
    for plan in fits[:AGAIN]:
        found += rivals.anew(plan, best(found, limit).seconds)
    yield from found
    bound = first.seconds + WRONG * (start.seconds - first.seconds)
    others = {c.seconds: c for c in rivals.beside(start) if c.seconds < bound}  # of plans that are alike one
    apart = [c for seconds, c in others.items() if seconds != start.seconds]
    near = {followed(c, _since(start, plan), follow): c for plan in fits[:AGAIN] for c in apart}
    yield from near
    plan = min(near, key=lambda c: c.seconds, default=None)
    if plan is not None and plan.seconds < (1 + LIMITS.recomputed) * first.seconds:
        yield keeping(near[plan], limit, follow)


def _since(start: Candidate, plan: Candidate) -> Sequence[Saving]:
    """What a plan saves that the one it is made of does not."""
    return plan.program.savings[len(start.program.savings) :]


def recomputable(start: Candidate) -> list[Recompute]:
    """What the program of a plan can compute again, ever more of it; where it has a loop over microbatches, in each."""
    graph, device, bytes_of = start.program.graph, start.machine.device, local(start)
    traffic, devices = Traffic.of(graph, device.compiler), start.machine.num_devices
    every = choices(innermost(graph), traffic, _estimate(device), devices)
    return [Recompute.of(graph, choice, device.compiler, _share(choice, bytes_of)) for choice in every]


def recomputing(
    start: Candidate,
    ways: Sequence[Recompute],
    made: Mapping[int, Candidate],
    follow: Follow,
    limit: float,
    fastest: float,
) -> Iterator[Candidate]:
    """Plans of which the first layers compute again as much as fits if all do, and the others less.

    **Arguments:** `made`: of ways, those that have been tried; `fastest`: seconds of the best plan so far, if it fits.
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
    """Plans of which the first layers compute again what fits if all layers do, and the others what does not, which is
    less: in search of the fewest layers. What these need and take is about linear between both, which tells what less
    is best: what saves most for its bytes. It ends where what fewer layers could still save is not worth a plan.

    **Arguments:** `ways`: what is computed again, ever more; `made`: of these, plans so far, and that of none as -1;
    `make`: the plan all of whose layers do as one of these, and the first as another; `fastest`: seconds of the best
    plan so far, if it fits.
    """
    i = min((i for i, plan in made.items() if plan.fits(limit)), key=lambda i: made[i].seconds, default=-1)
    faster = [j for j, plan in made.items() if j < i and not plan.fits(limit) and _is_faster(plan, made[i])]
    parts = start.program.parts
    if not faster or (parts is None and any(op.times > 1 for op in start.program.graph.ops)):
        return  # what is folded has its layers as one

    def share(below: Candidate, above: Candidate) -> float:
        """The part of the layers that compute again what `above` does, so that it fits."""
        return (below.memory.peak_bytes - limit) / max(below.memory.peak_bytes - above.memory.peak_bytes, 1)

    def told(below: Candidate, above: Candidate) -> float:
        """Seconds of such a plan."""
        return below.seconds + share(below, above) * (above.seconds - below.seconds)

    for less in sorted(faster, key=lambda j: told(made[j], made[i])):
        more = ways[i] if less < 0 else ways[i] - ways[less]
        count = parts.count if parts else layer_count(start.program.graph, more)
        few, enough, below, above, tries = 0, count, made[less], made[i], itertools.count()
        while enough - few > 1 and told(below, above) < fastest:
            interpolated = few + math.ceil(share(below, above) * (enough - few))
            middle = interpolated if next(tries) < INTERPOLATED else (few + enough) // 2
            layers = Layers(min(max(middle, few + 1), enough - 1), count)
            plan = make(less, i, layers)
            yield plan
            if plan.fits(limit):
                enough, above, fastest = layers.first, plan, min(fastest, (1 - LIMITS.saves) * plan.seconds)
            else:
                few, below = layers.first, plan


def _is_faster(a: Candidate, b: Candidate) -> bool:
    """By so much that it matters."""
    return a.seconds < (1 - LIMITS.saves) * b.seconds


def by_sections(ways: int, make: Callable[[int], Candidate], limit: float) -> Iterator[tuple[int, Candidate]]:
    """Plans that keep less and less, in search of the fastest that fits: all of few, and of many as if each were faster
    than the one before up to some, and slower from there on; each with which it is."""
    if ways <= FEW:
        yield from ((i, make(i)) for i in range(ways))
        return
    made = dict[int, Candidate]()
    low, high = 0, ways - 1
    while low <= high:
        left = low + 2 * (high - low) // 5
        right = min(left + 1 + (high - low) // 5, high)
        for i in dict.fromkeys((left, right)):
            if i not in made:
                made[i] = make(i)
                yield i, made[i]
        better = best([made[left], made[right]], limit)
        low, high = (low, right - 1) if better is made[left] else (left + 1, high)


def _estimate(device: Device) -> Callable[[Graph], Seconds]:
    rules = RuleCache()
    return by_kernels(device, lambda op: rules.shard(op, WHOLE, ()))


def _share(choice: Choice, local: Mapping[Tensor, int]) -> float:
    """The bytes of a choice on one device."""
    whole = sum(n * t.nbytes for t, n in choice.freed.items())
    return choice.bytes * sum(n * local.get(t, t.nbytes) for t, n in choice.freed.items()) / whole
