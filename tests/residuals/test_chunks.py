"""A loss by chunks of rows is the same but for the order of sums, and is refused where it would not be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.residuals import steps
from unity_jax.residuals.chunks import PARTS, chunked


def largest(graph):
    return max((t for op in graph.ops for t in op.outputs), key=lambda t: t.nbytes)


def by_chunks(of, dim, parts=PARTS):
    seed = largest(of.graph)
    made = chunked(of.graph, seed, dim, parts)
    return made and of.rewritten(made.graph, ())


@pytest.mark.parametrize("rows, dim", [((32,), 0), ((16, 8), 0), ((4, 16), 1), ((2, 4, 8), 2)])
def test_a_loss_by_chunks_is_the_same(rows, dim):
    args = steps.examples(*rows)
    of = steps.program(steps.sgd(steps.classifier), *args)
    changed = by_chunks(of, dim)
    made = {t.shape for op in changed.graph.walk() for t in op.outputs if t.shape[-1:] == (100,)} - {(16, 100)}
    assert {int(np.prod(shape)) for shape in made} == {100 * np.prod(rows) // PARTS}
    steps.same(changed, of, args)


def test_the_largest_dimension_of_a_loss_over_all_classes_is_not_cut():
    """A softmax needs all classes, and a number of rows that does not divide has no equal chunks."""
    of = steps.program(steps.sgd(steps.classifier), *steps.examples(12, 16))
    assert by_chunks(of, 2) is None and by_chunks(of, 0) is None and by_chunks(of, 1) is not None


def test_classes_that_do_not_meet_may_be_the_rows():
    def loss(params, x, labels, weights):
        v, w = params
        return jnp.log1p(jnp.exp(jnp.tanh(x @ v) @ w)).sum() * weights.sum()

    args = steps.examples(36, classes=800)
    of = steps.program(steps.sgd(loss), *args)
    steps.same(by_chunks(of, 1), of, args, 2e-5)


def middle(params, x, labels, weights):
    """All examples meet between the logits and their gradients."""
    v, w = params
    logits = jnp.tanh(x @ v) @ w
    return ((logits - logits.mean(0)) ** 2).mean() ** 0.5


def test_a_loss_that_needs_all_examples_in_the_middle_is_not_chunked():
    of = steps.program(steps.sgd(middle), *steps.examples(16, 8))
    assert by_chunks(of, 0) is None and by_chunks(of, 1) is None


def noisy(params, x, labels, weights, key):
    v, w = params
    logits = jnp.tanh(x @ v) @ w
    logits += jax.random.normal(key, logits.shape)
    return jax.nn.logsumexp(logits, -1).mean()


def test_random_bits_are_drawn_at_once():
    of = steps.program(steps.sgd(noisy), *steps.examples(16, 8), jax.random.key(0))
    assert by_chunks(of, 1) is None


def test_sums_of_narrow_parts_are_added_up_in_a_wide_type():
    params, x, labels, weights = steps.examples(32)
    args = ([p.astype(jnp.bfloat16) for p in params], x.astype(jnp.bfloat16), labels, weights)
    of = steps.program(steps.sgd(steps.classifier), *args)
    changed = by_chunks(of, 0)
    (loop,) = (op for op in changed.graph.ops if op.name == "scan")
    assert {t.dtype for t in loop.outputs if t.shape == (16, 100)} == {np.dtype(np.float32)}
    steps.same(changed, of, args, 2e-2)


def test_a_program_without_a_backward_pass_has_no_loss():
    of = steps.program(steps.classifier, *steps.examples(32))
    assert by_chunks(of, 0) is None
