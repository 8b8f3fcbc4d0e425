"""How long a collective takes on nodes of H100, through NCCL's own model of itself: the fastest of its protocols.

A protocol takes a time to begin, a time for each step along the ring or the tree, and the bytes that a device sends at
a part of the bandwidth (https://github.com/NVIDIA/nccl/blob/v2.28.7-1/src/graph/tuning.cc; here as for Intel processors
in the nodes). Its algorithms that add up inside a switch (NVLS) are left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .network import STEPS, Groups, Pairs


class Protocol(NamedTuple):
    """Seconds to begin (`base`), of a step inside a node (`near`) and from node to node (`far`); what part of the
    bandwidth it reaches, at `most` so many bytes per second in one node, over two, and over more."""

    base: float
    near: float
    far: float
    part: float
    most: tuple[float, float, float] = (math.inf,) * 3


LL_MOST = (141e9, 39e9, 20.4e9)
# LL, LL128 and Simple of each: `baseLatencies`, and `hwLatencies` over NVLink and over the network. Between nodes a
# step takes no less than to post it to the network (`getNetOverhead`); where a node has one member, nothing hides a
# step of the network, which takes as long as in a tree; and Simple's all-reduce takes longer ("plateau effect").
RING_IN_NODE = (
    Protocol(6.6e-6, 0.6e-6, 0, 1 / 2, LL_MOST),
    Protocol(14e-6, 1.9e-6, 0, 120 / 128),
    Protocol(8.4e-6, 3.4e-6, 0, 1),
)
RING = (
    Protocol(6.6e-6, 1e-6, 2.7e-6, 1 / 2, LL_MOST),
    Protocol(14e-6, 1.9e-6, 4e-6, 120 / 128),
    Protocol(8.4e-6, 3.4e-6, 14e-6, 1),
)
RING_OF_ONES = tuple(p._replace(far=far) for p, far in zip(RING, (5e-6, 8.5e-6, 14e-6), strict=True))
# Of the 48 GB/s of a channel a tree over more than two nodes reaches 36 (`perChMaxTreeBws`), with LL128 29
# (`perChMaxTreeLL128Bws`), and in the sizes between small and large less than that (`treeCorrectionFactor`, of 64
# bytes and so on by powers of two).
TREE = (
    Protocol(6.8e-6, 0.6e-6, 5e-6, 36 / 48 / 3.8, LL_MOST),
    Protocol(14e-6, 1.25e-6, 8.5e-6, 29 / 48),
    Protocol(8.4e-6, 4e-6, 14e-6, 36 / 48),
)
TREE_PARTS = (
    (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1),
    (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1),
    (0.9,) * 7 + (0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9),
)
PLATEAU = 1.4


@dataclass(frozen=True)
class Nodes:
    """Nodes of so many GPUs behind a switch, joined by a network card for each GPU; device i is on node `i // gpus`.

    Bytes per second in each direction: `port`, 20.6e9 per NVLink of a Hopper chip, which has 18 (topo.h of NCCL);
    `card`, what a channel of a ring takes of one of 400 Gb/s (`sm90SpeedArrayInter` in search.cc of NCCL;
    https://docs.nvidia.com/dgx/dgxh100-user-guide/introduction-to-dgxh100.html). A ring enters and leaves a node
    through the cards of the members that it has there: groups that run at once share the cards of a node so.
    """

    gpus: int
    port: float = 18 * 20.6e9
    card: float = 48e9

    def seconds(self, kind: str, groups: Groups, nbytes: float) -> float:
        return max(self._seconds(kind, members, nbytes) for members in {self._members(group) for group in groups})

    def permute_seconds(self, pairs: Pairs, nbytes: float) -> float:
        crosses = {len(self._members(pair)) > 1 for pair in pairs}
        return self._straight(nbytes * (False in crosses), nbytes * (True in crosses), 2)

    def _members(self, group: Sequence[int]) -> tuple[int, ...]:
        """How many of a group each node has that has any, the fewest first."""
        return tuple(sorted(Counter(device // self.gpus for device in group).values()))

    def _seconds(self, kind: str, members: tuple[int, ...], nbytes: float) -> float:
        n, nodes = sum(members), len(members)
        if kind == "all-to-all":
            return self._straight((members[-1] - 1) * nbytes / n, (n - members[0]) * nbytes / n, nodes)
        steps, far = STEPS[kind] * (n - 1), STEPS[kind] * (nodes - 1)
        sent = steps * nbytes / n
        if nodes == 1:
            return _fastest(RING_IN_NODE, steps, 0, sent, self.port, 1)
        cards = members[0] * self.card
        table = RING_OF_ONES if n == nodes else RING
        if kind != "all-reduce":
            return _fastest(table, steps - far, far, sent, min(self.port, cards), nodes)
        ring = _fastest([*table[:2], _slower(table[2])], steps - far, far, sent, min(self.port, cards), nodes)
        levels = 2 * (n // nodes - 1), 2 * int(math.log2(nodes))
        return min(ring, _fastest(_trees(nbytes), *levels, 2 * nbytes, cards, nodes))

    def _straight(self, inside: float, outside: float, nodes: int) -> float:
        """What a device sends to others of its node, and at the same time to those of other nodes."""
        near = _fastest(RING_IN_NODE, 1, 0, inside, self.port, 1)
        return max(near, _fastest(RING_OF_ONES, 0, 1, outside, self.card, nodes)) if outside else near


def _slower(p: Protocol) -> Protocol:
    return p._replace(base=PLATEAU * p.base, near=PLATEAU * p.near, far=PLATEAU * p.far)


def _trees(nbytes: float) -> list[Protocol]:
    size = int(math.log2(max(nbytes, 64) / 64))
    return [p._replace(part=p.part * (parts[size:] or (1,))[0]) for p, parts in zip(TREE, TREE_PARTS, strict=True)]


def _fastest(table: Iterable[Protocol], near: int, far: int, sent: float, bandwidth: float, nodes: int) -> float:
    """Of so many steps inside nodes and between them, and bytes that a device sends."""
    return min(
        p.base + near * p.near + far * p.far + sent / min(p.most[min(nodes, 3) - 1], p.part * bandwidth) for p in table
    )
