"""Messages between nodes: what a strategy costs when all that depends on it is taken into account, roughly.

Sequential tree-reweighted message passing (Kolmogorov, PAMI 28, 2006) on nodes in the order of their numbers, with
messages that stay as the nodes' own costs change, so that prices on memory may change between passes.

    messages = Messages(terms)
    messages.passed(costs)        # there and back
    messages.decoded(costs)       # a strategy per node, each the best for those before it and messages from those after
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .terms import Terms


class Messages:
    """`known[v][w]`: what w tells v about each strategy of v, the least being 0."""

    def __init__(self, terms: Terms) -> None:
        self.tables = terms.tables
        self.known = [{w: np.zeros(k) for w in of} for of, k in zip(terms.tables, terms.sizes, strict=True)]
        self.before = [[w for w in of if w < v] for v, of in enumerate(terms.tables)]
        self.after = [[w for w in of if w > v] for v, of in enumerate(terms.tables)]

    def passed(self, costs: Sequence[np.ndarray]) -> None:
        """One pass over all nodes, and one back."""
        self._pass(costs, range(len(costs)), self.after)
        self._pass(costs, range(len(costs) - 1, -1, -1), self.before)

    def _pass(self, costs: Sequence[np.ndarray], order: range, onward: list[list[int]]) -> None:
        known = self.known
        for v in order:
            told = known[v]
            total = costs[v]
            for message in told.values():
                total = total + message
            total = total / max(1, len(self.before[v]), len(self.after[v]))
            for w in onward[v]:
                message = (self.tables[w][v] + (total - told[w])).min(axis=1)
                known[w][v] = message - message.min()

    def decoded(self, costs: Sequence[np.ndarray]) -> np.ndarray:
        """A strategy per node; call it after a pass back."""
        x = np.zeros(len(costs), np.int64)
        for v, cost in enumerate(costs):
            total = cost
            for w in self.before[v]:
                total = total + self.tables[v][w][:, x[w]]
            for w in self.after[v]:
                total = total + self.known[v][w]
            x[v] = total.argmin()
        return x
