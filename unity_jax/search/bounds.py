"""Lower bounds by moving cost between factors, and what each value of each variable would cost at least.

Sequential reweighted message passing (TRW-S, Kolmogorov, PAMI 28, 2006; for larger factors SRMP, PAMI 37, 2015): visit
the variables in order, collect the least that each earlier factor needs for each value, hand an equal share on to each
later factor; then the same backwards. Costs only move, so after every pass

    the sum over variables of min over values of what is held  <=  the minimum

Everything is in whole units, shares rounded down, so the bound holds exactly.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from .eliminate import Eliminated, completed, easy, eliminated, excesses
from .network import Network

EASY = 2.0**14  # entries of tables that eliminating a variable ahead may bring; messages pass between the others
STALLED = 2e-4  # the part of a bound that a pass there and back must add for another to be worth it
FORBIDDEN = 2.0**50  # stands for inf: more than any sum of costs, and sums of a few stay exact


class Messages:
    """Costs held at variables, and what each factor has given to its variables."""

    def __init__(self, net: Network, sequence: tuple[int, ...]) -> None:
        """`sequence` orders variables, all of the network's factors among them."""
        rank = {v: r for r, v in enumerate(sequence)}
        self.sequence = sequence
        self.constant = net.constant
        self.held = {v: np.zeros(net.sizes[v]) for v in sequence}
        self.scopes: list[tuple[int, ...]] = []
        self.tables: list[np.ndarray] = []
        self.given: list[list[np.ndarray]] = []
        self.around: dict[int, list[tuple[int, int, bool, bool]]] = {v: [] for v in sequence}
        finite: dict[int, np.ndarray] = {}
        for scope, name in net.factors:
            if name not in finite:
                finite[name] = np.minimum(net.store[name], FORBIDDEN)
            table = finite[name]
            if len(scope) == 1:
                self.held[scope[0]] = np.minimum(self.held[scope[0]] + table, FORBIDDEN)
                continue
            ranks = [rank[v] for v in scope]
            for axis, v in enumerate(scope):
                first, last = ranks[axis] == min(ranks), ranks[axis] == max(ranks)
                self.around[v].append((len(self.tables), axis, first, last))
            self.scopes.append(scope)
            self.tables.append(table)
            self.given.append([np.zeros(k) for k in table.shape])

    def marginal(self, factor: int, axis: int) -> np.ndarray:
        """The least that a factor still holds for each value along one axis."""
        table, given = self.tables[factor], self.given[factor]
        for other in range(table.ndim):  # one after the other: what is left to subtract from is ever smaller
            if other != axis:
                place = int(other > axis)
                rest = (1,) * (table.ndim - 1 - place)
                table = np.minimum.reduce(table - given[other].reshape(-1, *rest), axis=place)
        return table - given[axis]

    def sweep(self, backward: bool) -> float:
        """One pass over all variables; the lower bound after it."""
        total = self.constant
        for v in reversed(self.sequence) if backward else self.sequence:
            around = self.around[v]
            held = self.held[v]
            incoming = outgoing = 0
            for factor, axis, first, last in around:
                if backward:
                    first, last = last, first
                outgoing += not last
                if not first:
                    incoming += 1
                    least = self.marginal(factor, axis)
                    held = held + least
                    self.given[factor][axis] = self.given[factor][axis] + least
            held = np.minimum(held, FORBIDDEN)
            if outgoing:
                share = np.floor(held / max(incoming, outgoing))
                for factor, axis, first, last in around:
                    if not (first if backward else last):
                        self.given[factor][axis] = self.given[factor][axis] - share
                held = held - outgoing * share
            self.held[v] = held
            total += float(held.min())
        return total

    def excess(self) -> dict[int, np.ndarray]:
        """How much more than the bound every value costs at least; call it directly after a sweep."""
        excess = {}
        for v in self.sequence:
            excess[v] = self.held[v] - self.held[v].min()
            for factor, axis, _, _ in self.around[v]:
                excess[v] = excess[v] + np.maximum(self.marginal(factor, axis), 0.0)
        return excess

    def decoded(self) -> dict[int, int]:
        """A value per variable, one after the other: the least for what is held and those decided before; call it
        directly after a pass backward."""
        chosen: dict[int, int] = {}
        for v in self.sequence:
            total = self.held[v]
            for factor, _, _, _ in self.around[v]:
                total = total + self.conditional(factor, v, chosen)
            chosen[v] = int(total.argmin())
        return chosen

    def conditional(self, factor: int, v: int, chosen: Mapping[int, int]) -> np.ndarray:
        """The least that a factor still holds for each value of v, other variables as chosen."""
        scope, given = self.scopes[factor], self.given[factor]
        table = self.tables[factor][tuple([chosen.get(n, slice(None)) for n in scope])]
        free = [axis for axis, n in enumerate(scope) if n not in chosen]
        for place, axis in enumerate(free):
            table = table - given[axis].reshape([-1] + [1] * (len(free) - 1 - place))
        others = tuple([place for place, axis in enumerate(free) if scope[axis] != v])
        return table.min(axis=others)


@dataclass(frozen=True)
class Bound:
    """`value` bounds the cost of every assignment from below. **Fields:** `core`: the network, easy ones eliminated;
    `messages` between the others, after a pass backward."""

    value: float
    core: Eliminated
    messages: Messages

    @functools.cached_property
    def least(self) -> dict[int, np.ndarray]:
        """`least[v][a]` bounds from below the cost of every assignment with x_v = a."""
        return {v: self.value + e for v, e in excesses(self.core, self.messages.excess()).items()}

    @functools.cached_property
    def assignment(self) -> np.ndarray:
        """What the messages lead to, an entry per variable."""
        return completed(self.core, self.messages.decoded())


def lower_bound(net: Network, sweeps: int, table_limit: float) -> Bound:
    """The bound after so many passes there and back at most, in the order of the variables' numbers, among those that
    are not easily eliminated."""
    most = min(EASY, table_limit)
    core = eliminated(net, easy(net, most))
    variables = sorted({v for scope, _ in net.factors for v in scope} - set(core.buckets))
    messages = Messages(core.left, tuple(variables))
    value, before = core.left.constant, -np.inf
    while sweeps and value - before > STALLED * abs(value):
        messages.sweep(backward=False)
        value, before, sweeps = messages.sweep(backward=True), value, sweeps - 1
    return Bound(value, core, messages)
