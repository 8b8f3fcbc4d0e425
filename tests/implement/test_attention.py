"""Attention is found however it is written, and computes the same as a kernel."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

import models
import unity_jax as unity
from experiments.validation.programs import VALIDATION
from tests.implement.attentions import WAYS, by_einsum, by_hand, drawn, found, gradients, mesh, with_bernoulli
from unity_jax.implement.attention import attentions
from unity_jax.implement.constants import LARGEST, Constants
from unity_jax.machine.machine import Machine
from unity_jax.program import trace
from unity_jax.search.implementing import implemented
from unity_jax.search.options import SearchOptions

FORCED = SearchOptions(attention="kernel")


def of_step(name, **changes):
    model = models.get(name, "tiny", dtype=jnp.bfloat16, **changes)
    return trace(model.train_step, (model.abstract_state(), model.abstract_batch()), {}, donate_argnums=0)


@pytest.mark.parametrize(
    ("name", "forward", "both", "causal", "drops"),
    [
        ("bert", 0, 2, False, True),
        ("gpt", 1, 1, True, True),
        ("llama", 1, 1, True, False),
        ("falcon", 1, 1, True, False),
        ("vit", 1, 1, False, False),
        ("moe", 1, 1, True, False),
        ("lora", 0, 2, True, False),
    ],
)
def test_it_is_found_in_the_zoo(name, forward, both, causal, drops):
    groups = found(of_step(name))
    assert [sum(bool(g.gradients) == back for g in groups) for back in (False, True)] == [forward, both]
    for group in groups:
        assert group.scores.causal == causal and (group.drop is not None) == drops
        assert not group.gradients or set(group.gradients) == set("qkv")


@pytest.mark.parametrize("remat", [False, True])
def test_a_mask_made_ahead_of_checkpointed_layers_is_causal_in_them(remat):
    """Behind the barrier of `jax.checkpoint` it is what it is ahead of it."""
    groups = found(of_step("llama", scan=False, remat=remat))
    assert [g.scores.causal for g in groups] == [True] * (4 if remat else 2)


def test_a_causal_mask_that_each_example_has_is_causal():
    """As Flax makes it of tokens: alike for all, and with more elements than are computed."""
    tokens, x = jax.ShapeDtypeStruct((4096, 256), jnp.int32), jax.ShapeDtypeStruct((4096, 256, 32), jnp.bfloat16)
    module = linen.MultiHeadDotProductAttention(num_heads=4, dtype=jnp.bfloat16)

    def loss(weights, tokens, x):
        return jnp.sum(module.apply(weights, x, mask=linen.make_causal_mask(tokens)).astype(jnp.float32) ** 2)

    weights = jax.eval_shape(module.init, jax.random.key(0), x)
    (group,) = found(trace(jax.grad(loss), (weights, tokens, x), {}))
    assert group.scores.causal and not group.scores.hiding
    assert math.prod(tokens.shape) * tokens.shape[1] > LARGEST


def test_of_an_encoder_and_a_decoder_each_has_its_own_masks():
    groups = found(of_step("transformer"))
    assert sorted((g.scores.causal, len(g.scores.biases)) for g in groups) == [(False, 1), (False, 1), (True, 0)]
    cross = found(of_step("t5"))
    assert len(cross) == 1 and not cross[0].scores.biases, "a learned bias needs the gradient of all scores"


@pytest.mark.parametrize(
    ("name", "count"), [("attention_layer", 1), ("bert_linen", 2), ("gpt_pytree", 2), ("diffusion_linen", 1)]
)
def test_it_is_found_in_programs_of_others(name, count):
    step = VALIDATION[name](tiny=True)
    program = trace(step.step, step.arguments, {}, donate_argnums=step.donate_argnums)
    assert sum(set(g.gradients) == set("qkv") for g in found(program)) == count


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 6))])
def test_every_way_to_write_it_computes_the_same(way, seed):
    given = drawn(seed, jnp.float32)
    if way is by_hand:
        q, k, v = given[0]
        n = min(q.shape[1], k.shape[1])
        given = [q[:, :n], k[:, :n], v[:, :n]], given[1][:, :n], given[2][:, :n], given[3]
    step = gradients(way)
    options = unity.Options(attention="kernel", rewrite=False, cache=None)
    planned = unity.auto_shard(step, mesh=mesh(1), options=options)
    names = [op.name for op in planned.plan(*given).pcg.walk()]
    assert names.count("attention_back") == 1 and "exp" not in names
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), planned(*given), jax.jit(step)(*given)
    )


@pytest.mark.parametrize("way", [by_einsum, with_bernoulli], ids=lambda way: way.__name__)
def test_in_bfloat16_it_is_no_worse(way):
    """Beside the same in float32, whose probabilities are not rounded."""
    given = drawn(1, jnp.bfloat16)
    step = gradients(way)
    planned = unity.auto_shard(step, mesh=mesh(1), options=unity.Options(attention="kernel", cache=None))
    exact = jax.tree.leaves(jax.jit(step)([t.astype(jnp.float32) for t in given[0]], *given[1:]))
    theirs, ours = (jax.tree.leaves(f(*given)) for f in (jax.jit(step), planned))
    for a, b, c in zip(exact, theirs, ours, strict=True):
        off, known = (float(jnp.abs(x.astype(jnp.float32) - a).max()) for x in (c, b))
        assert off <= 2 * known + 1e-2 * float(jnp.abs(a).max())


def test_it_is_split_by_batch_and_heads():
    given = drawn(3, jnp.float32)
    step = gradients(with_bernoulli)
    given = [[jnp.tile(t, (4, 1, 1, 1)) for t in given[0]], jnp.tile(given[1], (4, 1, 1, 1)), *given[2:]]
    planned = unity.auto_shard(step, mesh=mesh(2, 2), options=unity.Options(attention="kernel", cache=None))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), planned(*given), jax.jit(step)(*given)
    )


# What is no attention, or needs more than kernels compute


def returning_weights(q, k, v, seen, key):
    p = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return jnp.einsum("bhqk,bkhd->bqhd", p, v) + jnp.sum(p)


def with_soft_cap(q, k, v, seen, key):
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(30 * jnp.tanh(s / 30)), v)


def of_squares(q, k, v, seen, key):
    p = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return jnp.einsum("bhqk,bkhd->bqhd", p * p, v)


def through_the_largest(q, k, v, seen, key):
    """Whose gradient goes through the maximum, too."""
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    e = jnp.exp(s - jnp.max(s, -1, keepdims=True))
    return jnp.einsum("bhqk,bkhd->bqhd", e / jnp.sum(e, -1, keepdims=True), v)


def with_another_temperature_in_the_sum(q, k, v, seen, key):
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    e = jnp.exp(s - jax.lax.stop_gradient(jnp.max(s, -1, keepdims=True)))
    return jnp.einsum("bhqk,bkhd->bqhd", e / jnp.sum(e * e, -1, keepdims=True), v)


def of_scaled_probabilities(q, k, v, seen, key):
    p = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return jnp.einsum("bhqk,bkhd->bqhd", 1.01 * p, v)


def with_dropout_that_is_not_scaled_up(q, k, v, seen, key):
    p = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return jnp.einsum("bhqk,bkhd->bqhd", jnp.where(jax.random.bernoulli(key, 0.8, p.shape), p, 0), v)


def with_another_dropout_of_gradients(q, k, v, seen, key):
    """Dropped twice, by two keys."""
    p = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    for of in jax.random.split(key):
        p = jnp.where(jax.random.bernoulli(of, 0.8, p.shape), p / 0.8, 0)
    return jnp.einsum("bhqk,bkhd->bqhd", p, v)


def over_queries(q, k, v, seen, key):
    p = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k), axis=2)
    return jnp.einsum("bhqk,bkhd->bqhd", p, v)


@pytest.mark.parametrize(
    "way",
    [
        returning_weights,
        with_soft_cap,
        of_squares,
        through_the_largest,
        with_another_temperature_in_the_sum,
        of_scaled_probabilities,
        with_dropout_that_is_not_scaled_up,
        with_another_dropout_of_gradients,
        over_queries,
    ],
    ids=lambda way: way.__name__,
)
def test_what_is_none_is_left(way):
    program = trace(gradients(way), drawn(0, jnp.float32), {})
    graph, known = program.graph, Constants(program.graph)
    assert not attentions(graph, known)
    assert implemented(program, Machine.preset("cpu:2"), FORCED) is program
