"""The MLP of the Unity paper: wide layers of 8192, where reduction parallelism beats data parallelism.

Source: Unger et al. 2022, "Unity: Accelerating DNN Training Through Joint Optimization of Algebraic Transformations
and Parallelization" (OSDI 22), section 6: 16 layers of 8192, 256 samples per GPU, SGD at 0.01. Two readings of it:
`full` is the chain of the text; `towers` is the released program (two towers of 8 layers from one 1024-wide input,
no biases, ReLU but on the last layers, sum, softmax), which that program only ran forward and this one trains.

| size   | towers | layers each | input | width | classes | parameters    |
|--------|--------|-------------|-------|-------|---------|---------------|
| full   | 1      | 16          | 1024  | 8192  | 8192    | 1,015,021,568 |
| towers | 2      | 8           | 1024  | 8192  | 8192    | 956,301,312   |
| tiny   | 2      | 3           | 16    | 64    | 11      |               |
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

from models._common import Array, Batch, Metrics, Model, Precision, make_precision


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes and recipe; see the table above."""

    towers: int = 1
    layers: int = 16
    inputs: int = 1024
    width: int = 8192
    classes: int = 8192
    batch_size: int = 1024
    learning_rate: float = 0.01
    dtype: Any = jnp.bfloat16


SIZES = {
    "full": Config(),
    "towers": Config(towers=2, layers=8),
    "tiny": Config(
        towers=2, layers=3, inputs=16, width=64, classes=11, batch_size=16, learning_rate=0.1, dtype=jnp.float32
    ),
}


class Tower(nnx.Module):
    """A chain of bias-free linear layers with ReLU between them."""

    def __init__(self, config: Config, precision: Precision, rngs: nnx.Rngs) -> None:
        widths = [config.inputs] + [config.width] * (config.layers - 1) + [config.classes]
        make = {"use_bias": False, "kernel_init": nnx.initializers.he_normal(), "rngs": rngs, **precision.kwargs}
        self.layers = nnx.List([nnx.Linear(a, b, **make) for a, b in itertools.pairwise(widths)])

    def __call__(self, x: Array) -> Array:
        """f[B, inputs] -> f[B, classes]."""
        for layer in self.layers[:-1]:
            x = jax.nn.relu(layer(x))
        return self.layers[-1](x)


class Mlp(nnx.Module):
    """Towers from one input, summed, then softmax cross-entropy."""

    def __init__(self, config: Config, precision: Precision, rngs: nnx.Rngs) -> None:
        self.towers = nnx.List([Tower(config, precision, rngs) for _ in range(config.towers)])
        self.precision = precision

    def loss(self, batch: Batch, key: Array | None) -> tuple[Array, Metrics]:
        """Mean cross-entropy, f[]."""
        x = batch["inputs"].astype(self.precision.compute)
        logits = self.towers[0](x)
        for tower in self.towers[1:]:
            logits = logits + tower(x)
        return optax.softmax_cross_entropy_with_integer_labels(
            logits.astype(self.precision.param), batch["labels"]
        ).mean(), {}


def _make_batch(config: Config, rng: np.random.Generator) -> Batch:
    return {
        "inputs": rng.standard_normal((config.batch_size, config.inputs), np.float32),
        "labels": rng.integers(0, config.classes, config.batch_size, np.int32),
    }


def build(size: str, config: Config) -> Model:
    """The model for a configuration; see `models.get`."""
    precision = make_precision(config.dtype)
    return Model(
        name="mlp",
        size=size,
        config=config,
        make_module=lambda rngs: Mlp(config, precision, rngs),
        optimizer=optax.sgd(config.learning_rate),
        batch_spec={
            "inputs": ShapeDtypeStruct((config.batch_size, config.inputs), jnp.float32),
            "labels": ShapeDtypeStruct((config.batch_size,), jnp.int32),
        },
        make_numpy_batch=lambda rng: _make_batch(config, rng),
    )
