"""A loss by chunks of rows is the same but for the order of sums, and is refused where it would not be."""

import numpy as np
import pytest

from tests.residuals import steps
from unity_jax.residuals.chunks import PARTS, chunked
from unity_jax.residuals.region import around


def largest(graph):
    return max((t for op in graph.ops for t in op.outputs), key=lambda t: t.nbytes)


def by_chunks(of, dim, parts=PARTS):
    seed = largest(of.graph)
    region = around(of.graph, seed, dim, parts)
    made = region and chunked(of.graph, region, seed, parts)
    return made and of.rewritten(made.graph, ())


def same(changed, of, args, tolerance=2e-6):
    inputs = steps.flat(of, *args)
    for a, b in zip(steps.alone(changed)(inputs), steps.alone(of)(inputs), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rows, dim", [((32,), 0), ((16, 8), 0), ((4, 16), 1), ((2, 4, 8), 2)])
def test_a_loss_by_chunks_is_the_same(rows, dim):
    args = steps.examples(*rows)
    of = steps.program(steps.sgd(steps.classifier), *args)
    changed = by_chunks(of, dim)
    made = {t.shape for op in changed.graph.walk() for t in op.outputs if t.shape[-1:] == (100,)} - {(16, 100)}
    assert {int(np.prod(shape)) for shape in made} == {100 * np.prod(rows) // PARTS}
    same(changed, of, args)
