"""A loss by chunks of rows is the same but for the order of sums, and is refused where it would not be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.residuals import steps
from unity_jax.program import trace
from unity_jax.residuals.chunks import PARTS, chunked
from unity_jax.residuals.record import Microbatch


def largest(graph):
    return max((t for op in graph.ops for t in op.outputs), key=lambda t: t.nbytes)


def by_chunks(of, dim, parts=PARTS[0]):
    seed = largest(of.graph)
    made = chunked(of.graph, [seed], dim, parts)
    return made and of.rewritten(made.graph, ())


@pytest.mark.parametrize("rows, dim", [((32,), 0), ((16, 8), 0), ((4, 16), 1), ((2, 4, 8), 2)])
def test_a_loss_by_chunks_is_the_same(rows, dim):
    args = steps.examples(*rows)
    of = steps.program(steps.sgd(steps.classifier), *args)
    changed = by_chunks(of, dim)
    made = {t.shape for op in changed.graph.walk() for t in op.outputs if t.shape[-1:] == (100,)} - {(16, 100)}
    assert {int(np.prod(shape)) for shape in made} == {100 * np.prod(rows) // PARTS[0]}
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


def test_what_is_behind_a_product_may_have_none_of_the_rows():
    def fn(x, w):
        a = jnp.sin(x)
        rows = a.reshape(3, 4, 16)
        return jnp.cos(a) * (rows[0] @ w)[:, None]

    graph = trace(fn, (jnp.ones((4, 3, 16)), jnp.ones((16, 16))), {}).graph
    (seed,) = (op.outputs[0] for op in graph.ops if op.name == "reshape" and op.outputs[0].shape == (3, 4, 16))
    assert chunked(graph, [seed], 1, 2) is None


def test_a_loss_that_needs_all_examples_in_the_middle_is_not_chunked():
    of = steps.program(steps.sgd(middle), *steps.examples(16, 8))
    assert by_chunks(of, 0) is None and by_chunks(of, 1) is None


def noisy(params, x, labels, weights, key):
    v, w = params
    logits = jnp.tanh(x @ v) @ w
    logits += jax.random.normal(key, logits.shape)
    return jax.nn.logsumexp(logits, -1).mean()


@pytest.mark.parametrize("dim", [0, 1])
def test_a_chunk_has_its_part_of_the_random_bits(dim):
    args = (*steps.examples(16, 8), jax.random.key(0))
    of = steps.program(steps.sgd(noisy), *args)
    steps.same(by_chunks(of, dim), of, args)


def test_sums_of_narrow_parts_are_added_up_in_a_wide_type():
    params, x, labels, weights = steps.examples(32)
    args = ([p.astype(jnp.bfloat16) for p in params], x.astype(jnp.bfloat16), labels, weights)
    of = steps.program(steps.sgd(steps.classifier), *args)
    changed = by_chunks(of, 0)
    (loop,) = (op for op in changed.graph.ops if op.name == "scan")
    assert {t.dtype for t in loop.outputs if t.shape == (16, 100)} == {np.dtype(np.float32)}
    steps.same(changed, of, args, 2e-2)


def test_a_forward_pass_alone_is_chunked_as_well():
    args = steps.examples(32)
    of = steps.program(steps.classifier, *args)
    changed = by_chunks(of, 0)
    assert not any(op.backward for op in changed.graph.ops)
    steps.same(changed, of, args)


HEADS, LENGTH, WIDTH = 8, 32, 8


def attention(params, x, key):
    """x f[B, T, D] -> f[B, T, D]: causal, with dropout of the probabilities."""
    wq, wk, wv, wo = params
    q, k, v = (jnp.einsum("btd,dhw->bthw", x, w) for w in (wq, wk, wv))
    scores = jnp.einsum("bthw,bshw->bhts", q, k) / WIDTH**0.5
    scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), scores, -1e9)
    p = jax.nn.softmax(scores)
    p = jnp.where(jax.random.bernoulli(key, 0.9, p.shape), p / 0.9, 0)
    return x + jnp.einsum("bhts,bshw,hwd->btd", p, v, wo)


def scanned(params, x, key):
    keys = jax.random.split(key, len(params[0]))
    layer = jax.checkpoint(lambda x, inputs: (attention(inputs[0], x, inputs[1]), None))
    return (jax.lax.scan(layer, x, (params, keys))[0] ** 2).mean()


def stacked(params, x, key):
    """The same, with all that the backward pass reads stacked."""
    keys = jax.random.split(key, len(params[0]))
    return (jax.lax.scan(lambda x, y: (attention(y[0], x, y[1]), None), x, (params, keys))[0] ** 2).mean()


def unrolled(params, x, key):
    for i, k in enumerate(jax.random.split(key, len(params[0]))):
        x = attention([w[i] for w in params], x, k)
    return (x**2).mean()


def layers(count):
    keys, d = jax.random.split(jax.random.key(5), 5), HEADS * WIDTH
    shapes = [(count, d, HEADS, WIDTH)] * 3 + [(count, HEADS, WIDTH, d)]
    params = [0.1 * jax.random.normal(k, s) for k, s in zip(keys[:4], shapes, strict=True)]
    return params, jax.random.normal(keys[4], (4, LENGTH, d)), jax.random.key(7)


def scores(graph):
    """All arrays of scores, those within loops too."""
    found = [t for op in graph.walk() for t in op.outputs]
    return [t for t in found if t.rank == 4 and t.shape[-2:] == (LENGTH, LENGTH)]


@pytest.mark.parametrize("loss", [scanned, stacked, unrolled])
@pytest.mark.parametrize("dim, parts", [(0, 4), (1, 8), (2, 8)])
def test_attention_by_chunks_is_the_same(loss, dim, parts):
    """By examples, heads or rows of the queries; the backward pass computes the scores of a chunk again."""
    args = layers(2)
    of = steps.program(steps.sgd(loss), *args)
    changed = of.rewritten(chunked(of.graph, scores(of.graph), dim, parts).graph, ())
    made = {t.nbytes for op in changed.graph.walk() for t in op.outputs if t.rank >= 4 and t.dtype == jnp.float32}
    assert max(made) < 4 * HEADS * LENGTH * LENGTH * 4
    loops = [op for op in changed.graph.walk() if op.name == "scan" and op.params["length"] == parts]
    assert len(loops) == (4 if loss is unrolled else 2)
    steps.same(changed, of, args)


def test_chunks_of_microbatches_have_their_part_of_the_random_bits():
    args = layers(2)
    of = steps.program(steps.sgd(scanned), *args)
    (batch,) = (i for i, t in enumerate(of.graph.inputs) if t.shape == args[1].shape)
    graph = Microbatch(((batch, 0),), 2, 4).applied(of.graph).graph
    for dim, parts in ((1, 4), (2, 8)):
        graph = chunked(graph, scores(graph), dim, parts).graph
    drawn = [op for op in graph.walk() if op.name == "random_bits"]
    assert any(len(op.inputs) == 4 for op in drawn)
    steps.same(of.rewritten(graph, ()), of, args)
