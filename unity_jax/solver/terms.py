"""What a choice of strategies costs and uses, in pieces: around a node, of a block of nodes, of all.

    terms = Terms.of(small)
    terms.cost(x), terms.excess(terms.live.used(x))
    terms.around([3, 4], x)      # per node of the block, what its strategies cost by themselves and to nodes outside

Pairs that are not allowed cost `forbidden`, a finite amount above what anything allowed costs, so that a search can
pass through them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .blocks import Block
from .liveness import Liveness
from .reduce import Reduced


@dataclass(frozen=True, eq=False)
class Terms:
    """**Fields:** `tables`: per node and neighbour, (own strategies, the neighbour's); `live`: see `Liveness`;
    `edges`: how many there are."""

    costs: list[np.ndarray]
    tables: list[dict[int, np.ndarray]]
    live: Liveness
    sizes: list[int]
    forbidden: float
    edges: int

    @staticmethod
    def of(small: Reduced) -> Terms:
        """The terms of what is left of a problem."""
        top = sum(float(c.max()) for c in small.costs)
        top += sum(_top(t) for v, of in enumerate(small.tables) for w, t in of.items() if v < w)
        forbidden = 2 * top + 1
        tables: list[dict[int, np.ndarray]] = [{} for _ in small.tables]
        for v, of in enumerate(small.tables):
            for w, t in of.items():
                if v < w:
                    tables[v][w] = np.ascontiguousarray(np.minimum(t, forbidden))
                    tables[w][v] = np.ascontiguousarray(tables[v][w].T)
        edges = sum(map(len, tables)) // 2
        return Terms(small.costs, tables, small.liveness, [len(c) for c in small.costs], forbidden, edges)

    def cost(self, x: np.ndarray) -> float:
        """The cost of all nodes and edges."""
        total = sum(float(c[a]) for c, a in zip(self.costs, x, strict=True))
        pairs = (float(t[x[v], x[w]]) for v, of in enumerate(self.tables) for w, t in of.items() if v < w)
        return total + sum(pairs)

    def around(self, nodes: Sequence[int], x: np.ndarray) -> list[np.ndarray]:
        """Per node, what its strategies cost by themselves and to nodes that are not among these."""
        inside, found = set(nodes), []
        for v in nodes:
            cost = self.costs[v]
            for w, table in self.tables[v].items():
                if w not in inside:
                    cost = cost + table[:, x[w]]
            found.append(cost)
        return found

    def cost_within(self, block: Block, around: Sequence[np.ndarray], y: np.ndarray) -> float:
        """What a block's strategies `y` cost, with what its nodes cost to others."""
        place = {v: n for n, v in enumerate(block.nodes)}
        total = sum(float(c[a]) for c, a in zip(around, y, strict=True))
        for n, v in enumerate(block.nodes):
            for w, table in self.tables[v].items():
                m = place.get(w, -1)
                if m > n:
                    total += float(table[y[n], y[m]])
        return total

    def block(self, nodes: Sequence[int], most: int, spread: float, rng: np.random.Generator) -> Block:
        """A block of these nodes, less some that stand in the way; `spread`: how much chance decides which."""
        return Block.of(self.tables, nodes, self.sizes, most, np.exp(spread * rng.normal(size=len(nodes))))

    def excess(self, used: np.ndarray) -> float:
        """Bytes above the limit, of all steps."""
        return float(np.maximum(used - self.live.spare, 0.0).sum())


def _top(table: np.ndarray) -> float:
    return float(table[np.isfinite(table)].max(initial=0.0))
