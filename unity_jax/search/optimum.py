"""The least cost of a model: exact where elimination fits, otherwise the best over restricted domains and a bound.

What to do when tables would grow too large, in this order:
1. bound every strategy from below (messages, which lead to an assignment too) and drop those above the best known
   cost: the optimum stays;
2. keep, at each node, the known strategies and those that look best (by their bound, then by what they cost around the
   best assignment), as many as elimination allows; solve that exactly; repeat from the better assignment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np

from .bounds import EASY, Bound, lower_bound
from .eliminate import Order, hard, minimize, order
from .limits import LIMITS
from .local import Local
from .model import Model
from .network import Network, network
from .prune import pruned

GRAIN = 64  # the number of strategies that fit is found to within this part of all


@dataclass(frozen=True)
class Optimum:
    """`assignment` in original strategies; `cost` and `lower_bound` in units, equal if it is proved best."""

    assignment: np.ndarray
    cost: float
    lower_bound: float


def optimum(
    model: Model,
    seeds: Callable[[], Sequence[np.ndarray]],
    table_limit: int,
    most: float = np.inf,
    quick: bool = False,
) -> Optimum:
    """The best assignment of the model, no worse than any seed that the model still holds, if seeds are needed.

    Once the bound shows that all assignments cost more than `most`, the one it leads to is returned, and no seed is
    asked. `quick`: restricted domains are not tried, for a bound and an assignment that is repaired anyway.
    """
    small = pruned(model)
    net, plan = planned(small, table_limit)
    if _is_light(plan):
        return _exact(small, net, plan)
    here = Local(model, np.zeros(len(model.domains)))
    bound = lower_bound(network(small, table_limit, relaxed=True), LIMITS.sweeps, table_limit)
    floor, best = bound.value, improved(here, small.original(bound.assignment))
    if floor > most:
        return Optimum(best.assignment, best.cost, min(floor, best.cost))
    if not abs(best.cost - floor) <= LIMITS.proved * abs(floor):  # else no seed is better
        start = min((*seeds(), _first(small)), key=lambda s: _around(here, s).total())
        best = min(improved(here, start), best, key=lambda k: k.cost)
    if plan is not None or not _is_close(best, floor):
        fixed = _fixed(small, bound, best.cost)
        net, plan = planned(fixed, table_limit)
        if not quick and not _is_close(best, floor) and not _is_light(plan):
            better = _searched(here, small, bound.least, best, seeds(), table_limit)
            if better is not best:
                best, fixed = better, _fixed(small, bound, better.cost)
                net, plan = planned(fixed, table_limit)
        if plan is not None:  # heavy work, or what is left after fixing
            exact = _exact(fixed, net, plan)
            best, floor = min(best, exact, key=lambda k: k.cost), exact.cost
    return Optimum(best.assignment, best.cost, min(floor, best.cost))


def _is_light(plan: Order | None) -> TypeGuard[Order]:
    """Whether elimination fits and is little work."""
    return plan is not None and plan.work <= LIMITS.tried_work


def _is_close(best: Optimum, floor: float) -> bool:
    return best.cost - floor <= LIMITS.gap * abs(best.cost)


def _fixed(model: Model, bound: Bound, known: float) -> Model:
    """The model without the strategies that the bound shows to cost more than what is known."""
    fixed = model.choose(lambda i: bound.least[i] < known)
    return pruned(fixed) if fixed.strategies() < LIMITS.fixing * model.strategies() else fixed


def planned(model: Model, table_limit: int) -> tuple[Network, Order | None]:
    """The model as a network, and the order to eliminate it in; None if a table would have more entries than that."""
    net = network(model, table_limit)
    return net, order(net.sizes, [scope for scope, _ in net.factors], table_limit)


def _exact(small: Model, net: Network, plan: Order) -> Optimum:
    found = minimize(net, plan)
    return Optimum(small.original(found.assignment), found.value, found.value)


def _first(model: Model) -> np.ndarray:
    """The strategies that are cheapest by themselves."""
    return model.original([int(np.argmin(model.store[u])) for u in model.unary])


def improved(here: Local, assignment: np.ndarray) -> Optimum:
    """An assignment of a model improved by single changes.

    **Arguments:** `here`: the terms of the model, around any assignment.
    """
    found = _around(here, assignment)
    found.descend()
    return Optimum(here.model.original(found.x), found.total(), -np.inf)


def _around(here: Local, assignment: np.ndarray) -> Local:
    """The same terms around an assignment in original strategies."""
    return here.at(here.model.positions(assignment))


def _searched(
    here: Local, small: Model, ranks: dict[int, np.ndarray], best: Optimum, seeds: Sequence[np.ndarray], limit: int
) -> Optimum:
    """The best over restricted domains, which are chosen anew around it as long as that gains much."""
    better = _restricted(here, small, ranks, [best.assignment, *seeds], limit)
    if better is None or better.cost >= best.cost:
        return best
    if _is_close(best, better.cost):
        return better
    return _searched(here, small, _answered(small, better.assignment), better, seeds, limit)


def _answered(model: Model, assignment: np.ndarray) -> dict[int, np.ndarray]:
    """What each strategy costs when its neighbours choose their best answer to it, and all others stay."""
    here = Local(model, model.positions(assignment))
    costs = {i: here.costs(i) for i in range(len(here.x)) if model.size(i) > 1}
    answered = {}
    for i in costs:
        answered[i] = here.alone(i)
        for j, table in here.pairs[i]:  # (k_j, k_i)
            own = table[:, here.x[i]]
            others = np.where(np.isfinite(own), costs[j] - np.where(np.isfinite(own), own, 0.0), np.inf)
            answered[i] = answered[i] + (table + others[:, None]).min(axis=0)
    return {i: a if np.isfinite(a).any() else np.zeros_like(a) for i, a in answered.items()}


def _restricted(
    here: Local, small: Model, ranks: dict[int, np.ndarray], known: Sequence[np.ndarray], table_limit: int
) -> Optimum | None:
    """The best over known strategies and as many others as fit, those with the least rank first; None if none fit."""
    nodes = sorted(ranks)
    every = np.array(known).T  # (nodes, known)
    always = {i: (small.values(i)[:, None] == every[i]).any(axis=1) for i in nodes}
    always = {i: a if a.any() else ranks[i] == ranks[i].min() for i, a in always.items()}
    scores = np.concatenate([ranks[i] - ranks[i].min() for i in nodes])
    places = np.empty(len(scores), np.int64)
    places[np.argsort(scores, kind="stable")] = np.arange(len(scores))
    place = dict(zip(nodes, np.split(places, np.cumsum([len(ranks[i]) for i in nodes])[:-1]), strict=True))
    full = [small.size(i) for i in range(len(small.domains))]
    pairs = hard(full, [*small.pairs, *(r.nodes for r in small.rests)], min(EASY, table_limit))
    low, high = 0, len(scores) + 1
    while high - low > 1 + len(scores) // GRAIN:  # the most that fits by the sizes alone
        count = (low + high) // 2
        sizes = list(full)
        for i in nodes:
            sizes[i] = int((always[i] | (place[i] < count)).sum())
        left = [pair for pair in pairs if sizes[pair[0]] > 1 < sizes[pair[1]]]
        low, high = (low, count) if order(sizes, left, table_limit, LIMITS.tried_work) is None else (count, high)
    while True:
        trial = pruned(small.choose(lambda i, n=low: always[i] | (place[i] < n)))
        net, plan = planned(trial, table_limit)
        if plan is not None and plan.work <= LIMITS.tried_work:
            return improved(here, trial.original(minimize(net, plan).assignment))
        if low == 0:
            return None
        low //= 2
