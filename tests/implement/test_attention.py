"""Attention is found however it is written, and computes the same as a kernel."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import models
import unity_jax as unity
from experiments.validation.programs import VALIDATION
from unity_jax.implement.attention import attentions
from unity_jax.implement.constants import Constants
from unity_jax.implement.record import attending
from unity_jax.machine.machine import Machine
from unity_jax.program import trace
from unity_jax.search import implementing
from unity_jax.search.implementing import implemented
from unity_jax.search.options import SearchOptions


def mesh(*sizes):
    count = math.prod(sizes)
    return jax.sharding.Mesh(np.array(jax.devices()[:count]).reshape(sizes), tuple("xy"[: len(sizes)]))


FORCED = SearchOptions(attention="kernel")


def found(program):
    groups = []
    attending(program.graph, lambda _, some, __: groups.extend(some) or ())
    return groups


def of_step(name):
    model = models.get(name, "tiny", dtype=jnp.bfloat16)
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


# Ways to write it: functions of q, k, v of [batch, positions, heads, features], a mask of keys, and a key


def by_einsum(q, k, v, seen, key):
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    s = jnp.where(seen[:, None, None, :], s, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(s, axis=-1), v)


def by_hand(q, k, v, seen, key):
    """Softmax with its own maximum and sum, scaled queries, a causal mask that is added."""
    q, k, v = (jnp.transpose(t, (0, 2, 1, 3)) for t in (q * q.shape[-1] ** -0.5, k, v))
    s = q @ jnp.swapaxes(k, -1, -2)
    s += jnp.where(jnp.tril(jnp.ones((s.shape[-2], s.shape[-1]), bool)), 0.0, -1e10)
    e = jnp.exp(s - jax.lax.stop_gradient(jnp.max(s, -1, keepdims=True)))
    return jnp.transpose((e * (1 / jnp.sum(e, -1, keepdims=True))) @ v, (0, 2, 1, 3))


def with_additive_mask(q, k, v, seen, key):
    """As Hugging Face's Flax models: a causal mask and one of padding make a bias."""
    causal = jnp.tril(jnp.ones((1, 1, q.shape[1], k.shape[1]), jnp.bool_))
    both = jnp.logical_and(seen[:, None, None, :], causal)
    bias = jax.lax.select(
        jnp.broadcast_to(both, (q.shape[0], *both.shape[1:])),
        jnp.full((q.shape[0], *both.shape[1:]), 0.0),
        jnp.full((q.shape[0], *both.shape[1:]), jnp.finfo(jnp.float32).min),
    )
    w = nn.dot_product_attention_weights(q, k, bias=bias, deterministic=True)
    return jnp.einsum("...hqk,...khd->...qhd", w, v)


def of_linen(q, k, v, seen, key):
    mask = nn.combine_masks(nn.make_attention_mask(jnp.ones_like(q[:, :, 0, 0]), seen), None)
    return nn.dot_product_attention(q, k, v, mask=mask)


def with_dropout_of_linen(q, k, v, seen, key):
    """The same dropout for all heads."""
    return nn.dot_product_attention(q, k, v, dropout_rng=key, dropout_rate=0.25, deterministic=False)


def with_dropout_of_nnx(q, k, v, seen, key):
    return nnx.dot_product_attention(
        q, k, v, dropout_rng=key, dropout_rate=0.25, deterministic=False, broadcast_dropout=False
    )


def with_bernoulli(q, k, v, seen, key):
    p = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    p = jnp.where(jax.random.bernoulli(key, 0.8, p.shape), p / 0.8, 0)
    return jnp.einsum("bhqk,bkhd->bqhd", p, v)


def of_jax(q, k, v, seen, key):
    return jax.nn.dot_product_attention(q, k, v, mask=seen[:, None, None, :], is_causal=q.shape[1] == k.shape[1])


def with_shared_keys(q, k, v, seen, key):
    return jax.nn.dot_product_attention(q, k[:, :, ::2], v[:, :, ::2], is_causal=q.shape[1] == k.shape[1])


def of_one_head(q, k, v, seen, key):
    q, k, v = (t[:, :, 0] for t in (q, k, v))
    s = jnp.where(seen[:, None, :], q @ jnp.swapaxes(k, 1, 2), -jnp.inf)
    return (jax.nn.softmax(s * 0.3) @ v)[:, :, None]


def checkpointed(q, k, v, seen, key):
    return jax.checkpoint(with_bernoulli)(q, k, v, seen, key)


def by_examples(q, k, v, seen, key):
    def one(q, k, v, seen):
        s = jnp.einsum("qhd,khd->hqk", q, k) + jnp.where(seen, 0.0, -1e30)
        return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(s), v)

    return jax.vmap(one)(q, k, v, seen)


WAYS = [
    by_einsum, by_hand, with_additive_mask, of_linen, with_dropout_of_linen, with_dropout_of_nnx, with_bernoulli,
    of_jax, with_shared_keys, of_one_head, checkpointed, by_examples,
]  # fmt: skip


def gradients(way):
    """A loss and its gradients."""

    def loss(qkv, weights, seen, key):
        y = way(*qkv, seen, key)
        return jnp.sum(jnp.sin(y) * weights[:, :, : y.shape[2]])

    return jax.value_and_grad(loss)


def drawn(seed, dtype):
    random = np.random.default_rng(seed)
    sizes = (1, 2, 3), (5, 8), (5, 8), (2, 4), (4, 8)
    batch, queries, keys, heads, features = (int(random.choice(of)) for of in sizes)
    shapes = (batch, queries, heads, features), *[(batch, keys, heads, features)] * 2, (batch, queries, heads, features)
    *qkv, weights = (jnp.asarray(random.normal(size=shape), dtype) for shape in shapes)
    seen = random.random((batch, keys)) < 0.7
    seen[:, 0] = True
    return qkv, weights, jnp.asarray(seen), jax.random.key(seed)


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


# Plans


def test_a_plan_says_so_and_is_kept(tmp_path):
    given = drawn(2, jnp.float32)
    step = unity.auto_shard(
        gradients(by_einsum), mesh=mesh(2), options=unity.Options(attention="kernel", rewrite=False, cache=None)
    )
    plan = step.plan(*given)
    (done,) = plan.implementations
    assert "attention by a kernel at" in str(plan) and "attention by a kernel" in plan.explain("attention")
    assert done.where.startswith(__file__) or "test_attention.py" in done.where
    plan.save(tmp_path / "plan.json")
    again = unity.auto_shard(gradients(by_einsum), mesh=mesh(2), plan=unity.Plan.load(tmp_path / "plan.json"))
    assert again.plan(*given).implementations == plan.implementations
    for a, b in zip(jax.tree.leaves(again(*given)), jax.tree.leaves(step(*given)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("on", ["h100:8", "v5e:2x4"])
def test_kernels_are_chosen_where_they_are_faster(on):
    def case(batch, length):
        t = jax.ShapeDtypeStruct((batch, length, 16, 64), jnp.bfloat16)
        key = jax.eval_shape(lambda: jax.random.key(0))
        return trace(gradients(by_einsum), ([t, t, t], t, jax.ShapeDtypeStruct((batch, length), bool), key), {})

    machine = Machine.preset(on)
    long = case(16, 4096)
    assert implemented(long, machine, SearchOptions()).implementations[0].saved > 0
    if on.startswith("v5e"):  # where scores of few positions stay on the chip
        short = case(16, 32)
        assert implemented(short, machine, SearchOptions()) is short
    assert implemented(long, machine, SearchOptions(attention="xla")) is long


def test_of_equal_layers_one_is_priced(monkeypatch):
    """Time grows with distinct layers, not with all."""
    priced, both = [], implementing._both

    def noting(graph, group):
        priced.append(group)
        return both(graph, group)

    monkeypatch.setattr(implementing, "_both", noting)

    def layers(weights, x):
        for w in weights:
            q, k, v = jnp.moveaxis((x @ w).reshape(*x.shape[:2], 8, 3, 64), 3, 0)
            x = x + jax.nn.dot_product_attention(q, k, v).reshape(x.shape)
        return jnp.sum(x.astype(jnp.float32) ** 2)

    x = jax.ShapeDtypeStruct((32, 1024, 512), jnp.bfloat16)
    weights = [jax.ShapeDtypeStruct((512, 1536), jnp.bfloat16)] * 6
    program = trace(jax.grad(layers), (weights, x), {})
    done = implemented(program, Machine.preset("h100:8"), SearchOptions())
    assert len(done.implementations[0].places) == 6
    assert len(priced) == 1


@pytest.mark.parametrize(
    ("on", "heads", "shared", "features", "dtype"),
    [
        ("h100:8", 16, 1, 256, jnp.bfloat16),
        ("a100:8", 16, 1, 128, jnp.float32),
        ("v5e:2x4", 128, 128, 64, jnp.bfloat16),
    ],
)
def test_what_no_kernel_has_memory_for_is_left(on, heads, shared, features, dtype):
    """Features of many bytes on a GPU, many heads that share keys on a TPU."""
    q, kv = ((32, 2048, n, features) for n in (heads, heads // shared))
    given = [jax.ShapeDtypeStruct(shape, dtype) for shape in (q, kv, kv)]

    def step(q, k, v):
        return jax.grad(lambda *x: jnp.sum(jax.nn.dot_product_attention(*x) ** 2), (0, 1, 2))(q, k, v)

    program = trace(step, tuple(given), {})
    assert len(found(program)) == 1
    assert implemented(program, Machine.preset(on), SearchOptions()) is program


@pytest.mark.parametrize("on", ["cpu:4", "v100-summit:1x6"])
def test_there_are_no_kernels_for_some(on):
    program = trace(gradients(by_einsum), drawn(0, jnp.float32), {})
    assert implemented(program, Machine.preset(on), SearchOptions()) is program


def test_other_settings_are_refused():
    with pytest.raises(ValueError, match=r'attention= takes "choose", "xla" or "kernel", not \'flash\''):
        unity.Options(attention="flash")


def test_a_batch_of_fewer_sequences_than_devices_gets_kernels():
    """Which one mesh axis does not divide: 8 sequences of 16 heads over 64 devices."""

    def loss(q, k, v):
        return jnp.sum(jax.nn.dot_product_attention(q, k, v, is_causal=True) ** 2)

    shapes = (jax.ShapeDtypeStruct((8, 2048, 16, 128), jnp.bfloat16),) * 3
    made = implemented(trace(jax.grad(loss, (0, 1, 2)), shapes, {}), Machine.preset("v5e:8x8"), SearchOptions())
    assert [of.name for of in made.implementations] == ["attention"]
