"""The least cost of a model: exact where elimination fits, otherwise the best over restricted domains and a bound.

What to do when tables would grow too large, in this order:
1. eliminate what is cheap; what is left is the core;
2. bound every strategy in the core from below (messages) and drop those above the best known cost: the optimum stays;
3. keep, at each variable, the known strategies and those with the least bounds, as many as elimination allows; solve
   that exactly; repeat from the better assignment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .bounds import Bound, lower_bound
from .eliminate import Order, minimize, order
from .core import Core
from .local import Local
from .model import Model
from .network import Network, network
from .prune import pruned

MODEST_TABLE, MODEST_WORK = 2.0**20, 2.0**33  # what one step of a search may cost; exact elimination may use the limit
GUESS_TABLE = 10**5  # mini-buckets that make a first guess
CORE_TABLE = 10**4  # a variable whose elimination leaves no more is eliminated before bounds are computed
SWEEPS, ROUNDS = 5, 4


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
        return _exact(small, net, plan, table_limit)
    guess = minimize(net, plan, min(table_limit, GUESS_TABLE))
    known = [_settled(model, s) for s in (_original(small, guess.assignment), *seeds)]
    best, floor = min(known, key=lambda k: k.cost), guess.value
    core = Core(net)
    for _ in range(ROUNDS):
        core.condense(min(table_limit, CORE_TABLE))
        bound = lower_bound(core.net, core.variables, SWEEPS)
        floor = max(floor, bound.value)
        changed, least = _fix(core, bound, best.cost)
        plan = core.order()
        if plan.largest <= table_limit and plan.work <= MODEST_WORK * 8:
            found = minimize(core.net, plan, table_limit)
            exact = _settled(model, _original(small, core.expand(found.assignment)))
            best, floor = min(best, exact, key=lambda k: k.cost), found.value
            break
        better = _restricted(model, small, core, least, [best.assignment, *seeds], table_limit)
        if better.cost < best.cost:
            best = better
        elif not changed:
            break
    return Optimum(best.assignment, best.cost, min(floor, best.cost))


def planned(model: Model, table_limit: int) -> tuple[Network, Order]:
    """The model as a network, and the order to eliminate it in."""
    net = network(model, table_limit)
    return net, order(net.sizes, [scope for scope, _ in net.factors])


def _exact(small: Model, net: Network, plan: Order, table_limit: int) -> Optimum:
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


def _fix(core: Core, bound: Bound, cost: float) -> tuple[bool, dict[int, np.ndarray]]:
    """Drop what costs at least as much as the best known; whether there was any, and the bounds of the rest."""
    kept = {v: np.flatnonzero(b < cost) for v, b in bound.least.items()}
    kept = {v: k for v, k in kept.items() if 0 < len(k) < len(bound.least[v])}  # with none left, the best is optimal
    core.restrict(kept)
    return bool(kept), {v: b[kept[v]] if v in kept else b for v, b in bound.least.items()}


def _restricted(model: Model, small: Model, core: Core, least: dict[int, np.ndarray], known: Sequence[np.ndarray],
                table_limit: int) -> Optimum:
    """The best over known strategies and as many others as fit, those with the least bounds first."""
    limit = min(table_limit, MODEST_TABLE)
    scopes = [scope for scope, _ in core.net.factors]
    always = {v: _known(small, core, v, known) for v in core.variables}
    excess = np.concatenate([least[v] - least[v].min() for v in core.variables])
    rank = np.empty(len(excess), np.int64)
    rank[np.argsort(excess, kind="stable")] = np.arange(len(excess))
    ranks = dict(zip(core.variables, np.split(rank, np.cumsum([len(least[v]) for v in core.variables])[:-1]), strict=True))
    low, high, chosen = 0, len(rank), None
    while low < high:
        count = (low + high + 1) // 2
        kept = {v: np.flatnonzero(always[v] | (ranks[v] < count)) for v in core.variables}
        sizes = list(core.net.sizes)
        for v, k in kept.items():
            sizes[v] = len(k)
        plan = order(sizes, scopes)
        if plan.largest <= limit and plan.work <= MODEST_WORK:
            low, chosen = count, (kept, plan)
        else:
            high = count - 1
    if chosen is None:
        return Optimum(known[0], np.inf, -np.inf)
    trial = core.copy()
    trial.restrict(chosen[0])
    found = minimize(trial.net, chosen[1], table_limit)
    return _settled(model, _original(small, trial.expand(found.assignment)))


def _known(small: Model, core: Core, v: int, known: Sequence[np.ndarray]) -> np.ndarray:
    """Which values of a core variable the known assignments use (layout indicators: both)."""
    if v >= len(small.domains):
        return np.ones(len(core.values[v]), bool)
    used = np.isin(small.store[small.domains[v]][core.values[v]], [k[v] for k in known])
    return used if used.any() else np.arange(len(used)) == 0
