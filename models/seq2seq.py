"""Translation by LSTMs with attention: GNMT as trained in MLPerf and, smaller, the Seq2Seq of TBD.

Sources: Wu et al. 2016, "Google's Neural Machine Translation System" (arXiv 1609.08144), in the form of MLPerf
Training's reference (version 2: attention from the first decoder layer): the encoder's first layer runs both ways, the
rest forward, residual from the third on; the decoder's first layer attends over the encoder by the normalized additive
attention of Bahdanau et al. 2014 (arXiv 1409.0473), and the context joins the input of every later layer. Dropout on
the input of each LSTM, uniform(-0.1, 0.1) weights, label smoothing 0.1, Adam at 0.001 clipped at 5, 200 steps of
exponential warm-up, the rate halved four times in the last third. Zhu et al. 2018, "Benchmarking and Analyzing Deep
Neural Network Training" (TBD; arXiv 1803.06905) for nmt: 2 + 2 layers of 512 on IWSLT 2015 English-Vietnamese.

| size | layers | hidden | tokens | vocabulary | parameters  |
|------|--------|--------|--------|------------|-------------|
| full | 4 + 4  | 1024   | 50     | 32,320     | 160,634,433 |
| nmt  | 2 + 2  | 512    | 50     | 17,188     |  30,736,165 |
| tiny | 3 + 3  | 16     | 12     | 251        |             |

The two languages share the embedding; the output projection is its own. Layers run one after the other, each a scan
over time: in training the target is known, so all queries attend at once.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import ShapeDtypeStruct

from models._attention import as_bias
from models._common import (
    Array,
    Batch,
    Metrics,
    Model,
    Precision,
    drop,
    fold,
    make_precision,
    sentence_pairs,
    smoothed_cross_entropy,
)
from models._recurrent import Lstm


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes and recipe; see the table above."""

    layers: int = 4
    hidden: int = 1024
    vocabulary: int = 32_320
    length: int = 50
    batch_size: int = 1024
    dropout: float = 0.2
    smoothing: float = 0.1
    init_scale: float = 0.1
    learning_rate: float = 1e-3
    clip: float = 5.0
    warmup: int = 200
    steps: int = 26_000
    dtype: Any = jnp.bfloat16


SIZES = {
    "full": Config(),
    "nmt": Config(layers=2, hidden=512, vocabulary=17_188, batch_size=32, smoothing=0.0, steps=50_000),
    "tiny": Config(
        layers=3,
        hidden=16,
        vocabulary=251,
        length=12,
        batch_size=16,
        learning_rate=3e-2,
        warmup=0,
        dtype=jnp.float32,
    ),
}


class Attention(nnx.Module):
    """Normalized additive attention: softmax of g v/|v| . tanh(query + key + b)."""

    def __init__(self, hidden: int, init: Any, precision: Precision, rngs: nnx.Rngs) -> None:
        make = {"use_bias": False, "kernel_init": init, "rngs": rngs, **precision.kwargs}
        self.query = nnx.Linear(hidden, hidden, **make)
        self.key = nnx.Linear(hidden, hidden, **make)
        self.vector = nnx.Param(init(rngs.params(), (hidden,), precision.param))
        self.bias = nnx.Param(jnp.zeros((hidden,), precision.param))
        self.gain = nnx.Param(jnp.full((), hidden**-0.5, precision.param))
        self.precision = precision

    def __call__(self, x: Array, memory: Array, bias: Array) -> Array:
        """x f[T, B, H], memory f[S, B, H], bias f[S, B] -> contexts f[T, B, H]."""
        vector = self.vector[...]
        vector = (self.gain[...] * vector * jax.lax.rsqrt((vector**2).sum())).astype(x.dtype)
        keys = self.key(memory) + self.bias[...].astype(x.dtype)
        met = jnp.tanh(self.query(x)[:, None] + keys)  # [T, S, B, H]
        scores = jnp.einsum("tsbh,h->tsb", met, vector, preferred_element_type=self.precision.param)
        weights = jax.nn.softmax(scores + bias, axis=1).astype(x.dtype)
        return jnp.einsum("tsb,sbh->tbh", weights, memory)


class Seq2Seq(nnx.Module):
    """Embedding, encoder, decoder with attention, output projection."""

    def __init__(self, config: Config, precision: Precision, rngs: nnx.Rngs) -> None:
        scale, hidden = config.init_scale, config.hidden

        def init(key: Array, shape: tuple[int, ...], dtype: Any, **kwargs: Any) -> Array:
            return jax.random.uniform(key, shape, dtype, -scale, scale, **kwargs)

        def lstm(inputs: int) -> Lstm:
            return Lstm(inputs, hidden, init, precision, rngs)

        later = range(1, config.layers)
        self.token = nnx.Embed(config.vocabulary, hidden, embedding_init=init, param_dtype=precision.param, rngs=rngs)
        self.forward, self.backward = lstm(hidden), lstm(hidden)
        self.encoder = nnx.List([lstm(2 * hidden if i == 1 else hidden) for i in later])
        self.first = lstm(hidden)
        self.attention = Attention(hidden, init, precision, rngs)
        self.decoder = nnx.List([lstm(2 * hidden) for _ in later])
        self.output = nnx.Linear(
            hidden, config.vocabulary, kernel_init=init, bias_init=init, rngs=rngs, **precision.kwargs
        )
        self.dropout = nnx.Dropout(config.dropout)
        self.config = config
        self.precision = precision

    def encode(self, source: Array, key: Array | None) -> Array:
        """i32[S, B] -> f[S, B, H]."""
        real = (source > 0)[..., None]
        x = drop(self.dropout, self.token(source).astype(self.precision.compute), fold(key, 0))
        x = jnp.concatenate([self.forward(x)[0], self.backward(x, real=real, reverse=True)[0]], axis=-1)
        for i, layer in enumerate(self.encoder, 1):
            y, _ = layer(drop(self.dropout, x, fold(key, i)))
            x = y if i == 1 else x + y
        return x

    def decode(self, before: Array, memory: Array, bias: Array, key: Array | None) -> Array:
        """Tokens before those to predict i32[T, B], memory f[S, B, H], bias f[S, B] -> f[T, B, H]."""
        x = drop(self.dropout, self.token(before).astype(self.precision.compute), fold(key, 0))
        x, _ = self.first(x)
        context = self.attention(x, memory, bias)
        for i, layer in enumerate(self.decoder, 1):
            y, _ = layer(drop(self.dropout, jnp.concatenate([x, context], axis=-1), fold(key, i)))
            x = y if i == 1 else x + y
        return x

    def loss(self, batch: Batch, key: Array | None) -> tuple[Array, Metrics]:
        """Mean smoothed cross-entropy of the real target tokens, f[], and the same without smoothing."""
        source, target = batch["source"].T, batch["target"].T
        memory = self.encode(source, fold(key, 0))
        before = jnp.pad(target[:-1], ((1, 0), (0, 0)))
        x = self.decode(before, memory, as_bias(source > 0, self.precision), fold(key, 1))
        logits = self.output(x).astype(self.precision.param)
        weights = (target > 0).astype(logits.dtype)
        smoothed = smoothed_cross_entropy(logits, target, self.config.smoothing)
        plain = optax.softmax_cross_entropy_with_integer_labels(logits, target)
        count = weights.sum()
        return (weights * smoothed).sum() / count, {"token_loss": (weights * plain).sum() / count}


def _rate(config: Config) -> optax.ScalarOrSchedule:
    """A hundredth of the rate to all of it, exponentially; halved four times, evenly over the last third."""
    if not config.warmup:
        return config.learning_rate
    up = optax.exponential_decay(config.learning_rate / 100, config.warmup, 100.0)
    halvings = {round(config.steps * (2 + i / 4) / 3) - config.warmup: 0.5 for i in range(4)}
    down = optax.piecewise_constant_schedule(config.learning_rate, halvings)
    return optax.join_schedules([up, down], [config.warmup])


def build(size: str, config: Config) -> Model:
    """The model for a configuration; see `models.get`."""
    precision = make_precision(config.dtype)
    ids = ShapeDtypeStruct((config.batch_size, config.length), jnp.int32)
    return Model(
        name="seq2seq",
        size=size,
        config=config,
        make_module=lambda rngs: Seq2Seq(config, precision, rngs),
        optimizer=optax.chain(optax.clip_by_global_norm(config.clip), optax.adam(_rate(config))),
        batch_spec={"source": ids, "target": ids},
        make_numpy_batch=lambda rng: sentence_pairs(rng, config.batch_size, config.length, config.vocabulary),
    )
