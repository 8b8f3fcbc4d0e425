"""Falcon: causal language models with attention and feed-forward side by side; layers scanned or unrolled.

Source: Almazrouei et al. 2023, "The Falcon Series of Open Language Models" (arXiv 2311.16867), as in the released
checkpoints and model cards: x + attention(norm(x)) + mlp(norm(x)) with one layer norm for both at 7B and one each above
it, no biases, rotary positions, multi-query attention (at 40B and 180B eight key/value heads, one for each of eight
devices), GELU, output projection tied to the token embedding. AdamW with decay 0.1, a cosine to a tenth of the rate,
4 G tokens of warm-up, and a loss of 1e-4 x log(Z)^2 that keeps the logits small. The clip of the gradient norm (1) is
ours.

| size | layers | hidden | heads (kv) | tokens | vocabulary | parameters      |
|------|--------|--------|------------|--------|------------|-----------------|
| full | 32     | 4544   | 71 (1)     | 2048   | 65,024     | 6,921,720,704   |
| 40b  | 60     | 8192   | 128 (8)    | 2048   | 65,024     | 41,303,293,952  |
| 180b | 80     | 14,848 | 232 (8)    | 2048   | 65,024     | 178,557,088,768 |
| tiny | 2      | 32     | 8 (1)      | 16     | 251        |                 |

`full` is 7b. Its 71 heads are a prime number. The checkpoints also store a copy of the tied table.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

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
    next_token_model,
)
from models._layers import Remat, stack, through


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes and recipe; see the table above.

    `norms` is the number of layer norms of a block. `scan` runs the layers as one loop over stacked parameters,
    f[L, ...]; unrolled they are a list. `remat` recomputes each layer in the backward pass.
    """

    layers: int = 32
    hidden: int = 4544
    heads: int = 71
    kv_heads: int = 1
    norms: int = 1
    length: int = 2048
    vocabulary: int = 65_024
    batch_size: int = 2304
    dropout: float = 0.0
    rope_theta: float = 1e4
    z_loss: float = 1e-4
    learning_rate: float = 6e-4
    warmup: int = 850
    steps: int = 318_000
    scan: bool = True
    remat: Remat = True
    dtype: Any = jnp.bfloat16


SIZES = {
    "full": Config(),
    "7b": Config(),
    "40b": Config(60, 8192, 128, 8, 2, batch_size=1152, learning_rate=1.85e-4, warmup=1_700, steps=424_000),
    "180b": Config(80, 14_848, 232, 8, 2, batch_size=2048, learning_rate=1.25e-4, warmup=950, steps=834_000),
    "tiny": Config(
        layers=2,
        hidden=32,
        heads=8,
        norms=2,
        length=16,
        vocabulary=251,
        batch_size=16,
        dropout=0.1,
        learning_rate=4e-3,
        warmup=0,
        dtype=jnp.float32,
    ),
}
PUBLISHED = {"full": 6_921_720_704, "7b": 6_921_720_704, "40b": 41_303_293_952, "180b": 178_557_088_768}

_normal = nnx.initializers.normal(0.02)


class Block(nnx.Module):
    """x + dropout(attention(norm(x)) + mlp(norm(x)))."""

    def __init__(self, config: Config, precision: Precision, rngs: nnx.Rngs) -> None:
        d, width = config.hidden, config.hidden // config.heads
        make = {"use_bias": False, "kernel_init": _normal, "rngs": rngs, **precision.kwargs}
        self.norms = nnx.List(
            [nnx.LayerNorm(d, epsilon=1e-5, rngs=rngs, **precision.kwargs) for _ in range(config.norms)]
        )
        self.attention = GroupedAttention(d, config.heads, config.kv_heads, width, precision, rngs)
        self.expand = nnx.Linear(d, 4 * d, **make)
        self.contract = nnx.Linear(4 * d, d, **make)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, x: Array, turn: tuple[Array, Array], mask: Array, key: Array | None) -> Array:
        """x f[B, T, D], turn (cos, sin) f[T, W/2], mask bool[T, T] -> f[B, T, D]."""
        normed = [norm(x) for norm in self.norms]
        attended = self.attention(normed[0], turn, mask)
        y = self.contract(jax.nn.gelu(self.expand(normed[-1]), approximate=False))
        return x + drop(self.dropout, attended + y, key)


class Falcon(nnx.Module):
    """Embedding, blocks, norm, tied output projection."""

    def __init__(self, config: Config, precision: Precision, rngs: nnx.Rngs) -> None:
        self.token = nnx.Embed(
            config.vocabulary, config.hidden, embedding_init=_normal, param_dtype=precision.param, rngs=rngs
        )
        self.blocks = stack(lambda rngs: Block(config, precision, rngs), config.layers, rngs, scan=config.scan)
        self.norm = nnx.LayerNorm(config.hidden, epsilon=1e-5, rngs=rngs, **precision.kwargs)
        self.config = config
        self.precision = precision

    def loss(self, batch: Batch, key: Array | None) -> tuple[Array, Metrics]:
        """Mean next-token cross-entropy plus the loss on the logits' size, f[]."""
        config, precision = self.config, self.precision
        x = self.token(batch["tokens"]).astype(precision.compute)
        turn = rotary(x.shape[1], config.hidden // config.heads, config.rope_theta, precision)
        x = self.norm(through(self.blocks, x, turn, causal_mask(x.shape[1]), key=key, remat=config.remat))
        table = self.token.embedding[...].astype(x.dtype)
        logits = jnp.einsum("btd,vd->btv", x, table, preferred_element_type=precision.param)
        log_z = jax.nn.logsumexp(logits, axis=-1)
        right = jnp.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
        token = (log_z - right).mean()
        return token + config.z_loss * (log_z**2).mean(), {"token_loss": token}


def build(size: str, config: Config) -> Model:
    """The model for a configuration; see `models.get`."""
    optimizer = adamw(
        config.learning_rate,
        b2=0.999,
        eps=1e-8,
        weight_decay=0.1,
        clip=1.0,
        warmup=config.warmup,
        total=config.steps,
        cosine_to=0.1,
    )
    published = PUBLISHED.get(size) if config.layers == SIZES[size].layers else None
    return next_token_model("falcon", size, config, Falcon, optimizer, published)
