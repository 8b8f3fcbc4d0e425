"""What image models share: convolution with batch normalization, smoothed cross-entropy, synthetic labelled images."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import ShapeDtypeStruct

from models._common import Array, Batch, Precision

IMAGENET = 1_281_167
"""Training images of ImageNet-1k (ILSVRC 2012)."""


class ConvNorm(nnx.Module):
    """Convolution without bias, then batch normalization; statistics in f32 or wider."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: Sequence[int],
        precision: Precision,
        rngs: nnx.Rngs,
        *,
        stride: int = 1,
        groups: int = 1,
        padding: str | None = None,
        momentum: float = 0.9,
        epsilon: float = 1e-5,
    ) -> None:
        """padding: None for half the kernel on both sides, whatever the stride; else as XLA names it."""
        self.conv = nnx.Conv(
            inputs,
            outputs,
            kernel,
            stride,
            padding=padding or [(size // 2, size // 2) for size in kernel],
            feature_group_count=groups,
            use_bias=False,
            kernel_init=nnx.initializers.variance_scaling(2.0, "fan_out", "normal"),
            rngs=rngs,
            **precision.kwargs,
        )
        self.norm = batch_norm(outputs, precision, rngs, momentum=momentum, epsilon=epsilon)

    def __call__(self, x: Array, train: bool) -> Array:
        """f[B, H, W, inputs] -> f[B, H / stride, W / stride, outputs]."""
        return self.norm(self.conv(x), use_running_average=not train)


def batch_norm(
    channels: int, precision: Precision, rngs: nnx.Rngs, *, momentum: float = 0.9, epsilon: float = 1e-5
) -> nnx.BatchNorm:
    """Batch normalization whose running statistics have the dtype of the parameters."""
    norm = nnx.BatchNorm(channels, momentum=momentum, epsilon=epsilon, rngs=rngs, **precision.kwargs)
    # nnx makes the running statistics float32 whatever param_dtype is, which a float64 run cannot store into.
    norm.mean = nnx.BatchStat(jnp.zeros((channels,), precision.param))
    norm.var = nnx.BatchStat(jnp.ones((channels,), precision.param))
    return norm


def cross_entropy(logits: Array, labels: Array, smoothing: float = 0.0) -> Array:
    """Mean cross-entropy of f[B, C] with i32[B], f[]; `smoothing` of each target is spread evenly over all classes."""
    if not smoothing:
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    targets = optax.smooth_labels(jax.nn.one_hot(labels, logits.shape[-1], dtype=logits.dtype), smoothing)
    return optax.softmax_cross_entropy(logits, targets).mean()


def image_spec(rows: int, size: int) -> Batch:
    """Labelled square images in NHWC."""
    return {
        "images": ShapeDtypeStruct((rows, size, size, 3), jnp.float32),
        "labels": ShapeDtypeStruct((rows,), jnp.int32),
    }


def image_batch(rng: np.random.Generator, rows: int, size: int, classes: int) -> Batch:
    """Standardized noise with labels."""
    return {
        "images": rng.standard_normal((rows, size, size, 3), np.float32),
        "labels": rng.integers(0, classes, rows, np.int32),
    }
