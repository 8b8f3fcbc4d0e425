"""Inception-v3: blocks of parallel convolution branches that are concatenated; images in NHWC.

Source: Szegedy et al. 2015, "Rethinking the Inception Architecture for Computer Vision" (arXiv 1512.00567), with the
branch widths of the authors' released code (TF-slim), which the torchvision model shares: batch normalization in every
convolution and in the auxiliary head, dropout 0.2, label smoothing 0.1, RMSProp (decay 0.9, epsilon 1, momentum 0.9)
at 0.045 times 0.94 every two epochs, gradients clipped at 2. `unity` follows Unity's evaluation (Unger et al. 2022,
OSDI 22, section 6, whose released program is the example `InceptionV3` of FlexFlow): biases instead of normalization,
no auxiliary head, ten classes, SGD at 0.01 with 64 images per GPU (here of 4).

| size  | blocks                          | width | auxiliary head | norm | image | classes | parameters |
|-------|---------------------------------|-------|----------------|------|-------|---------|------------|
| full  | stem, 3 a, b, 4 c, d, 2 e       | 1     | after the c    | yes  | 299   | 1000    | 27,161,264 |
| plain | stem, 3 a, b, 4 c, d, 2 e       | 1     | none           | yes  | 299   | 1000    | 23,834,568 |
| unity | stem, 3 a, b, 4 c, d, 2 e       | 1     | none           | no   | 299   | 10      | 21,788,842 |
| tiny  | half of the stem, e             | 1/16  | after the stem | yes  | 27    | 11      |            |
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from models._common import Array, Batch, Metrics, Model, Precision, drop, is_matrix, make_precision
from models._image import IMAGENET, ConvNorm, cross_entropy, image_batch, image_spec

Pair = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Conv:
    """A convolution to `channels`, then ReLU; those with a stride have no padding."""

    channels: int
    kernel: Pair = (1, 1)
    stride: int = 1
    padding: str = "SAME"


@dataclasses.dataclass(frozen=True)
class Fork:
    """Paths from one input, concatenated by channels; a path is a tuple of layers."""

    paths: tuple[tuple[Any, ...], ...]


AVERAGE, MAX = "average 3x3", "max 3x3 with stride 2"
"""Poolings, which are layers as well."""


def _fork(*paths: Any) -> Fork:
    return Fork(tuple(path if isinstance(path, tuple) else (path,) for path in paths))


def _shrink(channels: int) -> Conv:
    return Conv(channels, (3, 3), 2, "VALID")


def _a(pooled: int) -> Fork:
    """Figure 5 of the paper, with one 5x5 kept."""
    return _fork(
        Conv(64),
        (Conv(48), Conv(64, (5, 5))),
        (Conv(64), Conv(96, (3, 3)), Conv(96, (3, 3))),
        (AVERAGE, Conv(pooled)),
    )


def _c(inner: int) -> Fork:
    """Figure 6: 7x7 as 1x7 and 7x1."""
    row, column = Conv(inner, (1, 7)), Conv(inner, (7, 1))
    return _fork(
        Conv(192),
        (Conv(inner), row, Conv(192, (7, 1))),
        (Conv(inner), column, row, column, Conv(192, (1, 7))),
        (AVERAGE, Conv(192)),
    )


_SPLIT = _fork(Conv(384, (1, 3)), Conv(384, (3, 1)))

BLOCKS: dict[str, tuple[Any, ...]] = {
    "stem1": (_shrink(32), Conv(32, (3, 3), padding="VALID"), Conv(64, (3, 3)), MAX),
    "stem2": (Conv(80), Conv(192, (3, 3), padding="VALID"), MAX),
    "a32": (_a(32),),
    "a64": (_a(64),),
    "b": (_fork(_shrink(384), (Conv(64), Conv(96, (3, 3)), _shrink(96)), MAX),),  # figure 10
    "c128": (_c(128),),
    "c160": (_c(160),),
    "c192": (_c(192),),
    "d": (
        _fork(
            (Conv(192), _shrink(320)),
            (Conv(192), Conv(192, (1, 7)), Conv(192, (7, 1)), _shrink(192)),
            MAX,
        ),
    ),
    "e": (  # figure 7
        _fork(Conv(320), (Conv(384), _SPLIT), (Conv(448), Conv(384, (3, 3)), _SPLIT), (AVERAGE, Conv(192))),
    ),
}
"""The layers of each block, with the sizes of its name."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes and recipe; see the table above.

    auxiliary: the block after which the auxiliary head is, empty for none; decay: of the rate, every two epochs.
    """

    blocks: tuple[str, ...] = tuple("stem1 stem2 a32 a64 a64 b c128 c160 c160 c192 d e e".split())
    width: float = 1.0
    auxiliary: str = "c192"
    norm: bool = True
    image: int = 299
    classes: int = 1000
    dropout: float = 0.2
    smoothing: float = 0.1
    rmsprop: bool = True
    batch_size: int = 256
    learning_rate: float = 0.045
    decay: float = 0.94
    weight_decay: float = 4e-5
    dtype: Any = jnp.bfloat16


SIZES = {
    "full": Config(),
    "plain": Config(auxiliary=""),
    "unity": Config(
        auxiliary="",
        norm=False,
        classes=10,
        dropout=0.0,
        smoothing=0.0,
        rmsprop=False,
        learning_rate=0.01,
        decay=1.0,
        weight_decay=0.0,
    ),
    "tiny": Config(
        blocks=("stem1", "e"),
        width=1 / 16,
        auxiliary="stem1",
        image=27,
        classes=11,
        batch_size=16,
        learning_rate=0.1,
        decay=1.0,
        dtype=jnp.float32,
    ),
}
PUBLISHED = {"full": 27_161_264, "plain": 23_834_568}


class ConvBias(nnx.Module):
    """Convolution with a bias, where `ConvNorm` normalizes."""

    def __init__(
        self, inputs: int, outputs: int, kernel: Pair, precision: Precision, rngs: nnx.Rngs, stride: int, padding: str
    ) -> None:
        self.conv = nnx.Conv(inputs, outputs, kernel, stride, padding=padding, rngs=rngs, **precision.kwargs)

    def __call__(self, x: Array, train: bool) -> Array:
        """f[B, H, W, inputs] -> f[B, H', W', outputs]."""
        return self.conv(x)


class Path(nnx.Module):
    """Layers one after the other; `outputs` is the number of channels of the last."""

    def __init__(
        self, layers: tuple[Any, ...], inputs: int, config: Config, precision: Precision, rngs: nnx.Rngs
    ) -> None:
        parts: list[Any] = []
        for layer in layers:
            if isinstance(layer, Conv):
                channels = max(8, round(layer.channels * config.width))
                common = (inputs, channels, layer.kernel, precision, rngs)
                if config.norm:
                    options = {"stride": layer.stride, "padding": layer.padding, "momentum": 0.9997, "epsilon": 1e-3}
                    parts.append(ConvNorm(*common, **options))
                else:
                    parts.append(ConvBias(*common, layer.stride, layer.padding))
                inputs = channels
            elif isinstance(layer, Fork):
                paths = [Path(path, inputs, config, precision, rngs) for path in layer.paths]
                parts.append(nnx.List(paths))
                inputs = sum(path.outputs for path in paths)
        self.layers = layers
        self.parts = nnx.List(parts)  # of the layers that have parameters
        self.outputs = inputs

    def __call__(self, x: Array, train: bool) -> Array:
        """f[B, H, W, inputs] -> f[B, H', W', outputs]."""
        parts = iter(self.parts)
        for layer in self.layers:
            if layer == AVERAGE:
                x = nnx.avg_pool(x, (3, 3), padding="SAME")
            elif layer == MAX:
                x = nnx.max_pool(x, (3, 3), strides=(2, 2))
            elif isinstance(layer, Fork):
                x = jnp.concatenate([path(x, train) for path in next(parts)], axis=-1)
            else:
                x = jax.nn.relu(next(parts)(x, train))
        return x


class Auxiliary(nnx.Module):
    """The head beside the trunk: pooling 5x5 with stride 3, 1x1, then a convolution over what is left, then classes."""

    def __init__(self, inputs: int, grid: int, config: Config, precision: Precision, rngs: nnx.Rngs) -> None:
        self.window = min(5, grid)
        left = (grid - self.window) // 3 + 1
        layers = (Conv(128), Conv(768, (left, left), padding="VALID"))
        self.path = Path(layers, inputs, config, precision, rngs)
        self.classifier = nnx.Linear(self.path.outputs, config.classes, rngs=rngs, **precision.kwargs)

    def __call__(self, x: Array, train: bool) -> Array:
        """f[B, H, W, inputs] -> logits f[B, classes]."""
        x = nnx.avg_pool(x, (self.window, self.window), strides=(3, 3))
        return self.classifier(self.path(x, train)[:, 0, 0])


class Inception(nnx.Module):
    """Blocks, global average pool, dropout, classifier; and the auxiliary head, in training only."""

    def __init__(self, config: Config, precision: Precision, rngs: nnx.Rngs) -> None:
        blocks, inputs, grid = [], 3, config.image
        auxiliary = None
        for name in config.blocks:
            blocks.append(Path(BLOCKS[name], inputs, config, precision, rngs))
            inputs, grid = blocks[-1].outputs, _grid_after(BLOCKS[name], grid)
            if name == config.auxiliary:
                auxiliary = Auxiliary(inputs, grid, config, precision, rngs)
        self.names = config.blocks
        self.blocks = nnx.List(blocks)
        self.auxiliary_at = config.auxiliary
        self.auxiliary = auxiliary
        self.dropout = nnx.Dropout(config.dropout)
        self.classifier = nnx.Linear(inputs, config.classes, rngs=rngs, **precision.kwargs)
        self.smoothing = config.smoothing
        self.precision = precision

    def loss(self, batch: Batch, key: Array | None) -> tuple[Array, Metrics]:
        """Mean cross-entropy, in training plus 0.4 times that of the auxiliary head, f[]."""
        train, param = key is not None, self.precision.param
        x = batch["images"].astype(self.precision.compute)
        side = jnp.zeros((), param)
        for name, block in zip(self.names, self.blocks, strict=True):
            x = block(x, train)
            if train and name == self.auxiliary_at:
                side = cross_entropy(self.auxiliary(x, train).astype(param), batch["labels"], self.smoothing)
        logits = self.classifier(drop(self.dropout, x.mean(axis=(1, 2)), key)).astype(param)
        main = cross_entropy(logits, batch["labels"], self.smoothing)
        return main + 0.4 * side, {"classifier_loss": main}


def _grid_after(layers: tuple[Any, ...], grid: int) -> int:
    """The height of the images after these layers."""
    for layer in layers:
        if isinstance(layer, Fork):
            grid = _grid_after(layer.paths[0], grid)
        elif layer == MAX:
            grid = (grid - 3) // 2 + 1
        elif isinstance(layer, Conv) and layer.padding == "VALID":
            grid = (grid - layer.kernel[0]) // layer.stride + 1
    return grid


def _optimizer(config: Config) -> optax.GradientTransformation:
    if not config.rmsprop:
        return optax.sgd(config.learning_rate)
    rate: optax.ScalarOrSchedule = config.learning_rate
    if config.decay != 1:
        rate = optax.exponential_decay(rate, 2 * IMAGENET // config.batch_size, config.decay, staircase=True)
    return optax.chain(
        optax.add_decayed_weights(config.weight_decay, mask=is_matrix),
        optax.clip_by_global_norm(2.0),
        optax.rmsprop(rate, decay=0.9, eps=1.0, initial_scale=1.0, momentum=0.9),
    )


def build(size: str, config: Config) -> Model:
    """The model for a configuration; see `models.get`."""
    precision = make_precision(config.dtype)
    rows, image, classes = config.batch_size, config.image, config.classes
    return Model(
        name="inception",
        size=size,
        config=config,
        make_module=lambda rngs: Inception(config, precision, rngs),
        optimizer=_optimizer(config),
        batch_spec=image_spec(rows, image),
        make_numpy_batch=lambda rng: image_batch(rng, rows, image, classes),
        published_parameters=PUBLISHED.get(size) if config.width == SIZES[size].width else None,
    )
