"""The least cost of a model: exact where elimination fits, otherwise the best over restricted domains and a bound.

What to do when tables would grow too large, in this order:
1. bound every strategy from below (messages) and drop those above the best known cost: the optimum stays;
2. keep, at each node, the best known strategies and those whose bound is within a slack of the least, the slack as
   large as elimination allows; solve that exactly; repeat from the better assignment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .bounds import Bound, lower_bound
from .eliminate import Order, minimize, order
from .local import Local
from .model import Model
from .network import Network, network
from .prune import pruned

MODEST_TABLE, MODEST_WORK = 2.0**20, 2.0**33  # what one step of a search may cost; exact elimination may use the limit
GUESS_TABLE = 10**5  # mini-buckets that make a first guess
SWEEPS, ROUNDS, HALVINGS = 10, 4, 10


@dataclass(frozen=True)
class Optimum:
    """`assignment` in original strategies; `cost` and `lower_bound` in units, equal if the assignment is proved best."""

    assignment: np.ndarray
    cost: float
    lower_bound: float


def optimum(model: Model, seeds: Sequence[np.ndarray], table_limit: int) -> Optimum:
    """The best assignment of the model, no worse than any seed."""
    small = pruned(model)
    net, plan = planned(small, table_limit)
    if plan.largest <= table_limit and plan.work <= MODEST_WORK:
        return _exact(model, small, net, plan, table_limit)
    guess = minimize(net, plan, min(table_limit, GUESS_TABLE))
    candidates = [_settled(model, s) for s in (_original(small, guess.assignment), *seeds)]
    best = min(candidates, key=lambda c: c.cost)
    floor = guess.value
    for _ in range(ROUNDS):
        bound = lower_bound(net, tuple(sorted(plan.variables)), SWEEPS)
        floor = max(floor, bound.value)
        small, changed = _fixed(small, bound, best)
        if changed:
            net, plan = planned(small, table_limit)
        if plan.largest <= table_limit:
            exact = _exact(model, small, net, plan, table_limit)
            return exact if exact.cost < best.cost else Optimum(best.assignment, best.cost, min(exact.cost, best.cost))
        better = _restricted(model, small, bound, [best.assignment, *seeds], table_limit)
        if better.cost >= best.cost:
            break
        best = better
    return Optimum(best.assignment, best.cost, min(floor, best.cost))


def planned(model: Model, table_limit: int) -> tuple[Network, Order]:
    """The model as a network, and the order to eliminate it in."""
    net = network(model, table_limit)
    return net, order(net.sizes, [scope for scope, _ in net.factors])


def _exact(model: Model, small: Model, net: Network, plan: Order, table_limit: int) -> Optimum:
    found = minimize(net, plan, table_limit)
    return Optimum(_original(small, found.assignment), found.value, found.value)


def _original(model: Model, assignment: np.ndarray) -> np.ndarray:
    """Positions in the model's domains as the problem's strategy numbers."""
    return np.array([model.store[d][a] for d, a in zip(model.domains, assignment, strict=False)], np.int64)


def _settled(model: Model, assignment: np.ndarray) -> Optimum:
    """An assignment improved by single changes."""
    start = [int(np.argmax(model.store[d] == a)) for d, a in zip(model.domains, assignment, strict=True)]
    here = Local(model, np.array(start))
    here.descend()
    return Optimum(_original(model, here.x), here.total(), -np.inf)


def _fixed(model: Model, bound: Bound, best: Optimum) -> tuple[Model, bool]:
    """The model without strategies that cost at least as much as the best known."""
    size = sum(model.size(i) for i in range(len(model.domains)))

    def keep(i: int) -> np.ndarray:
        domain = model.store[model.domains[i]]
        return domain[bound.least[i] < best.cost] if i in bound.least else domain

    smaller = pruned(model.choose(keep))
    return smaller, sum(smaller.size(i) for i in range(len(smaller.domains))) < size


def _restricted(model: Model, small: Model, bound: Bound, known: Sequence[np.ndarray], table_limit: int) -> Optimum:
    """The best over domains of known strategies and those whose bound is within a slack, as large as fits."""
    low, high, chosen = 0.0, max(float(b.max()) for b in bound.least.values()) - bound.value, None
    store = model.store
    limit = min(table_limit, MODEST_TABLE)
    for step in range(HALVINGS):
        slack = (low + high) / 2 if step else 0.0

        def keep(i: int, slack: float = slack) -> np.ndarray:
            domain = store[small.domains[i]]
            near = domain[bound.least[i] <= bound.value + slack] if i in bound.least else domain[:0]
            return np.concatenate([near, [k[i] for k in known]])

        trial = pruned(small.choose(keep))
        net, plan = planned(trial, table_limit)
        if plan.largest <= limit and plan.work <= MODEST_WORK:
            low, chosen = slack, (trial, net, plan)
        else:
            high = slack
        if chosen is None:
            break
    if chosen is None:
        return Optimum(known[0], np.inf, -np.inf)
    trial, net, plan = chosen
    found = minimize(net, plan, table_limit)
    return _settled(model, _original(trial, found.assignment))
