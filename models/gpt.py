"""GPT-2, GPT-3 and their kin: causal language models, layers scanned or unrolled, each rematerialized.

Sources: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", with the parameter counts of the
released checkpoints; Brown et al. 2020, "Language Models are Few-Shot Learners" (arXiv 2005.14165), table 2.1 for the
shapes and the recipe (Adam 0.9/0.95, clip 1, decay 0.1), table D.1 for counts in millions. Pre-layer-norm blocks,
learned positions, GELU (tanh form), output projection tied to the token embedding. GPT-3's alternating sparse
attention is dense here, its width 5140 at 13B is the intended 40 x 128 = 5120, and 1.3B has 16 heads of 128 (the
paper's 24 x 128 is not its width). Between 13B and 175B the shapes, vocabularies and batches of others: Korthikanti et
al. 2022 (arXiv 2205.05198; batch of Mist, arXiv 2503.19050), OPT (arXiv 2205.01068; it has ReLU and two more
positions), and Alpa (arXiv 2201.12023).

| size         | layers | hidden | heads | tokens | vocabulary | parameters      | published       |
|--------------|--------|--------|-------|--------|------------|-----------------|-----------------|
| gpt2         | 12     | 768    | 12    | 1024   | 50,257     | 124,439,808     | 124,439,808     |
| gpt2-xl      | 48     | 1600   | 25    | 1024   | 50,257     | 1,557,611,200   | 1,557,611,200   |
| gpt3-1.3b    | 24     | 2048   | 16    | 2048   | 50,257     | 1,315,723,264   | 1,320 M         |
| gpt3-2.7b    | 32     | 2560   | 32    | 2048   | 50,257     | 2,651,553,280   | 2,650 M         |
| gpt3-6.7b    | 32     | 4096   | 32    | 2048   | 50,257     | 6,658,404,352   | 6,660 M         |
| gpt3-13b     | 40     | 5120   | 40    | 2048   | 50,257     | 12,853,386,240  | 12,850 M        |
| megatron-22b | 48     | 6144   | 64    | 2048   | 51,200     | 22,074,273,792  | 22 B            |
| opt-30b      | 48     | 7168   | 56    | 2048   | 50,272     | 29,974,525,952  | 29,974,540,288  |
| alpa-39b     | 48     | 8192   | 64    | 1024   | 51,200     | 39,087,652,864  | 39 B            |
| opt-66b      | 64     | 9216   | 72    | 2048   | 50,272     | 65,719,683,072  | 66 B            |
| gpt3-175b    | 96     | 12288  | 96    | 2048   | 50,257     | 174,604,259,328 | 174,600 M       |
| tiny         | 2      | 64     | 8     | 32     | 250        |                 |                 |

`full` is gpt3-1.3b. 2, 4 and 8 do not divide the vocabulary of 50,257 (nor tiny's).
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

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

    layers: int
    hidden: int
    heads: int
    length: int = 2048
    vocabulary: int = 50_257
    batch_size: int = 512
    dropout: float = 0.0
    learning_rate: float = 2e-4
    warmup: int = 2_000
    scan: bool = True
    remat: Remat = True
    dtype: Any = jnp.bfloat16


_GPT2 = Config(12, 768, 12, length=1024, dropout=0.1, learning_rate=6e-4)
_XL = Config(24, 2048, 16)
SIZES = {
    "full": _XL,
    "gpt2": _GPT2,
    "gpt2-xl": dataclasses.replace(_GPT2, layers=48, hidden=1600, heads=25, learning_rate=2e-4),
    "gpt3-1.3b": _XL,
    "gpt3-2.7b": Config(32, 2560, 32, learning_rate=1.6e-4),
    "gpt3-6.7b": Config(32, 4096, 32, batch_size=1024, learning_rate=1.2e-4),
    "gpt3-13b": Config(40, 5120, 40, batch_size=1024, learning_rate=1e-4),
    "megatron-22b": Config(48, 6144, 64, vocabulary=51_200, learning_rate=1e-4),
    "opt-30b": Config(48, 7168, 56, vocabulary=50_272, batch_size=2048, learning_rate=1e-4),
    "alpa-39b": Config(48, 8192, 64, length=1024, vocabulary=51_200, batch_size=1024, learning_rate=1e-4),
    "opt-66b": Config(64, 9216, 72, vocabulary=50_272, batch_size=2048, learning_rate=0.8e-4),
    "gpt3-175b": Config(96, 12288, 96, batch_size=1536, learning_rate=0.6e-4),
    "tiny": Config(
        2,
        64,
        8,
        length=32,
        vocabulary=250,
        batch_size=16,
        dropout=0.1,
        learning_rate=2e-3,
        warmup=0,
        dtype=jnp.float32,
    ),
}
PUBLISHED = {"gpt2": 124_439_808, "gpt2-xl": 1_557_611_200}


class Block(nnx.Module):
    """Attention and feed-forward, each as x + dropout(f(norm(x)))."""

    def __init__(self, config: Config, precision: Precision, rngs: nnx.Rngs) -> None:
        d, heads = config.hidden, (config.heads, config.hidden // config.heads)
        normal = nnx.initializers.normal(0.02)
        residual = nnx.initializers.normal(0.02 / math.sqrt(2 * config.layers))
        make = {"rngs": rngs, **precision.kwargs}
        self.attention_norm = nnx.LayerNorm(d, epsilon=1e-5, **make)
        self.qkv = nnx.LinearGeneral(d, (3, *heads), kernel_init=normal, **make)
        self.out = nnx.LinearGeneral(heads, d, axis=(-2, -1), kernel_init=residual, **make)
        self.mlp_norm = nnx.LayerNorm(d, epsilon=1e-5, **make)
        self.expand = nnx.Linear(d, 4 * d, kernel_init=normal, **make)
        self.contract = nnx.Linear(4 * d, d, kernel_init=residual, **make)
        self.dropout = nnx.Dropout(config.dropout)
        self.precision = precision

    def __call__(self, x: Array, mask: Array, key: Array | None) -> Array:
        """x f[B, T, D], mask bool[T, T] -> f[B, T, D]."""
        q, k, v = jnp.moveaxis(checkpoint_name(self.qkv(self.attention_norm(x)), "qkv_proj"), 2, 0)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=self.precision.param)
        scores = jnp.where(mask, scores / math.sqrt(q.shape[-1]), jnp.finfo(scores.dtype).min)
        weights = drop(self.dropout, jax.nn.softmax(scores).astype(x.dtype), fold(key, 0))
        attended = checkpoint_name(jnp.einsum("bhqk,bkhd->bqhd", weights, v), "context")
        x = x + drop(self.dropout, checkpoint_name(self.out(attended), "out_proj"), fold(key, 1))
        hidden = jax.nn.gelu(checkpoint_name(self.expand(self.mlp_norm(x)), "mlpwi"), approximate=True)
        return x + drop(self.dropout, checkpoint_name(self.contract(hidden), "mlpwo"), fold(key, 2))


class Gpt(nnx.Module):
    """Embeddings, blocks, tied output projection."""

    def __init__(self, config: Config, precision: Precision, rngs: nnx.Rngs) -> None:
        table = {"embedding_init": nnx.initializers.normal(0.02), "param_dtype": precision.param, "rngs": rngs}
        self.token = nnx.Embed(config.vocabulary, config.hidden, **table)
        self.position = nnx.Embed(config.length, config.hidden, **table)
        self.dropout = nnx.Dropout(config.dropout)
        self.blocks = stack(lambda rngs: Block(config, precision, rngs), config.layers, rngs, scan=config.scan)
        self.norm = nnx.LayerNorm(config.hidden, epsilon=1e-5, rngs=rngs, **precision.kwargs)
        self.config = config
        self.precision = precision

    def encode(self, tokens: Array, key: Array | None) -> Array:
        """tokens i32[B, T] -> f[B, T, D]."""
        length = tokens.shape[1]
        x = (self.token(tokens) + self.position.embedding[:length]).astype(self.precision.compute)
        x = drop(self.dropout, x, fold(key, 0))
        mask = causal_mask(length)
        x = through(self.blocks, x, mask, key=key, remat=self.config.remat)
        return self.norm(x)

    def loss(self, batch: Batch, key: Array | None) -> tuple[Array, Metrics]:
        """Mean next-token cross-entropy, f[]."""
        x = self.encode(batch["tokens"], key)
        table = self.token.embedding[...].astype(x.dtype)
        logits = jnp.einsum("btd,vd->btv", x, table, preferred_element_type=self.precision.param)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean(), {}


def build(size: str, config: Config) -> Model:
    """The model for a configuration; see `models.get`."""
    optimizer = adamw(
        config.learning_rate, b2=0.95, eps=1e-8, weight_decay=0.1, clip=1.0, warmup=config.warmup, total=500_000
    )
    published = PUBLISHED.get(size) if config.layers == SIZES[size].layers else None
    return next_token_model("gpt", size, config, Gpt, optimizer, published)
