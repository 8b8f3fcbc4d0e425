"""A DLRM whose tables all have one size and are one array `f32[tables, rows, width]`, looked up with `vmap`."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .train_step import TrainStep, of

SOURCE = "DLRM (Naumov et al. 2019) with eight stacked tables of a million rows, plain pytrees, optax.adagrad"


@dataclass(frozen=True)
class Sizes:
    tables: int = 8
    rows: int = 1_000_000
    width: int = 64
    dense: int = 13
    bottom: tuple[int, ...] = (512, 256)
    top: tuple[int, ...] = (1024, 1024, 512, 256)
    batch: int = 8192


def mlp_params(key, widths):
    keys = jax.random.split(key, len(widths) - 1)
    return [
        (jax.nn.initializers.he_normal()(key, (n_in, n_out)), jnp.zeros(n_out))
        for key, n_in, n_out in zip(keys, widths[:-1], widths[1:], strict=True)
    ]


def mlp(layers, x, last):
    for weight, bias in layers[:-1]:
        x = jax.nn.relu(x @ weight + bias)
    weight, bias = layers[-1]
    return last(x @ weight + bias)


def predict(params, dense, ids):
    """Logits f[B] of dense features f[B, 13] and ids i[B, tables]."""
    x = mlp(params["bottom"], dense, jax.nn.relu)
    looked_up = jax.vmap(lambda table, i: jnp.take(table, i, axis=0), in_axes=(0, 1), out_axes=1)(params["tables"], ids)
    features = jnp.concatenate([x[:, None], looked_up], axis=1)
    products = jnp.einsum("bfd,bgd->bfg", features, features)
    left, right = np.tril_indices(features.shape[1], -1)
    crossed = jnp.concatenate([x, products[:, left, right]], axis=1)
    return mlp(params["top"], crossed, lambda y: y[:, 0])


def dlrm_stacked(tiny: bool = False) -> TrainStep:
    s = Sizes(tables=3, rows=50, width=8, bottom=(16,), top=(16,), batch=32) if tiny else Sizes()
    optimizer = optax.adagrad(0.02)

    def train_step(state, batch):
        def loss_fn(params):
            logits = predict(params, batch["dense"], batch["ids"])
            return optax.sigmoid_binary_cross_entropy(logits, batch["clicked"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt_state = optimizer.update(grads, state["opt_state"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, {"loss": loss}

    def make(seed):
        table_key, bottom_key, top_key, dense_key, ids_key, label_key = jax.random.split(jax.random.key(seed), 6)
        features = s.tables + 1
        params = {
            "tables": jax.random.uniform(table_key, (s.tables, s.rows, s.width), minval=-1, maxval=1) * s.rows**-0.5,
            "bottom": mlp_params(bottom_key, (s.dense, *s.bottom, s.width)),
            "top": mlp_params(top_key, (s.width + features * (features - 1) // 2, *s.top, 1)),
        }
        batch = {
            "dense": jax.random.normal(dense_key, (s.batch, s.dense)),
            "ids": jax.random.randint(ids_key, (s.batch, s.tables), 0, s.rows, jnp.int32),
            "clicked": jax.random.bernoulli(label_key, 0.3, (s.batch,)).astype(jnp.float32),
        }
        return {"params": params, "opt_state": optimizer.init(params)}, batch

    return of(train_step, make, SOURCE)
