"""Ways to write attention: functions of q, k, v of [batch, positions, heads, features], a mask of keys, and a key.
And which of it is found in a program."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from unity_jax.implement.record import attending


def mesh(*sizes):
    count = math.prod(sizes)
    return jax.sharding.Mesh(np.array(jax.devices()[:count]).reshape(sizes), tuple("xy"[: len(sizes)]))


def found(program):
    groups = []
    attending(program.graph, lambda _, some, __: groups.extend(some) or ())
    return groups


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
