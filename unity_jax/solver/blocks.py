"""The best strategies of a block of nodes while all other nodes stay: exact, by eliminating one node after the other.

    block = Block.of(tables, nodes, most=2**14)
    block.nodes                          # all of them but those that would make a table larger than that
    block.solved([costs of each node])   # the least sum, and their strategies

The order is made once and serves for any costs of the nodes, such as those at other prices on memory.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Tables = Sequence[Mapping[int, np.ndarray]]


@dataclass(frozen=True, eq=False)
class _Step:
    """One node eliminated: its place among the block's nodes, the places of its neighbours then, the tables it meets,
    shaped to (neighbours..., own), and the earlier steps whose results it meets, with their shapes."""

    node: int
    around: list[int]
    table: np.ndarray | None
    met: list[tuple[int, tuple[int, ...] | None, tuple[int, ...]]]


@dataclass(frozen=True, eq=False)
class Block:
    """Nodes and the order to eliminate them in."""

    nodes: list[int]
    steps: list[_Step]

    @staticmethod
    def of(tables: Tables, nodes: Sequence[int], sizes: Sequence[int], most: int, noise: np.ndarray) -> Block:
        """A block of these nodes, less those that stand in the way.

        **Arguments:** `most`: entries of any table; `noise`: per node in `nodes`, a factor by which it is dropped later
        than another one.
        """
        order, kept = _ordered(tables, nodes, sizes, most, noise)
        place = {v: n for n, v in enumerate(order)}
        steps: list[_Step] = []
        results: list[list[int]] = [[] for _ in order]
        for n, v in enumerate(order):
            around = sorted(place[w] for w in kept[v] if w in place)
            rank = {w: axis for axis, w in enumerate([*around, n])}
            shape = [sizes[order[w]] for w in around] + [sizes[v]]
            total: np.ndarray | None = None
            for w, table in tables[v].items():
                if place.get(w, -1) > n:
                    full = [1] * len(shape)
                    full[rank[place[w]]], full[-1] = table.shape[1], table.shape[0]
                    term = table.T.reshape(full)
                    total = term if total is None else total + term
            met = []
            for s in results[n]:
                axes = [rank[w] for w in steps[s].around]
                order_ = sorted(range(len(axes)), key=axes.__getitem__)
                full = [1] * len(shape)
                for a in axes:
                    full[a] = shape[a]
                met.append((s, None if order_ == [*range(len(axes))] else tuple(order_), tuple(full)))
            if around:
                results[around[0]].append(len(steps))
            steps.append(_Step(n, around, total, met))
        return Block(order, steps)

    def solved(self, costs: Sequence[np.ndarray]) -> np.ndarray:
        """The strategies with the least sum, of the nodes in order.

        **Arguments:** `costs`: per node of the block, of each strategy: its own and to nodes outside.
        """
        joint: list[np.ndarray] = []
        least: list[np.ndarray] = []
        for step in self.steps:
            total = costs[step.node] if step.table is None else step.table + costs[step.node]
            for s, axes, shape in step.met:
                term = least[s] if axes is None else least[s].transpose(axes)
                total = total + term.reshape(shape)
            joint.append(total)
            least.append(total.min(axis=-1))
        x = np.zeros(len(self.nodes), np.int64)
        for step, total in zip(reversed(self.steps), reversed(joint), strict=True):
            x[step.node] = total[tuple(x[w] for w in step.around)].argmin()
        return x


def _ordered(
    tables: Tables, nodes: Sequence[int], sizes: Sequence[int], most: int, noise: np.ndarray
) -> tuple[list[int], dict[int, set[int]]]:
    """Nodes in the order of elimination and the neighbours of each then; the cheapest one next, or if that makes too
    large a table, the one with most neighbours is dropped."""
    inside = set(nodes)
    late = dict(zip(nodes, noise.tolist(), strict=True))
    near = {v: {w for w in tables[v] if w in inside} for v in nodes}

    def entries(v: int) -> float:
        total = float(sizes[v])
        for w in near[v]:
            total *= sizes[w]
        return total

    heap = [(entries(v), v) for v in nodes]
    heapq.heapify(heap)
    order: list[int] = []
    kept: dict[int, set[int]] = {}
    while heap:
        score, v = heapq.heappop(heap)
        if v not in near or score != entries(v):
            continue
        if score > most:
            worst = max(near, key=lambda w: (len(near[w]) * late[w], w))
            around = near.pop(worst)
            heapq.heappush(heap, (score, v))
            for w in around:
                near[w].discard(worst)
                heapq.heappush(heap, (entries(w), w))
            continue
        around = near.pop(v)
        order.append(v)
        kept[v] = around
        for w in around:
            near[w] |= around
            near[w] -= {v, w}
        for w in around:
            heapq.heappush(heap, (entries(w), w))
    return order, kept
