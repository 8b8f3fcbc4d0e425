"""ResNeXt-50 (32x4d): grouped convolutions, batch normalization with running statistics, residuals; images in NHWC.

Source: Xie et al. 2017, "Aggregated Residual Transformations for Deep Neural Networks" (arXiv 1611.05431), table 1,
25.0 M parameters (25,028,904 in the torchvision model, which this one equals); SGD 0.1, Nesterov momentum 0.9, weight
decay 1e-4, 256 images.

| size | stages      | groups | group width | stem | image | classes | parameters |
|------|-------------|--------|-------------|------|-------|---------|------------|
| full | 3, 4, 6, 3  | 32     | 4           | 64   | 224   | 1000    | 25,028,904 |
| tiny | 1, 1        | 8      | 2           | 16   | 32    | 11      |            |

A block of stage s has group convolutions of width groups x group_width x 2^s and outputs 4 x stem x 2^s channels.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from models._common import Array, Batch, Metrics, Model, Precision, make_precision
from models._image import ConvNorm, cross_entropy, image_batch, image_spec


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes and recipe; see the table above."""

    stages: tuple[int, ...] = (3, 4, 6, 3)
    groups: int = 32
    group_width: int = 4
    stem: int = 64
    image: int = 224
    classes: int = 1000
    batch_size: int = 256
    learning_rate: float = 0.1
    weight_decay: float = 1e-4
    dtype: Any = jnp.bfloat16


SIZES = {
    "full": Config(),
    "tiny": Config(
        stages=(1, 1),
        groups=8,
        group_width=2,
        stem=16,
        image=32,
        classes=11,
        batch_size=16,
        learning_rate=0.05,
        dtype=jnp.float32,
    ),
}
PUBLISHED = {"full": 25_028_904}


class Block(nnx.Module):
    """1x1, grouped 3x3, 1x1, around a residual that is projected where shapes change."""

    def __init__(
        self, inputs: int, width: int, outputs: int, stride: int, groups: int, precision: Precision, rngs: nnx.Rngs
    ) -> None:
        self.reduce = ConvNorm(inputs, width, (1, 1), precision, rngs)
        self.grouped = ConvNorm(width, width, (3, 3), precision, rngs, stride=stride, groups=groups)
        self.expand = ConvNorm(width, outputs, (1, 1), precision, rngs)
        changes = stride != 1 or inputs != outputs
        self.project = ConvNorm(inputs, outputs, (1, 1), precision, rngs, stride=stride) if changes else None

    def __call__(self, x: Array, train: bool) -> Array:
        """f[B, H, W, inputs] -> f[B, H / stride, W / stride, outputs]."""
        y = jax.nn.relu(self.reduce(x, train))
        y = jax.nn.relu(self.grouped(y, train))
        y = self.expand(y, train)
        return jax.nn.relu(y + (x if self.project is None else self.project(x, train)))


class ResNext(nnx.Module):
    """Stem, stages of blocks, global average pool, classifier."""

    def __init__(self, config: Config, precision: Precision, rngs: nnx.Rngs) -> None:
        self.stem = ConvNorm(3, config.stem, (7, 7), precision, rngs, stride=2)
        blocks = []
        inputs = config.stem
        for stage, count in enumerate(config.stages):
            width = config.groups * config.group_width * 2**stage
            outputs = 4 * config.stem * 2**stage
            for i in range(count):
                stride = 2 if stage > 0 and i == 0 else 1
                blocks.append(Block(inputs, width, outputs, stride, config.groups, precision, rngs))
                inputs = outputs
        self.blocks = nnx.List(blocks)
        self.classifier = nnx.Linear(inputs, config.classes, rngs=rngs, **precision.kwargs)
        self.precision = precision

    def loss(self, batch: Batch, key: Array | None) -> tuple[Array, Metrics]:
        """Mean cross-entropy, f[]; without a key (evaluation) the running statistics are used."""
        train = key is not None
        x = jax.nn.relu(self.stem(batch["images"].astype(self.precision.compute), train))
        x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
        for block in self.blocks:
            x = block(x, train)
        logits = self.classifier(x.mean(axis=(1, 2))).astype(self.precision.param)
        return cross_entropy(logits, batch["labels"]), {}


def build(size: str, config: Config) -> Model:
    """The model for a configuration; see `models.get`."""
    precision = make_precision(config.dtype)
    return Model(
        name="resnext",
        size=size,
        config=config,
        make_module=lambda rngs: ResNext(config, precision, rngs),
        optimizer=optax.chain(
            optax.add_decayed_weights(config.weight_decay),
            optax.sgd(config.learning_rate, momentum=0.9, nesterov=True),
        ),
        batch_spec=image_spec(config.batch_size, config.image),
        make_numpy_batch=lambda rng: image_batch(rng, config.batch_size, config.image, config.classes),
        published_parameters=PUBLISHED.get(size) if config.stages == SIZES[size].stages else None,
    )
