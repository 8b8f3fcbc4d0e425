"""One strategy per node at little cost, within a limit on the bytes alive at any time: for large published problems.

    answer = solve(load("asplos-2025-iopddl-B.json.gz"))
    answer.cost, answer.feasible  # 532843.0, True

What is forced is decided (`reduce`), the rest is searched for (`search`). There is no proof of how good an answer is;
`unity_jax.search.solver` gives one, for problems of a train step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..search.problem import Problem
from .reduce import reduced
from .search import searched
from .terms import Terms

WORK = 1_000
"""Looks at each node and edge of what is left to decide, at an effort of 1."""
LEAST_WORK = 12_000_000
"""Looks of a small problem: it is begun so many times."""


@dataclass(frozen=True, eq=False)
class Answer:
    """A choice of strategies.

    **Fields:** `cost`: in the problem's unit, inf if a pair of strategies is not allowed; `peak`: the most bytes alive;
    `feasible`: whether it is allowed and fits.
    """

    assignment: np.ndarray
    cost: float
    peak: float
    feasible: bool


def solve(problem: Problem, *, effort: float = 1.0, seed: int = 0) -> Answer:
    """A choice of strategies that costs little and fits, if one is found.

    **Arguments:**
    - `problem`: without shared terms.
    - `effort`: how much work to do; 1 takes about a minute for five thousand nodes that are left to decide.
    - `seed`: of what is tried by chance; the same effort and seed give the same answer.

    **Returns:** an `Answer`; `feasible` is False if nothing was found that is allowed and fits.
    """
    small = reduced(problem)
    if small is None:
        return _answer(problem, np.array([int(np.argmin(u)) for u in problem.unary], np.int64))
    x = np.zeros(0, np.int64)
    if small.costs:
        terms = Terms.of(small)
        work = WORK * (terms.edges + len(terms.costs))
        starts = max(1, round(effort * LEAST_WORK / work))
        x = searched(terms, work if starts > 1 else max(100, int(work * effort)), starts, seed)
    return _answer(problem, small.original(x))


def _answer(problem: Problem, assignment: np.ndarray) -> Answer:
    cost, peak = problem.cost(assignment), problem.peak(assignment)
    return Answer(assignment, cost, peak, bool(np.isfinite(cost)) and problem.fits(assignment))
