"""A selective state-space model with parameters in registered dataclasses: layers scanned, chunks of time scanned.

Within a chunk the recurrence is a masked matmul, between chunks `lax.scan` carries the state f[B, H, P, N]. Layers are
one stacked dataclass that `lax.scan` runs through, each under `jax.checkpoint`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax

from .train_step import TrainStep, of

SOURCE = "Mamba-2 (Dao and Gu 2024), four layers of 1024 on 2,048 tokens, as scans over layers and over chunks of 128"


@dataclass(frozen=True)
class Shape:
    vocab: int = 32_000
    width: int = 1024
    heads: int = 32
    head: int = 64
    state: int = 128
    layers: int = 4
    length: int = 2048
    chunk: int = 128
    rows: int = 16


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["norm", "enter", "leave", "decay", "bias", "skip"], meta_fields=[]
)
@dataclass
class Block:
    norm: jax.Array
    enter: jax.Array
    leave: jax.Array
    decay: jax.Array
    bias: jax.Array
    skip: jax.Array


@functools.partial(jax.tree_util.register_dataclass, data_fields=["embedding", "blocks", "norm"], meta_fields=[])
@dataclass
class Params:
    embedding: jax.Array
    blocks: Block
    norm: jax.Array


def make_block(key, s):
    enter, leave, bias = jax.random.split(key, 3)
    inner = s.heads * s.head
    return Block(
        norm=jnp.ones(s.width),
        enter=jax.random.normal(enter, (s.width, 2 * inner + 2 * s.state + s.heads)) * s.width**-0.5,
        leave=jax.random.normal(leave, (inner, s.width)) * inner**-0.5,
        decay=jnp.log(jnp.linspace(1.0, 16.0, s.heads)),
        bias=jnp.log(jnp.expm1(jax.random.uniform(bias, (s.heads,), minval=1e-3, maxval=1e-1))),
        skip=jnp.ones(s.heads),
    )


def rms_norm(x, scale):
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-5) * scale).astype(x.dtype)


def advance(carried, chunk):
    """One chunk: x f[B, L, H, P], log decays a f[B, L, H], b and c f[B, L, N], against the state f[B, H, P, N]."""
    x, a, b, c = chunk
    total = jnp.cumsum(a, axis=1)
    past = jnp.tril(jnp.ones((x.shape[1],) * 2, bool))[None, :, :, None]
    between = jnp.exp(jnp.where(past, total[:, :, None] - total[:, None], -jnp.inf)).astype(x.dtype)
    weights = jnp.einsum("bin,bjn->bij", c, b)[..., None] * between
    inside = jnp.einsum("bijh,bjhp->bihp", weights, x)
    before = jnp.einsum("bin,bhpn->bihp", c, carried.astype(x.dtype)) * jnp.exp(total)[..., None].astype(x.dtype)
    left = jnp.exp(total[:, -1:] - total).astype(x.dtype)
    added = jnp.einsum("bjn,bjhp->bhpn", b, x * left[..., None])
    return carried * jnp.exp(total[:, -1])[..., None, None] + added.astype(jnp.float32), inside + before


def mix(x, a, b, c, chunk):
    """The recurrence over f[B, T, ...], in chunks of time."""
    rows, length = x.shape[:2]

    def cut(y):
        return jnp.moveaxis(y.reshape(rows, length // chunk, chunk, *y.shape[2:]), 1, 0)

    start = jnp.zeros((rows, *x.shape[2:], b.shape[-1]), jnp.float32)
    _, y = jax.lax.scan(advance, start, (cut(x), cut(a), cut(b), cut(c)))
    return jnp.moveaxis(y, 0, 1).reshape(x.shape)


def apply_block(block, x, s):
    inner = s.heads * s.head
    joined = rms_norm(x, block.norm) @ block.enter.astype(x.dtype)
    z, u, b, c, dt = jnp.split(joined, [inner, 2 * inner, 2 * inner + s.state, 2 * inner + 2 * s.state], axis=-1)
    dt = jax.nn.softplus(dt.astype(jnp.float32) + block.bias)
    u = jax.nn.silu(u).reshape(*u.shape[:2], s.heads, s.head)
    y = mix(u * dt[..., None].astype(u.dtype), -dt * jnp.exp(block.decay), b, c, s.chunk)
    y = y + u * block.skip[:, None].astype(u.dtype)
    return x + (y.reshape(z.shape) * jax.nn.silu(z)) @ block.leave.astype(x.dtype)


def ssm_chunks(tiny: bool = False) -> TrainStep:
    s = Shape(53, 16, 2, 8, 4, layers=2, length=16, chunk=4, rows=4) if tiny else Shape()
    tx = optax.adamw(1e-2 if tiny else 4e-4, b2=0.95, weight_decay=0.1)

    def loss_fn(params, tokens, targets):
        @jax.checkpoint
        def layer(x, block):
            return apply_block(block, x, s), None

        x, _ = jax.lax.scan(layer, params.embedding.astype(jnp.bfloat16)[tokens], params.blocks)
        logits = rms_norm(x, params.norm) @ params.embedding.astype(x.dtype).T
        return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets).mean()

    def train_step(state, batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch["tokens"], batch["targets"])
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    def make(seed):
        embedding_key, block_key, data_key = jax.random.split(jax.random.key(seed), 3)
        params = Params(
            embedding=jax.random.normal(embedding_key, (s.vocab, s.width)) * 0.02,
            blocks=jax.vmap(lambda key: make_block(key, s))(jax.random.split(block_key, s.layers)),
            norm=jnp.ones(s.width),
        )
        text = jax.random.randint(data_key, (s.rows, s.length + 1), 0, s.vocab, jnp.int32)
        return (params, tx.init(params)), {"tokens": text[:, :-1], "targets": text[:, 1:]}

    return of(train_step, make, SOURCE)
