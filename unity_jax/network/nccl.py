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
from unity_jax.network.spans import Span


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


class Group(NamedTuple):
    """A group of GPUs: its nodes and the devices inside each; bytes per second of a device's port inside a node
    (`port`), of its own network card (`card`) and of all cards that its devices in a node have (`cards`); seconds of a
    hop inside a node (`near`) and between nodes (`far`)."""

    nodes: int
    inside: int
    port: float
    card: float
    cards: float
    near: float
    far: float

    @staticmethod
    def of(crossed: Sequence[Span], innermost: Level) -> Group:
        apart = [s for s in crossed if s.level is not innermost]
        node = next((s for s in crossed if s.level is innermost), None)
        return Group(
            math.prod(s.members for s in apart),
            node.members if node is not None else 1,
            node.level.bandwidth if node is not None else math.inf,
            min((s.level.bandwidth for s in apart), default=math.inf),
            min((s.inside * s.level.bandwidth for s in apart), default=math.inf),
            node.level.latency if node is not None else 0.0,
            max((s.level.latency for s in apart), default=0.0),
        )


def lines(kind: str, crossed: Sequence[Span], innermost: Level) -> Iterator[tuple[float, float]]:
    """(seconds, seconds per byte) of each algorithm of a collective in each protocol; `crossed`: the outermost level
    first."""
    group = Group.of(crossed, innermost)
    for p in PROTOCOLS:
        if kind in ("permute", "all_to_all"):
            yield _direct(kind, group, p)
        else:
            yield _ring(kind, group, p)
        if kind == "all_reduce" and group.nodes > 1:
            yield _tree(group, p)


def _direct(kind: str, group: Group, p: Protocol) -> tuple[float, float]:
    """Straight to the others, of this node and of others at once."""
    n = group.nodes * group.inside
    if kind == "permute":
        slope = 1 / (group.card if group.nodes > 1 else group.port)
    else:
        slope = max((group.inside - 1) / n / group.port, (n - group.inside) / n / group.card)
    return p.start + max(p.near * group.near, p.far * group.far), slope / p.ring


def _ring(kind: str, group: Group, p: Protocol) -> tuple[float, float]:
    n, rounds = group.nodes * group.inside, 2 if kind == "all_reduce" else 1
    hops = rounds * (n - group.nodes), rounds * (group.nodes - 1)
    begun = p.start + hops[0] * p.near * group.near + hops[1] * p.far * group.far
    return begun, rounds * (n - 1) / n / _rate(group, p, p.ring)


def _tree(group: Group, p: Protocol) -> tuple[float, float]:
    """Up along the devices of a node and a binary tree of nodes, and down again."""
    hops = 2 * (group.inside - 1), 2 * math.ceil(math.log2(group.nodes))
    begun = p.start + hops[0] * p.near * group.near + hops[1] * p.far * group.far
    return begun, 2 / _rate(group, p, p.tree)


def _rate(group: Group, p: Protocol, part: float) -> float:
    return min(p.most[min(group.nodes, 3) - 1], part * min(group.port, group.cards))
