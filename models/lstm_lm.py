"""LSTM language model: scan over time, dropout between layers only, state carried from batch to batch.

Source: Zaremba, Sutskever and Vinyals 2014, "Recurrent Neural Network Regularization" (arXiv 1409.2329), on the Penn
Treebank: 20 streams, 35 steps of truncated backpropagation, SGD at 1.0 on the loss summed over time, gradients clipped
by global norm; large: 66 M parameters, dropout 0.65, clip 10; medium: 20 M, dropout 0.5, clip 5.

| size   | layers | hidden | tokens | vocabulary | parameters |
|--------|--------|--------|--------|------------|------------|
| full   | 2      | 1500   | 35     | 10,000     | 66,022,000 |
| medium | 2      | 650    | 35     | 10,000     | 19,775,200 |
| tiny   | 2      | 64     | 12     | 250        |            |

The last hidden and cell states, f[L, B, H] each, are `state.variables` and begin the next batch.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from models._common import (
    Array,
    Batch,
    Metrics,
    Model,
    Precision,
    drop,
    fold,
    next_token_model,
)
from models._recurrent import Lstm


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes and recipe; see the table above."""

    layers: int = 2
    hidden: int = 1500
    length: int = 35
    vocabulary: int = 10_000
    batch_size: int = 20
    dropout: float = 0.65
    learning_rate: float = 1.0
    clip: float = 10.0
    init_scale: float = 0.04
    dtype: Any = jnp.bfloat16


SIZES = {
    "full": Config(),
    "medium": Config(hidden=650, dropout=0.5, clip=5.0, init_scale=0.05),
    "tiny": Config(
        hidden=64,
        length=12,
        vocabulary=250,
        batch_size=16,
        dropout=0.1,
        learning_rate=0.3,
        init_scale=0.1,
        dtype=jnp.float32,
    ),
}


class Carry(nnx.Variable):
    """A recurrent state that outlives the step."""


class LstmLm(nnx.Module):
    """Embedding, LSTM layers with dropout around each, output projection."""

    def __init__(self, config: Config, precision: Precision, rngs: nnx.Rngs) -> None:
        scale = config.init_scale

        def init(key: Array, shape: tuple[int, ...], dtype: Any, **kwargs: Any) -> Array:
            return jax.random.uniform(key, shape, dtype, -scale, scale, **kwargs)

        self.token = nnx.Embed(
            config.vocabulary, config.hidden, embedding_init=init, param_dtype=precision.param, rngs=rngs
        )
        self.layers = nnx.List(
            [Lstm(config.hidden, config.hidden, init, precision, rngs) for _ in range(config.layers)]
        )
        self.output = nnx.Linear(
            config.hidden, config.vocabulary, kernel_init=init, bias_init=init, rngs=rngs, **precision.kwargs
        )
        self.dropout = nnx.Dropout(config.dropout)
        start = (config.layers, config.batch_size, config.hidden)
        self.hidden = Carry(jnp.zeros(start, precision.param))
        self.cell = Carry(jnp.zeros(start, precision.param))
        self.precision = precision

    def loss(self, batch: Batch, key: Array | None) -> tuple[Array, Metrics]:
        """Next-token cross-entropy summed over time, averaged over streams, f[]; and perplexity per token."""
        x = self.token(batch["tokens"].T).astype(self.precision.compute)
        hidden, cell = self.hidden[...], self.cell[...]
        last = []
        for i, layer in enumerate(self.layers):
            x, end = layer(drop(self.dropout, x, fold(key, i)), (hidden[i], cell[i]))
            last.append(end)
        self.hidden[...] = jnp.stack([h for h, _ in last])
        self.cell[...] = jnp.stack([c for _, c in last])
        logits = self.output(drop(self.dropout, x, fold(key, len(self.layers)))).astype(self.precision.param)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"].T)
        return losses.sum(axis=0).mean(), {"perplexity": jnp.exp(losses.mean())}


def build(size: str, config: Config) -> Model:
    """The model for a configuration; see `models.get`."""
    optimizer = optax.chain(optax.clip_by_global_norm(config.clip), optax.sgd(config.learning_rate))
    return next_token_model("lstm_lm", size, config, LstmLm, optimizer)
