"""Less memory for more time: where no plan fits, the largest arrays are computed by chunks, what the backward pass
reads is computed again instead of kept, gradients are accumulated over microbatches, state is on the host until its
update, or activations are there until the backward pass.

    BERT-Large, 1,024 sequences on eight H100: 155 GiB in 713 ms as written, 55 GiB in 803 ms so

A loss by chunks costs little. Values are computed again, best first (`residuals.choice`), as few as make the plan
fit, its layouts as they were; microbatches are as few as do. For what is fastest then, layouts are searched anew.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from unity_jax import progress
from unity_jax.program import Program
from unity_jax.residuals.pair import innermost, pairs
from unity_jax.residuals.record import Microbatch, NeedsWholeBatchError, Offload, Recompute, Spill
from unity_jax.search.batch import batch_arguments
from unity_jax.search.candidate import Candidate, best
from unity_jax.search.chunking import by_chunks
from unity_jax.search.following import Follow, changed, followed
from unity_jax.search.hosting import hostable, spillable, stacks
from unity_jax.search.in_layers import fewest_layers
from unity_jax.search.limits import LIMITS
from unity_jax.search.recomputing import keeping, recomputable
from unity_jax.search.rule_cache import RuleCache
from unity_jax.search.searched import Searched

NEARLY = 1.5
"""How many times the limit a plan may need that is planned anew to fit: layouts make so much of a difference."""

PASSES = 8
"""How many times its bytes what is computed again at the speed of memory may move."""

More = Callable[[Candidate], Sequence[Recompute | Offload | Spill]]
"""What a plan may do to need less memory, ever more of it."""


def fitting(
    starts: Sequence[Candidate],
    limit: float,
    follow: Follow,
    plan: Callable[[Program], Candidate],
    beside: Callable[[], Sequence[Candidate]],
    checkpoints: bool,
) -> Candidate:
    """The fastest plan that fits of those that need less memory than some that do not; else that which needs least.

    **Arguments:** `starts`: plans of a program as it is: the fastest, and that which needs least memory; `follow` makes
    plans of other forms of it that do the same, and `plan` the best one of such a form; `beside`: other plans of it on
    the mesh of the first, nearly as fast; `checkpoints`: whether what the user's `jax.checkpoint` has computed again
    must be.
    """
    progress.stage("what needs less memory")
    first, *others = starts
    ways = _Ways(limit, follow)
    made = ways.of(first)
    for start in others:
        now = best(made, limit)
        if now.fits(limit) and start.program is first.program:  # what is best of the one is tried with the other
            made += [*ways.by_chunks(start, made), followed(start, now.program.savings, follow)]
        else:
            made += ways.of(start)
    if not checkpoints and (kept := keeping(first, math.inf, follow)).program is not first.program:
        made += ways.of(kept, best(made, limit))
    beside = functools.cache(beside)

    def settled(made: Sequence[Candidate]) -> Candidate:
        """The best plan, with what layouts do for it."""
        now = best(made, limit)
        if now.fits(limit) and now.mesh == first.mesh and now.program.savings:
            form = changed(first.program, now.program.savings)
            made = [*made, *(follow(other, *form) for other in beside())]
            now = best(made, limit)
        forms = [c.program for c in (now, *_nearly(made, now, limit)) if c.program.savings]
        return best([now, *map(plan, forms)], limit)

    found = settled(made)
    if more := ways.beyond(made):
        found = best([found, settled([*made, *more])], limit)
    return found.noting(searched=found.searched + Searched(entire=tuple(ways.entire)))


def _nearly(made: Sequence[Candidate], first: Candidate, limit: float) -> Sequence[Candidate]:
    """The plan that is faster than the first one, and with other layouts may fit: what needs least memory."""
    faster = [c for c in made if c.seconds < first.seconds]
    near = [c for c in faster if c.program.savings and c.program.savings != first.program.savings]
    near = [c for c in near if limit < c.memory.peak_bytes <= NEARLY * limit]
    return sorted(near, key=lambda c: c.memory.peak_bytes)[:1]


class _Ways:
    """Plans of a program that need less memory. **Fields:** `entire`: the lines that need the whole batch at once."""

    def __init__(self, limit: float, follow: Follow) -> None:
        self.limit, self.follow = limit, follow
        self.entire = dict[str, None]()
        self._again, self._spills = functools.cache(recomputable), functools.cache(spillable)

    def of(self, start: Candidate, now: Candidate | None = None) -> list[Candidate]:
        """The plan itself, and others that do the same, until some fit.

        **Arguments:** `now`: the best plan so far, if there is one: what is slower is not made to fit.
        """
        known, parts = [] if now is None else [now], list[Candidate]()
        if start.seconds >= self._fastest(known):
            return []
        try:
            parts += self._accumulating(start, self._fastest(known))
        except NeedsWholeBatchError as error:
            self.entire[str(error)] = None
        forms = list(self.by_chunks(start, [*known, *parts]))
        made, last = [*forms, *parts], [*forms, *parts][-1]
        made += self.by_chunks(last, made) if last.seconds < self._fastest(known) else ()
        for least in [c for c in parts if not c.fits(self.limit)][-1:]:  # each computes some again
            made += self._more(least, self._again, best([*made, *known], self.limit))
        for form in _least(forms):
            for more in (self._again, hostable, stacks):
                made += self._more(form, more, best([*made, *known], self.limit))
            made += self._spilling(form, [*made, *known])
        for more in (stacks, self._again, self._spills):  # besides what needs least so far
            if not (least := best([*made, *known], self.limit)).fits(self.limit):
                made += self._more(least, more, least)
        return made

    def beyond(self, made: Sequence[Candidate]) -> list[Candidate]:
        """Where the best plan that fits is far behind others, more of everything besides what needs least of these."""
        found = list[Candidate]()
        for more in (self._again, stacks, self._spills):
            now = best([*made, *found], self.limit)
            ahead = [c for c in (*made, *found) if LIMITS.behind * c.seconds < now.seconds and c.program.savings]
            if now.fits(self.limit) and ahead:
                found += self._more(min(ahead, key=lambda c: c.memory.peak_bytes), more, now)
        return found

    def _fastest(self, plans: Sequence[Candidate]) -> float:
        """Seconds of the fastest plan that fits."""
        return min((c.seconds for c in plans if c.fits(self.limit)), default=math.inf)

    def by_chunks(self, start: Candidate, known: Sequence[Candidate]) -> Iterator[Candidate]:
        """A plan with ever more by chunks, as long as it may be faster than those that are known."""
        most = self._fastest(known)
        for made in by_chunks(start, self.limit, self.follow):
            yield made
            if made.seconds >= most:
                return

    def _more(self, start: Candidate, more: More, now: Candidate) -> Iterator[Candidate]:
        """A plan with ever more of something, in search of the least with which it fits.

        What layers of a scan stack for the backward pass takes time to stack, so that with less of it a step may be
        faster: of these the fastest is searched.

        **Arguments:** `now`: the best plan so far: what is slower is not made to fit.
        """
        if start.fits(self.limit) or (now.fits(self.limit) and now.seconds <= start.seconds):
            return
        fastest = now.seconds if now.fits(self.limit) else math.inf
        saves_time = more is self._again and bool(pairs(innermost(start.program.graph)))
        yield from fewest_layers(start, more(start), self.limit, self.follow, fastest, saves_time)

    def _spilling(self, start: Candidate, known: Sequence[Candidate]) -> Iterator[Candidate]:
        """A plan with ever more activations on the host: as it is, and where it computes again what takes the time of
        a pass through memory, or less than copies there and back, which other work may hide."""
        yield from self._more(start, self._spills, best(known, self.limit))
        if start.fits(self.limit) or not self._spills(start):
            return
        device, every = start.machine.device, self._again(start)
        steps = itertools.pairwise([(0, 0.0), *((how.bytes, how.seconds) for how in every)])
        rates = [(n - m) / (t - s) if t > s else math.inf for (m, s), (n, t) in steps]
        known = [*known]
        for least in (device.memory_bandwidth / PASSES, device.host_bandwidth / 2):
            if quick := [how for how, rate in zip(every, rates, strict=True) if rate >= least]:
                known += [made := followed(start, quick[-1:], self.follow)]
                yield made
                yield from self._more(made, self._spills, best(known, self.limit))

    def _accumulating(self, start: Candidate, most: float) -> Iterator[Candidate]:
        """A plan with ever more microbatches, until it fits or takes as many seconds as this, or twice all that more
        would save is not enough.

        Raises `NeedsWholeBatchError` where there can be none.
        """
        fewer, before = 0, 0
        for how in microbatches(start) if not start.fits(self.limit) else ():
            made = followed(start, [how], self.follow)
            yield made
            peak = made.memory.peak_bytes  # what rows take of it is about in proportion to 1 / parts
            more = fewer * (before - peak) / (how.parts - fewer) if fewer else math.inf
            if made.fits(self.limit) or made.seconds >= most or peak - 2 * more > self.limit:
                return
            fewer, before = how.parts, peak


def microbatches(start: Candidate) -> Iterator[Microbatch]:
    """Ever more of them that the program of a plan may run by, if it does not yet."""
    batch = None if any(isinstance(how, Microbatch) for how in start.program.savings) else _batch(start)
    if batch is not None:
        yield from (dataclasses.replace(batch.whole, parts=parts) for parts in batch.counts)


def _least(plans: Sequence[Candidate]) -> list[Candidate]:
    """The plans than which none before them is as fast and needs as little memory."""
    found = list[Candidate]()
    for plan in plans:
        if not any(c.seconds <= plan.seconds and c.memory.peak_bytes <= plan.memory.peak_bytes for c in found):
            found.append(plan)
    return found


class _Batch(NamedTuple):
    """**Fields:** `whole`: all rows as one microbatch; `counts`: how many there may be, fewest first."""

    whole: Microbatch
    counts: Sequence[int]


def _batch(start: Candidate) -> _Batch | None:
    """The rows of the batch, of which each device has a part in every microbatch."""
    inputs, ways = start.program.graph.inputs, max(start.machine.num_devices, 2)  # one divides nothing
    arguments = batch_arguments(start.program, RuleCache(), ways)
    if not arguments:
        return None
    (i, d), *_ = arguments
    size, layout = inputs[i].shape[d], start.graph.inputs[i].layout
    assert layout is not None
    local = size // start.mesh.size(layout.dims[d])
    return _Batch(Microbatch(arguments, 1, size), [n for n in range(2, local + 1) if local % n == 0])
