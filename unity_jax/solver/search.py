"""A cheap choice of strategies that fits: prices on memory first, then blocks of nodes one after the other.

    best = searched(terms, moves=3_000_000, seed=0)

1. Prices. Each time step has a price per byte, which rises while the step is over the limit and falls while it is under
   it (multiplicative weights); between changes, messages pass once between all nodes, and from time to time what they
   lead to is improved by whole blocks at these prices.
2. Blocks. Around the best that is known, a block of nodes is solved exactly while all others stay, at the prices and,
   as long as that uses too much, at higher ones where it does. What is better is taken: less above the limit first,
   then less cost.

Work is counted in tables looked at, never in seconds, and chance comes from a seed: the same problem and the same moves
give the same answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .blocks import Block
from .liveness import summed
from .messages import Messages
from .terms import Terms

MOST = 20_000  # entries of a table of a block
SPREAD = 1.5  # of chance in what a block leaves out
FAINT = -9.0  # logarithm of a price, against the first one, below which it is none
QUICK, SLOW = 0.5, 0.05  # how fast prices change, at first and at last


@dataclass(frozen=True, eq=False)
class Found:
    """A choice of strategies. **Fields:** `used`: bytes per step; `excess`: bytes above the limit, of all steps."""

    x: np.ndarray
    cost: float
    used: np.ndarray
    excess: float

    @property
    def rank(self) -> tuple[float, float]:
        """Less is better."""
        return (self.excess, self.cost)


class Search:
    """What is known while searching: prices, the best that was found, and the work done."""

    def __init__(self, terms: Terms, seed: int) -> None:
        self.terms, self.live = terms, terms.live
        self.rng = np.random.default_rng(seed)
        self.work = 0
        self.prices = np.zeros(len(terms.live.spare))
        self.best: Found | None = None

    def offer(self, x: np.ndarray) -> Found:
        """Look at a choice; keep it if it is the best."""
        used = self.live.used(x)
        found = Found(x, self.terms.cost(x), used, self.terms.excess(used))
        self.work += self.terms.edges
        if self.best is None or found.rank < self.best.rank:
            self.best = found
        return found

    def priced(self) -> list[np.ndarray]:
        """The nodes' costs with what their usage costs."""
        sums = summed(self.prices)
        return [c + self.live.charges(v, sums) for v, c in enumerate(self.terms.costs)]

    def descended(self, x: np.ndarray, rounds: int) -> np.ndarray:
        """A choice improved at the prices by blocks of all nodes that fit into one."""
        sums, x = summed(self.prices), x.copy()
        for _ in range(rounds):
            block = self.terms.block(range(len(x)), MOST, SPREAD, self.rng)
            costs = self.terms.around(block.nodes, x)
            charged = [c + self.live.charges(v, sums) for c, v in zip(costs, block.nodes, strict=True)]
            x[block.nodes] = block.solved(charged)
            self.work += 6 * self.terms.edges
        return x

    def price(self, work: int) -> None:
        """Find prices, with so much work, and good choices on the way."""
        messages = Messages(self.terms)
        for _ in range(10):
            messages.passed(self.terms.costs)
        x = self.descended(messages.decoded(self.terms.costs), 4)
        first = self.offer(x)
        if first.excess == 0 and first.cost < self.terms.forbidden:
            return
        spare = np.maximum(self.live.spare, 1.0)
        base = 0.1 * first.cost / spare.mean() / len(spare)
        level = np.zeros(len(spare))
        start, done, n = self.work, 0.0, 0
        while done < 1:
            self.prices = np.where(level > FAINT, base * np.exp(level), 0.0)
            costs = self.priced()
            if done < 0.4:
                messages.passed(costs)
                self.work += 5 * self.terms.edges
                x = messages.decoded(costs)
                if n % 5 == 4:
                    self.offer(self.descended(x, 3))
            else:
                x = self.descended(x, 1)
            found = self.offer(x)
            rate = QUICK * (SLOW / QUICK) ** done
            level = np.clip(level + rate * np.clip(found.used / spare - 1, -1, 1), FAINT, 30.0)
            n += 1
            done = (self.work - start) / work

    def improve(self, work: int) -> None:
        """Improve the best choice block by block, with so much work."""
        assert self.best is not None
        end = self.work + work
        while self.work < end:
            size = int(self.rng.choice([20, 60, 200, 600]))
            nodes = self._near(size) if self.rng.random() < 0.6 else self._window(size)
            self._solve(nodes)

    def _near(self, size: int) -> list[int]:
        """Nodes around one, by chance."""
        start = int(self.rng.integers(len(self.terms.costs)))
        found, edge = {start: None}, [start]
        while edge and len(found) < size:
            v = edge.pop(int(self.rng.integers(len(edge))))
            near = [w for w in self.terms.tables[v] if w not in found]
            for w in self.rng.permutation(near)[: max(4, size // 10)].tolist():
                found[w] = None
                edge.append(w)
        return list(found)

    def _window(self, size: int) -> list[int]:
        """Nodes whose numbers, so in general also their times, are close."""
        n = len(self.terms.costs)
        start = int(self.rng.integers(n))
        return list(range(max(0, start - size // 2), min(n, start + size // 2 + 1)))

    def _solve(self, nodes: Sequence[int]) -> None:
        best, terms = self.best, self.terms
        assert best is not None
        block = terms.block(nodes, MOST, SPREAD, self.rng)
        around = terms.around(block.nodes, best.x)
        old = best.x[block.nodes]
        touched = sum(len(terms.tables[v]) for v in block.nodes)
        self.work += 4 * touched
        rest = best.used - self.live.added(block.nodes, old)
        room = self.live.spare - rest
        price = self.prices * float(self.rng.choice([0.0, 0.3, 1.0, 3.0]))
        value = terms.cost_within(block, around, old)
        step = self._step(price)
        seen: set[bytes] = set()
        for _ in range(6):
            sums = summed(price)
            y = block.solved([c + self.live.charges(v, sums) for c, v in zip(around, block.nodes, strict=True)])
            self.work += touched
            if y.tobytes() in seen:
                price = np.where(added > room, price * 4 + step, price)
                continue
            seen.add(y.tobytes())
            added = self.live.added(block.nodes, y)
            excess = float(np.maximum(added - room, 0.0).sum())
            cost = best.cost + terms.cost_within(block, around, y) - value
            if (excess, cost) < best.rank:
                x = best.x.copy()
                x[block.nodes] = y
                self.best = Found(x, cost, rest + added, excess)
                return
            if excess == 0:
                return
            price = np.where(added > room, price * 2 + step, price)

    def _step(self, price: np.ndarray) -> float:
        """A price to begin with where there is none."""
        known = price[price > 0]
        assert self.best is not None
        fallback = 1e-3 * self.best.cost / float(np.maximum(self.live.spare, 1.0).mean()) / max(1, len(price))
        return float(np.median(known)) if len(known) else fallback
