"""U-Net: a contracting and an expanding path of convolutions with skip connections; segmentation, images in NHWC.

Source: Ronneberger et al. 2015, "U-Net: Convolutional Networks for Biomedical Image Segmentation" (arXiv 1505.04597),
the original in two dimensions: unpadded convolutions, so that skips are cropped and 572 x 572 pixels give 388 x 388
labels; dropout at the end of the contracting path; cross-entropy weighted pixel by pixel; SGD with momentum 0.99 on one
image per device (here of eight). The paper gives no learning rate.

| size | levels | channels   | image | output | classes | parameters |
|------|--------|------------|-------|--------|---------|------------|
| full | 5      | 64 to 1024 | 572   | 388    | 2       | 31,030,658 |
| tiny | 2      | 8 to 16    | 24    | 8      | 2       |            |
"""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import ShapeDtypeStruct

from models._common import Array, Batch, Metrics, Model, Precision, drop, make_precision


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes and recipe; see the table above. channels: of the first level, doubled at each further one."""

    levels: int = 5
    channels: int = 64
    image: int = 572
    classes: int = 2
    batch_size: int = 8
    dropout: float = 0.5
    learning_rate: float = 1e-3
    dtype: Any = jnp.bfloat16

    @property
    def output(self) -> int:
        """Height of the labelled part: two convolutions of 3 x 3 take 4 pixels of each level's input, up and down."""
        size = self.image
        for _ in range(self.levels - 1):
            size = (size - 4) // 2
        for _ in range(self.levels - 1):
            size = (size - 4) * 2
        return size - 4


SIZES = {
    "full": Config(),
    "tiny": Config(levels=2, channels=8, image=24, learning_rate=0.2, dtype=jnp.float32),
}
PUBLISHED = {"full": 31_030_658}


class Double(nnx.Module):
    """Two unpadded 3x3 convolutions with ReLU."""

    def __init__(self, inputs: int, outputs: int, precision: Precision, rngs: nnx.Rngs) -> None:
        he = nnx.initializers.he_normal()
        make = {"kernel_size": (3, 3), "padding": "VALID", "kernel_init": he, "rngs": rngs, **precision.kwargs}
        self.first = nnx.Conv(inputs, outputs, **make)
        self.second = nnx.Conv(outputs, outputs, **make)

    def __call__(self, x: Array) -> Array:
        """f[B, H, W, inputs] -> f[B, H - 4, W - 4, outputs]."""
        return jax.nn.relu(self.second(jax.nn.relu(self.first(x))))


class Unet(nnx.Module):
    """Down: two convolutions and a pooling per level. Up: a transposed convolution, the cropped skip, two more."""

    def __init__(self, config: Config, precision: Precision, rngs: nnx.Rngs) -> None:
        widths = [config.channels * 2**level for level in range(config.levels)]
        make = {"rngs": rngs, **precision.kwargs}
        self.down = nnx.List([Double(a, b, precision, rngs) for a, b in zip([1, *widths], widths, strict=False)])
        widths.reverse()
        pairs = list(itertools.pairwise(widths))
        self.grow = nnx.List([nnx.ConvTranspose(a, b, (2, 2), (2, 2), padding="VALID", **make) for a, b in pairs])
        self.up = nnx.List([Double(a, b, precision, rngs) for a, b in pairs])
        self.classifier = nnx.Conv(config.channels, config.classes, (1, 1), **make)
        self.dropout = nnx.Dropout(config.dropout)
        self.precision = precision

    def loss(self, batch: Batch, key: Array | None) -> tuple[Array, Metrics]:
        """Weighted mean cross-entropy over pixels, f[]."""
        x = batch["images"].astype(self.precision.compute)
        skips = []
        for level in self.down[:-1]:
            skips.append(level(x))
            x = nnx.max_pool(skips[-1], (2, 2), strides=(2, 2))
        x = drop(self.dropout, self.down[-1](x), key)
        for grow, level, skip in zip(self.grow, self.up, reversed(skips), strict=True):
            x = grow(x)
            x = level(jnp.concatenate([_crop(skip, x.shape[1]), x], axis=-1))
        logits = self.classifier(x).astype(self.precision.param)
        weights = batch["weights"].astype(logits.dtype)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
        return (weights * losses).sum() / weights.sum(), {}


def _crop(x: Array, size: int) -> Array:
    """The middle of f[B, H, W, C] -> f[B, size, size, C]."""
    start = (x.shape[1] - size) // 2
    return x[:, start : start + size, start : start + size]


def _batch_spec(config: Config) -> Batch:
    rows, output = config.batch_size, config.output
    return {
        "images": ShapeDtypeStruct((rows, config.image, config.image, 1), jnp.float32),
        "labels": ShapeDtypeStruct((rows, output, output), jnp.int32),
        "weights": ShapeDtypeStruct((rows, output, output), jnp.float32),
    }


def _make_batch(config: Config, rng: np.random.Generator) -> Batch:
    """Disks on noise, as bright as their label; pixels near the edge of a disk weigh up to eleven times as much."""
    rows, output, border = config.batch_size, config.output, (config.image - config.output) // 2
    axis = np.arange(config.image) - border
    centers = rng.uniform(0, output, (2, rows, 1, 1))
    radii = rng.uniform(0.2, 0.5, (rows, 1, 1)) * output
    edge = np.hypot(axis[:, None] - centers[0], axis[None, :] - centers[1]) - radii
    labels = (edge < 0).astype(np.int32)
    images = labels + 0.5 * rng.standard_normal(labels.shape)
    inside = slice(border, border + output)
    weights = 1 + 10 * np.exp(-(edge**2) / 50)
    return {
        "images": images[..., None].astype(np.float32),
        "labels": labels[:, inside, inside] % config.classes,
        "weights": weights[:, inside, inside].astype(np.float32),
    }


def build(size: str, config: Config) -> Model:
    """The model for a configuration; see `models.get`."""
    precision = make_precision(config.dtype)
    return Model(
        name="unet",
        size=size,
        config=config,
        make_module=lambda rngs: Unet(config, precision, rngs),
        optimizer=optax.sgd(config.learning_rate, momentum=0.99),
        batch_spec=_batch_spec(config),
        make_numpy_batch=lambda rng: _make_batch(config, rng),
        published_parameters=PUBLISHED.get(size) if config.levels == SIZES[size].levels else None,
    )
