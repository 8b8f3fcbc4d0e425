"""Deep Speech 2: spectrograms to letters by convolutions, recurrent layers both ways in time, and the CTC loss.

Source: Amodei et al. 2015, "Deep Speech 2: End-to-End Speech Recognition in English and Mandarin" (arXiv 1512.02595):
the architecture with 2 convolutions over frequency and time (41 x 11 by 2 x 2, 21 x 11 by 2 x 1, 32 channels) and 7
simple recurrent layers, f(B(W x) + U h) in each direction with shared W, their outputs added; one dense layer; f is the
ReLU clipped at 20, B batch normalization, over all real frames ("sequence-wise"). 29 symbols: letters, apostrophe,
space and the blank, 0. SGD with Nesterov momentum 0.99, gradients clipped at 400, the rate divided by 1.2 each epoch,
512 utterances a batch; no dropout. The paper gives 68 M parameters for 9 layers, and no width: 1760 gives that.

| size  | recurrent | hidden | frames | bins | letters | parameters |
|-------|-----------|--------|--------|------|---------|------------|
| full  | 7         | 1760   | 1600   | 161  | 256     | 67,689,053 |
| small | 7         | 1280   | 1600   | 161  | 256     | 36,394,493 |
| tiny  | 2         | 16     | 24     | 12   | 4       |            |

`small` has the width of 7 recurrent layers where the paper compares depths at 38 M. Utterances are of up to 16 s at 100
frames per second, sorted by length as in the paper's first epoch: those of a batch fill half of it or more.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import ShapeDtypeStruct

from models._common import Array, Batch, Metrics, Model, Precision, make_precision

SYMBOLS, BLANK = 29, 0


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes and recipe; see the table above. `kernels`: frequency x time of each convolution."""

    layers: int = 7
    hidden: int = 1760
    channels: int = 32
    kernels: tuple[tuple[int, int], ...] = ((41, 11), (21, 11))
    frames: int = 1600
    bins: int = 161
    letters: int = 256
    batch_size: int = 512
    learning_rate: float = 3e-4
    momentum: float = 0.99
    clip: float = 400.0
    epoch: int = 16_000
    dtype: Any = jnp.bfloat16


SIZES = {
    "full": Config(),
    "small": Config(hidden=1280),
    "tiny": Config(
        layers=2,
        hidden=16,
        channels=4,
        kernels=((5, 3), (3, 3)),
        frames=24,
        bins=12,
        letters=4,
        batch_size=16,
        learning_rate=1e-2,
        momentum=0.9,
        dtype=jnp.float32,
    ),
}


def clipped_relu(x: Array) -> Array:
    """min(max(x, 0), 20)."""
    return jnp.clip(x, 0, 20)


def _batch_norm(features: int, precision: Precision, rngs: nnx.Rngs) -> nnx.BatchNorm:
    norm = nnx.BatchNorm(features, momentum=0.99, epsilon=1e-5, rngs=rngs, **precision.kwargs)
    # nnx makes the running statistics float32 whatever param_dtype is, which a float64 run cannot store into.
    norm.mean = nnx.BatchStat(jnp.zeros((features,), precision.param))
    norm.var = nnx.BatchStat(jnp.ones((features,), precision.param))
    return norm


class Convolution(nnx.Module):
    """Convolution over frequency and time, batch normalization, clipped ReLU; padding stays zero."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: tuple[int, int],
        stride: tuple[int, int],
        precision: Precision,
        rngs: nnx.Rngs,
    ) -> None:
        self.conv = nnx.Conv(
            inputs,
            outputs,
            kernel,
            stride,
            padding=[(size // 2, size // 2) for size in kernel],
            use_bias=False,
            rngs=rngs,
            **precision.kwargs,
        )
        self.norm = _batch_norm(outputs, precision, rngs)

    def __call__(self, x: Array, real: Array, train: bool) -> Array:
        """x f[B, F, T, inputs], real bool[B, 1, T', 1] -> f[B, F', T', outputs]."""
        y = self.norm(self.conv(x), use_running_average=not train, mask=real)
        return jnp.where(real, clipped_relu(y), 0)


class Recurrent(nnx.Module):
    """A simple recurrent layer, forward plus backward in time; the input projection is outside the scans."""

    def __init__(self, inputs: int, hidden: int, precision: Precision, rngs: nnx.Rngs) -> None:
        make = {"use_bias": False, "rngs": rngs, **precision.kwargs}
        orthogonal = nnx.initializers.orthogonal(0.5)
        self.input = nnx.Linear(inputs, hidden, **make)
        self.norm = _batch_norm(hidden, precision, rngs)
        self.forward = nnx.Linear(hidden, hidden, kernel_init=orthogonal, **make)
        self.backward = nnx.Linear(hidden, hidden, kernel_init=orthogonal, **make)

    def __call__(self, x: Array, real: Array, train: bool) -> Array:
        """x f[T, B, I], real bool[T, B, 1] -> f[T, B, H]; the state is zero in padding, whence the backward pass."""
        projected = self.norm(self.input(x), use_running_average=not train, mask=real)

        def run(layer: nnx.Linear, reverse: bool) -> Array:
            kernel = layer.kernel[...].astype(x.dtype)

            def step(hidden: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
                projected, real = now
                hidden = jnp.where(real, clipped_relu(projected + hidden @ kernel), 0)
                return hidden, hidden

            return jax.lax.scan(step, jnp.zeros_like(projected[0]), (projected, real), reverse=reverse)[1]

        return run(self.forward, False) + run(self.backward, True)


class DeepSpeech(nnx.Module):
    """Convolutions, recurrent layers, a dense layer, symbols."""

    def __init__(self, config: Config, precision: Precision, rngs: nnx.Rngs) -> None:
        inputs, bins, convolutions = 1, config.bins, []
        for i, kernel in enumerate(config.kernels):
            stride = (2, 2 if i == 0 else 1)
            convolutions.append(Convolution(inputs, config.channels, kernel, stride, precision, rngs))
            inputs, bins = config.channels, -(-bins // 2)
        self.convolutions = nnx.List(convolutions)
        widths = [bins * inputs] + [config.hidden] * config.layers
        self.layers = nnx.List([Recurrent(width, config.hidden, precision, rngs) for width in widths[:-1]])
        self.dense = nnx.Linear(config.hidden, config.hidden, use_bias=False, rngs=rngs, **precision.kwargs)
        self.dense_norm = _batch_norm(config.hidden, precision, rngs)
        self.output = nnx.Linear(config.hidden, SYMBOLS, rngs=rngs, **precision.kwargs)
        self.precision = precision

    def loss(self, batch: Batch, key: Array | None) -> tuple[Array, Metrics]:
        """Mean CTC loss of the utterances, f[]; without a key (evaluation) the running statistics are used."""
        train, dtype = key is not None, self.precision.param
        x = batch["spectrogram"].astype(self.precision.compute)[..., None]
        lengths = (batch["frames"] + 1) // 2
        times = jnp.arange((x.shape[2] + 1) // 2, dtype=jnp.int32)
        real = times < lengths[:, None]  # [B, T]
        for convolution in self.convolutions:
            x = convolution(x, real[:, None, :, None], train)
        x = x.transpose(2, 0, 1, 3).reshape(x.shape[2], x.shape[0], -1)
        along = real.T[..., None]
        for layer in self.layers:
            x = layer(x, along, train)
        x = clipped_relu(self.dense_norm(self.dense(x), use_running_average=not train, mask=along))
        logits = self.output(x).astype(dtype).swapaxes(0, 1)
        letters = jnp.arange(batch["letters"].shape[1], dtype=jnp.int32)
        absent = (letters >= batch["letter_count"][:, None]).astype(dtype)
        losses = optax.ctc_loss(logits, (~real).astype(dtype), batch["letters"], absent, blank_id=BLANK)
        return losses.mean(), {"loss_per_letter": losses.sum() / batch["letter_count"].sum(dtype=jnp.int32)}


def _batch_spec(config: Config) -> Batch:
    rows = config.batch_size
    return {
        "spectrogram": ShapeDtypeStruct((rows, config.bins, config.frames), jnp.float32),
        "frames": ShapeDtypeStruct((rows,), jnp.int32),
        "letters": ShapeDtypeStruct((rows, config.letters), jnp.int32),
        "letter_count": ShapeDtypeStruct((rows,), jnp.int32),
    }


def _make_batch(config: Config, rng: np.random.Generator) -> Batch:
    """Noise with a spectrum that depends on the letter being said, normalized per bin; silence (0) in padding."""
    rows = config.batch_size
    frames = rng.integers(config.frames // 2, config.frames + 1, rows)
    count = np.maximum(1, (frames / config.frames * rng.uniform(0.7, 1.0, rows) * config.letters).astype(int))
    letters = rng.integers(1, SYMBOLS, (rows, config.letters))
    absent = np.arange(config.letters) >= count[:, None]
    times = np.arange(config.frames)
    said = np.minimum(times * count[:, None] // frames[:, None], config.letters - 1)
    voices = rng.standard_normal((SYMBOLS, config.bins))[np.take_along_axis(letters, said, axis=1)]
    noise = rng.standard_normal((rows, config.bins, config.frames))
    spectrogram = np.where((times < frames[:, None])[:, None], (voices.swapaxes(1, 2) + noise) / np.sqrt(2), 0)
    return {
        "spectrogram": spectrogram.astype(np.float32),
        "frames": frames.astype(np.int32),
        "letters": np.where(absent, 0, letters).astype(np.int32),
        "letter_count": count.astype(np.int32),
    }


def build(size: str, config: Config) -> Model:
    """The model for a configuration; see `models.get`."""
    precision = make_precision(config.dtype)
    rate = optax.exponential_decay(config.learning_rate, config.epoch, 1 / 1.2, staircase=True)
    return Model(
        name="deep_speech",
        size=size,
        config=config,
        make_module=lambda rngs: DeepSpeech(config, precision, rngs),
        optimizer=optax.chain(
            optax.clip_by_global_norm(config.clip), optax.sgd(rate, momentum=config.momentum, nesterov=True)
        ),
        batch_spec=_batch_spec(config),
        make_numpy_batch=lambda rng: _make_batch(config, rng),
    )
