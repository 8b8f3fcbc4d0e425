"""The solver of published problems against brute force: what fits, what it costs, and the same each time."""

import itertools

import numpy as np
import pytest

from unity_jax.search.problem import Edge, Problem, Shared, Usage
from unity_jax.solver import solve
from unity_jax.solver.reduce import reduced

pytestmark = pytest.mark.slow  # the same numbers on every JAX version

EFFORT = 0.003


def random_problem(seed):
    """Two to seven nodes with one to four strategies, some pairs forbidden, and a limit that some assignments keep."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 8))
    sizes = rng.integers(1, 5, n)

    def table(*shape):
        return np.where(rng.random(shape) < 0.2, np.inf, rng.integers(0, 9, shape).astype(float))

    pairs = [(int(rng.integers(0, j)), j) for j in range(1, n)]
    pairs += [(0, n - 1)] * int(rng.integers(0, 3)) if n > 2 else []
    edges = [Edge(i, j, table(sizes[i], sizes[j])) for i, j in pairs]
    usage = []
    for i in range(n):
        start = int(rng.integers(0, 6))
        usage.append(Usage(i, rng.integers(0, 10, sizes[i]).astype(float), start, start + int(rng.integers(0, 4))))
    problem = Problem([rng.integers(0, 9, k).astype(float) for k in sizes], edges, usage=usage)
    low = problem.peak([int(np.argmin(u.bytes)) for u in usage])
    problem.limit = float(np.floor(low * (0.9, 1.0, 1.1, 1.3, 2.0, 9.0)[seed % 6]))
    return problem


def least_cost(problem):
    """Of all assignments that fit; inf if there is none."""
    every = itertools.product(*(range(len(u)) for u in problem.unary))
    return min((problem.cost(x) for x in every if problem.fits(x)), default=np.inf)


def test_fits_where_anything_does_and_costs_as_little():
    cheapest, feasible = 0, 0
    for seed in range(100):
        problem = random_problem(seed)
        least, found = least_cost(problem), solve(problem, effort=EFFORT)
        assert found.feasible == np.isfinite(least), seed
        assert found.cost == problem.cost(found.assignment)
        assert found.peak == problem.peak(found.assignment)
        if found.feasible:
            assert found.peak <= problem.limit
            assert least <= found.cost <= 1.3 * least + 1
            feasible += 1
            cheapest += found.cost == least
    assert feasible >= 40
    assert cheapest >= 0.97 * feasible


def test_what_is_forced_changes_no_optimum():
    for seed in range(100):
        problem = random_problem(seed)
        least, small = least_cost(problem), reduced(problem)
        if small is None:
            assert np.isinf(least)
            continue
        every = itertools.product(*(range(len(c)) for c in small.costs))
        found = [small.original(np.array(x, np.int64)) for x in every]
        assert min((problem.cost(x) for x in found if problem.fits(x)), default=np.inf) == least


def test_what_is_left_costs_and_uses_what_the_original_does():
    for seed in range(100):
        problem = random_problem(seed)
        if (small := reduced(problem)) is None:
            continue
        for x in itertools.islice(itertools.product(*(range(len(c)) for c in small.costs)), 20):
            x = np.array(x, np.int64)
            cost = small.constant + sum(c[a] for c, a in zip(small.costs, x, strict=True))
            cost += sum(t[x[v], x[w]] for v, of in enumerate(small.tables) for w, t in of.items() if v < w)
            assert cost == problem.cost(small.original(x))
            fits = bool((small.liveness.used(x) <= small.liveness.spare).all())
            assert fits == problem.fits(small.original(x))


def test_same_answer_each_time():
    problem = random_problem(5)
    first, again = (solve(problem, effort=EFFORT, seed=3) for _ in range(2))
    assert np.array_equal(first.assignment, again.assignment)


def test_no_limit_and_no_edges():
    found = solve(Problem([np.array([3.0, 1.0]), np.array([2.0])]), effort=EFFORT)
    assert (found.assignment.tolist(), found.cost, found.feasible) == ([1, 0], 3.0, True)


def test_nothing_fits():
    problem = Problem([np.array([1.0, 2.0])], usage=[Usage(0, np.array([5.0, 6.0]), 0, 1)], limit=4.0)
    assert not solve(problem).feasible


def test_nothing_is_allowed():
    problem = Problem([np.zeros(2), np.zeros(2)], [Edge(0, 1, np.full((2, 2), np.inf))])
    assert not solve(problem).feasible


def test_shared_terms_are_for_the_other_solver():
    shared = Shared(0, (1,), np.zeros(1, int), (np.zeros(1, int),), np.zeros((1, 1)))
    with pytest.raises(ValueError, match="shared terms"):
        solve(Problem([np.zeros(1), np.zeros(1)], shared=[shared]))
