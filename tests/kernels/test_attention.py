"""Attention for users: as `jax.nn.dot_product_attention`, and planned."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import unity_jax as unity
from unity_jax.kernels import attention


def drawn(*shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(len(shape) + shape[-1]).normal(size=shape), dtype)


QUERY, KEY, VALUE = drawn(2, 37, 4, 16), drawn(2, 51, 2, 16), drawn(2, 51, 2, 16)
BIAS = drawn(4, 37, 51)
MASK = jnp.asarray(np.random.default_rng(0).random((2, 1, 1, 51)) < 0.8)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("bias", "mask"), [(None, None), (BIAS, None), (None, MASK), (BIAS, MASK)])
def test_it_is_the_function_of_jax(causal, bias, mask):
    def loss(fn):
        return lambda *x: jnp.sum(fn(*x) ** 2)

    ours = loss(lambda q, k, v, b: attention(q, k, v, b, mask, causal=causal, scale=0.3))
    theirs = loss(
        lambda q, k, v, b: jax.nn.dot_product_attention(
            q, k, v, None if b is None else b[None], mask, is_causal=causal, scale=0.3
        )
    )
    of = (0, 1, 2) if bias is None else (0, 1, 2, 3)
    found, wanted = (jax.jit(jax.value_and_grad(fn, of))(QUERY, KEY, VALUE, bias) for fn in (ours, theirs))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4), found, wanted)


def by_hand(key, rate, q, k, v):
    k, v = (jnp.repeat(t, 2, axis=2) for t in (k, v))
    p = jax.nn.softmax(jnp.einsum("bqhf,bkhf->bhqk", q, k) / 4, axis=-1)
    p = jnp.where(jax.random.bernoulli(key, 1 - rate, p.shape), p / (1 - rate), 0)
    return jnp.einsum("bhqk,bkhf->bqhf", p, v)


@pytest.mark.parametrize("key", [jax.random.key(1), jax.random.PRNGKey(1)])
def test_dropout_is_that_of_jax_random(key):
    ours = jax.grad(lambda *x: jnp.sum(attention(*x, dropout_rate=0.1, dropout_key=key) ** 2), (0, 1, 2))
    theirs = jax.grad(lambda *x: jnp.sum(by_hand(key, 0.1, *x) ** 2), (0, 1, 2))
    for a, b in zip(ours(QUERY, KEY, VALUE), theirs(QUERY, KEY, VALUE), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_examples_of_vmap_are_a_batch():
    q, k = drawn(3, 2, 9, 4, 8), drawn(2, 11, 4, 8)
    fn = jax.grad(lambda q, k: jnp.sum(attention(q, k, k, BIAS[:, :9, :11]) ** 2), (0, 1))
    found = jax.vmap(fn, (0, None))(q, k)
    for i in range(3):
        for a, b in zip(found, fn(q[i], k), strict=True):
            np.testing.assert_allclose(a[i], b, atol=1e-5)


def test_a_step_is_planned_with_it_as_one_op_of_each_pass():
    def step(w, x, key):
        def loss(w):
            q, k, v = (jnp.einsum("bsd,dhf->bshf", x, w[of]) for of in "qkv")
            y = attention(q, k, v, causal=True, dropout_rate=0.1, dropout_key=key)
            return jnp.mean(jnp.einsum("bshf,hfd->bsd", y, w["o"]) ** 2)

        value, gradients = jax.value_and_grad(loss)(w)
        return jax.tree.map(lambda w, g: w - 0.1 * g, w, gradients), value

    w = {"q": drawn(64, 8, 16), "k": drawn(64, 4, 16), "v": drawn(64, 4, 16), "o": drawn(8, 16, 64)}
    sharded = unity.auto_shard(step, mesh=jax.make_mesh((4, 2), ("x", "y")))
    given = (jax.tree.map(lambda t: 0.1 * t, w), drawn(16, 32, 64), jax.random.key(0))
    plan = sharded.plan(*given)
    ops = {op.name: op.outputs[0] for op in plan.pcg.walk() if op.name.startswith("attention")}
    assert sorted(ops) == ["attention", "attention_back"]
    assert all(not t.layout.is_replicated for t in ops.values())
    found, wanted = sharded(*given), jax.jit(step)(*given)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, wanted)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"query": drawn(2, 37, 16)}, ValueError, r"query has the shape \(2, 37, 16\): \[batch, positions"),
        ({"query": jnp.ones((2, 37, 4, 16), int)}, TypeError, "query is of int32: convert it"),
        ({"query": drawn(2, 37, 3, 16)}, ValueError, r"query \(2, 37, 3, 16\), key .* do not go together"),
        ({"value": drawn(2, 50, 2, 16)}, ValueError, "do not go together"),
        ({"bias": drawn(37, 50)}, ValueError, r"bias has the shape \(1, 1, 37, 50\), which does not broadcast"),
        ({"mask": BIAS}, TypeError, "mask is of float32: true where a key is seen"),
        ({"dropout_rate": 1.0, "dropout_key": jax.random.key(0)}, ValueError, "dropout_rate=1.0: at least 0"),
        ({"dropout_rate": 0.1}, ValueError, "without dropout_key: pass a key"),
        ({"dropout_rate": 0.1, "dropout_key": jax.random.key(0, impl="rbg")}, ValueError, "one of threefry2x32"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(change, error, text):
    with pytest.raises(error, match=text):
        attention(**{"query": QUERY, "key": KEY, "value": VALUE} | change)
