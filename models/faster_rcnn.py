"""Faster R-CNN: a backbone, a region proposal network and a head on the regions it proposes; images in NHWC.

Source: Ren et al. 2015, "Faster R-CNN" (arXiv 1506.01497), on the ResNet-101 of He et al. 2015 (arXiv 1512.03385): its
first four stages are the backbone, its last is the head on regions of 14 x 14, made by RoIAlign (He et al. 2017, arXiv
1703.06870) with one sample per cell. Pascal VOC: shorter side 600 (here padded to 608 x 800), 20 classes and the
background, SGD at 0.001, momentum 0.9, weight decay 5e-4, one image per device (here of eight).

| size | backbone blocks | head blocks | stem | image     | anchors | proposals | classes | parameters |
|------|-----------------|-------------|------|-----------|---------|-----------|---------|------------|
| full | 3, 4, 23        | 3           | 64   | 608 x 800 | 17,100  | 128       | 21      | 47,457,494 |
| tiny | 1               | 1           | 8    | 32 x 32   | 384     | 16        | 5       |            |

Shapes are static, so these parts of the published training are left out or replaced by their expectation:
suppression of overlapping proposals (the best by score are taken; the true boxes, as published, are among them), the
random choice of 256 anchors, half of them positive (all count, positives and negatives with equal weight), and the
random choice of a quarter of positive regions (all proposals count). Normalization is trained, not frozen at the
statistics of a pre-trained backbone.
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

from models._common import Array, Batch, Metrics, Model, Precision, make_precision
from models._image import ConvNorm
from models.resnet import Block

RATIOS = (0.5, 1.0, 2.0)
"""Height over width of the anchors of each scale."""
BOX_SCALE = (0.1, 0.1, 0.2, 0.2)
"""Standard deviations that the head's box targets are divided by, as in the authors' code."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes and recipe; see the table above. scales: side of the square anchors; boxes: room for true boxes."""

    stages: tuple[int, ...] = (3, 4, 23)
    head: int = 3
    stem: int = 64
    region: int = 14
    image: tuple[int, int] = (608, 800)
    scales: tuple[int, ...] = (128, 256, 512)
    rpn_width: int = 512
    proposals: int = 128
    boxes: int = 16
    classes: int = 21
    batch_size: int = 8
    learning_rate: float = 1e-3
    weight_decay: float = 5e-4
    dtype: Any = jnp.bfloat16

    @property
    def stride(self) -> int:
        """Pixels per cell of the backbone's result: the stem and its pooling halve, and each stage but the first."""
        return 4 * 2 ** (len(self.stages) - 1)


SIZES = {
    "full": Config(),
    "tiny": Config(
        stages=(1,),
        head=1,
        stem=8,
        region=4,
        image=(32, 32),
        scales=(8, 16),
        rpn_width=16,
        proposals=16,
        boxes=4,
        classes=5,
        learning_rate=0.02,
        dtype=jnp.float32,
    ),
}


class FasterRcnn(nnx.Module):
    """Backbone; proposal network with a score and a box per anchor; head with a class and a box per class."""

    def __init__(self, config: Config, precision: Precision, rngs: nnx.Rngs) -> None:
        self.stem = ConvNorm(3, config.stem, (7, 7), precision, rngs, stride=2)
        blocks, inputs = [], config.stem
        counts = [*config.stages, config.head]
        for stage, count in enumerate(counts):
            for i in range(count):
                stride = 2 if stage > 0 and i == 0 else 1
                blocks.append(Block(inputs, config.stem * 2**stage, True, stride, precision, rngs))
                inputs = blocks[-1].outputs
        self.backbone = nnx.List(blocks[: -config.head])
        self.head = nnx.List(blocks[-config.head :])
        make = {"kernel_init": nnx.initializers.normal(0.01), "rngs": rngs, **precision.kwargs}
        anchors = len(config.scales) * len(RATIOS)
        self.rpn = nnx.Conv(self.backbone[-1].outputs, config.rpn_width, (3, 3), **make)
        self.rpn_score = nnx.Conv(config.rpn_width, anchors, (1, 1), **make)
        self.rpn_box = nnx.Conv(config.rpn_width, 4 * anchors, (1, 1), **make)
        self.classifier = nnx.Linear(inputs, config.classes, **make)
        self.box = nnx.Linear(inputs, 4 * config.classes, **make)
        self.config = config
        self.precision = precision

    def propose(self, features: Array, batch: Batch, anchors: Array) -> tuple[Array, Array, Array]:
        """features f[B, H, W, C], anchors f[A, 4] -> proposals f[B, P, 4], and the two losses of the network."""
        config, param = self.config, self.precision.param
        x = jax.nn.relu(self.rpn(features))
        scores = self.rpn_score(x).astype(param).reshape(x.shape[0], -1)
        moves = self.rpn_box(x).astype(param).reshape(x.shape[0], -1, 4)

        boxes, real = batch["boxes"].astype(param), batch["classes"] > 0
        overlap = jnp.where(real[:, None, :], iou(anchors, boxes), 0)
        best_anchor = overlap.argmax(axis=1)
        number = jnp.arange(anchors.shape[0], dtype=best_anchor.dtype)
        forced = ((number[None, :, None] == best_anchor[:, None, :]) & real[:, None, :]).any(axis=2)
        positive = forced | (overlap.max(axis=2) >= 0.7)
        negative = ~positive & (overlap.max(axis=2) < 0.3)
        losses = optax.sigmoid_binary_cross_entropy(scores, positive.astype(param))
        score_loss = (_mean_where(positive, losses) + _mean_where(negative, losses)) / 2
        targets = encode(_pick(boxes, overlap.argmax(axis=2)), anchors)
        box_loss = _mean_where(positive, smooth_l1(moves - targets, 1 / 9).sum(axis=-1))

        _, best = jax.lax.top_k(scores, config.proposals - config.boxes)
        limits = jnp.asarray([*config.image, *config.image], param)
        proposals = jnp.clip(decode(moves, anchors), 0, limits)
        proposals = jnp.concatenate([_pick(proposals, best), boxes], axis=1)
        return jax.lax.stop_gradient(proposals), score_loss, box_loss

    def detect(self, features: Array, proposals: Array, batch: Batch, train: bool) -> tuple[Array, Array]:
        """features f[B, H, W, C], proposals f[B, P, 4] -> the two losses of the head."""
        config, param = self.config, self.precision.param
        x = align(features, proposals / config.stride, config.region)
        rows, count = x.shape[:2]
        x = x.reshape(rows * count, *x.shape[2:])
        for block in self.head:
            x = block(x, train)
        x = x.mean(axis=(1, 2))
        logits = self.classifier(x).astype(param).reshape(rows, count, -1)
        moves = self.box(x).astype(param).reshape(rows, count, config.classes, 4)

        boxes = batch["boxes"].astype(param)
        overlap = jnp.where((batch["classes"] > 0)[:, None, :], iou(proposals, boxes), 0)
        match = overlap.argmax(axis=2)
        positive = overlap.max(axis=2) >= 0.5
        labels = jnp.where(positive, jnp.take_along_axis(batch["classes"], match, axis=1), 0)
        class_loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        targets = encode(_pick(boxes, match), proposals) / jnp.asarray(BOX_SCALE, param)
        moves = jnp.take_along_axis(moves, labels[:, :, None, None], axis=2)[:, :, 0]
        losses = jnp.where(positive, smooth_l1(moves - targets, 1.0).sum(axis=-1), 0)
        return class_loss, losses.mean()

    def loss(self, batch: Batch, key: Array | None) -> tuple[Array, Metrics]:
        """Sum of the losses of both parts, f[]."""
        train = key is not None
        x = jax.nn.relu(self.stem(batch["images"].astype(self.precision.compute), train))
        x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
        for block in self.backbone:
            x = block(x, train)
        anchors = jnp.asarray(make_anchors(self.config), self.precision.param)
        proposals, score_loss, proposal_loss = self.propose(x, batch, anchors)
        class_loss, box_loss = self.detect(x, proposals, batch, train)
        metrics = {
            "score_loss": score_loss,
            "proposal_loss": proposal_loss,
            "class_loss": class_loss,
            "box_loss": box_loss,
        }
        return score_loss + proposal_loss + class_loss + box_loss, metrics


def make_anchors(config: Config) -> np.ndarray:
    """Corners (top, left, bottom, right) of the anchors of every cell, f64[H W K, 4]."""
    rows, columns = (side // config.stride for side in config.image)
    sizes = np.array([[s * math.sqrt(r), s / math.sqrt(r)] for s in config.scales for r in RATIOS])
    cells = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), axis=-1).reshape(-1, 1, 2)
    centers = (cells + 0.5) * config.stride
    return np.concatenate([centers - sizes / 2, centers + sizes / 2], axis=-1).reshape(-1, 4)


def iou(a: Array, b: Array) -> Array:
    """Intersection over union of boxes f[..., N, 4] and f[..., M, 4] -> f[..., N, M]."""
    a, b = a[..., :, None, :], b[..., None, :, :]
    height = jnp.minimum(a[..., 2], b[..., 2]) - jnp.maximum(a[..., 0], b[..., 0])
    width = jnp.minimum(a[..., 3], b[..., 3]) - jnp.maximum(a[..., 1], b[..., 1])
    common = jnp.maximum(height, 0) * jnp.maximum(width, 0)
    return common / jnp.maximum(_area(a) + _area(b) - common, 1)


def _area(box: Array) -> Array:
    return (box[..., 2] - box[..., 0]) * (box[..., 3] - box[..., 1])


def _center_and_size(box: Array) -> tuple[Array, Array]:
    size = jnp.maximum(box[..., 2:] - box[..., :2], 1)
    return box[..., :2] + size / 2, size


def encode(box: Array, anchor: Array) -> Array:
    """The move from an anchor to a box: shift of the center in sizes of the anchor, logarithm of the size's growth."""
    (center, size), (start, unit) = _center_and_size(box), _center_and_size(anchor)
    return jnp.concatenate([(center - start) / unit, jnp.log(size / unit)], axis=-1)


def decode(move: Array, anchor: Array) -> Array:
    """The inverse of `encode`; a size grows at most from 16 pixels to 1000."""
    start, unit = _center_and_size(anchor)
    center = start + move[..., :2] * unit
    size = unit * jnp.exp(jnp.minimum(move[..., 2:], math.log(1000 / 16)))
    return jnp.concatenate([center - size / 2, center + size / 2], axis=-1)


def align(features: Array, boxes: Array, size: int) -> Array:
    """RoIAlign: features f[B, H, W, C] at the centers of size x size cells of boxes f[B, P, 4], in units of pixels.

    Returns f[B, P, size, size, C], each value bilinear between the four pixels around it.
    """
    rows, height, width, channels = features.shape
    cell = (jnp.arange(size, dtype=boxes.dtype) + 0.5) / size
    flat = features.reshape(rows, height * width, channels)
    y = _between(boxes[..., 0:1] + (boxes[..., 2:3] - boxes[..., 0:1]) * cell, height)
    x = _between(boxes[..., 1:2] + (boxes[..., 3:4] - boxes[..., 1:2]) * cell, width)
    total = 0
    for row, row_share in y:
        for column, column_share in x:
            place = row[..., :, None] * width + column[..., None, :]
            share = (row_share[..., :, None] * column_share[..., None, :])[..., None].astype(features.dtype)
            found = jnp.take_along_axis(flat, place.reshape(rows, -1, 1), axis=1)
            total = total + share * found.reshape(*place.shape, channels)
    return total


def _between(position: Array, size: int) -> list[tuple[Array, Array]]:
    """The two pixels around each position, whose centers are at half pixels, and the share of each."""
    position = jnp.clip(position - 0.5, 0, size - 1)
    low = jnp.minimum(jnp.floor(position), size - 2)
    share = position - low
    low = jax.lax.stop_gradient(low).astype(jnp.int32)
    return [(low, 1 - share), (low + 1, share)]


def smooth_l1(error: Array, beta: float) -> Array:
    """Quadratic within `beta` of zero, then linear with slope one."""
    return optax.huber_loss(error, delta=beta) / beta


def _pick(boxes: Array, index: Array) -> Array:
    """Boxes f[B, N, 4] by i32[B, M] -> f[B, M, 4]."""
    return jnp.take_along_axis(boxes, index[:, :, None], axis=1)


def _mean_where(mask: Array, x: Array) -> Array:
    return jnp.where(mask, x, 0).sum() / jnp.maximum(mask.sum(dtype=x.dtype), 1)


def _batch_spec(config: Config) -> Batch:
    return {
        "images": ShapeDtypeStruct((config.batch_size, *config.image, 3), jnp.float32),
        "boxes": ShapeDtypeStruct((config.batch_size, config.boxes, 4), jnp.float32),
        "classes": ShapeDtypeStruct((config.batch_size, config.boxes), jnp.int32),
    }


def _make_batch(config: Config, rng: np.random.Generator) -> Batch:
    """Noise with one to four true boxes per image (2.5 on average, as in VOC); the rest of the room is class 0."""
    rows, room = config.batch_size, config.boxes
    limits = np.array(config.image, np.float64)
    size = rng.uniform(0.2, 0.8, (rows, room, 2)) * limits
    start = rng.random((rows, room, 2)) * (limits - size)
    real = np.arange(room) < rng.integers(1, min(4, room) + 1, (rows, 1))
    boxes = np.concatenate([start, start + size], axis=-1) * real[..., None]
    return {
        "images": rng.standard_normal((rows, *config.image, 3), np.float32),
        "boxes": boxes.astype(np.float32),
        "classes": (rng.integers(1, config.classes, (rows, room)) * real).astype(np.int32),
    }


def build(size: str, config: Config) -> Model:
    """The model for a configuration; see `models.get`."""
    precision = make_precision(config.dtype)
    return Model(
        name="faster_rcnn",
        size=size,
        config=config,
        make_module=lambda rngs: FasterRcnn(config, precision, rngs),
        optimizer=optax.chain(
            optax.add_decayed_weights(config.weight_decay), optax.sgd(config.learning_rate, momentum=0.9)
        ),
        batch_spec=_batch_spec(config),
        make_numpy_batch=lambda rng: _make_batch(config, rng),
    )
