"""What need not be in a loop is before and after it, and computes the same."""

import jax
import pytest

from tests.implement import cells
from tests.numerics.harness import error
from tests.residuals import steps
from unity_jax.implement import batchable, batched
from unity_jax.program import trace


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def divided(of):
    return of.rewritten(batched(of.graph, batchable(of.graph)), ())


def scans(graph):
    return [op for op in graph.walk() if op.name == "scan"]


def count(graph, name="dot_general"):
    return sum(op.name == name for op in graph.ops)


def products(of):
    """How many products are in the body of each loop."""
    return [count(op.bodies[0]) for op in scans(of.graph)]


def same(after, of, args, tolerance=1e-12):
    """Both programs compute the same on one device."""
    inputs = steps.flat(of, *args)
    got, want = steps.alone(after)(inputs), steps.alone(of)(inputs)
    assert max(error(w, g, 1e-3) for w, g in zip(want, got, strict=True)) < tolerance


@pytest.mark.parametrize("seed", range(80))
def test_random_cells(seed):
    cell = cells.Cell(seed)
    args = cell.arguments()
    for fn in (cell.run, jax.grad(cell.loss, (0, 1, 2))):
        of = trace(fn, args, {})
        after = divided(of)
        if batchable(of.graph):
            same(after, of, args)
        else:
            assert after.graph is of.graph
