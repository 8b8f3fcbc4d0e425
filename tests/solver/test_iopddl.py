"""Reading published problems: the example of the contest's pages, what is malformed, and one instance solved."""

import copy
import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from unity_jax.solver import load, solve
from unity_jax.solver.iopddl import parsed

EXAMPLE = {
    "problem": {
        "name": "example",
        "nodes": {
            "intervals": [[30, 70], [40, 70], [50, 120], [110, 140], [110, 150]],
            "costs": [[15], [55, 65], [25, 45, 35], [85, 75], [95]],
            "usages": [[10], [25, 25], [15, 20, 15], [10, 10], [15]],
        },
        "edges": {
            "nodes": [[0, 1], [0, 2], [1, 3], [2, 4], [3, 4]],
            "costs": [[30, 40], [50, 10, 40], [90, 10, 20, 80], [60, 20, 30], [70, 60]],
        },
        "usage_limit": 50,
    }
}
"""https://github.com/google/iopddl (Apache-2.0), example.json."""

B = Path(__file__).parents[2] / "experiments" / "data" / "asplos-2025-iopddl-B.json.gz"


def test_example():
    problem = parsed(EXAMPLE)
    assert [len(u) for u in problem.unary] == [1, 2, 3, 2, 1]
    assert problem.edges[2].table.tolist() == [[90, 10], [20, 80]]
    assert problem.limit == 50
    x = [0, 0, 2, 1, 0]
    assert problem.cost(x) == 15 + 55 + 35 + 75 + 95 + 30 + 40 + 10 + 30 + 60
    assert problem.profile(x)[[30, 50, 69, 70, 110, 139, 140]].tolist() == [10, 50, 50, 15, 40, 25, 15]
    found = solve(problem, effort=0.001)
    assert found.feasible
    assert found.cost == 445  # the least of the 12 assignments whose usage fits


def test_huge_costs_are_forbidden_and_empty_intervals_use_nothing():
    changed = copy.deepcopy(EXAMPLE)
    changed["problem"]["edges"]["costs"][0][1] = 10**18
    changed["problem"]["nodes"]["intervals"][0] = [30, 30]
    problem = parsed(changed)
    assert problem.edges[0].table.tolist() == [[30, np.inf]]
    assert [u.node for u in problem.usage] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("nodes",), None, "problem has no 'nodes'"),
        (("nodes", "costs"), [[1]], "nodes has 5 intervals and 1 costs"),
        (("nodes", "usages", 1), [1], "node 1 has 2 costs and 1 usages"),
        (("nodes", "intervals", 0), [1], "interval of node 0 is"),
        (("nodes", "costs", 0), ["x"], "costs of node 0 are not a list of numbers"),
        (("edges", "nodes", 3), [2, 9], "edge 3 joins nodes 2 and 9, of 5 nodes"),
        (("edges", "costs", 2), [1, 2, 3], "edge 2 has 3 costs, nodes 1 and 3 have 2 x 2 pairs"),
        (("edges", "costs"), [], "edges has 5 pairs of nodes and 0 costs"),
        (("usage_limit",), "50", "usage_limit is '50'"),
    ],
)
def test_malformed(path, value, message):
    changed = copy.deepcopy(EXAMPLE)
    at = changed["problem"]
    for name in path[:-1]:
        at = at[name]
    if value is None:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    with pytest.raises(ValueError, match=message):
        parsed(changed)


def test_files(tmp_path):
    plain, packed, broken = tmp_path / "a.json", tmp_path / "a.json.gz", tmp_path / "b.json"
    plain.write_text(json.dumps(EXAMPLE))
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    broken.write_text("{")
    assert load(plain).cost([0, 0, 0, 0, 0]) == load(packed).cost([0, 0, 0, 0, 0])
    with pytest.raises(ValueError, match=r"b\.json"):
        load(broken)


@pytest.mark.slow
def test_published_instance():
    problem = load(B)
    found = solve(problem, effort=0.2)
    assert found.feasible
    assert found.peak <= problem.limit
    assert found.cost == 532843  # the best known


@pytest.mark.slow
def test_same_answer_each_time():
    problem = load(B)
    first, again = (solve(problem, effort=0.02) for _ in range(2))
    assert np.array_equal(first.assignment, again.assignment)
