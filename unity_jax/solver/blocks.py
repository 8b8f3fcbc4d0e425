"""The best strategies of a block of nodes while all other nodes stay: exact, by eliminating one node after the other.

    block = Block.of(tables, nodes, sizes, most=2**14, weights=weights)
    block.nodes                          # in another order, without those that make a table larger than that
    block.solved([costs of each node])   # their strategies with the least sum

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
    """A node eliminated.

    **Fields:** `around`: the places in the block of its neighbours then; `table`: the sum of its tables with nodes
    eliminated later, an axis for each neighbour and the last for the node, None if there are none; `met`: earlier steps
    whose results are added, each with the order of its axes, if that changes, and the shape that it gets.
    """

    around: list[int]
    table: np.ndarray | None
    met: list[tuple[int, tuple[int, ...] | None, tuple[int, ...]]]


@dataclass(frozen=True, eq=False)
class Block:
    """Nodes in the order of their elimination."""

    nodes: list[int]
    steps: list[_Step]

    @staticmethod
    def of(tables: Tables, nodes: Sequence[int], sizes: Sequence[int], most: int, weights: np.ndarray) -> Block:
        """A block of these nodes, less those that stand in the way.

        **Arguments:** `tables`: per node and neighbour, (own strategies, the neighbour's); `sizes`: strategies of each
        node; `most`: entries of any table; `weights`: of each of `nodes`; its number of neighbours times its weight
        says which one is left out next.
        """
        order, kept = _ordered(tables, nodes, sizes, most, weights)
        place = {v: n for n, v in enumerate(order)}
        steps: list[_Step] = []
        results: list[list[int]] = [[] for _ in order]  # steps whose result the node at this place meets
        for n, v in enumerate(order):
            around = sorted(place[w] for w in kept[v] if w in place)
            axis = {place_: a for a, place_ in enumerate(around)}
            shape = [sizes[order[m]] for m in around]
            total: np.ndarray | None = None
            for w, table in tables[v].items():
                if (m := place.get(w, -1)) > n:
                    term = table.T.reshape(_spread(shape, [axis[m]], sizes[v]))
                    total = term if total is None else total + term
            axis[n] = len(shape)
            met = []
            for s in results[n]:
                axes = [axis[m] for m in steps[s].around]
                turned = tuple(sorted(range(len(axes)), key=axes.__getitem__))
                full = _spread(shape, axes, sizes[v])
                met.append((s, None if turned == tuple(range(len(axes))) else turned, full))
            if around:
                results[around[0]].append(n)
            steps.append(_Step(around, total, met))
        return Block(order, steps)

    def solved(self, costs: Sequence[np.ndarray]) -> np.ndarray:
        """The strategies with the least sum, of the nodes in order.

        **Arguments:** `costs`: per node of the block, of each strategy: its own and to nodes outside.
        """
        joint: list[np.ndarray] = []
        least: list[np.ndarray] = []
        for cost, step in zip(costs, self.steps, strict=True):
            total = cost if step.table is None else step.table + cost
            for s, axes, shape in step.met:
                term = least[s] if axes is None else least[s].transpose(axes)
                total = total + term.reshape(shape)
            joint.append(total)
            least.append(total.min(axis=-1))
        x = np.zeros(len(self.nodes), np.int64)
        for n in reversed(range(len(x))):
            x[n] = joint[n][tuple(x[m] for m in self.steps[n].around)].argmin()
        return x


def _spread(shape: Sequence[int], axes: Sequence[int], own: int) -> tuple[int, ...]:
    """The shape of a table over some of these axes, and over the node's own strategies as the last."""
    return (*(k if a in axes else 1 for a, k in enumerate(shape)), own)


def _ordered(
    tables: Tables, nodes: Sequence[int], sizes: Sequence[int], most: int, weights: np.ndarray
) -> tuple[list[int], dict[int, set[int]]]:
    """Nodes in the order of elimination and the neighbours of each then; the cheapest one next, or if that makes too
    large a table, the one with most neighbours (weighted) is left out."""
    inside = set(nodes)
    weight = dict(zip(nodes, weights.tolist(), strict=True))
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
            worst = max(near, key=lambda w: (len(near[w]) * weight[w], w))
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
