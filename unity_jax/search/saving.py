"""Less memory for more time: where no plan fits, the loss is computed by chunks, what the backward pass reads is
computed again instead of kept, or gradients are accumulated over microbatches. And the other way round: where memory is
left, what `jax.checkpoint` has the backward pass compute again is kept (`keeping`).

    BERT-Large, 1,024 sequences on eight H100: 155 GiB in 713 ms as written, 55 GiB in 803 ms so

A loss by chunks costs little. Values are computed again, best first (`residuals.choice`), as few as make the plan
fit, its layouts as they were; microbatches are as few as do. For what is fastest then, layouts are searched anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import NamedTuple, Protocol

from unity_jax import progress
from unity_jax.cost.program import local_bytes
from unity_jax.machine.device import Device
from unity_jax.pcg.graph import Graph, Tensor
from unity_jax.pcg.mesh import WHOLE, MeshAxes
from unity_jax.program import Program
from unity_jax.residuals.change import at, positions
from unity_jax.residuals.choice import Choice, choices
from unity_jax.residuals.chunks import PARTS
from unity_jax.residuals.keep import Rematerialized
from unity_jax.residuals.pair import pairs
from unity_jax.residuals.record import Chunk, Keep, Microbatch, NeedsWholeBatchError, Recompute, Saving
from unity_jax.rewrite.estimate import Seconds, by_kernels
from unity_jax.search.batch import batch_arguments
from unity_jax.search.candidate import Candidate, best
from unity_jax.search.rule_cache import RuleCache
from unity_jax.search.searched import Searched
from unity_jax.xla.traffic import Traffic

WORTH = 0.25
"""The part of what does not fit that chunks must free."""

LEAST = 0.5
"""The part of what does not fit that values must free to be computed again: what frees less fits by chance."""

NEARLY = 1.5
"""How many times the limit a plan may need that is planned anew to fit: layouts make so much of a difference."""

SEEDS = 6
"""How many shapes of the largest arrays are tried as those that chunks are made around."""

class Follow(Protocol):
    """Makes the plan of a variant of a program that does what a plan of that does."""

    def __call__(self, plan: Candidate, program: Program, like: Mapping[Tensor, Tensor]) -> Candidate:
        """**Arguments:** `like`: what the program before has in place of tensors of the variant."""


def fitting(
    starts: Sequence[Candidate], limit: float, follow: Follow, plan: Callable[[Program], Candidate]
) -> Candidate:
    """The fastest plan that fits of those that need less memory than some that do not; else that which needs least.

    **Arguments:** `starts`: plans of a program as it is: the fastest, and that which needs least memory; `follow` makes
    plans of other forms of it that do the same, and `plan` the best one of such a form.
    """
    progress.stage("what needs less memory")
    made, entire = list[Candidate](), dict[str, None]()
    for start in starts:
        forms = list(by_chunks(start, limit, follow))
        made += forms
        try:
            made += _accumulating(start, limit, follow)
            made += by_chunks(made[-1], limit, follow)
        except NeedsWholeBatchError as error:
            entire[str(error)] = None
        for form in forms:
            made += _recomputing(form, limit, follow, best(made, limit))
    first = best(made, limit)
    forms = [c.program for c in (first, *_nearly(made, first, limit)) if c.program.savings]
    found = best([first, *map(plan, forms)], limit)
    return found.noting(searched=found.searched + Searched(entire=tuple(entire)))


def _nearly(made: Sequence[Candidate], first: Candidate, limit: float) -> Sequence[Candidate]:
    """The plan that is faster than the first one, and with other layouts may fit: what needs least memory."""
    faster = [c for c in made if c.seconds < first.seconds]
    near = [c for c in faster if c.program.savings and c.program.savings != first.program.savings]
    near = [c for c in near if limit < c.memory.peak_bytes <= NEARLY * limit]
    return sorted(near, key=lambda c: c.memory.peak_bytes)[:1]


def by_chunks(start: Candidate, limit: float, follow: Follow) -> Iterator[Candidate]:
    """A plan, and as long as it does not fit with ever more of its largest arrays by chunks."""
    yield start
    before: Candidate | None = None
    while start is not before and not start.fits(limit):
        before = start
        for arrays in _largest(before, limit):
            for made in _chunked(before, arrays, follow):
                yield made
                freed = start.memory.peak_bytes - made.memory.peak_bytes
                if freed < WORTH * (start.memory.peak_bytes - limit):
                    break
                start = made
                if start.fits(limit):
                    return
            if start is not before:
                break


def _largest(start: Candidate, limit: float) -> Iterator[list[Tensor]]:
    """The largest arrays of a plan, wherever they are, those together that are alike and are a good part of what does
    not fit."""
    graph, local = start.program.graph, _local(start)
    kinds = defaultdict[object, list[Tensor]](list)
    for t in local:
        kinds[t.shape, t.dtype].append(t)
    read = {t for op in graph.walk() if op.backward for t in op.inputs}
    kept = {t for op in graph.walk() if not op.backward for t in op.outputs if t in read}
    excess, tried = start.memory.peak_bytes - limit, 0
    for arrays in sorted(kinds.values(), key=lambda arrays: -max(map(local.__getitem__, arrays))):
        there = sum(local[t] * (t.times if t in kept else 1) for t in arrays)
        if there >= WORTH * excess and tried < SEEDS:
            tried += 1
            yield arrays


def _chunked(start: Candidate, arrays: Sequence[Tensor], follow: Follow) -> Iterator[Candidate]:
    """A plan with the ops around some arrays that are alike by ever more chunks, if they can be cut."""
    graph, planned, local = start.program.graph, _planned(start), _local(start)
    places, largest = positions(graph, arrays), max(map(local.__getitem__, arrays))
    where = next(op.source for op in graph.walk() if not set(op.outputs).isdisjoint(arrays))
    for cuts in _cuts([planned[t] for t in arrays], start.mesh):
        for dim, parts in cuts:
            how = Chunk(places, dim, parts, where, largest * (parts - 1) // parts)
            with contextlib.suppress(LookupError):
                yield _followed(start, how, follow)
                break


def _cuts(arrays: Sequence[Tensor], mesh: MeshAxes) -> Iterator[list[tuple[int, int]]]:
    """Along which dimensions arrays can be cut, and into how many parts, few at first. Of others than the outermost one
    devices have no part of each part if they are split."""
    shape = arrays[0].shape
    axes = [[t.layout.dims[d] for t in arrays if t.layout is not None] for d in range(len(shape))]
    free = [d for d in (*range(1, len(shape)), 0) if shape and not (d and any(axes[d]))]
    sizes = {d: math.gcd(*(shape[d] // mesh.size(a) for a in axes[d])) for d in free}
    for few, many in itertools.pairwise((*PARTS, 4 * PARTS[-1])):
        parts = {d: [n for n in range(few, min(many, size + 1)) if size % n == 0] for d, size in sizes.items()}
        yield [(d, ns[0]) for d, ns in parts.items() if ns]


def _recomputing(start: Candidate, limit: float, follow: Follow, now: Candidate) -> Iterator[Candidate]:
    """A plan with ever more values computed again in the backward pass, in search of the fewest with which it fits:
    first as many as free by estimate what does not fit.

    What layers of a scan stack for the backward pass takes time to stack, so that with less of it a step may be faster:
    of these the fastest is searched.

    **Arguments:** `now`: the best plan so far: what is slower is not made to fit.
    """
    if pairs(start.program.graph):
        ways = [how for how in _recomputable(start) if how.bytes >= LEAST * (start.memory.peak_bytes - limit)]
        yield from _by_sections(len(ways), lambda i: _followed(start, ways[i], follow), limit)
        return
    if start.fits(limit) or (now.fits(limit) and now.seconds <= start.seconds):
        return
    every = _recomputable(start)
    excess = start.memory.peak_bytes - limit
    few = sum(how.bytes < LEAST * excess for how in every) - 1
    enough = len(every)
    at = min(sum(how.bytes < excess for how in every), enough - 1)
    while few < at < enough:
        made = _followed(start, every[at], follow)
        few, enough = (few, at) if made.fits(limit) else (at, enough)
        at = (few + enough) // 2
        yield made
        if not made.fits(limit) and now.fits(limit) and now.seconds <= made.seconds:
            return


def _by_sections(ways: int, make: Callable[[int], Candidate], limit: float) -> Iterator[Candidate]:
    """Plans that keep less and less, in search of the fastest that fits, as if each were faster than the one before up
    to some, and slower from there on."""
    made = dict[int, Candidate]()
    low, high = 0, ways - 1
    while low <= high:
        left = low + 2 * (high - low) // 5
        right = min(left + 1 + (high - low) // 5, high)
        for i in dict.fromkeys((left, right)):
            if i not in made:
                made[i] = make(i)
                yield made[i]
        better = best([made[left], made[right]], limit)
        low, high = (low, right - 1) if better is made[left] else (left + 1, high)


def keeping(start: Candidate, limit: float, follow: Follow) -> Candidate:
    """A plan, or where memory is left a faster one, whose backward pass does not compute again by the user's
    `jax.checkpoint` what there is memory for."""
    if not start.fits(limit):
        return start
    graph, device, devices = start.program.graph, start.machine.device, start.machine.num_devices
    again = Rematerialized(graph, Traffic.of(graph, device.compiler), _estimate(device), devices)
    if not again.values:
        return start
    progress.stage("what jax.checkpoint would recompute, and there is memory for")
    local = _local(start)

    def kept(values: Set[Tensor]) -> Candidate:
        choice = again.keeping(values)
        return start if choice is None else _followed(start, Keep.of(graph, choice, _share(choice, local)), follow)

    free = kept(frozenset())
    ways = [frozenset(at(free.program.graph, how.values)) for how in _recomputable(free)]
    found = best([start, free, *_by_sections(len(ways), lambda i: kept(ways[i]), limit)], limit)
    return found.noting(searched=start.searched)


def _recomputable(start: Candidate) -> list[Recompute]:
    """What the program of a plan can compute again, ever more of it."""
    graph, device, local = start.program.graph, start.machine.device, _local(start)
    every = choices(graph, Traffic.of(graph, device.compiler), _estimate(device), start.machine.num_devices)
    return [Recompute.of(graph, choice, device.compiler, _share(choice, local)) for choice in every]


def _estimate(device: Device) -> Callable[[Graph], Seconds]:
    rules = RuleCache()
    return by_kernels(device, lambda op: rules.shard(op, WHOLE, ()))


def _accumulating(start: Candidate, limit: float, follow: Follow) -> Iterator[Candidate]:
    """A plan with ever more microbatches, until it fits; with fewer, some values are computed again besides.

    Raises `NeedsWholeBatchError` where there can be none.
    """
    batch = None if start.fits(limit) else _batch(start)
    if batch is None:
        return
    again: list[Recompute] | None = None
    for parts in batch.counts:
        made = _followed(start, dataclasses.replace(batch.whole, parts=parts), follow)
        yield made
        if made.fits(limit):
            return
        again = _recomputable(start) if again is None else again
        excess = parts * (made.memory.peak_bytes - limit)
        enough = next((how for how in again if how.bytes >= excess), None)
        if enough is not None:
            with contextlib.suppress(NeedsWholeBatchError):  # what is computed again may have come in between
                less = _followed(start, enough, follow)
                yield _followed(less, dataclasses.replace(batch.whole, parts=parts), follow)


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


def _followed(start: Candidate, how: Saving, follow: Follow) -> Candidate:
    made = how.applied(start.program.graph)
    like = {t: origin for t, origin in made.origin.items() if isinstance(origin, Tensor)}
    return follow(start, start.program.saving(made.graph, how), like)


def _share(choice: Choice, local: Mapping[Tensor, int]) -> float:
    """The bytes of a choice on one device."""
    whole = sum(n * t.nbytes for t, n in choice.freed.items())
    return choice.bytes * sum(n * local.get(t, t.nbytes) for t, n in choice.freed.items()) / whole


def _local(found: Candidate) -> dict[Tensor, int]:
    """Bytes of the tensors of a program on one device, as a plan holds them."""
    return {t: local_bytes(planned, found.mesh) for t, planned in _planned(found).items()}


def _planned(found: Candidate) -> dict[Tensor, Tensor]:
    """The tensors that a program makes, and the same as a plan holds them."""
    pairs = ((op.traced.outputs, op.outputs) for op in found.graph.walk() if op.traced is not None)
    return {t: planned for before, after in pairs for t, planned in zip(before, after, strict=True)}
