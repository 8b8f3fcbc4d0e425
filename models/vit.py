"""ViT: an image as patches through a transformer encoder, layers scanned or unrolled; images in NHWC.

Source: Dosovitskiy et al. 2020, "An Image is Worth 16x16 Words: Transformers for Image Recognition at Scale" (arXiv
2010.11929), table 1, as in the authors' released code: pre-layer-norm blocks, GELU, learned positions, a class token,
a zero-initialized linear head. Trained on ImageNet-1k as in its table 3: AdamW at 3e-3 with weight decay 0.3, 10,000
steps of warm-up, gradients clipped at 1, dropout 0.1 (none on JFT-300M), 300 epochs of 4096 images.

| size | layers | hidden | heads | feed-forward | patch | image | classes | parameters  |
|------|--------|--------|-------|--------------|-------|-------|---------|-------------|
| full | 24     | 1024   | 16    | 4096         | 16    | 224   | 1000    | 304,326,632 |
| base | 12     | 768    | 12    | 3072         | 16    | 224   | 1000    | 86,567,656  |
| huge | 32     | 1280   | 16    | 5120         | 14    | 224   | 1000    | 632,045,800 |
| tiny | 2      | 32     | 8     | 64           | 8     | 32    | 11      |             |

`full` is ViT-L/16, `base` ViT-B/16 and `huge` ViT-H/14.

The gradient of every attention key bias is zero in exact arithmetic: it shifts all scores of a query alike.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models._common import Array, Batch, Metrics, Model, Precision, adamw, drop, fold, make_precision
from models._image import IMAGENET, cross_entropy, image_batch, image_spec
from models._layers import stack, through


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes and recipe; see the table above.

    `scan` runs the layers as one loop over stacked parameters, f[L, ...]; unrolled they are a list. `remat` recomputes
    each layer in the backward pass.
    """

    layers: int = 24
    hidden: int = 1024
    heads: int = 16
    feed_forward: int = 4096
    patch: int = 16
    image: int = 224
    classes: int = 1000
    batch_size: int = 4096
    dropout: float = 0.1
    learning_rate: float = 3e-3
    weight_decay: float = 0.3
    warmup: int = 10_000
    scan: bool = True
    remat: bool = True
    dtype: Any = jnp.bfloat16


SIZES = {
    "full": Config(),
    "base": Config(layers=12, hidden=768, heads=12, feed_forward=3072),
    "huge": Config(layers=32, hidden=1280, feed_forward=5120, patch=14),
    "tiny": Config(
        layers=2,
        hidden=32,
        heads=8,
        feed_forward=64,
        patch=8,
        image=32,
        classes=11,
        batch_size=16,
        learning_rate=5e-3,
        warmup=0,
        dtype=jnp.float32,
    ),
}
PUBLISHED = {"full": 304_326_632, "base": 86_567_656, "huge": 632_045_800}


class Layer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); attention weights f[D, H, D/H]."""

    def __init__(self, config: Config, precision: Precision, rngs: nnx.Rngs) -> None:
        heads = (config.heads, config.hidden // config.heads)
        make = {"rngs": rngs, **precision.kwargs}
        self.attention_norm = _norm(config, precision, rngs)
        self.query = nnx.LinearGeneral(config.hidden, heads, **make)
        self.key = nnx.LinearGeneral(config.hidden, heads, **make)
        self.value = nnx.LinearGeneral(config.hidden, heads, **make)
        self.out = nnx.LinearGeneral(heads, config.hidden, axis=(-2, -1), **make)
        self.mlp_norm = _norm(config, precision, rngs)
        self.expand = nnx.Linear(config.hidden, config.feed_forward, **make)
        self.contract = nnx.Linear(config.feed_forward, config.hidden, **make)
        self.dropout = nnx.Dropout(config.dropout)
        self.precision = precision

    def attend(self, x: Array) -> Array:
        """f[B, T, D] -> f[B, T, D]."""
        q, k, v = self.query(x), self.key(x), self.value(x)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=self.precision.param)
        weights = jax.nn.softmax(scores / math.sqrt(q.shape[-1])).astype(x.dtype)
        return self.out(jnp.einsum("bhqk,bkhd->bqhd", weights, v))

    def __call__(self, x: Array, key: Array | None) -> Array:
        """f[B, T, D] -> f[B, T, D]."""
        x = x + drop(self.dropout, self.attend(self.attention_norm(x)), fold(key, 0))
        hidden = drop(self.dropout, jax.nn.gelu(self.expand(self.mlp_norm(x)), approximate=False), fold(key, 1))
        return x + drop(self.dropout, self.contract(hidden), fold(key, 2))


def _norm(config: Config, precision: Precision, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(config.hidden, use_fast_variance=False, rngs=rngs, **precision.kwargs)


class Vit(nnx.Module):
    """Patches and a class token with positions, layers, norm, and a head on the class token."""

    def __init__(self, config: Config, precision: Precision, rngs: nnx.Rngs) -> None:
        patch, tokens = (config.patch, config.patch), (config.image // config.patch) ** 2 + 1
        self.embed = nnx.Conv(3, config.hidden, patch, patch, padding="VALID", rngs=rngs, **precision.kwargs)
        self.token = nnx.Param(jnp.zeros((1, 1, config.hidden), precision.param))
        self.position = nnx.Param(0.02 * jax.random.normal(rngs.params(), (1, tokens, config.hidden), precision.param))
        self.dropout = nnx.Dropout(config.dropout)
        self.layers = stack(lambda rngs: Layer(config, precision, rngs), config.layers, rngs, scan=config.scan)
        self.norm = _norm(config, precision, rngs)
        zeros = nnx.initializers.zeros
        self.head = nnx.Linear(config.hidden, config.classes, kernel_init=zeros, rngs=rngs, **precision.kwargs)
        self.config = config
        self.precision = precision

    def encode(self, images: Array, key: Array | None) -> Array:
        """f[B, H, W, 3] -> f[B, T, D], the class token first."""
        compute = self.precision.compute
        patches = self.embed(images.astype(compute))
        rows = patches.shape[0]
        patches = patches.reshape(rows, -1, patches.shape[-1])
        token = jnp.broadcast_to(self.token[...].astype(compute), (rows, 1, patches.shape[-1]))
        x = jnp.concatenate([token, patches], axis=1) + self.position[...].astype(compute)
        x = drop(self.dropout, x, fold(key, 0))
        x = through(self.layers, x, key=key, remat=self.config.remat)
        return self.norm(x)

    def loss(self, batch: Batch, key: Array | None) -> tuple[Array, Metrics]:
        """Mean cross-entropy, f[]."""
        logits = self.head(self.encode(batch["images"], key)[:, 0]).astype(self.precision.param)
        return cross_entropy(logits, batch["labels"]), {}


def build(size: str, config: Config) -> Model:
    """The model for a configuration; see `models.get`."""
    precision = make_precision(config.dtype)
    rows, image, classes = config.batch_size, config.image, config.classes
    return Model(
        name="vit",
        size=size,
        config=config,
        make_module=lambda rngs: Vit(config, precision, rngs),
        optimizer=adamw(
            config.learning_rate,
            b2=0.999,
            eps=1e-8,
            weight_decay=config.weight_decay,
            clip=1.0,
            warmup=config.warmup,
            total=300 * IMAGENET // config.batch_size,
        ),
        batch_spec=image_spec(rows, image),
        make_numpy_batch=lambda rng: image_batch(rng, rows, image, classes),
        published_parameters=PUBLISHED.get(size) if config.layers == SIZES[size].layers else None,
        zero_gradients=("['key']['bias']",),
    )
