"""Plans whose largest arrays are computed by chunks (`residuals.chunks`): few chunks at first, of few arrays."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from unity_jax.pcg.graph import Graph, Tensor, nested
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.residuals.change import positions
from unity_jax.residuals.chunks import PARTS
from unity_jax.residuals.flat import Flat
from unity_jax.residuals.record import Chunk
from unity_jax.search.candidate import Candidate
from unity_jax.search.following import Follow, followed, local, planned

WORTH = 0.25
"""The part of what does not fit that chunks must free."""

SEEDS = 6
"""How many shapes of the largest arrays are tried as those that chunks are made around."""


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
    graph, bytes_of = start.program.graph, local(start)
    kinds = defaultdict[object, list[Tensor]](list)
    for t in bytes_of:
        kinds[t.shape, t.dtype].append(t)
    kept = dict(_kept(graph))
    excess, tried = start.memory.peak_bytes - limit, 0
    for arrays in sorted(kinds.values(), key=lambda arrays: -max(map(bytes_of.__getitem__, arrays))):
        there = sum(bytes_of[t] * kept.get(t, 1) for t in arrays)
        if there >= WORTH * excess and tried < SEEDS:
            tried += 1
            yield arrays


def _kept(graph: Graph) -> Iterator[tuple[Tensor, int]]:
    """What the backward pass reads of the forward pass, those of layers and in loops too, and for how many layers."""
    for _, inside, _ in nested(graph):
        layers = Flat(inside)
        read = {t for op in layers.graph.ops if op.backward for t in op.inputs}
        early = (t for op in layers.graph.ops if not op.backward for t in op.outputs if t in read)
        yield from ((layers.origin.get(t, t), t.times) for t in early)


def _chunked(start: Candidate, arrays: Sequence[Tensor], follow: Follow) -> Iterator[Candidate]:
    """A plan with the ops around some arrays that are alike by ever more chunks, if they can be cut."""
    graph, at, bytes_of = start.program.graph, planned(start), local(start)
    places, largest = positions(graph, arrays), max(map(bytes_of.__getitem__, arrays))
    where = next(op.source for op in graph.walk() if not set(op.outputs).isdisjoint(arrays))
    for cuts in _cuts([at[t] for t in arrays], start.mesh):
        for dim, parts in cuts:
            how = Chunk(places, dim, parts, where, largest * (parts - 1) // parts)
            with contextlib.suppress(LookupError):
                yield followed(start, [how], follow)
                break
        else:
            return


def _cuts(arrays: Sequence[Tensor], mesh: MeshAxes) -> Iterator[list[tuple[int, int]]]:
    """Along which dimensions arrays can be cut, and into how many parts, few at first. Of others than the outermost one
    devices have no part of each part if they are split."""
    shape = arrays[0].shape
    axes = [[t.layout.dims[d] for t in arrays if t.layout is not None] for d in range(len(shape))]
    free = [d for d in (*range(1, len(shape)), 0) if shape and not (d and any(axes[d]))]
    sizes = {d: math.gcd(*(shape[d] // mesh.size(a) for a in axes[d])) for d in free}
    for few, many in itertools.pairwise((*PARTS, 4 * PARTS[-1])):
        parts = {d: [n for n in range(few, min(many, size + 1)) if size % n == 0] for d, size in sizes.items()}
        if cuts := [(d, ns[0]) for d, ns in parts.items() if ns]:
            yield cuts
