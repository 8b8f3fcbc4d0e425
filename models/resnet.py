"""ResNet: residual blocks with batch normalization; images in NHWC.

Source: He et al. 2015, "Deep Residual Learning for Image Recognition" (arXiv 1512.03385), table 1, with the stride of a
bottleneck in its 3x3 convolution, as in the torchvision models that the counts are of. Trained as in MLPerf: LARS (You
et al. 2017, arXiv 1708.03888) with weight decay 2e-4 and momentum 0.9, neither scaling nor decay for biases and
normalization, label smoothing 0.1; at the rates of its reference for 4096 images: 17, polynomial decay of power 2 after
5 epochs of warm-up, 72 epochs in all. `lars` false is the paper's recipe: SGD, momentum 0.9, decay 1e-4, 256 images.

| size  | stages      | block      | stem | image | classes | parameters |
|-------|-------------|------------|------|-------|---------|------------|
| full  | 3, 4, 6, 3  | bottleneck | 64   | 224   | 1000    | 25,557,032 |
| 18    | 2, 2, 2, 2  | basic      | 64   | 224   | 1000    | 11,689,512 |
| 101   | 3, 4, 23, 3 | bottleneck | 64   | 224   | 1000    | 44,549,160 |
| 152   | 3, 8, 36, 3 | bottleneck | 64   | 224   | 1000    | 60,192,808 |
| tiny  | 1, 1        | bottleneck | 8    | 32    | 11      |            |

`full` is ResNet-50.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from models._common import Array, Batch, Metrics, Model, Precision, is_matrix, make_precision
from models._image import IMAGENET, ConvNorm, cross_entropy, image_batch, image_spec


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes and recipe; see the table above. epochs: of training, 0 for a constant rate."""

    stages: tuple[int, ...] = (3, 4, 6, 3)
    bottleneck: bool = True
    stem: int = 64
    image: int = 224
    classes: int = 1000
    smoothing: float = 0.1
    lars: bool = True
    batch_size: int = 4096
    learning_rate: float = 17.0
    epochs: int = 72
    weight_decay: float = 2e-4
    dtype: Any = jnp.bfloat16


SIZES = {
    "full": Config(),
    "18": Config(stages=(2, 2, 2, 2), bottleneck=False),
    "101": Config(stages=(3, 4, 23, 3)),
    "152": Config(stages=(3, 8, 36, 3)),
    "tiny": Config(
        stages=(1, 1), stem=8, image=32, classes=11, batch_size=16, learning_rate=10.0, epochs=0, dtype=jnp.float32
    ),
}
PUBLISHED = {"full": 25_557_032, "18": 11_689_512, "101": 44_549_160, "152": 60_192_808}


class Block(nnx.Module):
    """1x1, 3x3, 1x1 (or two 3x3) around a residual that is projected where shapes change."""

    def __init__(
        self, inputs: int, width: int, bottleneck: bool, stride: int, precision: Precision, rngs: nnx.Rngs
    ) -> None:
        outputs = 4 * width if bottleneck else width
        if bottleneck:
            shapes = [(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)]
        else:
            shapes = [(inputs, width, 3, stride), (width, width, 3, 1)]
        self.layers = nnx.List([ConvNorm(a, b, (k, k), precision, rngs, stride=s) for a, b, k, s in shapes])
        # The last scale starts at zero, so that a block starts as the identity (Goyal et al. 2017, arXiv 1706.02677).
        scale = self.layers[-1].norm.scale
        scale[...] = jnp.zeros_like(scale[...])
        changes = stride != 1 or inputs != outputs
        self.project = ConvNorm(inputs, outputs, (1, 1), precision, rngs, stride=stride) if changes else None
        self.outputs = outputs

    def __call__(self, x: Array, train: bool) -> Array:
        """f[B, H, W, inputs] -> f[B, H / stride, W / stride, outputs]."""
        y = x
        for layer in self.layers[:-1]:
            y = jax.nn.relu(layer(y, train))
        y = self.layers[-1](y, train)
        return jax.nn.relu(y + (x if self.project is None else self.project(x, train)))


class ResNet(nnx.Module):
    """Stem, stages of blocks, global average pool, classifier."""

    def __init__(self, config: Config, precision: Precision, rngs: nnx.Rngs) -> None:
        self.stem = ConvNorm(3, config.stem, (7, 7), precision, rngs, stride=2)
        blocks, inputs = [], config.stem
        for stage, count in enumerate(config.stages):
            for i in range(count):
                stride = 2 if stage > 0 and i == 0 else 1
                width = config.stem * 2**stage
                blocks.append(Block(inputs, width, config.bottleneck, stride, precision, rngs))
                inputs = blocks[-1].outputs
        self.blocks = nnx.List(blocks)
        self.classifier = nnx.Linear(inputs, config.classes, rngs=rngs, **precision.kwargs)
        self.smoothing = config.smoothing
        self.precision = precision

    def loss(self, batch: Batch, key: Array | None) -> tuple[Array, Metrics]:
        """Mean cross-entropy, f[]; without a key (evaluation) the running statistics are used."""
        train = key is not None
        x = jax.nn.relu(self.stem(batch["images"].astype(self.precision.compute), train))
        x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
        for block in self.blocks:
            x = block(x, train)
        logits = self.classifier(x.mean(axis=(1, 2))).astype(self.precision.param)
        return cross_entropy(logits, batch["labels"], self.smoothing), {}


def _optimizer(config: Config) -> optax.GradientTransformation:
    rate: optax.ScalarOrSchedule = config.learning_rate
    if config.epochs:
        steps = IMAGENET // config.batch_size
        up = optax.linear_schedule(0.0, rate, 5 * steps)
        down = optax.polynomial_schedule(rate, 0.0, power=2, transition_steps=(config.epochs - 5) * steps)
        rate = optax.join_schedules([up, down], [5 * steps])
    decay = {"weight_decay": config.weight_decay}
    if config.lars:
        return optax.lars(rate, momentum=0.9, weight_decay_mask=is_matrix, trust_ratio_mask=is_matrix, **decay)
    return optax.chain(optax.add_decayed_weights(**decay), optax.sgd(rate, momentum=0.9))


def build(size: str, config: Config) -> Model:
    """The model for a configuration; see `models.get`."""
    precision = make_precision(config.dtype)
    rows, image, classes = config.batch_size, config.image, config.classes
    return Model(
        name="resnet",
        size=size,
        config=config,
        make_module=lambda rngs: ResNet(config, precision, rngs),
        optimizer=_optimizer(config),
        batch_spec=image_spec(rows, image),
        make_numpy_batch=lambda rng: image_batch(rng, rows, image, classes),
        published_parameters=PUBLISHED.get(size) if config.stages == SIZES[size].stages else None,
    )
