"""BERT pre-training: masked language model and next-sentence prediction, layers unrolled.

Source: Devlin et al. 2018, "BERT: Pre-training of Deep Bidirectional Transformers" (arXiv 1810.04805), as in the
authors' released code: post-layer-norm residual blocks, 4x feed-forward with GELU, the output projection tied to the
token embedding, predictions gathered at the masked positions only. Phase 2 of the recipe: 512 tokens and 76
predictions (MLPerf's cap, 15 % of 512), 256 sequences, AdamW at 1e-4 with 10,000 steps of warm-up.

| size  | layers | hidden | heads | feed-forward | vocabulary | tokens | predictions | parameters  |
|-------|--------|--------|-------|--------------|------------|--------|-------------|-------------|
| full  | 24     | 1024   | 16    | 4096         | 30,522     | 512    | 76          | 336,226,108 |
| base  | 12     | 768    | 12    | 3072         | 30,522     | 512    | 76          | 110,106,428 |
| tiny  | 2      | 64     | 8     | 256          | 509        | 32     | 5           |             |

`full` is BERT-Large: 335,141,888 in the encoder with its pooler, 1,082,170 in the masked-LM head (dense, norm and
output bias; the projection is tied) and 2,050 in the next-sentence head.

The gradient of every attention key bias is zero in exact arithmetic: it shifts all scores of a query alike.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import ShapeDtypeStruct

from models._common import (
    Array,
    Batch,
    Metrics,
    Model,
    Precision,
    adamw,
    drop,
    fold,
    make_precision,
    zipf,
)

PAD, CLS, SEP, MASK = 0, 101, 102, 103


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes and recipe; see the table above."""

    layers: int = 24
    hidden: int = 1024
    heads: int = 16
    feed_forward: int = 4096
    vocabulary: int = 30_522
    max_length: int = 512
    length: int = 512
    predictions: int = 76
    batch_size: int = 256
    dropout: float = 0.1
    learning_rate: float = 1e-4
    warmup: int = 10_000
    dtype: Any = jnp.bfloat16


SIZES = {
    "full": Config(),
    "base": Config(layers=12, hidden=768, heads=12, feed_forward=3072),
    "tiny": Config(
        layers=2,
        hidden=64,
        heads=8,
        feed_forward=256,
        vocabulary=509,
        max_length=32,
        length=32,
        predictions=5,
        batch_size=16,
        learning_rate=2e-3,
        warmup=0,
        dtype=jnp.float32,
    ),
}
PUBLISHED = {"full": 336_226_108, "base": 110_106_428}

_normal = nnx.initializers.truncated_normal(0.02)


def _norm(config: Config, precision: Precision, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(config.hidden, epsilon=1e-12, use_fast_variance=False, rngs=rngs, **precision.kwargs)


class Attention(nnx.Module):
    """Bidirectional multi-head self-attention; weights f[D, H, D/H], so heads are a dimension of their own."""

    def __init__(self, config: Config, precision: Precision, rngs: nnx.Rngs) -> None:
        heads = (config.heads, config.hidden // config.heads)
        make = {"kernel_init": _normal, "rngs": rngs, **precision.kwargs}
        self.query = nnx.LinearGeneral(config.hidden, heads, **make)
        self.key = nnx.LinearGeneral(config.hidden, heads, **make)
        self.value = nnx.LinearGeneral(config.hidden, heads, **make)
        self.out = nnx.LinearGeneral(heads, config.hidden, axis=(-2, -1), **make)
        self.dropout = nnx.Dropout(config.dropout)
        self.precision = precision

    def __call__(self, x: Array, bias: Array, key: Array | None) -> Array:
        """x f[B, T, D], bias f[B, 1, 1, T] (0 or very negative) -> f[B, T, D]."""
        q, k, v = self.query(x), self.key(x), self.value(x)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=self.precision.param)
        weights = jax.nn.softmax(scores / math.sqrt(q.shape[-1]) + bias).astype(x.dtype)
        weights = drop(self.dropout, weights, key)
        return self.out(jnp.einsum("bhqk,bkhd->bqhd", weights, v))


class Layer(nnx.Module):
    """Attention, then feed-forward, each as norm(x + dropout(f(x)))."""

    def __init__(self, config: Config, precision: Precision, rngs: nnx.Rngs) -> None:
        make = {"kernel_init": _normal, "rngs": rngs, **precision.kwargs}
        self.attention = Attention(config, precision, rngs)
        self.attention_norm = _norm(config, precision, rngs)
        self.expand = nnx.Linear(config.hidden, config.feed_forward, **make)
        self.contract = nnx.Linear(config.feed_forward, config.hidden, **make)
        self.output_norm = _norm(config, precision, rngs)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, x: Array, bias: Array, key: Array | None) -> Array:
        """x f[B, T, D], bias f[B, 1, 1, T] -> f[B, T, D]."""
        attended = drop(self.dropout, self.attention(x, bias, fold(key, 0)), fold(key, 1))
        x = self.attention_norm(x + attended)
        hidden = jax.nn.gelu(self.expand(x), approximate=False)
        return self.output_norm(x + drop(self.dropout, self.contract(hidden), fold(key, 2)))


class Bert(nnx.Module):
    """Embeddings, encoder layers and the two pre-training heads."""

    def __init__(self, config: Config, precision: Precision, rngs: nnx.Rngs) -> None:
        table = {"embedding_init": _normal, "param_dtype": precision.param, "rngs": rngs}
        make = {"kernel_init": _normal, "rngs": rngs, **precision.kwargs}
        self.token = nnx.Embed(config.vocabulary, config.hidden, **table)
        self.position = nnx.Embed(config.max_length, config.hidden, **table)
        self.segment = nnx.Embed(2, config.hidden, **table)
        self.embedding_norm = _norm(config, precision, rngs)
        self.dropout = nnx.Dropout(config.dropout)
        self.layers = nnx.List([Layer(config, precision, rngs) for _ in range(config.layers)])
        self.pooler = nnx.Linear(config.hidden, config.hidden, **make)
        self.next_sentence = nnx.Linear(config.hidden, 2, **make)
        self.transform = nnx.Linear(config.hidden, config.hidden, **make)
        self.transform_norm = _norm(config, precision, rngs)
        self.output_bias = nnx.Param(jnp.zeros((config.vocabulary,), precision.param))
        self.precision = precision

    def encode(self, batch: Batch, key: Array | None) -> Array:
        """tokens, segments i32[B, T] and attention_mask i32[B, T] -> f[B, T, D]."""
        tokens = batch["tokens"]
        x = self.token(tokens) + self.position.embedding[: tokens.shape[1]] + self.segment(batch["segments"])
        x = drop(self.dropout, self.embedding_norm(x), fold(key, 0))
        seen = batch["attention_mask"][:, None, None, :] > 0
        bias = jnp.where(seen, 0.0, jnp.finfo(self.precision.param).min / 2).astype(self.precision.param)
        for i, layer in enumerate(self.layers):
            x = layer(x, bias, fold(key, i + 1))
        return x

    def loss(self, batch: Batch, key: Array | None) -> tuple[Array, Metrics]:
        """Mean cross-entropy over the real predictions plus that of the next-sentence label, f[]."""
        x = self.encode(batch, key)
        picked = jnp.take_along_axis(x, batch["masked_positions"][:, :, None], axis=1)
        picked = self.transform_norm(jax.nn.gelu(self.transform(picked), approximate=False))
        table = self.token.embedding[...].astype(picked.dtype)
        logits = jnp.einsum("bpd,vd->bpv", picked, table, preferred_element_type=self.precision.param)
        logits = logits + self.output_bias[...]
        weights = batch["masked_weights"].astype(self.precision.param)
        count = jnp.maximum(weights.sum(), 1.0)
        masked = (
            weights * optax.softmax_cross_entropy_with_integer_labels(logits, batch["masked_tokens"])
        ).sum() / count

        pooled = jnp.tanh(self.pooler(x[:, 0]))
        sentence_logits = self.next_sentence(pooled).astype(self.precision.param)
        sentence = optax.softmax_cross_entropy_with_integer_labels(sentence_logits, batch["next_sentence"]).mean()
        metrics = {"masked_loss": masked, "next_sentence_loss": sentence}
        if key is None:
            hits = (logits.argmax(-1) == batch["masked_tokens"]).astype(weights.dtype)
            metrics["masked_accuracy"] = (weights * hits).sum() / count
        return masked + sentence, metrics


def _batch_spec(config: Config) -> Batch:
    whole, picked = (config.batch_size, config.length), (config.batch_size, config.predictions)
    return {
        "tokens": ShapeDtypeStruct(whole, jnp.int32),
        "segments": ShapeDtypeStruct(whole, jnp.int32),
        "attention_mask": ShapeDtypeStruct(whole, jnp.int32),
        "masked_positions": ShapeDtypeStruct(picked, jnp.int32),
        "masked_tokens": ShapeDtypeStruct(picked, jnp.int32),
        "masked_weights": ShapeDtypeStruct(picked, jnp.float32),
        "next_sentence": ShapeDtypeStruct((config.batch_size,), jnp.int32),
    }


def _make_batch(config: Config, rng: np.random.Generator) -> Batch:
    """Sentence pairs with Zipf tokens: nine in ten fill the sequence, the rest are padded; 15 % of tokens masked."""
    rows, columns = config.batch_size, np.arange(config.length)[None, :]
    full = rng.random(rows) < 0.9
    lengths = np.where(full, config.length, rng.integers(config.length // 4, config.length + 1, rows))[:, None]
    middle = (lengths * rng.uniform(0.2, 0.8, (rows, 1))).astype(np.int64)
    mask = columns < lengths

    words = zipf(rng, (rows, config.length), config.vocabulary - MASK - 1) + MASK + 1
    special = (columns == 0) | (columns == middle) | (columns == lengths - 1)
    tokens = np.where(special, np.where(columns == 0, CLS, SEP), np.where(mask, words, PAD))

    order = np.where(mask & ~special, rng.random(tokens.shape), np.inf)
    positions = np.argsort(order, axis=1)[:, : config.predictions]
    wanted = np.maximum(1, np.round(0.15 * lengths))
    weights = np.arange(config.predictions)[None, :] < np.minimum(wanted, config.predictions)
    targets = np.where(weights, np.take_along_axis(tokens, positions, axis=1), PAD)
    positions = np.where(weights, positions, 0)

    draw = rng.random(positions.shape)
    noise = zipf(rng, positions.shape, config.vocabulary - MASK - 1) + MASK + 1
    shown = np.where(draw < 0.8, MASK, np.where(draw < 0.9, noise, targets))
    row = np.arange(rows)[:, None].repeat(config.predictions, 1)
    tokens[row[weights], positions[weights]] = shown[weights]
    return {
        "tokens": tokens.astype(np.int32),
        "segments": (mask & (columns > middle)).astype(np.int32),
        "attention_mask": mask.astype(np.int32),
        "masked_positions": positions.astype(np.int32),
        "masked_tokens": targets.astype(np.int32),
        "masked_weights": weights.astype(np.float32),
        "next_sentence": rng.integers(0, 2, rows).astype(np.int32),
    }


def build(size: str, config: Config) -> Model:
    """The model for a configuration; see `models.get`."""
    precision = make_precision(config.dtype)
    return Model(
        name="bert",
        size=size,
        config=config,
        make_module=lambda rngs: Bert(config, precision, rngs),
        optimizer=adamw(
            config.learning_rate, b2=0.999, eps=1e-6, weight_decay=0.01, clip=1.0, warmup=config.warmup, total=1_000_000
        ),
        batch_spec=_batch_spec(config),
        make_numpy_batch=lambda rng: _make_batch(config, rng),
        published_parameters=PUBLISHED.get(size) if config.layers == SIZES[size].layers else None,
        zero_gradients=("['attention']['key']['bias']",),
    )
