"""XDL: embeddings of sparse features, concatenated, then a small MLP; click-through prediction.

Source: Jiang et al. 2019, "XDL: An Industrial Deep Learning Framework for High-dimensional Sparse Data" (DLP-KDD 19),
as in Unity's evaluation (Unger et al. 2022, OSDI 22, section 6, whose released program is the example `XDL` of
FlexFlow): tables of a million rows, no biases, ReLU, a sigmoid after the last layer, mean squared error on its two
outputs (not clicked, clicked), SGD at 0.01 with 1024 samples per GPU (here of 4).

| size | tables (rows)  | ids | width | MLP             | parameters  |
|------|----------------|-----|-------|-----------------|-------------|
| full | 4 (4,000,000)  | 4   | 64    | 256-256-256-2   | 256,131,584 |
| tiny | 4 (1,256)      | 8   | 16    | 64-32-32-2      |             |

`ids` is the number of ids per sample, over all tables; the embeddings of a bag are summed.
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

from models._common import Array, Batch, Metrics, Model, Precision, make_precision, uniform_within, zipf


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes and recipe; see the table above. rows: of each table; bag: ids per sample and table."""

    rows: tuple[int, ...] = (1_000_000,) * 4
    bag: int = 1
    width: int = 64
    mlp: tuple[int, ...] = (256, 256, 2)
    batch_size: int = 4096
    learning_rate: float = 0.01
    dtype: Any = jnp.bfloat16


SIZES = {
    "full": Config(),
    "tiny": Config(
        rows=(1000, 128, 64, 64), bag=2, width=16, mlp=(32, 32, 2), batch_size=16, learning_rate=1.0, dtype=jnp.float32
    ),
}


class Xdl(nnx.Module):
    """Embedding bags side by side, then linear layers."""

    def __init__(self, config: Config, precision: Precision, rngs: nnx.Rngs) -> None:
        self.tables = nnx.List([
            nnx.Embed(
                rows,
                config.width,
                embedding_init=uniform_within(rows**-0.5),
                param_dtype=precision.param,
                rngs=rngs,
            )
            for rows in config.rows
        ])  # fmt: skip
        widths = [len(config.rows) * config.width, *config.mlp]
        make = {"use_bias": False, "kernel_init": nnx.initializers.glorot_normal(), "rngs": rngs, **precision.kwargs}
        self.layers = nnx.List([nnx.Linear(a, b, **make) for a, b in itertools.pairwise(widths)])
        self.precision = precision

    def loss(self, batch: Batch, key: Array | None) -> tuple[Array, Metrics]:
        """Mean squared error of the two outputs, f[]."""
        compute, param = self.precision.compute, self.precision.param
        bags = [table(ids).sum(axis=1).astype(compute) for table, ids in zip(self.tables, batch["ids"], strict=True)]
        x = jnp.concatenate(bags, axis=1)
        for layer in self.layers[:-1]:
            x = jax.nn.relu(layer(x))
        scores = jax.nn.sigmoid(self.layers[-1](x).astype(param))
        return jnp.square(scores - jax.nn.one_hot(batch["labels"], scores.shape[1], dtype=param)).mean(), {}


def _batch_spec(config: Config) -> Batch:
    return {
        "ids": tuple(ShapeDtypeStruct((config.batch_size, config.bag), jnp.int32) for _ in config.rows),
        "labels": ShapeDtypeStruct((config.batch_size,), jnp.int32),
    }


def _make_batch(config: Config, rng: np.random.Generator) -> Batch:
    """Zipf ids, one click in four."""
    return {
        "ids": tuple(zipf(rng, (config.batch_size, config.bag), rows) for rows in config.rows),
        "labels": (rng.random(config.batch_size) < 0.25).astype(np.int32),
    }


def build(size: str, config: Config) -> Model:
    """The model for a configuration; see `models.get`."""
    precision = make_precision(config.dtype)
    return Model(
        name="xdl",
        size=size,
        config=config,
        make_module=lambda rngs: Xdl(config, precision, rngs),
        optimizer=optax.sgd(config.learning_rate),
        batch_spec=_batch_spec(config),
        make_numpy_batch=lambda rng: _make_batch(config, rng),
    )
