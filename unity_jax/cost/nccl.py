"""Collectives among GPUs, as NCCL expects them of itself: along a ring or, for an all-reduce over several nodes, up and
down a tree, in one of three protocols (https://github.com/NVIDIA/nccl/blob/v2.28.7-1/src/graph/tuning.cc).

    8 H100, all-reduce of 64 KiB    LL        17 us    little to begin, but half of what it sends are flags
    8 H100, all-reduce of 8 MiB     LL128     84 us
    8 H100, all-reduce of 1 GiB     Simple     5 ms    most to begin, all of the bandwidth

An algorithm in a protocol takes a time to begin, a time for each hop to a neighbour and the bytes that a device sends.
Left out: reductions inside a switch (NVLS), and how trees fall behind at sizes between small and large.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from unity_jax.machine.network import Level


class Protocol(NamedTuple):
    """Seconds to begin (`baseLatencies`); a hop inside a node and from node to node (`hwLatencies`), of the `latency`
    of a level, which is that of LL128; the part of the bandwidth that a ring and a tree reach, and the most bytes per
    second in one node, over two and over more (`llMaxBws` of an H100)."""

    start: float
    near: float
    far: float
    ring: float
    tree: float
    most: tuple[float, float, float] = (math.inf,) * 3


PROTOCOLS = (
    Protocol(6.6e-6, 0.6 / 1.9, 2.7 / 4.0, 1 / 2, 0.2, (141e9, 39e9, 20.4e9)),  # LL
    Protocol(14e-6, 1.0, 1.0, 120 / 128, 29 / 48),  # LL128
    Protocol(8.4e-6, 3.4 / 1.9, 14 / 4.0, 1.0, 36 / 48),  # Simple
)


class Crossed(NamedTuple):
    """A level that a group crosses: into how many members, and how many of its devices are inside each of them."""

    level: Level
    members: int
    inside: int


def lines(kind: str, crossed: Sequence[Crossed], innermost: Level) -> Iterator[tuple[float, float]]:
    """(seconds, seconds per byte) of each algorithm of a collective; `crossed`: the outermost level first."""
    apart = [c for c in crossed if c.level is not innermost]
    near = next((c for c in crossed if c.level is innermost), None)
    nodes = math.prod(c.members for c in apart)
    inside = near.members if near is not None else 1
    n, rounds = nodes * inside, 2 if kind == "all_reduce" else 1
    port = near.level.bandwidth if near is not None else math.inf
    cards = min((c.inside * c.level.bandwidth for c in apart), default=math.inf)
    hop = near.level.latency if near is not None else 0.0
    away = max((c.level.latency for c in apart), default=0.0)
    for p in PROTOCOLS:
        most = p.most[min(nodes, 3) - 1]
        if kind in ("permute", "all_to_all"):  # straight to the others, of this node and of others at once
            whole = kind == "permute"
            sent = 1 if whole else (inside - 1) / n, 1 if whole else (n - inside) / n
            card = min((c.level.bandwidth for c in apart), default=math.inf)
            slope = sent[1] / card if whole and apart else max(sent[0] / port, sent[1] / card)
            yield p.start + max(p.near * hop, p.far * away), slope / p.ring
            continue
        hops = rounds * (n - nodes), rounds * (nodes - 1)
        begun = p.start + hops[0] * p.near * hop + hops[1] * p.far * away
        yield begun, rounds * (n - 1) / n / min(most, p.ring * min(port, cards))
        if kind == "all_reduce" and nodes > 1:
            up = inside - 1, math.ceil(math.log2(nodes))
            begun = p.start + 2 * up[0] * p.near * hop + 2 * up[1] * p.far * away
            yield begun, 2 / min(most, p.tree * min(port, cards))
