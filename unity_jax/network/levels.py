"""Collectives on a network of levels: switches, rings and lines, one inside another. Those of GPUs are in `nccl`.

A group that spans several levels runs hierarchically: the payload that crosses a level is divided by the members that
the group has inside each of its parts, all of which send at once (every network card of a node works). On the axes of a
torus, parts of the payload take the axes in different orders, so that all links work at once. Through a switch each
device has its own bandwidth; on a ring or line interleaved groups share the links.

Algorithms: Chan, Heimlich, Purkayastha, van de Geijn (https://doi.org/10.1002/cpe.1206); rings and lines with links in
both directions, several axes at once: https://jax-ml.github.io/scaling-book/sharding/ .
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from unity_jax.machine.network import Level
from unity_jax.network import nccl
from unity_jax.network.spans import TORUS, Span, is_grid, spans


def lines(network: tuple[Level, ...], kind: str, groups: np.ndarray) -> list[tuple[float, float]]:
    """(seconds, seconds per byte) of each algorithm of a collective in all these groups at once; `groups` as in
    `communication`."""
    crossed = spans(network, groups)
    if all(s.level.links == "nccl" for s in crossed):
        return list(nccl.lines(kind, crossed, network[-1]))
    ring = _grid_ring(kind, crossed)
    return [_by_levels(kind, crossed), *([ring] if ring else [])]


def _grid_ring(kind: str, crossed: list[Span]) -> tuple[float, float] | None:
    """One ring through all chips of a group that fills a grid, in both directions: XLA:TPU orders the members so. A
    grid of an even number of chips has a closed way through all of them; on lines, which do not wrap around, it uses
    more links than one axis after the other."""
    n = math.prod(s.members for s in crossed)
    if len(crossed) < 2 or n % 2 or not is_grid(crossed) or kind in ("all_to_all", "permute"):
        return None
    rounds = 2 if kind == "all_reduce" else 1
    latency, bandwidth = max(s.level.latency for s in crossed), min(s.level.bandwidth for s in crossed)
    return rounds * n / 2 * latency, rounds * (n - 1) / n / (2 * bandwidth)


def _by_levels(kind: str, crossed: list[Span]) -> tuple[float, float]:
    """One level after the other."""
    terms = [_level_line(kind, s.level, s.members, s.stride) for s in crossed]
    if kind == "permute":  # neighbours exchange at every level at the same time
        return max(terms, key=lambda t: (t[1], t[0]))
    shrinks = kind != "all_to_all"
    latency = sum(t[0] for t in terms)
    per_byte = 0.0
    for torus, part in itertools.groupby(zip(crossed, terms, strict=True), lambda s: s[0].level.links in TORUS):
        rows = list(part)
        if torus:
            per_byte += _torus([(s.members, t[1]) for s, t in rows], rows[-1][0].inside if shrinks else 1, shrinks)
        else:
            per_byte += sum(t[1] / (s.inside if shrinks else 1) for s, t in rows)
    return latency, per_byte


def _torus(axes: list[tuple[int, float]], inside: int, shrinks: bool) -> float:
    """Seconds per byte over several axes of a torus, each (members, seconds per byte alone).

    The payload is cut into as many parts as there are axes. Each part takes the axes in turn, beginning with another
    one, and what is left of it shrinks by the members of the axes that it has inside.
    """
    k = len(axes)
    total = 0.0
    for phase in range(k):
        slowest = 0.0
        for first in range(k):
            done = math.prod(axes[(first + p) % k][0] for p in range(phase)) if shrinks else 1
            slowest = max(slowest, axes[(first + phase) % k][1] / done)
        total += slowest / k
    return total / inside


def _level_line(kind: str, level: Level, n: int, stride: int) -> tuple[float, float]:
    """(seconds, seconds per byte) of a collective among `n` members of one level that are `stride` apart.

    Every device receives (n - 1) / n of the bytes. A switch joins any two devices, so halving and doubling takes
    log2(n) steps: two collectives over parts of the group are never faster. A ring or line moves data both ways at
    once, but at the end of a line all data arrive through one link; an all-to-all is bound by the bisection. In shared
    memory an all-reduce reads and writes twice, but meets once.
    """
    rounds = 2 if kind == "all_reduce" else 1
    if level.links == "shared":
        return level.latency, rounds * (1.0 if kind == "permute" else (n - 1) / n) / level.bandwidth
    if level.links not in TORUS:
        hops, moved, bandwidth = math.ceil(math.log2(n)), (n - 1) / n, level.bandwidth
        if kind == "permute":
            hops, moved = 1, 1.0
    else:
        wraps = level.links == "ring" and n * stride == level.size and n > 2
        hops = (math.ceil(n / 2) if wraps else n - 1) * stride
        moved = (n - 1) / n
        if kind == "all_to_all":
            moved = (n * n // 4) / n
        bandwidth = level.bandwidth * (2 if wraps else 1) / stride
        if kind == "permute":  # one direction only; without a wrap the last member sends back along the line
            hops, moved, bandwidth = (stride if wraps else hops), 1.0, level.bandwidth / stride
    return rounds * hops * level.latency, rounds * moved / bandwidth
