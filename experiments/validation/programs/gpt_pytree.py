"""A GPT without a library: parameters in dicts and lists, layers in a Python loop, AdamW by hand.

Master weights are float32 and are cast to bfloat16 as a whole at the beginning of the forward pass.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from .train_step import TrainStep, of

SOURCE = "GPT-2 (Radford et al. 2019), pre-norm, two layers of 1024, as a script with plain pytrees and no library"


@dataclass(frozen=True)
class Hyper:
    vocab: int = 50_304
    length: int = 1024
    width: int = 1024
    heads: int = 16
    layers: int = 2
    rows: int = 32
    rate: float = 3e-4
    decay: float = 0.1


def init_params(key, hp):
    def dense(key, n_in, n_out, scale=1.0):
        return {"w": jax.random.normal(key, (n_in, n_out)) * scale * n_in**-0.5, "b": jnp.zeros(n_out)}

    def norm():
        return {"scale": jnp.ones(hp.width), "bias": jnp.zeros(hp.width)}

    wte, wpe, head, *keys = jax.random.split(key, 3 + hp.layers)
    blocks = []
    for block_key in keys:
        qkv, out, up, down = jax.random.split(block_key, 4)
        residual = (2 * hp.layers) ** -0.5
        blocks.append(
            {
                "ln1": norm(),
                "qkv": dense(qkv, hp.width, 3 * hp.width),
                "out": dense(out, hp.width, hp.width, residual),
                "ln2": norm(),
                "up": dense(up, hp.width, 4 * hp.width),
                "down": dense(down, 4 * hp.width, hp.width, residual),
            }
        )
    return {
        "wte": 0.02 * jax.random.normal(wte, (hp.vocab, hp.width)),
        "wpe": 0.02 * jax.random.normal(wpe, (hp.length, hp.width)),
        "blocks": blocks,
        "ln_f": norm(),
        "head": dense(head, hp.width, hp.vocab),
    }


def linear(p, x):
    return x @ p["w"] + p["b"]


def layer_norm(p, x):
    y = x.astype(jnp.float32)
    y = (y - y.mean(-1, keepdims=True)) * jax.lax.rsqrt(y.var(-1, keepdims=True) + 1e-5)
    return (y * p["scale"] + p["bias"]).astype(x.dtype)


def attention(p, x, heads):
    b, t, d = x.shape
    q, k, v = (a.reshape(b, t, heads, d // heads) for a in jnp.split(linear(p["qkv"], x), 3, axis=-1))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) * (d // heads) ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores, -1e30)
    weights = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
    return linear(p["out"], jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(b, t, d))


def forward(params, tokens, heads):
    x = params["wte"][tokens] + params["wpe"][: tokens.shape[1]]
    for p in params["blocks"]:
        x = x + attention(p, layer_norm(p["ln1"], x), heads)
        x = x + linear(p["down"], jax.nn.gelu(linear(p["up"], layer_norm(p["ln2"], x))))
    return linear(params["head"], layer_norm(params["ln_f"], x))


def loss_fn(params, tokens, targets, heads):
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    logits = forward(half, tokens, heads).astype(jnp.float32)
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    return -jnp.take_along_axis(log_probs, targets[..., None], axis=-1).mean()


def adamw(params, grads, opt, hp, b1=0.9, b2=0.95, eps=1e-8):
    t = opt["t"] + 1
    m = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, opt["m"], grads)
    v = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, opt["v"], grads)

    def move(p, m, v):
        m_hat, v_hat = m / (1 - b1 ** t.astype(jnp.float32)), v / (1 - b2 ** t.astype(jnp.float32))
        decay = hp.decay if p.ndim > 1 else 0.0
        return p - hp.rate * (m_hat / (jnp.sqrt(v_hat) + eps) + decay * p)

    return jax.tree.map(move, params, m, v), {"t": t, "m": m, "v": v}


def train_step(state, batch, hp):
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch["tokens"], batch["targets"], hp.heads)
    params, opt = adamw(state["params"], grads, state["opt"], hp)
    return {"params": params, "opt": opt}, {"loss": loss}


def gpt_pytree(tiny: bool = False) -> TrainStep:
    hp = Hyper(vocab=61, length=16, width=32, heads=4, layers=2, rows=8, rate=1e-2) if tiny else Hyper()

    def make(seed):
        params_key, data_key = jax.random.split(jax.random.key(seed))
        params = init_params(params_key, hp)
        zeros = jax.tree.map(jnp.zeros_like, params)
        opt = {"t": jnp.zeros((), jnp.int32), "m": zeros, "v": jax.tree.map(jnp.zeros_like, params)}
        text = jax.random.randint(data_key, (hp.rows, hp.length + 1), 0, hp.vocab, jnp.int32)
        return {"params": params, "opt": opt}, {"tokens": text[:, :-1], "targets": text[:, 1:]}

    return of(functools.partial(train_step, hp=hp), make, SOURCE)
