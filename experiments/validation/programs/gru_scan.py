"""A recurrent language model with `lax.scan` over time inside each layer, all gates of a GRU in one matmul."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from .train_step import TrainStep, of

SOURCE = "a GRU (Cho et al. 2014) language model, two layers of 1024, NamedTuples and lax.scan, optax.rmsprop"


class Gru(NamedTuple):
    """Input to gates f[D, 3H], state to gates f[H, 3H], biases f[3H]: reset, update, candidate."""

    w: jax.Array
    u: jax.Array
    b: jax.Array


class Params(NamedTuple):
    embed: jax.Array
    layers: tuple[Gru, ...]
    out: jax.Array


def make_params(key, vocab, hidden, layers):
    embed_key, out_key, *keys = jax.random.split(key, 2 + 2 * layers)
    square = jax.nn.initializers.orthogonal()

    def layer(w_key, u_key):
        gates = [square(k, (hidden, hidden)) for k in jax.random.split(u_key, 3)]
        w = jax.nn.initializers.glorot_uniform()(w_key, (hidden, 3 * hidden))
        return Gru(w, jnp.concatenate(gates, axis=1), jnp.zeros(3 * hidden))

    return Params(
        embed=jax.random.normal(embed_key, (vocab, hidden)) * 0.1,
        layers=tuple(layer(*pair) for pair in zip(keys[::2], keys[1::2], strict=True)),
        out=jax.random.normal(out_key, (hidden, vocab)) * hidden**-0.5,
    )


def run_layer(p, xs):
    """f[T, B, D] -> f[T, B, H]."""
    hidden = p.u.shape[0]

    def cell(h, x):
        from_state = h @ p.u
        reset, update = jnp.split(jax.nn.sigmoid(x[:, : 2 * hidden] + from_state[:, : 2 * hidden]), 2, axis=1)
        candidate = jnp.tanh(x[:, 2 * hidden :] + reset * from_state[:, 2 * hidden :])
        h = update * h + (1 - update) * candidate
        return h, h

    return jax.lax.scan(cell, jnp.zeros((xs.shape[1], hidden)), xs @ p.w + p.b)[1]


def loss_fn(params, text):
    """text i[B, T + 1]."""
    x = params.embed[text[:, :-1].T]
    for layer in params.layers:
        x = run_layer(layer, x)
    return optax.softmax_cross_entropy_with_integer_labels(x @ params.out, text[:, 1:].T).mean()


def gru_scan(tiny: bool = False) -> TrainStep:
    vocab, hidden, rows, length = (31, 16, 8, 12) if tiny else (10_000, 1024, 256, 128)
    tx = optax.chain(optax.clip(1.0), optax.rmsprop(1e-2 if tiny else 1e-3))

    def train_step(state, text):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, text)
        updates, opt_state = tx.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    def make(seed):
        params_key, text_key = jax.random.split(jax.random.key(seed))
        params = make_params(params_key, vocab, hidden, 2)
        return (params, tx.init(params)), jax.random.randint(text_key, (rows, length + 1), 0, vocab, jnp.int32)

    return of(train_step, make, SOURCE)
