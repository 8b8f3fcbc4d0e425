"""A memory limit as prices: bytes alive at a time step cost so many seconds each, and prices rise until all fits.

For prices p_t >= 0 the least of `cost + sum over t of p_t * (bytes alive at t - limit)` is a lower bound on the cost
of everything that fits (Lagrangian dual). The best prices are found by cutting planes (Kelley, 1960) over the time
steps where some solution did not fit. Prices only reach the convex hull of (cost, bytes), so every solution met on the
way is repaired against the true peak and improved while it fits (`repair`), and small problems are closed by branch
and bound (`branch`).

    twelve bytes at step 0, a limit of 8: strategies (1 s, 12 B) and (3 s, 6 B); at 1/3 s per byte both cost the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog

from .branch import best_within
from .eliminate import minimize
from .limits import LIMITS
from .model import Model
from .optimum import Optimum, optimum, planned
from .problem import Problem
from .prune import pruned
from .repair import Ledger, fitted, improved, joined
from .tables import Store

TOLERANCE = 1e-6


@dataclass(frozen=True)
class _Cut:
    cost: float  # units
    excess: np.ndarray  # bytes alive minus the limit, per time step


def within(
    problem: Problem, model: Model, free: Optimum, seeds: Sequence[np.ndarray], table_limit: int
) -> tuple[list[np.ndarray], float]:
    """Assignments that fit (as far as any was found), and a lower bound in units on all that do."""
    base = pruned(model)
    pool = _Pool(problem, model)
    pool.offer(free.assignment)
    for s in seeds:
        pool.offer(s)
    prices, bound = _dual(problem, base, pool, free, table_limit)
    if prices:
        pool.polish()
        if pool.cost * model.store.scale > bound * (1 + LIMITS.gap):
            _graded(problem, base, pool, prices, table_limit)
            pool.polish()
        bound = max(bound, _branched(problem, base, pool, prices, bound, table_limit))
    return pool.kept(), bound


class _Pool:
    """Assignments met, the best that fits first in line, and everything that was cheap."""

    def __init__(self, problem: Problem, model: Model) -> None:
        self.problem, self.model = problem, model
        self.ledger = Ledger.of(problem)
        self.best: np.ndarray | None = None
        self.cost = np.inf  # seconds of the best that fits
        self.met: list[np.ndarray] = []

    def offer(self, assignment: np.ndarray) -> None:
        """Take an assignment and what repair makes of it."""
        if any(np.array_equal(assignment, m) for m in self.met):
            return
        self.met.append(np.array(assignment))
        for x in (assignment, fitted(self.model, self.ledger, assignment)):
            if self.problem.fits(x) and self.problem.cost(x) < self.cost:
                self.best, self.cost = np.array(x), self.problem.cost(x)

    def polish(self) -> None:
        """Improve the best while it fits: single changes, then parts of the cheaper assignments."""
        if self.best is None:
            return
        x = improved(self.model, self.ledger, self.best)
        for other in self.met:
            x = joined(self.model, self.ledger, x, other)
        x = improved(self.model, self.ledger, x)
        if self.problem.fits(x) and self.problem.cost(x) < self.cost:
            self.best, self.cost = x, self.problem.cost(x)

    def kept(self) -> list[np.ndarray]:
        """What may be the answer."""
        least = min(self.met, key=self.problem.peak)
        flat = fitted(self.model, self.ledger, least)
        return [self.best] if self.best is not None else [*self.met, flat]


def priced(problem: Problem, model: Model, prices: dict[int, float], grade: float = 0.0) -> Model:
    """The model with bytes charged at the prices (units per byte); `grade` tilts them along time, for tie-breaking."""
    store = model.store
    times = np.array(sorted(prices))
    sums = np.concatenate([[0.0], np.cumsum([prices[int(t)] for t in times])])
    horizon = max(1, max(u.end for u in problem.usage))
    charges: dict[int, list[int]] = defaultdict(list)
    for u in problem.usage:
        price = float(sums[np.searchsorted(times, u.end)] - sums[np.searchsorted(times, u.start)])
        if price > 0:
            price *= 1 + grade * (round(LIMITS.grades * u.start / horizon) / LIMITS.grades - 0.5)
            charges[u.node].append(_charge(store, store.plain(u.bytes), model.domains[u.node], price))
    unary = [store.sum([n, *charges[i]]) if i in charges else n for i, n in enumerate(model.unary)]
    return Model(model.domains, unary, model.pairs, model.rests, [()] * len(unary), store)


def _charge(store: Store, weights: int, domain: int, price: float) -> int:
    return store.once(
        ("charge", weights, domain, price), lambda: store.add(np.round(store[weights][store[domain]] * price))
    )


def _dual(
    problem: Problem, base: Model, pool: _Pool, free: Optimum, table_limit: int
) -> tuple[dict[int, float], float]:
    """Prices (units per byte) and the lower bound that they prove."""
    limit = problem.limit
    scale = base.store.scale
    cap = 2.0**50 / max(1.0, sum(float(np.max(u.bytes, initial=0.0)) for u in problem.usage))
    first = problem.profile(free.assignment)
    cuts = [_Cut(free.lower_bound, first - limit)]
    times = [int(np.argmax(first))]
    best: tuple[float, dict[int, float]] = (free.lower_bound, {})
    prices = {times[0]: cap}  # the other end: as little memory as possible
    for _ in range(LIMITS.cuts):
        found = optimum(priced(problem, base, prices), lambda: pool.met[:1], table_limit, quick=True)
        value = found.lower_bound - limit * sum(prices.values())
        if value > best[0]:
            best = (value, prices)
        pool.offer(found.assignment)
        profile = problem.profile(found.assignment)
        paid = sum(p * profile[t] for t, p in prices.items())
        cuts.append(_Cut(found.lower_bound - paid, profile - limit))
        worst = int(np.argmax(profile))
        if profile[worst] > limit and worst not in times:
            times.append(worst)
        prices, top = _master(cuts, times, cap)
        target = min(top, pool.cost * scale)
        near = TOLERANCE if found.cost <= found.lower_bound else LIMITS.gap  # an inexact solve cannot tell prices finer
        if target - best[0] <= near * abs(target) or not prices:
            break
    return best[1], best[0]


def _master(cuts: Sequence[_Cut], times: Sequence[int], cap: float) -> tuple[dict[int, float], float]:
    """Prices with the greatest minimum over the cuts, and that minimum (an upper bound on the dual)."""
    unit = max(1.0, max(abs(c.cost) for c in cuts))  # keeps the program's numbers near 1
    weight = max(1.0, max(float(np.abs(c.excess[list(times)]).max()) for c in cuts))
    rows = [[1.0, *(-c.excess[t] / weight for t in times)] for c in cuts]
    found = linprog(
        [-1.0] + [0.0] * len(times),
        A_ub=rows,
        b_ub=[c.cost / unit for c in cuts],
        bounds=[(None, None)] + [(0.0, cap * weight / unit)] * len(times),
        method="highs",
    )
    if found.status != 0:
        return {}, np.inf
    prices = {t: float(p) * unit / weight for t, p in zip(times, found.x[1:], strict=True) if p > 0}
    return prices, float(found.x[0]) * unit


def _graded(problem: Problem, base: Model, pool: _Pool, prices: dict[int, float], table_limit: int) -> None:
    """Solutions between those of the dual: tilted prices let repeated layers change one after the other."""
    low, high = 0.25, 4.0
    for _ in range(LIMITS.graded):
        factor = (low * high) ** 0.5
        model = priced(problem, base, {t: p * factor for t, p in prices.items()}, grade=0.5)
        found = optimum(model, lambda: [pool.best] if pool.best is not None else [], table_limit, quick=True)
        pool.offer(found.assignment)
        if problem.fits(found.assignment):
            high = factor
        else:
            low = factor


def _branched(
    problem: Problem, base: Model, pool: _Pool, prices: dict[int, float], bound: float, table_limit: int
) -> float:
    """Look through everything whose priced cost is below the best; returns the bound that this proves."""
    model = priced(problem, base, prices)
    net, plan = planned(model, table_limit)
    if plan is None:
        return bound
    found = minimize(net, plan)
    allowance = problem.limit * sum(prices.values())
    best, complete = best_within(problem, model, net, plan, found, allowance, pool.cost)
    if best is not None:
        pool.best, pool.cost = best, problem.cost(best)
    return pool.cost * base.store.scale if complete else bound
