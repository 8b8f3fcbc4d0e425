"""The Transformer of "Attention Is All You Need", translating; layers scanned or unrolled.

Source: Vaswani et al. 2017, "Attention Is All You Need" (arXiv 1706.03762), table 3, on WMT 2014 English-German, with
the projections of attention without biases as in the authors' released code: norm(x + dropout(f(x))) around every
sublayer, sinusoidal positions, one embedding for both languages and the output (about 37,000 byte pairs), scaled by
hidden^1/2 on the way in. Adam 0.9/0.98, a rate of hidden^-1/2 min(step^-1/2, step x 4000^-3/2), labels smoothed by 0.1;
about 25,000 tokens of each language in a batch.

| size | layers | hidden | heads | feed-forward | dropout | parameters  | published |
|------|--------|--------|-------|--------------|---------|-------------|-----------|
| base | 6 + 6  | 512    | 8     | 2048         | 0.1     | 63,045,632  | 65 M      |
| full | 6 + 6  | 1024   | 16    | 4096         | 0.3     | 214,171,648 | 213 M     |
| tiny | 2 + 2  | 32     | 8     | 64           | 0.1     |             |           |

`full` is big. The vocabulary is 37,000 (tiny: 251).
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import ShapeDtypeStruct

from models._attention import HeadedAttention, Initializers, as_bias
from models._common import (
    Array,
    Batch,
    Metrics,
    Model,
    Precision,
    causal_mask,
    drop,
    fold,
    make_precision,
    sentence_pairs,
    smoothed_cross_entropy,
)
from models._layers import stack, through


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes and recipe; see the table above.

    `scan` runs the layers as one loop over stacked parameters, f[L, ...]; unrolled they are a list. `remat` recomputes
    each layer in the backward pass.
    """

    layers: int = 6
    hidden: int = 1024
    heads: int = 16
    feed_forward: int = 4096
    vocabulary: int = 37_000
    length: int = 64
    batch_size: int = 384
    dropout: float = 0.3
    smoothing: float = 0.1
    warmup: int = 4_000
    scan: bool = True
    remat: bool = False
    dtype: Any = jnp.bfloat16


SIZES = {
    "full": Config(),
    "base": Config(hidden=512, heads=8, feed_forward=2048, dropout=0.1),
    "tiny": Config(
        layers=2,
        hidden=32,
        heads=8,
        feed_forward=64,
        vocabulary=251,
        length=16,
        batch_size=16,
        dropout=0.1,
        warmup=40,
        dtype=jnp.float32,
    ),
}

_glorot = nnx.initializers.glorot_uniform()


def _attention(config: Config, precision: Precision, rngs: nnx.Rngs) -> HeadedAttention:
    begin = Initializers(_glorot, _glorot, _glorot)
    return HeadedAttention(config.hidden, config.heads, config.hidden // config.heads, begin, 0.0, precision, rngs)


def _norm(config: Config, precision: Precision, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(config.hidden, epsilon=1e-6, use_fast_variance=False, rngs=rngs, **precision.kwargs)


def positions(length: int, hidden: int, precision: Precision) -> Array:
    """Sines in the first half, cosines in the second, of wavelengths from 2 pi to 10,000 x 2 pi: f[T, D]."""
    half = hidden // 2
    frequency = jnp.exp(jnp.arange(half, dtype=precision.param) * (-math.log(1e4) / (half - 1)))
    angles = jnp.arange(length, dtype=precision.param)[:, None] * frequency
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


class FeedForward(nnx.Module):
    """Two dense layers with a ReLU between."""

    def __init__(self, config: Config, precision: Precision, rngs: nnx.Rngs) -> None:
        make = {"kernel_init": _glorot, "rngs": rngs, **precision.kwargs}
        self.expand = nnx.Linear(config.hidden, config.feed_forward, **make)
        self.contract = nnx.Linear(config.feed_forward, config.hidden, **make)

    def __call__(self, x: Array) -> Array:
        """f[B, T, D] -> f[B, T, D]."""
        return self.contract(jax.nn.relu(self.expand(x)))


class EncoderLayer(nnx.Module):
    """Self-attention, then feed-forward, each as norm(x + dropout(f(x)))."""

    def __init__(self, config: Config, precision: Precision, rngs: nnx.Rngs) -> None:
        self.attention = _attention(config, precision, rngs)
        self.attention_norm = _norm(config, precision, rngs)
        self.mlp = FeedForward(config, precision, rngs)
        self.mlp_norm = _norm(config, precision, rngs)
        self.scale = (config.hidden // config.heads) ** -0.5
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, x: Array, bias: Array, key: Array | None) -> Array:
        """x f[B, S, D], bias f[B, 1, 1, S] -> f[B, S, D]."""
        attended = self.attention(x, x, bias, self.scale, None)
        x = self.attention_norm(x + drop(self.dropout, attended, fold(key, 0)))
        return self.mlp_norm(x + drop(self.dropout, self.mlp(x), fold(key, 1)))


class DecoderLayer(nnx.Module):
    """Causal self-attention, attention over the encoder, feed-forward, each as norm(x + dropout(f(x)))."""

    def __init__(self, config: Config, precision: Precision, rngs: nnx.Rngs) -> None:
        self.attention = _attention(config, precision, rngs)
        self.attention_norm = _norm(config, precision, rngs)
        self.cross = _attention(config, precision, rngs)
        self.cross_norm = _norm(config, precision, rngs)
        self.mlp = FeedForward(config, precision, rngs)
        self.mlp_norm = _norm(config, precision, rngs)
        self.scale = (config.hidden // config.heads) ** -0.5
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, x: Array, causal: Array, memory: Array, bias: Array, key: Array | None) -> Array:
        """x f[B, T, D], causal f[T, T], memory f[B, S, D], bias f[B, 1, 1, S] -> f[B, T, D]."""
        attended = self.attention(x, x, causal, self.scale, None)
        x = self.attention_norm(x + drop(self.dropout, attended, fold(key, 0)))
        crossed = self.cross(x, memory, bias, self.scale, None)
        x = self.cross_norm(x + drop(self.dropout, crossed, fold(key, 1)))
        return self.mlp_norm(x + drop(self.dropout, self.mlp(x), fold(key, 2)))


class Transformer(nnx.Module):
    """One embedding, encoder, decoder."""

    def __init__(self, config: Config, precision: Precision, rngs: nnx.Rngs) -> None:
        self.token = nnx.Embed(
            config.vocabulary,
            config.hidden,
            embedding_init=nnx.initializers.normal(config.hidden**-0.5),
            param_dtype=precision.param,
            rngs=rngs,
        )
        self.dropout = nnx.Dropout(config.dropout)
        self.encoder = stack(lambda rngs: EncoderLayer(config, precision, rngs), config.layers, rngs, scan=config.scan)
        self.decoder = stack(lambda rngs: DecoderLayer(config, precision, rngs), config.layers, rngs, scan=config.scan)
        self.config = config
        self.precision = precision

    def embed(self, tokens: Array, key: Array | None) -> Array:
        """i32[B, T] -> f[B, T, D]."""
        x = self.token(tokens) * math.sqrt(self.config.hidden)
        x = x + positions(tokens.shape[1], self.config.hidden, self.precision)
        return drop(self.dropout, x.astype(self.precision.compute), key)

    def loss(self, batch: Batch, key: Array | None) -> tuple[Array, Metrics]:
        """Mean smoothed cross-entropy of the real target tokens, f[], and the same without smoothing."""
        config, precision = self.config, self.precision
        source, target = batch["source"], batch["target"]
        bias = as_bias(source > 0, precision)[:, None, None, :]
        x = self.embed(source, fold(key, 0))
        memory = through(self.encoder, x, bias, key=fold(key, 1), remat=config.remat)
        causal = as_bias(causal_mask(target.shape[1]), precision)
        x = self.embed(jnp.pad(target[:, :-1], ((0, 0), (1, 0))), fold(key, 2))
        x = through(self.decoder, x, causal, memory, bias, key=fold(key, 3), remat=config.remat)

        table = self.token.embedding[...].astype(x.dtype)
        logits = jnp.einsum("btd,vd->btv", x, table, preferred_element_type=precision.param)
        weights = (target > 0).astype(precision.param)
        smoothed = smoothed_cross_entropy(logits, target, config.smoothing)
        plain = optax.softmax_cross_entropy_with_integer_labels(logits, target)
        count = weights.sum()
        return (weights * smoothed).sum() / count, {"token_loss": (weights * plain).sum() / count}


def build(size: str, config: Config) -> Model:
    """The model for a configuration; see `models.get`."""
    precision = make_precision(config.dtype)
    ids = ShapeDtypeStruct((config.batch_size, config.length), jnp.int32)

    def rate(step: Array) -> Array:
        step = step + 1
        return config.hidden**-0.5 * jnp.minimum(step**-0.5, step * config.warmup**-1.5)

    return Model(
        name="transformer",
        size=size,
        config=config,
        make_module=lambda rngs: Transformer(config, precision, rngs),
        optimizer=optax.adam(rate, b1=0.9, b2=0.98, eps=1e-9),
        batch_spec={"source": ids, "target": ids},
        make_numpy_batch=lambda rng: sentence_pairs(rng, config.batch_size, config.length, config.vocabulary),
    )
