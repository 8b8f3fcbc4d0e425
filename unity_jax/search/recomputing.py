"""What the backward pass of a plan could compute again, and what it does by `jax.checkpoint` and need not."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import NamedTuple

from unity_jax import progress
from unity_jax.machine.machine import Machine
from unity_jax.pcg.graph import Graph, Tensor
from unity_jax.pcg.mesh import WHOLE
from unity_jax.residuals.choice import Choice, choices
from unity_jax.residuals.keep import Rematerialized, kept
from unity_jax.residuals.pair import innermost
from unity_jax.residuals.ranges import Layers
from unity_jax.residuals.record import Keep, Microbatch, NeedsWholeBatchError, Recompute, Saving
from unity_jax.rewrite.estimate import Seconds, by_kernels
from unity_jax.search.candidate import Candidate, best, sparing
from unity_jax.search.following import Follow, by_sections, followed, local, saved
from unity_jax.search.hosting import spillable
from unity_jax.search.in_layers import Part, by_layers, fewest_layers
from unity_jax.search.limits import LIMITS
from unity_jax.search.rule_cache import RuleCache
from unity_jax.xla.traffic import Traffic

ALL = -1
"""The way in which all is kept that can be, before those that keep ever less, as `by_layers` counts them."""

WRONG = 2.0
"""By what factor an estimate of what is saved may be too low."""


class Rivals(NamedTuple):
    """What else is planned beside what keeps more. **Fields:** `beside`: other plans of the program of one, nearly as
    fast, and in less than so many seconds, that keep what the best one keeps, too, and the nearest of them what is best
    for it; `anew`: plans of the program of one that take less than so many seconds; `settle`: makes the best one once
    more, with care for where what it keeps lies; `seconds` of a plan that there is already."""

    beside: Callable[[Candidate, float], Sequence[Candidate]]
    anew: Callable[[Candidate, float], Sequence[Candidate]]
    settle: Follow
    seconds: float = math.inf


def keeping(
    start: Candidate,
    limit: float,
    follow: Follow,
    microbatches: Callable[[Candidate], Iterable[Microbatch]] | None = None,
    rivals: Rivals | None = None,
    spare: float = 0.0,
) -> Candidate:
    """A plan, or where memory is left a faster one, whose backward pass does not compute again by the user's
    `jax.checkpoint` what there is memory for, in all layers or in the last ones; the same where that has been chosen
    before.

    **Arguments:** `microbatches`: ever more of them that a plan may have: each keeps what a whole batch could not; None
    if it may have none; `rivals`: what else is planned beside what keeps more; None if nothing is; `spare`: bytes that
    are rather left, see `sparing`.
    """
    if not start.fits(limit) or any(isinstance(how, Keep) for how in start.program.savings):
        return start
    checkpoints = _Checkpoints(start.program.graph, start.machine)
    if not checkpoints.again.values:
        return start
    progress.stage("what jax.checkpoint would recompute, and there is memory for")
    more = _More(start, follow, checkpoints)
    found = _within(more, limit, microbatches, rivals)
    if found.fits(limit - spare) or not start.fits(limit - spare):
        return found
    return sparing([found, _within(more, limit - spare, microbatches, rivals)], limit, spare)


def _within(
    more: _More,
    limit: float,
    microbatches: Callable[[Candidate], Iterable[Microbatch]] | None = None,
    rivals: Rivals | None = None,
) -> Candidate:
    """The same, of a plan that fits, with nothing to spare."""
    start, follow, checkpoints = more.start, more.follow, more.checkpoints
    most = WRONG * more.most(limit)
    if most < LIMITS.saves * start.seconds:
        return start
    free, count = more.kept(ALL), len(checkpoints.ways)
    if rivals and start.seconds - most > rivals.seconds:
        return best([start, free], limit).noting(searched=start.searched)
    made = {ALL: free, **dict(by_sections(count, more.kept, limit)), count: start}
    every = [*checkpoints.ways, checkpoints.again.originals]
    partly = by_layers(start, every, made, functools.partial(more.partly, every), limit, start.seconds)
    found = best([start, *made.values(), *partly], limit)
    fits = sorted((c for c in made.values() if c.fits(limit) and c is not start), key=lambda c: c.seconds)
    if rivals and fits:
        found = best([found, *_rivalling(more, fits, limit, rivals)], limit)
    found = best([found, *more.spilled(limit, found.seconds)], limit)
    wanted = min((free, *made.values()), key=lambda c: c.seconds)
    with contextlib.suppress(NeedsWholeBatchError):
        for how in microbatches(start) if microbatches and not wanted.fits(limit) else ():
            few = followed(start, [how], follow)
            if few.seconds - (start.seconds - wanted.seconds) >= found.seconds:
                break
            other = keeping(few, limit, follow)
            if other.seconds >= found.seconds:
                break
            found = other
    return found.noting(searched=start.searched)


class _Checkpoints:
    """What a program could keep of what `jax.checkpoint` computes again, whatever its plan.

    **Fields:** `again`: what that is; `keeping`: what is kept in one of the `ways`, or all of it (`ALL`), found once;
    None if that is nothing.
    """

    def __init__(self, graph: Graph, machine: Machine) -> None:
        self.graph, self.machine = graph, machine
        self.again = _rematerialized(graph, machine)
        self.keeping = functools.cache(self._keeping)

    @functools.cached_property
    def ways(self) -> list[frozenset[Tensor]]:
        """What would still be computed again, ever more of it, where all is kept that can be."""
        every = self.keeping(ALL)
        free = kept(self.graph, every.values).graph if every else self.graph
        return [choice.values for choice in _recomputable(free, self.machine)]

    def _keeping(self, way: int) -> Choice | None:
        return self.again.keeping(frozenset() if way == ALL else self.ways[way])


class _More:
    """Plans of a program that keep more than one of them does (`start`), and otherwise do the same. **Fields:** `kept`:
    the one that keeps as much as is kept in one of the ways of `checkpoints`, made once."""

    def __init__(self, start: Candidate, follow: Follow, checkpoints: _Checkpoints) -> None:
        self.start, self.follow, self.checkpoints = start, follow, checkpoints
        self.kept = functools.cache(self._kept)
        self._local = local(start)

    def _kept(self, way: int) -> Candidate:
        choice = self.checkpoints.keeping(way)
        if choice is None:
            return self.start
        how = Keep.of(self.start.program.graph, choice, _share(choice, self._local))
        return followed(self.start, [how], self.follow)

    def spilled(self, limit: float, fastest: float) -> list[Candidate]:
        """Plans that keep more than fits, so much of it on the host that they do, in search of one that takes less
        than so many seconds."""

        def fitted(way: int) -> Candidate:
            plan = self.kept(way)
            if plan.fits(limit) or plan.seconds >= fastest:
                return plan
            return best([plan, *fewest_layers(plan, spillable(plan), limit, self.follow, fastest)], limit)

        if not self._spillable:
            return []
        every = range(ALL, len(self.checkpoints.ways))
        return [plan for _, plan in by_sections(len(every), lambda i: fitted(every[i]), limit)]

    @functools.cached_property
    def _spillable(self) -> bool:
        """Whether what layers keep may be on the host."""
        return bool(spillable(self.kept(ALL)))

    def most(self, limit: float) -> float:
        """Seconds that any of these choices saves at most within a limit; none more than all of it, if that fits."""
        every, gain = self.checkpoints.keeping(ALL), self._gain(ALL, limit)
        if every is None or gain == every.seconds:
            return gain
        return max(self._gain(way, limit) for way in range(ALL, len(self.checkpoints.ways)))

    def _gain(self, way: int, limit: float) -> float:
        """Seconds that it saves, in as many layers as there is memory for within a limit, or on the host, as far as all
        of the step hides copies there and back; by estimates."""
        choice, room = self.checkpoints.keeping(way), limit - self.start.memory.peak_bytes
        if choice is None:
            return 0.0
        if self._spillable:
            room += self.start.seconds * self.start.machine.device.host_bandwidth / 2
        return choice.seconds * min(1.0, room / max(_share(choice, self._local), 1.0))

    def partly(self, ways: Sequence[Set[Tensor]], less: int, more: int, layers: Layers) -> Candidate:
        """The plan that keeps in its first layers what one of these ways leaves, and in the others what another does,
        see `by_layers`."""
        part = Part.of(self.start, ways[less] if less >= 0 else frozenset(), ways[more], layers)
        choice = _rematerialized(part.graph, self.start.machine).keeping(part.values)
        if choice is None:
            return self.start
        near = {t: self._local[of] for t, of in part.like.items() if of in self._local}
        how = Keep.of(part.graph, choice, _share(choice, near), layers)
        return self.follow(self.start, *saved(part.program, part.found, [how]))


def _rivalling(more: _More, fits: Sequence[Candidate], limit: float, rivals: Rivals) -> Iterator[Candidate]:
    """What else is planned beside what keeps more (`fits`, the fastest first)."""
    first, start, follow = fits[0], more.start, more.follow
    found = [first, followed(start, _since(start, first), rivals.settle)]
    for plan in fits[: LIMITS.kept_experts]:
        found += rivals.anew(plan, best(found, limit).seconds)
    yield from found
    bound = first.seconds + WRONG * (start.seconds - first.seconds)
    others = {c.seconds: c for c in rivals.beside(start, bound)}  # of plans that are alike one
    apart = [c for seconds, c in others.items() if seconds != start.seconds]
    near = {followed(c, _since(start, plan), follow): c for plan in fits[: LIMITS.kept_beside] for c in apart}
    yield from near
    plan = min(near, key=lambda c: c.seconds, default=None)
    if plan is not None and plan.seconds < (1 + LIMITS.recomputed) * first.seconds and near[plan].fits(limit):
        yield _within(_More(near[plan], follow, more.checkpoints), limit)


def _since(start: Candidate, plan: Candidate) -> Sequence[Saving]:
    """What a plan saves that the one it is made of does not."""
    return plan.program.savings[len(start.program.savings) :]


def recomputable(start: Candidate) -> list[Recompute]:
    """What the program of a plan can compute again, ever more of it; where it has a loop over microbatches, in each."""
    graph, compiler, bytes_of = start.program.graph, start.machine.device.compiler, local(start)
    every = _recomputable(graph, start.machine)
    return [Recompute.of(graph, choice, compiler, _share(choice, bytes_of)) for choice in every]


def _recomputable(graph: Graph, machine: Machine) -> Iterator[Choice]:
    return choices(innermost(graph), *_told(graph, machine))


def _rematerialized(graph: Graph, machine: Machine) -> Rematerialized:
    return Rematerialized(innermost(graph), *_told(graph, machine))


def _told(graph: Graph, machine: Machine) -> tuple[Traffic, Callable[[Graph], Seconds], int]:
    """By what choices for a graph are told: what it moves, what graphs take, and how many devices share the work."""
    rules, device = RuleCache(), machine.device
    seconds = by_kernels(device, lambda op: rules.shard(op, WHOLE, ()))
    return Traffic.of(graph, device.compiler), seconds, machine.num_devices


def _share(choice: Choice, local: Mapping[Tensor, int]) -> float:
    """The bytes of a choice on one device."""
    whole = sum(n * t.nbytes for t, n in choice.freed.items())
    return choice.bytes * sum(n * local.get(t, t.nbytes) for t, n in choice.freed.items()) / whole
