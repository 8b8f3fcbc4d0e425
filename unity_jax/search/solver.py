"""Choose one strategy per node at the least total cost, under a limit on the bytes alive at any time.

    solution = solve(Problem([np.array([1.0, 3.0]), np.array([0.0, 0.0])], [Edge(0, 1, table)]))
    solution.assignment, solution.cost, solution.gap

Planning is contraction: costs on nodes and edges are a tensor network over (min, +). Strategies that cannot win are
removed (`prune`), variables are eliminated exactly, each distinct contraction once (`eliminate`); when tables would
grow past `table_limit`, lower bounds drop strategies and restricted domains are solved exactly (`optimum`). A memory
limit becomes prices on time steps, then a repair against the true peak (`memory`). Nothing is random or timed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

from .limits import LIMITS
from .local import Local
from .memory import within
from .model import Model
from .optimum import improved, optimum
from .problem import Edge, Problem, Shared, Solution, Usage
from .tables import Store

__all__ = ["Edge", "Problem", "Shared", "Solution", "Usage", "adapted", "solve", "store_for"]


def solve(
    problem: Problem,
    *,
    seeds: Sequence[np.ndarray] | Callable[[], Sequence[np.ndarray]] = (),
    table_limit: int = LIMITS.table,
    store: Store | None = None,
    most: float = math.inf,
) -> Solution:
    """The cheapest assignment of a problem, never worse than a seed that fits the limit, unless all cost too much.

    **Arguments:**
    - `problem`: costs, and the memory limit if there is one.
    - `seeds`: full assignments, such as expert plans; or what makes them, if they are needed.
    - `table_limit`: the most entries of any table; below it the result without a memory limit is exact.
    - `store`: what problems that are alike share; see `store_for`.
    - `most`: seconds beyond which no assignment is wanted: where all cost more, one is found with less effort.

    **Returns:** a `Solution`; `feasible` is False if nothing was found that is allowed and fits.
    """
    store = store or store_for(problem)
    model = Model.of(problem, store)
    known = functools.cache(lambda: [np.asarray(s, np.int64) for s in (seeds() if callable(seeds) else seeds)])
    free = optimum(model, known, table_limit, most=most * store.scale)
    bound = free.lower_bound
    candidates = [free.assignment] if callable(seeds) and problem.limit is None else [free.assignment, *known()]
    if problem.limit is not None and not problem.fits(free.assignment):
        found, bound = within(problem, model, free, known(), table_limit)
        candidates += found
    best = min(candidates, key=lambda x: problem.rank(x))
    cost, peak = problem.cost(best), problem.peak(best)
    feasible = bool(np.isfinite(cost)) and problem.fits(best)
    proved = float(bound / store.scale)
    return Solution(best, cost, min(proved, cost) if feasible else proved, peak, feasible, store.largest)


def adapted(problem: Problem, keep: Sequence[np.ndarray], store: Store, improving: bool) -> np.ndarray:
    """The best assignment among some strategies of each node; `improving`: and then by single changes, if cheaper."""
    model = Model.of(problem, store)
    few = {i: store.add(k) for i, k in enumerate(keep) if len(k) < model.size(i)}
    found = optimum(model.restricted(few), list, LIMITS.table)
    return improved(Local(model, found.assignment), found.assignment).assignment if improving else found.assignment


def store_for(problem: Problem, known: Store | None = None) -> Store:
    """A store in which the sums of a problem are exact: the known one if it is one."""
    largest = _largest_cost(problem)
    return known if known is not None and known.holds(largest) else Store(largest)


def _largest_cost(problem: Problem) -> float:
    """A bound on the size of any sum of costs; each distinct array is looked at once."""
    seen: dict[int, float] = {}

    def top(array: np.ndarray) -> float:
        if id(array) not in seen:
            most = float(np.abs(array).max(initial=0.0))
            seen[id(array)] = most if most < np.inf else float(np.abs(array[np.isfinite(array)]).max(initial=0.0))
        return seen[id(array)]

    total = sum(top(u) for u in problem.unary) + sum(top(e.table) for e in problem.edges)
    return total + sum(len(s.consumers) * top(s.cost) for s in problem.shared)
