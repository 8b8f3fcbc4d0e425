"""How much streams slow each other: every pair of them measured alone and together, in turns.

    found = overlaps(streams_of(samples, probes, seconds=0.01), mesh, repeats=9)
    fit_contention(found).compute_by_collectives
    # 0.21

Arithmetic and a collective run in one program, as a train step has them; copies are started beside it. Streams that the
compiler or the backend runs one after the other show as such: their coefficients are near 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jax.sharding import Mesh

from unity_jax.calibration.measure import COPIES, Probe, Sample, medians, runner
from unity_jax.machine.contention import STREAMS, Contention, fit

_KIND = {"compute": "matmul", "collectives": "all_gather"}


@dataclass(frozen=True)
class Overlap:
    """Two streams: the seconds of each alone, and of both started together."""

    streams: tuple[str, str]
    alone: tuple[float, float]
    together: float

    @property
    def row(self) -> list[float]:
        """Seconds alone in the order of `STREAMS`, 0 for those that did not run."""
        return [dict(zip(self.streams, self.alone, strict=True)).get(s, 0.0) for s in STREAMS]


def streams_of(probes: Sequence[Probe], samples: Sequence[Sample], seconds: float) -> dict[str, Probe]:
    """A probe for each stream, the largest of its kind (a matmul of the first dtype), repeated or resized to take about
    so long alone."""
    found: dict[str, Probe] = {}
    for stream in STREAMS:
        own = [(p, s) for p, s in zip(probes, samples, strict=True) if p.kind == _KIND.get(stream, stream)]
        if own:
            probe, sample = max(own, key=lambda pair: pair[0].flops or pair[0].nbytes)
            times = seconds / sample.seconds
            if probe.kind in COPIES:
                found[stream] = replace(probe, elements=max(1, int(times * probe.elements)))
            else:
                found[stream] = replace(probe, chain=max(1, min(64, round(times))))
    return found


Pair = tuple[str, str]


def overlaps(
    streams: Mapping[str, Probe], mesh: Mesh, repeats: int, track: Callable[[Sequence[Pair]], Iterable[Pair]] = iter
) -> Iterator[Overlap]:
    """Every pair of streams; `track`: what the pairs go through, such as a progress bar."""
    for a, b in track(list(itertools.combinations(streams, 2))):
        both = streams[a], streams[b]
        first, second, together = medians([runner([p], mesh) for p in both] + [runner(both, mesh)], repeats)
        yield Overlap((a, b), (first, second), together)


def fit_contention(found: Sequence[Overlap]) -> Contention:
    """The coefficients that explain the overlaps best."""
    return fit(np.array([o.row for o in found]), np.array([o.together for o in found]))
