"""LLaMA, Llama 2 and Llama 3: causal language models, layers scanned or unrolled, each rematerialized.

Sources: Touvron et al. 2023, "LLaMA: Open and Efficient Foundation Language Models" (arXiv 2302.13971), "Llama 2"
(arXiv 2307.09288); Grattafiori et al. 2024, "The Llama 3 Herd of Models" (arXiv 2407.21783); parameter counts of the
released checkpoints. Pre-RMS-norm blocks without biases, rotary positions, SwiGLU, grouped-query attention where the
table has fewer key/value heads (kv) than heads, an output projection of its own except where the table says tied. The
recipe: AdamW 0.9/0.95, clip 1, decay 0.1, 2,000 steps of warm-up, a cosine to a tenth of the rate, 4 M tokens a batch.
1.3b and 2.7b are those of Xia et al. 2023, "Sheared LLaMA" (arXiv 2310.06694); 22b has the width, depth and heads of
Zhu et al. 2025, "Mist" (arXiv 2503.19050), and the feed-forward 8/3 x 6144.

| size        | layers | hidden | heads (kv) | feed-forward | vocabulary     | tokens | parameters      |
|-------------|--------|--------|------------|--------------|----------------|--------|-----------------|
| 1.3b        | 24     | 2048   | 16         | 5504         | 32,000         | 2048   | 1,345,423,360   |
| 2.7b        | 32     | 2560   | 20         | 6912         | 32,000         | 2048   | 2,701,560,320   |
| 7b          | 32     | 4096   | 32         | 11,008       | 32,000         | 2048   | 6,738,415,616   |
| 13b         | 40     | 5120   | 40         | 13,824       | 32,000         | 2048   | 13,015,864,320  |
| 22b         | 48     | 6144   | 64         | 16,384       | 32,000         | 2048   | 22,137,083,904  |
| 33b         | 60     | 6656   | 52         | 17,920       | 32,000         | 2048   | 32,528,943,616  |
| 65b         | 80     | 8192   | 64         | 22,016       | 32,000         | 2048   | 65,285,660,672  |
| llama2-70b  | 80     | 8192   | 64 (8)     | 28,672       | 32,000         | 4096   | 68,976,648,192  |
| llama3-8b   | 32     | 4096   | 32 (8)     | 14,336       | 128,256        | 8192   | 8,030,261,248   |
| llama3-70b  | 80     | 8192   | 64 (8)     | 28,672       | 128,256        | 8192   | 70,553,706,496  |
| llama3-405b | 126    | 16,384 | 128 (8)    | 53,248       | 128,256        | 8192   | 405,853,388,800 |
| llama3.2-1b | 16     | 2048   | 32 (8)     | 8192         | 128,256 (tied) | 8192   | 1,235,814,400   |
| llama3.2-3b | 28     | 3072   | 24 (8)     | 8192         | 128,256 (tied) | 8192   | 3,212,749,824   |
| tiny        | 2      | 32     | 8 (4)      | 48           | 251            | 16     |                 |

`full` is 7b. Llama 3 warms up for 8,000 steps of 1.2 M; its batches grow in training, here they keep their first size.
Llama 3.1's scaling of rotary frequencies beyond 8192 tokens is left out.
"""

import dataclasses
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

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    feed_forward: int
    vocabulary: int = 32_000
    length: int = 2048
    batch_size: int = 2048
    tied: bool = False
    dropout: float = 0.0
    rope_theta: float = 1e4
    norm_epsilon: float = 1e-5
    learning_rate: float = 3e-4
    warmup: int = 2_000
    steps: int = 350_000
    scan: bool = True
    remat: Remat = True
    dtype: Any = jnp.bfloat16


_7B = Config(32, 4096, 32, 32, 11_008, batch_size=2048, norm_epsilon=1e-6, steps=250_000)
_LLAMA3 = {"vocabulary": 128_256, "length": 8192, "batch_size": 512, "rope_theta": 5e5}
SIZES = {
    "full": _7B,
    "1.3b": Config(24, 2048, 16, 16, 5504),
    "2.7b": Config(32, 2560, 20, 20, 6912),
    "7b": _7B,
    "13b": dataclasses.replace(_7B, layers=40, hidden=5120, heads=40, kv_heads=40, feed_forward=13_824),
    "22b": Config(48, 6144, 64, 64, 16_384),
    "33b": Config(60, 6656, 52, 52, 17_920, norm_epsilon=1e-6, learning_rate=1.5e-4),
    "65b": Config(80, 8192, 64, 64, 22_016, learning_rate=1.5e-4),
    "llama2-70b": Config(80, 8192, 64, 8, 28_672, length=4096, batch_size=1024, learning_rate=1.5e-4, steps=500_000),
    "llama3-8b": Config(32, 4096, 32, 8, 14_336, **_LLAMA3, warmup=8_000, steps=1_200_000),
    "llama3-70b": Config(80, 8192, 64, 8, 28_672, **_LLAMA3, learning_rate=1.5e-4, warmup=8_000, steps=1_200_000),
    "llama3-405b": Config(126, 16_384, 128, 8, 53_248, **_LLAMA3, learning_rate=8e-5, warmup=8_000, steps=1_200_000),
    "llama3.2-1b": Config(16, 2048, 32, 8, 8192, **_LLAMA3, tied=True),
    "llama3.2-3b": Config(28, 3072, 24, 8, 8192, **_LLAMA3, tied=True),
    "tiny": Config(
        2,
        32,
        8,
        4,
        48,
        vocabulary=251,
        length=16,
        batch_size=16,
        dropout=0.1,
        learning_rate=4e-3,
        warmup=0,
        dtype=jnp.float32,
    ),
}
PUBLISHED = {
    "full": 6_738_415_616,
    "1.3b": 1_345_423_360,
    "7b": 6_738_415_616,
    "13b": 13_015_864_320,
    "33b": 32_528_943_616,
    "65b": 65_285_660_672,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
}

_normal = nnx.initializers.normal(0.02)


class Block(nnx.Module):
    """Attention and gated feed-forward, each as x + dropout(f(norm(x)))."""

    def __init__(self, config: Config, precision: Precision, rngs: nnx.Rngs) -> None:
        d, width = config.hidden, config.hidden // config.heads
        norm = {"epsilon": config.norm_epsilon, "rngs": rngs, **precision.kwargs}
        make = {"use_bias": False, "kernel_init": _normal, "rngs": rngs, **precision.kwargs}
        self.attention_norm = nnx.RMSNorm(d, **norm)
        self.attention = GroupedAttention(d, config.heads, config.kv_heads, width, precision, rngs)
        self.mlp_norm = nnx.RMSNorm(d, **norm)
        self.gate = nnx.Linear(d, config.feed_forward, **make)
        self.up = nnx.Linear(d, config.feed_forward, **make)
        self.down = nnx.Linear(config.feed_forward, d, **make)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, x: Array, turn: tuple[Array, Array], mask: Array, key: Array | None) -> Array:
        """x f[B, T, D], turn (cos, sin) f[T, W/2], mask bool[T, T] -> f[B, T, D]."""
        attended = self.attention(self.attention_norm(x), turn, mask)
        x = x + drop(self.dropout, attended, fold(key, 0))
        y = self.mlp_norm(x)
        gate, up = checkpoint_name(self.gate(y), "mlpwi_0"), checkpoint_name(self.up(y), "mlpwi_1")
        y = checkpoint_name(self.down(jax.nn.silu(gate) * up), "mlpwo")
        return x + drop(self.dropout, y, fold(key, 1))


class Llama(nnx.Module):
    """Embedding, blocks, norm, output projection."""

    def __init__(self, config: Config, precision: Precision, rngs: nnx.Rngs) -> None:
        self.token = nnx.Embed(
            config.vocabulary, config.hidden, embedding_init=_normal, param_dtype=precision.param, rngs=rngs
        )
        self.blocks = stack(lambda rngs: Block(config, precision, rngs), config.layers, rngs, scan=config.scan)
        self.norm = nnx.RMSNorm(config.hidden, epsilon=config.norm_epsilon, rngs=rngs, **precision.kwargs)
        if not config.tied:
            self.output = nnx.Linear(
                config.hidden, config.vocabulary, use_bias=False, kernel_init=_normal, rngs=rngs, **precision.kwargs
            )
        self.config = config
        self.precision = precision

    def loss(self, batch: Batch, key: Array | None) -> tuple[Array, Metrics]:
        """Mean next-token cross-entropy, f[]."""
        config, precision = self.config, self.precision
        x = self.token(batch["tokens"]).astype(precision.compute)
        turn = rotary(x.shape[1], config.hidden // config.heads, config.rope_theta, precision)
        x = self.norm(through(self.blocks, x, turn, causal_mask(x.shape[1]), key=key, remat=config.remat))
        if config.tied:
            table = self.token.embedding[...].astype(x.dtype)
            logits = jnp.einsum("btd,vd->btv", x, table, preferred_element_type=precision.param)
        else:
            logits = self.output(x).astype(precision.param)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean(), {}


def build(size: str, config: Config) -> Model:
    """The model for a configuration; see `models.get`."""
    optimizer = adamw(
        config.learning_rate,
        b2=0.95,
        eps=1e-8,
        weight_decay=0.1,
        clip=1.0,
        warmup=config.warmup,
        total=config.steps,
        cosine_to=0.1,
    )
    published = PUBLISHED.get(size) if config.layers == SIZES[size].layers else None
    return next_token_model("llama", size, config, Llama, optimizer, published)
