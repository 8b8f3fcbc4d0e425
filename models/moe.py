"""Mixtral: a Transformer whose feed-forward is routed to the top 2 of 8 experts; layers unrolled, each rematerialized.

Sources: Jiang et al. 2024, "Mixtral of Experts" (arXiv 2401.04088) for the architecture: pre-RMS-norm, grouped-query
attention with rotary positions, gated SiLU experts, untied output. Lepikhin et al. 2020, "GShard" (arXiv 2006.16668),
and Fedus et al. 2021, "Switch Transformers" (arXiv 2101.03961), for routing as training on accelerators does it: each
sequence is a group, each expert takes `capacity` tokens of a group, first choices before second ones, the rest pass by
on the residual; dispatch and combination are einsums with one-hot masks, and a loss of 0.01 x E x sum(fraction x
probability) keeps the load even.

| size  | layers | hidden | heads (kv) | experts | feed-forward | vocabulary | tokens | parameters      |
|-------|--------|--------|------------|---------|--------------|------------|--------|-----------------|
| 8x7b  | 32     | 4096   | 32 (8)     | 8       | 14,336       | 32,000     | 4096   | 46,702,792,704  |
| 8x22b | 56     | 6144   | 48 (8)     | 8       | 16,384       | 32,000     | 4096   | 140,620,634,112 |
| tiny  | 2      | 64     | 8 (4)      | 8       | 96           | 251        | 16     |                 |

`full` is 8x7b.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from models._attention import GroupedAttention, rotary
from models._common import (
    Array,
    Batch,
    Metrics,
    Model,
    Precision,
    adamw,
    causal_mask,
    drop,
    fold,
    next_token_model,
)
from models._layers import Remat, stack, through


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes and recipe; see the table above.

    `scan` runs the layers as one loop over stacked parameters, f[L, ...]; unrolled they are a list. `remat`: which
    layers the backward pass computes again.
    """

    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_width: int = 128
    experts: int = 8
    top_k: int = 2
    feed_forward: int = 14_336
    capacity_factor: float = 1.25
    vocabulary: int = 32_000
    length: int = 4096
    batch_size: int = 256
    dropout: float = 0.0
    balance: float = 0.01
    rope_theta: float = 1e6
    learning_rate: float = 3e-4
    warmup: int = 2_000
    scan: bool = True
    remat: Remat = True
    dtype: Any = jnp.bfloat16

    @property
    def capacity(self) -> int:
        """Tokens of one sequence that one expert takes."""
        return math.ceil(self.capacity_factor * self.top_k * self.length / self.experts)


SIZES = {
    "full": Config(),
    "8x7b": Config(),
    "8x22b": Config(layers=56, hidden=6144, heads=48, feed_forward=16_384),
    "tiny": Config(
        layers=2,
        hidden=64,
        heads=8,
        kv_heads=4,
        head_width=8,
        feed_forward=96,
        vocabulary=251,
        length=16,
        batch_size=16,
        dropout=0.1,
        learning_rate=2e-3,
        warmup=0,
        dtype=jnp.float32,
    ),
}
PUBLISHED = {"full": 46_702_792_704, "8x7b": 46_702_792_704, "8x22b": 140_620_634_112}

_normal = nnx.initializers.normal(0.02)


class Experts(nnx.Module):
    """Top-k routed experts; their weights are stacked, f[E, D, F] and f[E, F, D]."""

    def __init__(self, config: Config, precision: Precision, rngs: nnx.Rngs) -> None:
        e, d, f = config.experts, config.hidden, config.feed_forward
        self.router = nnx.Linear(
            d, e, use_bias=False, kernel_init=_normal, dtype=precision.param, param_dtype=precision.param, rngs=rngs
        )
        self.gate = nnx.Param(_normal(rngs.params(), (e, d, f), precision.param))
        self.up = nnx.Param(_normal(rngs.params(), (e, d, f), precision.param))
        self.down = nnx.Param(_normal(rngs.params(), (e, f, d), precision.param))
        self.config = config

    def route(self, x: Array) -> tuple[Array, Array, Array]:
        """x f[B, T, D] -> dispatch and combine f[B, T, E, C] (0/1, and 0/gate), balance loss f[]."""
        config = self.config
        probabilities = jax.nn.softmax(self.router(x))
        gates, chosen = jax.lax.top_k(probabilities, config.top_k)
        gates = gates / gates.sum(axis=-1, keepdims=True)
        hot = jax.nn.one_hot(chosen, config.experts, dtype=jnp.int32)  # [B, T, k, E]

        # A token's place in its expert's queue: how many came before, all first choices first.
        queue = hot.swapaxes(1, 2).reshape(x.shape[0], -1, config.experts)  # [B, k T, E]
        place = (jnp.cumsum(queue, axis=1, dtype=jnp.int32) - queue).reshape(
            x.shape[0], config.top_k, x.shape[1], config.experts
        )
        place = (place.swapaxes(1, 2) * hot).sum(axis=-1, dtype=jnp.int32)  # [B, T, k]
        slot = jax.nn.one_hot(place, config.capacity, dtype=gates.dtype)  # zero beyond the capacity
        hot = hot.astype(gates.dtype)
        dispatch = jnp.einsum("btke,btkc->btec", hot, slot)
        combine = jnp.einsum("btke,btkc->btec", hot * gates[..., None], slot)

        fraction = hot[:, :, 0].mean(axis=(0, 1))
        balance = config.experts * (fraction * probabilities.mean(axis=(0, 1))).sum()
        return dispatch, combine, balance

    def __call__(self, x: Array) -> tuple[Array, Array]:
        """x f[B, T, D] -> f[B, T, D], balance loss f[]."""
        dispatch, combine, balance = self.route(x)
        gate, up, down = (weight[...].astype(x.dtype) for weight in (self.gate, self.up, self.down))
        taken = jnp.einsum("btec,btd->ebcd", dispatch.astype(x.dtype), x)
        wide = (jnp.einsum("ebcd,edf->ebcf", taken, weight) for weight in (gate, up))
        gated, linear = (checkpoint_name(x, f"mlpwi_{i}") for i, x in enumerate(wide))
        given = checkpoint_name(jnp.einsum("ebcf,efd->ebcd", jax.nn.silu(gated) * linear, down), "mlpwo")
        return jnp.einsum("btec,ebcd->btd", combine.astype(x.dtype), given), balance


class Layer(nnx.Module):
    """Attention and experts, each as x + dropout(f(norm(x)))."""

    def __init__(self, config: Config, precision: Precision, rngs: nnx.Rngs) -> None:
        make = {"epsilon": 1e-5, "rngs": rngs, **precision.kwargs}
        self.attention_norm = nnx.RMSNorm(config.hidden, **make)
        self.attention = GroupedAttention(
            config.hidden, config.heads, config.kv_heads, config.head_width, precision, rngs
        )
        self.experts_norm = nnx.RMSNorm(config.hidden, **make)
        self.experts = Experts(config, precision, rngs)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(
        self, carry: tuple[Array, Array], turn: tuple[Array, Array], mask: Array, key: Array | None
    ) -> tuple[Array, Array]:
        """x f[B, T, D] and the balance loss of the layers before, f[], with turn (cos, sin) f[T, W/2] and mask
        bool[T, T] -> both after this layer."""
        x, before = carry
        attended = self.attention(self.attention_norm(x), turn, mask)
        x = x + drop(self.dropout, attended, fold(key, 0))
        routed, balance = self.experts(self.experts_norm(x))
        return x + drop(self.dropout, routed, fold(key, 1)), before + balance


class Moe(nnx.Module):
    """Embedding, layers, norm, untied output projection."""

    def __init__(self, config: Config, precision: Precision, rngs: nnx.Rngs) -> None:
        self.token = nnx.Embed(
            config.vocabulary, config.hidden, embedding_init=_normal, param_dtype=precision.param, rngs=rngs
        )
        self.layers = stack(lambda rngs: Layer(config, precision, rngs), config.layers, rngs, scan=config.scan)
        self.norm = nnx.RMSNorm(config.hidden, epsilon=1e-5, rngs=rngs, **precision.kwargs)
        self.output = nnx.Linear(
            config.hidden, config.vocabulary, use_bias=False, kernel_init=_normal, rngs=rngs, **precision.kwargs
        )
        self.config = config
        self.precision = precision

    def loss(self, batch: Batch, key: Array | None) -> tuple[Array, Metrics]:
        """Mean next-token cross-entropy plus the balance loss, f[]."""
        config, precision = self.config, self.precision
        x = self.token(batch["tokens"]).astype(precision.compute)
        length = x.shape[1]
        turn = rotary(length, config.head_width, config.rope_theta, precision)
        mask = causal_mask(length)
        start = x, jnp.zeros((), precision.param)
        x, balance = through(self.layers, start, turn, mask, key=key, remat=config.remat)
        balance = balance / config.layers
        logits = self.output(self.norm(x)).astype(precision.param)
        token = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()
        return token + config.balance * balance, {"token_loss": token, "balance_loss": balance}


def build(size: str, config: Config) -> Model:
    """The model for a configuration; see `models.get`."""
    optimizer = adamw(
        config.learning_rate, b2=0.95, eps=1e-8, weight_decay=0.1, clip=1.0, warmup=config.warmup, total=500_000
    )
    published = PUBLISHED.get(size) if config.layers == SIZES[size].layers else None
    return next_token_model("moe", size, config, Moe, optimizer, published)
