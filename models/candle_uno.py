"""CANDLE-Uno: a tower of dense layers per feature set of a tumor and two drugs, joined into one regression.

Source: the ECP-CANDLE benchmark Pilot1/Uno and its version in Unity's evaluation (Unger et al. 2022, OSDI 22, section
6, whose released program is the example `candle_uno` of FlexFlow): tumor growth from RNA sequences, drug descriptors
and fingerprints, mean squared error. Unity's version has a tower of its own for each of the five feature sets, no
biases, and SGD at 0.01 with 256 samples per GPU (here of 4); the benchmark shares a tower between the two drugs, has
biases and is trained by Adam on 32 samples.

| size      | features               | towers      | tower   | head    | others | bias | parameters  |
|-----------|------------------------|-------------|---------|---------|--------|------|-------------|
| full      | 942, 2 x (5270, 2048)  | 5           | 8x4192  | 4x4192  | 2      | no   | 820,948,704 |
| benchmark | 17,750, 2 x (5270, 2048) | 3, 2 shared | 3x1000  | 3x1000  | 13     | yes  | 38,094,001  |
| tiny      | 24, 2 x (40, 16)       | 5           | 2x32    | 2x32    | 2      | yes  |             |

`others` are the inputs without a tower: two doses, and in the benchmark which of 11 sources the response is from.
With `residual`, an option of the benchmark that is off in both published sizes, a layer adds its input to its output
where the shapes agree.
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

from models._common import Array, Batch, Metrics, Model, Precision, drop, fold, make_precision


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes and recipe; see the table above. shared: one tower for the same features of both drugs."""

    rnaseq: int = 942
    descriptors: int = 5270
    fingerprints: int = 2048
    others: int = 2
    tower: tuple[int, ...] = (4192,) * 8
    head: tuple[int, ...] = (4192,) * 4
    shared: bool = False
    bias: bool = False
    residual: bool = False
    dropout: float = 0.0
    adam: bool = False
    batch_size: int = 1024
    learning_rate: float = 0.01
    dtype: Any = jnp.bfloat16


SIZES = {
    "full": Config(),
    "benchmark": Config(
        rnaseq=17_750,
        others=13,
        tower=(1000,) * 3,
        head=(1000,) * 3,
        shared=True,
        bias=True,
        adam=True,
        batch_size=32,
        learning_rate=1e-3,
    ),
    "tiny": Config(
        rnaseq=24,
        descriptors=40,
        fingerprints=16,
        tower=(32, 32),
        head=(32, 32),
        bias=True,
        residual=True,
        dropout=0.1,
        batch_size=16,
        learning_rate=0.02,
        dtype=jnp.float32,
    ),
}
PUBLISHED = {"benchmark": 38_094_001}


class Dense(nnx.Module):
    """Linear layers, each with ReLU, dropout and (where shapes agree) a residual."""

    def __init__(
        self, inputs: int, widths: tuple[int, ...], config: Config, precision: Precision, rngs: nnx.Rngs
    ) -> None:
        self.layers = nnx.List(
            [_linear(a, b, config, precision, rngs) for a, b in itertools.pairwise([inputs, *widths])]
        )
        self.dropout = nnx.Dropout(config.dropout)
        self.residual = config.residual

    def __call__(self, x: Array, key: Array | None) -> Array:
        """f[B, inputs] -> f[B, widths[-1]]."""
        for i, layer in enumerate(self.layers):
            y = drop(self.dropout, jax.nn.relu(layer(x)), fold(key, i))
            x = x + y if self.residual and x.shape == y.shape else y
        return x


def _linear(inputs: int, outputs: int, config: Config, precision: Precision, rngs: nnx.Rngs) -> nnx.Linear:
    make = {"kernel_init": nnx.initializers.glorot_uniform(), "rngs": rngs, **precision.kwargs}
    return nnx.Linear(inputs, outputs, use_bias=config.bias, **make)


class CandleUno(nnx.Module):
    """Towers of the feature sets, concatenated with the other inputs, then dense layers down to the growth."""

    def __init__(self, config: Config, precision: Precision, rngs: nnx.Rngs) -> None:
        towers = {
            name: Dense(inputs, config.tower, config, precision, rngs)
            for name, inputs in _features(config).items()
            if not (config.shared and name.startswith("drug2"))
        }
        self.towers = nnx.Dict(towers)
        encoded = len(_features(config)) * config.tower[-1] + config.others
        self.head = Dense(encoded, config.head, config, precision, rngs)
        self.growth = _linear(config.head[-1], 1, config, precision, rngs)
        self.shared = config.shared
        self.precision = precision

    def loss(self, batch: Batch, key: Array | None) -> tuple[Array, Metrics]:
        """Mean squared error, f[]."""
        encoded = [batch["others"].astype(self.precision.compute)]
        for i, (name, x) in enumerate(batch["features"].items()):
            tower = self.towers[name.replace("drug2", "drug1") if self.shared else name]
            encoded.append(tower(x.astype(self.precision.compute), fold(key, i)))
        x = self.head(jnp.concatenate(encoded, axis=1), fold(key, len(encoded)))
        growth = self.growth(x)[:, 0].astype(self.precision.param)
        return jnp.square(growth - batch["growth"].astype(growth.dtype)).mean(), {}


def _features(config: Config) -> dict[str, int]:
    """Feature set -> its width, in alphabetical order."""
    return {
        "drug1_descriptors": config.descriptors,
        "drug1_fingerprints": config.fingerprints,
        "drug2_descriptors": config.descriptors,
        "drug2_fingerprints": config.fingerprints,
        "rnaseq": config.rnaseq,
    }


def _batch_spec(config: Config) -> Batch:
    rows = config.batch_size
    return {
        "features": {name: ShapeDtypeStruct((rows, width), jnp.float32) for name, width in _features(config).items()},
        "others": ShapeDtypeStruct((rows, config.others), jnp.float32),
        "growth": ShapeDtypeStruct((rows,), jnp.float32),
    }


def _make_batch(config: Config, rng: np.random.Generator) -> Batch:
    """Standardized features; two doses in [0, 1] and a one-hot source; growth falls from 1 to -1 with the doses."""
    rows = config.batch_size
    others = np.zeros((rows, config.others), np.float32)
    others[:, :2] = rng.random((rows, 2))
    if config.others > 2:
        others[np.arange(rows), rng.integers(2, config.others, rows)] = 1
    growth = 1 - 2 * others[:, :2].max(axis=1) + 0.3 * rng.standard_normal(rows)
    return {
        "features": {name: rng.standard_normal((rows, w), np.float32) for name, w in _features(config).items()},
        "others": others,
        "growth": growth.astype(np.float32),
    }


def build(size: str, config: Config) -> Model:
    """The model for a configuration; see `models.get`."""
    precision = make_precision(config.dtype)
    return Model(
        name="candle_uno",
        size=size,
        config=config,
        make_module=lambda rngs: CandleUno(config, precision, rngs),
        optimizer=(optax.adam if config.adam else optax.sgd)(config.learning_rate),
        batch_spec=_batch_spec(config),
        make_numpy_batch=lambda rng: _make_batch(config, rng),
        published_parameters=PUBLISHED.get(size) if config.tower == SIZES[size].tower else None,
    )
