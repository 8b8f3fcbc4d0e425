"""Blocks of nodes against brute force."""

import itertools

import numpy as np
import pytest

from unity_jax.solver.blocks import Block


def random_tables(rng, n):
    """The strategies of some nodes and the tables between most of them."""
    sizes = rng.integers(1, 4, n).tolist()
    tables = [{} for _ in sizes]
    for v, w in itertools.combinations(range(n), 2):
        if rng.random() < 0.5:
            tables[v][w] = rng.integers(0, 9, (sizes[v], sizes[w])).astype(float)
            tables[w][v] = tables[v][w].T
    return sizes, tables


@pytest.mark.parametrize("most", [4, 12, 10_000])
def test_least_of_all_strategies(most):
    for seed in range(50):
        rng = np.random.default_rng(seed)
        sizes, tables = random_tables(rng, 6)
        block = Block.of(tables, [0, 1, 2, 4, 5], sizes, most, np.ones(5))
        assert {*block.nodes} <= {0, 1, 2, 4, 5}
        assert len(block.nodes) == 5 or most < 10_000
        costs = [rng.integers(0, 9, sizes[v]).astype(float) for v in block.nodes]

        def cost(x, block=block, costs=costs, tables=tables):
            of = dict(zip(block.nodes, x, strict=True))
            pairs = sum(t[of[v], of[w]] for v in of for w, t in tables[v].items() if w in of and v < w)
            return pairs + sum(c[a] for c, a in zip(costs, x, strict=True))

        every = itertools.product(*(range(sizes[v]) for v in block.nodes))
        assert cost(block.solved(costs)) == min(map(cost, every))


def test_no_table_is_larger():
    rng = np.random.default_rng(0)
    sizes, tables = random_tables(rng, 30)
    block = Block.of(tables, range(30), sizes, 50, np.ones(30))
    assert 0 < len(block.nodes) < 30
    assert max(s.table.size for s in block.steps if s.table is not None) <= 50
