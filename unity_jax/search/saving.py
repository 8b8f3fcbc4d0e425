"""Less memory for more time: where no plan fits, the loss is computed by chunks, what the backward pass reads is
computed again instead of kept, gradients are accumulated over microbatches, or state is on the host until its update.

    BERT-Large, 1,024 sequences on eight H100: 155 GiB in 713 ms as written, 55 GiB in 803 ms so

A loss by chunks costs little. Values are computed again, best first (`residuals.choice`), as few as make the plan
fit, its layouts as they were; microbatches, and leaves on the host, are as few as do. For what is fastest then, layouts
are searched anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from unity_jax import progress
from unity_jax.cost.program import local_bytes
from unity_jax.network.reshard import Resharder
from unity_jax.pcg.graph import Tensor
from unity_jax.pcg.mesh import WHOLE
from unity_jax.program import Program
from unity_jax.residuals.change import positions
from unity_jax.residuals.choice import Choice, choices
from unity_jax.residuals.chunks import PARTS
from unity_jax.residuals.record import Chunk, Microbatch, NeedsWholeBatchError, Offload, Recompute, Saving
from unity_jax.rewrite.estimate import by_kernels
from unity_jax.search.batch import batch_dims
from unity_jax.search.candidate import Candidate, best, finish
from unity_jax.search.rule_cache import RuleCache
from unity_jax.search.searched import Searched
from unity_jax.xla.traffic import Traffic

LEAST = 0.5
"""The part of what does not fit that values must free to be computed again: what frees less fits by chance."""

NEARLY = 1.5
"""How many times the limit a plan may need that is planned anew to fit: layouts make so much of a difference."""

LEAF = 1 / 64
"""Leaves of no more than this part of the largest one stay on the device: a copy of them takes mostly its start."""

SEEDS = 8
"""How many of the largest arrays are tried as the one that a loss is chunked around, of each shape one."""


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
        by_chunks = _chunked(start, follow)
        forms = [start] if by_chunks is None else [start, by_chunks]
        made += forms
        try:
            made += _accumulating(start, limit, follow)
        except NeedsWholeBatchError as error:
            entire[str(error)] = None
        for form in forms:
            for more in (_recomputable, _hostable, _stacks):
                made += _fewest(form, more, limit, follow, best(made, limit))
    for more in (_stacks, _recomputable):  # besides what needs least so far
        if not (least := best(made, limit)).fits(limit):
            made += _fewest(least, more, limit, follow, least)
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


def _chunked(start: Candidate, follow: Follow) -> Candidate | None:
    """A plan with its loss by chunks, if it has one."""
    graph, local = start.program.graph, _local(start)
    made = [t for op in graph.ops for t in op.outputs if t.times == 1 and t.rank]
    largest = sorted(made, key=lambda t: -t.nbytes)
    for seed in list({(t.shape, t.dtype): t for t in reversed(largest)}.values())[: -SEEDS - 1 : -1]:
        for dim in (*range(1, seed.rank), 0):  # devices hold blocks of what is outermost
            freed = local.get(seed, seed.nbytes) * (PARTS - 1) // PARTS
            (at,) = positions(graph, [seed])
            how = Chunk(at, dim, PARTS, graph.producer[seed].source, freed)
            with contextlib.suppress(LookupError):
                return _followed(start, how, follow)
    return None


def _fewest(
    start: Candidate,
    more: Callable[[Candidate], Sequence[Recompute | Offload]],
    limit: float,
    follow: Follow,
    now: Candidate,
) -> Iterator[Candidate]:
    """A plan with ever more values computed again in the backward pass, or ever more state on the host, in search of
    the fewest with which it fits: first as many as free by estimate what does not fit.

    **Arguments:** `more`: ever more of them; `now`: the best plan so far: what is slower is not made to fit.
    """
    if start.fits(limit) or (now.fits(limit) and now.seconds <= start.seconds):
        return
    every = more(start)
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


def _hostable(start: Candidate) -> list[Offload]:
    """The state of a plan that only its update reads, ever more of it, the largest leaves first."""
    program = start.program
    early = {t for op in program.graph.ops if not op.backward for t in op.inputs}
    free = [i for i in {*program.ties.values()} - program.hosted if program.graph.inputs[i] not in early]
    inputs = start.graph.inputs
    link = start.machine.device.host_bandwidth
    local = {i: inputs[i].times * local_bytes(inputs[i], start.mesh) for i in free if link}
    largest = sorted((i for i in local if local[i] > LEAF * max(local.values())), key=lambda i: (-local[i], i))
    return [_offload(start, largest[: n + 1]) for n in range(len(largest))]


def _stacks(start: Candidate) -> list[Offload]:
    """The same, updated layer by layer."""
    every = [dataclasses.replace(how, by_layer=True) for how in _hostable(start)]
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
    return _followed(
        found,
        _offload(found, [*new]),
        lambda plan, program, _: finish(program, plan.decisions, resharder, RuleCache(), plan.label, plan.lower_bound),
    )


def _recomputable(start: Candidate) -> list[Recompute]:
    """What the program of a plan can compute again, ever more of it."""
    graph, device, rules = start.program.graph, start.machine.device, RuleCache()
    seconds = by_kernels(device, lambda op: rules.shard(op, WHOLE, ()))
    every = choices(graph, Traffic.of(graph, device.compiler), seconds, start.machine.num_devices)
    local = _local(start)
    return [Recompute.of(graph, choice, device.compiler, _freed(choice, local)) for choice in every]


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
    program, inputs = start.program, start.program.graph.inputs
    rows = batch_dims(program, RuleCache(), start.machine.num_devices)
    arguments = tuple((i, d) for i, t in enumerate(inputs) for d in range(t.rank) if rows.get((t, d)) == 1)
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
    return follow(start, start.program.saving(made, how), like)


def _freed(choice: Choice, local: dict[Tensor, int]) -> float:
    """By how much less is live at once on one device."""
    whole = sum(t.times * t.nbytes for t in choice.freed)
    return choice.bytes * sum(t.times * local.get(t, t.nbytes) for t in choice.freed) / whole


def _local(found: Candidate) -> dict[Tensor, int]:
    """Bytes of the tensors of a program on one device, as a plan holds them."""
    return {
        t: local_bytes(planned, found.mesh)
        for op in found.graph.ops
        if op.traced is not None
        for t, planned in zip(op.traced.outputs, op.outputs, strict=True)
    }
