"""One causal attention layer in bfloat16, trained by SGD: eight rows of 4,096, so that eight devices have one each."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .train_step import TrainStep, of

SOURCE = "the smallest program with long attention: one layer, a squared error, plain SGD, all in bfloat16"
RATE = 0.1


def layer(params, x):
    """f[B, T, D] -> f[B, T, D]; the projections are f[D, H, K] and, of the output, f[H, K, D]."""
    q, k, v = (jnp.einsum("btd,dhk->bthk", x, params[name]) for name in ("query", "key", "value"))
    scores = jnp.einsum("bqhk,bshk->bhqs", q * q.shape[-1] ** -0.5, k)
    t = x.shape[1]
    scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores, jnp.finfo(scores.dtype).min)
    attended = jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(scores, axis=-1), v)
    return jnp.einsum("bthk,hkd->btd", attended, params["out"])


def train_step(params, batch):
    def loss_fn(params):
        return jnp.mean(jnp.square(layer(params, batch["x"]) - batch["y"]).astype(jnp.float32))

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - RATE * g, params, grads), {"loss": loss}


def attention_layer(tiny: bool = False) -> TrainStep:
    rows, length, heads, width = (2, 16, 2, 4) if tiny else (8, 4096, 8, 128)

    def make(seed):
        *keys, out_key, x_key, y_key = jax.random.split(jax.random.key(seed), 6)
        d, bf16 = heads * width, jnp.bfloat16
        params = {
            name: jax.random.normal(key, (d, heads, width), bf16) * d**-0.5
            for name, key in zip(("query", "key", "value"), keys, strict=True)
        }
        params["out"] = jax.random.normal(out_key, (heads, width, d), bf16) * d**-0.5
        x, y = (jax.random.normal(key, (rows, length, d), bf16) for key in (x_key, y_key))
        return params, {"x": x, "y": y}

    return of(train_step, make, SOURCE)
