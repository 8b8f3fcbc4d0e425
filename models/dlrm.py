"""DLRM: embedding bags over huge tables, a pairwise interaction, and two MLPs; click-through prediction.

Source: Naumov et al. 2019, "Deep Learning Recommendation Model for Personalization and Recommendation Systems" (arXiv
1906.00091). `full` has the tables, bags and MLPs of the MLPerf training benchmark on Criteo 1TB since version 3.0
(multi-hot, Adagrad at 0.005), with the paper's dot interaction in place of the benchmark's cross network. `kaggle` and
`terabyte` are the two Criteo runs of the paper's released code (one id per table; the larger caps tables at ten
million rows). `unity` follows the larger program of Unity's artifact (8 tables of a million rows, interaction by
concatenation), `unity-24` the variant of its scripts with 24 narrower tables. All use Adagrad.

| size     | tables (rows)    | ids | width | bottom MLP       | top MLP                 | parameters     |
|----------|------------------|-----|-------|------------------|-------------------------|----------------|
| full     | 26 (204,184,588) | 214 | 128   | 13-512-256-128   | 479-1024-1024-512-256-1 | 26,137,996,161 |
| kaggle   | 26 (33,762,577)  | 26  | 16    | 13-512-256-64-16 | 367-512-256-1           | 540,677,217    |
| terabyte | 26 (49,126,297)  | 26  | 64    | 13-512-256-64    | 415-512-512-256-1       | 3,144,845,185  |
| unity    | 8 (8,000,000)    | 8   | 256   | 13-8x1024-256    | 2304-4x1024-1           | 2,061,134,081  |
| unity-24 | 24 (24,000,000)  | 24  | 64    | 64-512-512-64    | 1600-3x1024-1           | 1,540,068,417  |
| tiny     | 5 (1,378)        | 12  | 16    | 13-32-16         | 31-32-16-1              | 24,593         |

`ids` is the number of ids per sample, over all tables.

Rows range from 3 to 40,000,000: tables smaller than any mesh next to tables larger than a device. Gradients of tables
are dense, as JAX makes them: a scatter-add into zeros of the table's size.
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

_M = 1_000_000
# fmt: off
_CRITEO_ROWS = (
    40 * _M, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40 * _M, 3_067_956, 405_282, 10,
    2_209, 11_938, 155, 4, 976, 14, 40 * _M, 40 * _M, 40 * _M, 590_152, 12_973, 108, 36,
)
_KAGGLE_ROWS = (
    1_460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5_683, 8_351_593, 3_194,
    27, 14_992, 5_461_306, 10, 5_652, 2_173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572,
)
_TERABYTE_ROWS = (
    3, 4, 10, 14, 36, 61, 101, 122, 970, 1_442, 2_208, 7_112, 7_378, 11_156, 12_420, 17_217, 20_134,
    36_084, 313_829, 415_421, 1_333_352, 7_267_859, 9_758_201, 9_946_608, 9_980_333, 9_994_222,
)
_CRITEO_BAGS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
# fmt: on


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes and recipe; see the table above. rows, bags: per table, its rows and the ids per sample."""

    rows: tuple[int, ...] = _CRITEO_ROWS
    bags: tuple[int, ...] = _CRITEO_BAGS
    width: int = 128
    dense: int = 13
    bottom: tuple[int, ...] = (512, 256, 128)
    top: tuple[int, ...] = (1024, 1024, 512, 256, 1)
    interaction: str = "dot"
    batch_size: int = 65_536
    learning_rate: float = 0.005
    dtype: Any = jnp.bfloat16


SIZES = {
    "full": Config(),
    "kaggle": Config(
        rows=_KAGGLE_ROWS,
        bags=(1,) * 26,
        width=16,
        bottom=(512, 256, 64, 16),
        top=(512, 256, 1),
        batch_size=128,
    ),
    "terabyte": Config(
        rows=_TERABYTE_ROWS,
        bags=(1,) * 26,
        width=64,
        bottom=(512, 256, 64),
        top=(512, 512, 256, 1),
        batch_size=2048,
    ),
    "unity": Config(
        rows=(_M,) * 8,
        bags=(1,) * 8,
        width=256,
        bottom=(1024,) * 8 + (256,),
        top=(1024,) * 4 + (1,),
        interaction="concat",
        batch_size=4096,
    ),
    "unity-24": Config(
        rows=(_M,) * 24,
        bags=(1,) * 24,
        width=64,
        dense=64,
        bottom=(512, 512, 64),
        top=(1024,) * 3 + (1,),
        interaction="concat",
        batch_size=4096,
    ),
    "tiny": Config(
        rows=(1000, 3, 64, 250, 61),
        bags=(4, 1, 3, 2, 2),
        width=16,
        bottom=(32, 16),
        top=(32, 16, 1),
        batch_size=16,
        learning_rate=0.05,
        dtype=jnp.float32,
    ),
}


class Mlp(nnx.Module):
    """Linear layers with ReLU between them."""

    def __init__(self, widths: tuple[int, ...], precision: Precision, rngs: nnx.Rngs) -> None:
        make = {"kernel_init": nnx.initializers.glorot_normal(), "rngs": rngs, **precision.kwargs}
        self.layers = nnx.List([nnx.Linear(a, b, **make) for a, b in itertools.pairwise(widths)])

    def __call__(self, x: Array) -> Array:
        """f[B, widths[0]] -> f[B, widths[-1]]."""
        for layer in self.layers[:-1]:
            x = jax.nn.relu(layer(x))
        return self.layers[-1](x)


class Dlrm(nnx.Module):
    """Bags of each table and the bottom MLP's output, combined and scored by the top MLP."""

    def __init__(self, config: Config, precision: Precision, rngs: nnx.Rngs) -> None:
        features = len(config.rows) + 1
        if config.interaction == "dot":
            combined = config.width + features * (features - 1) // 2
        else:
            combined = config.width * features
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
        self.bottom = Mlp((config.dense, *config.bottom), precision, rngs)
        self.top = Mlp((combined, *config.top), precision, rngs)
        self.interaction = config.interaction
        self.precision = precision

    def interact(self, features: list[Array]) -> Array:
        """F arrays f[B, W], the dense one first -> f[B, W + F(F-1)/2] of pairwise dots, or f[B, F W] concatenated."""
        if self.interaction == "concat":
            return jnp.concatenate(features, axis=1)
        stacked = jnp.stack(features, axis=1)
        dots = jnp.einsum("bfw,bgw->bfg", stacked, stacked)
        rows, columns = np.tril_indices(len(features), -1)
        below = (rows * len(features) + columns).astype(np.int32)
        pairs = jnp.take(dots.reshape(dots.shape[0], -1), below, axis=1)
        return jnp.concatenate([features[0], pairs], axis=1)

    def loss(self, batch: Batch, key: Array | None) -> tuple[Array, Metrics]:
        """Mean binary cross-entropy, f[]."""
        compute = self.precision.compute
        dense = jax.nn.relu(self.bottom(batch["dense"].astype(compute)))
        bags = [table(ids).sum(axis=1).astype(compute) for table, ids in zip(self.tables, batch["ids"], strict=True)]
        logits = self.top(self.interact([dense, *bags]))[:, 0].astype(self.precision.param)
        labels = batch["labels"].astype(logits.dtype)
        return optax.sigmoid_binary_cross_entropy(logits, labels).mean(), {}


def _batch_spec(config: Config) -> Batch:
    return {
        "dense": ShapeDtypeStruct((config.batch_size, config.dense), jnp.float32),
        "ids": tuple(ShapeDtypeStruct((config.batch_size, bag), jnp.int32) for bag in config.bags),
        "labels": ShapeDtypeStruct((config.batch_size,), jnp.float32),
    }


def _make_batch(config: Config, rng: np.random.Generator) -> Batch:
    """Counts on a log scale, Zipf ids, one click in four (as in Criteo's sampled logs, roughly)."""
    counts = rng.poisson(rng.gamma(0.5, 20.0, (config.batch_size, config.dense)))
    return {
        "dense": np.log1p(counts).astype(np.float32),
        "ids": tuple(zipf(rng, (config.batch_size, b), r) for r, b in zip(config.rows, config.bags, strict=True)),
        "labels": (rng.random(config.batch_size) < 0.25).astype(np.float32),
    }


def build(size: str, config: Config) -> Model:
    """The model for a configuration; see `models.get`."""
    precision = make_precision(config.dtype)
    return Model(
        name="dlrm",
        size=size,
        config=config,
        make_module=lambda rngs: Dlrm(config, precision, rngs),
        optimizer=optax.adagrad(config.learning_rate),
        batch_spec=_batch_spec(config),
        make_numpy_batch=lambda rng: _make_batch(config, rng),
    )
