"""A cheap choice of strategies that fits: prices on memory first, then blocks of nodes one after the other.

    x = searched(terms, work=3_000_000, starts=1, seed=0)

1. Prices. Each time step has a price per byte, which rises while the step is over the limit and falls while it is under
   it (multiplicative weights); between changes, messages pass once between all nodes, and from time to time what they
   lead to is improved by whole blocks at these prices.
2. Blocks. Around the best that is known, a block of nodes is solved exactly while all others stay, at the prices and,
   as long as that uses too much, at higher ones where it does. What is better is taken: less above the limit first,
   then less cost.

Work is counted in tables looked at, never in seconds, and chance comes from a seed: the same problem, work and seed
give the same answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .blocks import Block
from .liveness import summed
from .messages import Messages
from .terms import Terms

MOST = 20_000  # entries of a table of a block
SPREADS = 0.5, 1.5, 3.0  # of chance in what a block leaves out
BLOCKS = 20, 60, 200, 600  # nodes of a block
RISE = 0.1  # how fast a price rises at least
CYCLES = 3  # of prices and blocks
RECENT, FRESH = 8, 0.2  # blocks of all nodes that are kept, and how often there is a new one
FAINT = -9.0  # logarithm of a price, against the first one, below which it is none


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


class Style(NamedTuple):
    """How prices move, which leads to one choice or another.

    **Fields:** `base`: what memory costs at first, as a part of everything; `fall`: how fast a price falls, against how
    fast it rises; `haste`: how much faster it rises with each change at which a step is still above the limit.
    """

    base: float
    fall: float
    haste: float

    @staticmethod
    def any(rng: np.random.Generator) -> Style:
        """One by chance."""
        return Style(0.1 * 10 ** rng.uniform(-1.5, 1.5), float(rng.choice([0.3, 1.0])), float(rng.choice([0.0, 0.25])))


STYLE = Style(base=0.1, fall=0.3, haste=0.25)
"""That of the first start."""


def searched(terms: Terms, work: int, starts: int, seed: int) -> np.ndarray:
    """The best choice found in so many starts, each with so much work: looks at nodes and edges, roughly."""
    rng = np.random.default_rng(seed)
    styles = [STYLE, *(Style.any(rng) for _ in range(1, starts))]
    return min((_started(terms, work, style, rng) for style in styles), key=lambda found: found.rank).x


def _started(terms: Terms, work: int, style: Style, rng: np.random.Generator) -> Found:
    search = Search(terms, style, rng)
    search.price(int(0.3 * work), talk=0.4, quick=0.5, slow=0.05)
    search.improve(int(0.1 * work))
    for _ in range(CYCLES):
        search.price(int(0.07 * work), talk=0.0, quick=0.2, slow=0.05)
        search.improve(int(0.08 * work))
    search.here = search.best
    search.improve(int(0.15 * work))
    return search.best


class Search:
    """What is known while searching.

    **Fields:** `prices`: per byte and step, and their logarithms against `base`: `level`; `since`: for how many changes
    a step has been above the limit; `penalty`: per byte above the limit, while blocks make a choice fit; `here`: the
    choice at hand; `best`: the best one; `work`: what has been done.
    """

    def __init__(self, terms: Terms, style: Style, rng: np.random.Generator) -> None:
        """Begin with a choice that messages lead to where memory costs nothing."""
        self.terms, self.live = terms, terms.live
        self.style, self.rng = style, rng
        self.work, self.unit = 0, terms.edges + len(terms.costs)
        self.scale = np.maximum(self.live.spare, 1.0)  # bytes
        self.level, self.since, self.prices = np.zeros((3, len(self.scale)))
        degrees = np.array([1.0 + len(of) for of in terms.tables])
        self.degrees = degrees / degrees.sum()
        self.blocks: list[Block] = []
        self.messages = Messages(terms)
        for _ in range(10):
            self.messages.passed(terms.costs)
        self.here = self.best = self._found(self.descended(self.messages.decoded(terms.costs), 4))
        self.base = style.base * max(abs(self.here.cost), 1e-6 * terms.forbidden) / max(1.0, float(self.scale.sum()))
        self.penalty = self.first = self.base

    def _found(self, x: np.ndarray) -> Found:
        used = self.live.used(x)
        self.work += self.unit
        return Found(x, self.terms.cost(x), used, self.terms.excess(used))

    def offer(self, x: np.ndarray) -> Found:
        """Look at a choice; keep it if it is the best."""
        found = self._found(x)
        self.best = min(self.best, found, key=lambda f: f.rank)
        return found

    def priced(self) -> list[np.ndarray]:
        """The nodes' costs with what their usage costs."""
        sums = summed(self.prices)
        return [c + self.live.charges(v, sums) for v, c in enumerate(self.terms.costs)]

    def descended(self, x: np.ndarray, rounds: int) -> np.ndarray:
        """A choice improved at the prices by blocks of all nodes that fit into one."""
        sums, x = summed(self.prices), x.copy()
        for _ in range(rounds):
            block = self._whole()
            costs = self.terms.around(block.nodes, x)
            charged = [c + self.live.charges(v, sums) for c, v in zip(costs, block.nodes, strict=True)]
            x[block.nodes] = block.solved(charged)
            self.work += 3 * self.unit
        return x

    def _whole(self) -> Block:
        """A block of all nodes that fit into one: a new one, or one of the last."""
        if len(self.blocks) < RECENT or self.rng.random() < FRESH:
            spread = float(self.rng.choice(SPREADS))
            self.blocks.append(self.terms.block(range(len(self.terms.costs)), MOST, spread, self.rng))
            self.work += 6 * self.unit
            del self.blocks[:-RECENT]
            return self.blocks[-1]
        return self.blocks[int(self.rng.integers(RECENT))]

    def price(self, work: int, talk: float, quick: float, slow: float) -> None:
        """Change prices, with so much work, and find choices on the way; `here` is the last.

        **Arguments:** `talk`: the part of the work, the first, in which messages lead to choices, later the last one
        is improved; `quick`, `slow`: how fast prices change, at first and at last.
        """
        begun, done, n, x = self.work, 0.0, 0, self.here.x
        while done < 1:
            self.prices = np.where(self.level > FAINT, self.base * np.exp(self.level), 0.0)
            if done < talk:
                costs = self.priced()
                self.messages.passed(costs)
                self.work += 5 * self.unit
                x = self.messages.decoded(costs)
                if n % 5 == 4:
                    self.offer(self.descended(x, 3))
            else:
                x = self.descended(x, 1)
            self.here = self.offer(x)
            rate = quick * (slow / quick) ** done
            self._adjust((self.here.used - self.live.spare) / self.scale, rate)
            n += 1
            done = (self.work - begun) / work

    def _adjust(self, over: np.ndarray, rate: float) -> None:
        """Raise the prices of steps above the limit, the faster the longer they are, and lower the others.

        **Arguments:** `over`: how far above the limit each step is, in parts of it.
        """
        self.since = np.where(over > 0, self.since + 1, 0)
        rise = np.clip(over, RISE, 1) * (1 + self.style.haste * self.since)
        fall = self.style.fall * np.maximum(over, -1)
        self.level = np.clip(self.level + rate * np.where(over > 0, rise, fall), FAINT, 30.0)

    def improve(self, work: int) -> None:
        """Improve the choice at hand block by block, with so much work."""
        known = self.prices[self.prices > 0]
        self.first = float(np.median(known)) if len(known) else self.base / 10
        self.penalty = float(self.prices.max(initial=self.first))
        end, n = self.work + work, 0
        while self.work < end:
            size, kind = int(self.rng.choice(BLOCKS)), self.rng.random()
            if self.here.excess > 0 and kind < 0.7:
                self._solve(self._near(self._guilty(), size))
            elif kind < 0.4:
                self._solve(self._near(int(self.rng.integers(len(self.terms.costs))), size))
            elif kind < 0.7:
                self._solve(self._window(size))
            else:
                self._solve(self._hub(size))
            n += 1
            if n % 20 == 0:
                self.penalty *= 1.1
        self.best = min(self.best, self.here, key=lambda f: f.rank)

    def _guilty(self) -> int:
        """A node that uses much more than it could at a step above the limit."""
        over = np.maximum(self.here.used - self.live.spare, 0.0)
        sums = summed(over / over.sum())
        charges = [self.live.charges(v, sums) + np.zeros(k) for v, k in enumerate(self.terms.sizes)]
        more = np.array([c[a] - c.min() for c, a in zip(charges, self.here.x, strict=True)])
        chances = more if more.any() else np.ones(len(more))
        return int(self.rng.choice(len(more), p=chances / chances.sum()))

    def _near(self, start: int, size: int) -> list[int]:
        """Nodes around one, by chance."""
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

    def _hub(self, size: int) -> list[int]:
        """A node with many neighbours, these, and some of theirs."""
        start = int(self.rng.choice(len(self.terms.costs), p=self.degrees))
        near = [*self.terms.tables[start]]
        found = dict.fromkeys([start, *self.rng.permutation(near)[:size].tolist()])
        for v in list(found):
            if len(found) >= size:
                break
            found.update(dict.fromkeys(self.terms.tables[v]))
        return list(found)

    def _solve(self, nodes: Sequence[int]) -> None:
        best, terms = self.here, self.terms
        block = terms.block(nodes, MOST, float(self.rng.choice(SPREADS)), self.rng)
        around = terms.around(block.nodes, best.x)
        old = best.x[block.nodes]
        touched = len(nodes) + sum(len(terms.tables[v]) for v in block.nodes)
        self.work += 4 * touched
        rest = best.used - self.live.added(block.nodes, old)
        room = self.live.spare - rest
        price = self.prices * float(self.rng.choice([0.0, 0.3, 1.0, 3.0]))
        value = terms.cost_within(block, around, old)
        step = self.first
        for _ in range(8):
            sums = summed(price)
            y = block.solved([c + self.live.charges(v, sums) for c, v in zip(around, block.nodes, strict=True)])
            self.work += touched
            added = self.live.added(block.nodes, y)
            excess = float(np.maximum(added - room, 0.0).sum())
            cost = best.cost + terms.cost_within(block, around, y) - value
            if self._better(cost, excess, best):
                x = best.x.copy()
                x[block.nodes] = y
                self.here = Found(x, cost, rest + added, excess)
                return
            if excess == 0:
                return
            price = np.where(added > room, price * 4 + step, price)

    def _better(self, cost: float, excess: float, best: Found) -> bool:
        if best.excess == 0:
            return excess == 0 and cost < best.cost
        return excess == 0 or cost + self.penalty * excess < best.cost + self.penalty * best.excess
