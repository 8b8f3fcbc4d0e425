"""T5: an encoder-decoder that writes out the spans cut from its input; layers scanned or unrolled, rematerialized.

Source: Raffel et al. 2019, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer" (arXiv
1910.10683), as in the released code and checkpoints, and version 1.1 of these: pre-norm blocks without any biases,
norms that scale by the root mean square only, attention without 1/sqrt(width), with a learned bias per head and bucket
of relative position that all layers of a stack share. The original has ReLU, an output projection tied to the token
embedding (and scaled by hidden^-1/2) and dropout 0.1; version 1.1 a gated GELU, an output of its own and, in
pre-training, no dropout. Spans of 3 tokens, 15 % of the text, are cut: 568 tokens become 512 and 114. Adafactor at
1/sqrt(step), at most 0.01; it clips and scales a tensor as a whole, also one of stacked layers.

| size       | layers  | hidden | heads x width | feed-forward | parameters     |
|------------|---------|--------|---------------|--------------|----------------|
| small      | 6 + 6   | 512    | 8 x 64        | 2048         | 60,506,624     |
| base       | 12 + 12 | 768    | 12 x 64       | 3072         | 222,903,552    |
| large      | 24 + 24 | 1024   | 16 x 64       | 4096         | 737,668,096    |
| 3b         | 24 + 24 | 1024   | 32 x 128      | 16,384       | 2,851,598,336  |
| 11b        | 24 + 24 | 1024   | 128 x 128     | 65,536       | 11,307,321,344 |
| v1.1-small | 8 + 8   | 512    | 6 x 64        | 1024         | 76,961,152     |
| v1.1-base  | 12 + 12 | 768    | 12 x 64       | 2048         | 247,577,856    |
| v1.1-large | 24 + 24 | 1024   | 16 x 64       | 2816         | 783,150,080    |
| v1.1-xl    | 24 + 24 | 2048   | 32 x 64       | 5120         | 2,849,757,184  |
| v1.1-xxl   | 24 + 24 | 4096   | 64 x 64       | 10,240       | 11,135,332,352 |
| tiny       | 2 + 2   | 32     | 8 x 4         | 48           |                |

`full` is large. The vocabulary is 32,128 (tiny: 250); tiny has gated GELU, tied embeddings and dropout.
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
    zipf,
)
from models._layers import stack, through

PAD, END = 0, 1


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes and recipe; see the table above.

    `text` is the tokens of a row before spans are cut. `factored` is the size from which on two dimensions of a
    parameter make Adafactor keep their means instead of all second moments. `scan` runs the layers as one loop over
    stacked parameters, f[L, ...]; unrolled they are a list. `remat` recomputes each layer in the backward pass.
    """

    layers: int = 24
    hidden: int = 1024
    heads: int = 16
    width: int = 64
    feed_forward: int = 4096
    gated: bool = False
    tied: bool = True
    buckets: int = 32
    furthest: int = 128
    vocabulary: int = 32_128
    text: int = 568
    batch_size: int = 128
    dropout: float = 0.1
    warmup: int = 10_000
    factored: int = 128
    scan: bool = True
    remat: bool = True
    dtype: Any = jnp.bfloat16

    @property
    def cut(self) -> tuple[int, int]:
        """How many tokens of a text are cut, and in how many spans."""
        tokens = round(0.15 * self.text)
        return tokens, max(1, round(tokens / 3))

    @property
    def lengths(self) -> tuple[int, int]:
        """Tokens of an input and of its target: each span leaves a mark in both, and both have an end."""
        tokens, spans = self.cut
        return self.text - tokens + spans + 1, tokens + spans + 1


_V11 = {"gated": True, "tied": False, "batch_size": 2048, "dropout": 0.0}
SIZES = {
    "full": Config(),
    "small": Config(6, 512, 8, 64, 2048),
    "base": Config(12, 768, 12, 64, 3072),
    "large": Config(),
    "3b": Config(24, 1024, 32, 128, 16_384),
    "11b": Config(24, 1024, 128, 128, 65_536),
    "v1.1-small": Config(8, 512, 6, 64, 1024, **_V11),
    "v1.1-base": Config(12, 768, 12, 64, 2048, **_V11),
    "v1.1-large": Config(24, 1024, 16, 64, 2816, **_V11),
    "v1.1-xl": Config(24, 2048, 32, 64, 5120, **_V11),
    "v1.1-xxl": Config(24, 4096, 64, 64, 10_240, **_V11),
    "tiny": Config(
        layers=2,
        hidden=32,
        heads=8,
        width=4,
        feed_forward=48,
        gated=True,
        buckets=8,
        furthest=16,
        vocabulary=250,
        text=34,
        batch_size=16,
        warmup=1_000,
        factored=16,
        remat=False,
        dtype=jnp.float32,
    ),
}
PUBLISHED = {
    "full": 737_668_096,
    "small": 60_506_624,
    "base": 222_903_552,
    "large": 737_668_096,
    "3b": 2_851_598_336,
    "11b": 11_307_321_344,
    "v1.1-small": 76_961_152,
    "v1.1-base": 247_577_856,
    "v1.1-large": 783_150_080,
    "v1.1-xl": 2_849_757_184,
    "v1.1-xxl": 11_135_332_352,
}

_normal = nnx.initializers.normal


def _norm(config: Config, precision: Precision, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(config.hidden, epsilon=1e-6, rngs=rngs, **precision.kwargs)


def _attention(config: Config, precision: Precision, rngs: nnx.Rngs) -> HeadedAttention:
    d, h, w = config.hidden, config.heads, config.width
    begin = Initializers(_normal((d * w) ** -0.5), _normal(d**-0.5), _normal((h * w) ** -0.5))
    return HeadedAttention(d, h, w, begin, config.dropout, precision, rngs)


def buckets(queries: int, keys: int, count: int, furthest: int, *, both_ways: bool) -> Array:
    """The bucket of each relative position, i32[queries, keys]: exact up to half of them, then by logarithm.

    `both_ways`: keys after the query have the upper half of the buckets, else they share the one of distance 0.
    """
    ahead = jnp.arange(keys, dtype=jnp.int32)[None, :] - jnp.arange(queries, dtype=jnp.int32)[:, None]
    if both_ways:
        count //= 2
        first, distance = count * (ahead > 0).astype(jnp.int32), jnp.abs(ahead)
    else:
        first, distance = 0, jnp.maximum(-ahead, 0)
    exact = count // 2
    bucket = jnp.minimum(distance, exact)
    for step in range(1, count - exact):
        begins = math.ceil(exact * (furthest / exact) ** (step / (count - exact)) - 1e-9)
        bucket = bucket + (distance >= begins).astype(jnp.int32)
    return first + bucket


class FeedForward(nnx.Module):
    """ReLU, or a gated GELU."""

    def __init__(self, config: Config, precision: Precision, rngs: nnx.Rngs) -> None:
        d, f = config.hidden, config.feed_forward
        make = {"use_bias": False, "rngs": rngs, **precision.kwargs}
        self.up = nnx.Linear(d, f, kernel_init=_normal(d**-0.5), **make)
        self.gate = nnx.Linear(d, f, kernel_init=_normal(d**-0.5), **make) if config.gated else None
        self.down = nnx.Linear(f, d, kernel_init=_normal(f**-0.5), **make)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, x: Array, key: Array | None) -> Array:
        """f[B, T, D] -> f[B, T, D]."""
        if self.gate is None:
            hidden = jax.nn.relu(self.up(x))
        else:
            hidden = jax.nn.gelu(self.gate(x), approximate=True) * self.up(x)
        return self.down(drop(self.dropout, hidden, key))


class EncoderLayer(nnx.Module):
    """Self-attention and feed-forward, each as x + dropout(f(norm(x)))."""

    def __init__(self, config: Config, precision: Precision, rngs: nnx.Rngs) -> None:
        self.attention_norm = _norm(config, precision, rngs)
        self.attention = _attention(config, precision, rngs)
        self.mlp_norm = _norm(config, precision, rngs)
        self.mlp = FeedForward(config, precision, rngs)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, x: Array, bias: Array, key: Array | None) -> Array:
        """x f[B, T, D], bias f[1, H, T, T] -> f[B, T, D]."""
        y = self.attention_norm(x)
        x = x + drop(self.dropout, self.attention(y, y, bias, 1.0, fold(key, 0)), fold(key, 1))
        return x + drop(self.dropout, self.mlp(self.mlp_norm(x), fold(key, 2)), fold(key, 3))


class DecoderLayer(nnx.Module):
    """Causal self-attention, attention over the encoder, feed-forward, each as x + dropout(f(norm(x)))."""

    def __init__(self, config: Config, precision: Precision, rngs: nnx.Rngs) -> None:
        self.attention_norm = _norm(config, precision, rngs)
        self.attention = _attention(config, precision, rngs)
        self.cross_norm = _norm(config, precision, rngs)
        self.cross = _attention(config, precision, rngs)
        self.mlp_norm = _norm(config, precision, rngs)
        self.mlp = FeedForward(config, precision, rngs)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, x: Array, bias: Array, memory: Array, key: Array | None) -> Array:
        """x f[B, T, D], bias f[1, H, T, T], memory f[B, S, D] -> f[B, T, D]."""
        y = self.attention_norm(x)
        x = x + drop(self.dropout, self.attention(y, y, bias, 1.0, fold(key, 0)), fold(key, 1))
        crossed = self.cross(self.cross_norm(x), memory, None, 1.0, fold(key, 2))
        x = x + drop(self.dropout, crossed, fold(key, 3))
        return x + drop(self.dropout, self.mlp(self.mlp_norm(x), fold(key, 4)), fold(key, 5))


class Stack(nnx.Module):
    """Embedded tokens through layers that share their relative position biases, then a norm."""

    def __init__(self, layer: type[nnx.Module], config: Config, precision: Precision, rngs: nnx.Rngs) -> None:
        self.relative = nnx.Embed(
            config.buckets,
            config.heads,
            embedding_init=_normal(config.hidden**-0.5),
            param_dtype=precision.param,
            rngs=rngs,
        )
        self.layers = stack(lambda rngs: layer(config, precision, rngs), config.layers, rngs, scan=config.scan)
        self.norm = _norm(config, precision, rngs)
        self.dropout = nnx.Dropout(config.dropout)
        self.causal = layer is DecoderLayer
        self.config = config
        self.precision = precision

    def __call__(self, x: Array, *memory: Array, key: Array | None) -> Array:
        """f[B, T, D] -> f[B, T, D]."""
        config, length = self.config, x.shape[1]
        places = buckets(length, length, config.buckets, config.furthest, both_ways=not self.causal)
        bias = jnp.moveaxis(self.relative(places), -1, 0)[None]
        if self.causal:
            bias = bias + as_bias(causal_mask(length), self.precision)
        x = drop(self.dropout, x, fold(key, 0))
        x = through(self.layers, x, bias, *memory, key=fold(key, 1), remat=config.remat)
        return drop(self.dropout, self.norm(x), fold(key, 2))


class T5(nnx.Module):
    """Token embedding, encoder, decoder, output projection."""

    def __init__(self, config: Config, precision: Precision, rngs: nnx.Rngs) -> None:
        self.token = nnx.Embed(
            config.vocabulary, config.hidden, embedding_init=_normal(1.0), param_dtype=precision.param, rngs=rngs
        )
        self.encoder = Stack(EncoderLayer, config, precision, rngs)
        self.decoder = Stack(DecoderLayer, config, precision, rngs)
        if not config.tied:
            self.output = nnx.Linear(
                config.hidden,
                config.vocabulary,
                use_bias=False,
                kernel_init=_normal(config.hidden**-0.5),
                rngs=rngs,
                **precision.kwargs,
            )
        self.config = config
        self.precision = precision

    def loss(self, batch: Batch, key: Array | None) -> tuple[Array, Metrics]:
        """Mean cross-entropy of the target tokens, f[]."""
        precision = self.precision
        targets = batch["targets"]
        memory = self.encoder(self.token(batch["inputs"]).astype(precision.compute), key=fold(key, 0))
        before = jnp.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=PAD)
        x = self.decoder(self.token(before).astype(precision.compute), memory, key=fold(key, 1))
        if self.config.tied:
            table = self.token.embedding[...].astype(x.dtype)
            x = x * self.config.hidden**-0.5
            logits = jnp.einsum("btd,vd->btv", x, table, preferred_element_type=precision.param)
        else:
            logits = self.output(x).astype(precision.param)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean(), {}


def _parts(rng: np.random.Generator, rows: int, total: int, parts: int) -> np.ndarray:
    """Rows of `parts` positive lengths with sum `total`, all such divisions equally likely: i64[rows, parts]."""
    cuts = np.sort(rng.permuted(np.tile(np.arange(1, total), (rows, 1)), axis=1)[:, : parts - 1], axis=1)
    ends = np.concatenate([np.zeros((rows, 1), int), cuts, np.full((rows, 1), total)], axis=1)
    return np.diff(ends, axis=1)


def _make_batch(config: Config, rng: np.random.Generator) -> Batch:
    """Zipf text with spans cut out: kept and cut spans alternate, a mark (the last ids) stands for each in the other
    half."""
    rows, (cut, spans) = config.batch_size, config.cut
    text = zipf(rng, (rows, config.text), config.vocabulary - spans - 2) + 2
    kept_lengths = _parts(rng, rows, config.text - cut, spans)
    cut_lengths = _parts(rng, rows, cut, spans)
    lengths = np.stack([kept_lengths, cut_lengths], axis=-1)  # in the order of the text
    inputs, targets = (np.zeros((rows, length), np.int32) for length in config.lengths)
    marks = config.vocabulary - 1 - np.arange(spans)
    for row in range(rows):
        pieces = np.split(text[row], np.cumsum(lengths[row].ravel())[:-1])
        kept, removed = pieces[::2], pieces[1::2]
        inputs[row] = np.concatenate([*(x for pair in zip(kept, marks[:, None], strict=True) for x in pair), [END]])
        targets[row] = np.concatenate([*(x for pair in zip(marks[:, None], removed, strict=True) for x in pair), [END]])
    return {"inputs": inputs, "targets": targets}


def build(size: str, config: Config) -> Model:
    """The model for a configuration; see `models.get`."""
    precision = make_precision(config.dtype)
    inputs, targets = config.lengths
    return Model(
        name="t5",
        size=size,
        config=config,
        make_module=lambda rngs: T5(config, precision, rngs),
        optimizer=optax.adafactor(
            lambda step: jnp.maximum(step, config.warmup) ** -0.5, min_dim_size_to_factor=config.factored
        ),
        batch_spec={
            "inputs": ShapeDtypeStruct((config.batch_size, inputs), jnp.int32),
            "targets": ShapeDtypeStruct((config.batch_size, targets), jnp.int32),
        },
        make_numpy_batch=lambda rng: _make_batch(config, rng),
        published_parameters=PUBLISHED.get(size) if config.layers == SIZES[size].layers else None,
    )
