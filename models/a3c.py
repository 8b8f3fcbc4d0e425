"""A3C: a convolutional and recurrent policy with a value, trained on rollouts of Atari games; images in NHWC.

Source: Mnih et al. 2016, "Asynchronous Methods for Deep Reinforcement Learning" (arXiv 1602.01783), section 8 of its
supplement: two convolutions, a layer of 256 and an LSTM of 256 over four stacked 84 x 84 frames; rollouts of 5 steps of
16 actors, discount 0.99, entropy weight 0.01, value loss weight 0.5, gradients clipped at norm 40, RMSProp with decay
0.99 and epsilon 0.1. The actors step together (A2C), so a batch is a rollout of each; the rate 7e-4 is inside the
paper's range of 1e-4 to 1e-2. The feed-forward agent of the paper is `feed_forward`.

| size         | frames      | convolutions             | dense | LSTM | actions | parameters |
|--------------|-------------|--------------------------|-------|------|---------|------------|
| full         | 84 x 84 x 4 | 16 8x8 / 4, 32 4x4 / 2   | 256   | 256  | 18      | 1,206,339  |
| feed_forward | 84 x 84 x 4 | 16 8x8 / 4, 32 4x4 / 2   | 256   |      | 18      | 681,027    |
| tiny         | 20 x 20 x 4 | 8 8x8 / 4, 8 4x4 / 2     | 16    | 16   | 6       |            |

The LSTM's state at the start of a rollout is what the last rollout ended with; a finished game resets it.
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


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes and recipe; see the table above. lstm: its width, 0 for the feed-forward agent; steps: of a rollout."""

    image: int = 84
    frames: int = 4
    channels: tuple[int, int] = (16, 32)
    dense: int = 256
    lstm: int = 256
    actions: int = 18
    steps: int = 5
    discount: float = 0.99
    entropy: float = 0.01
    value: float = 0.5
    batch_size: int = 16
    learning_rate: float = 7e-4
    dtype: Any = jnp.bfloat16


SIZES = {
    "full": Config(),
    "feed_forward": Config(lstm=0),
    "tiny": Config(image=20, channels=(8, 8), dense=16, lstm=16, actions=6, learning_rate=0.1, dtype=jnp.float32),
}


class Carry(nnx.Variable):
    """A recurrent state that outlives the step."""


class Agent(nnx.Module):
    """Convolutions and a dense layer for every frame, the LSTM over time, then the policy and the value."""

    def __init__(self, config: Config, precision: Precision, rngs: nnx.Rngs) -> None:
        first, second = config.channels
        make = {"rngs": rngs, **precision.kwargs}
        self.first = nnx.Conv(config.frames, first, (8, 8), 4, padding="VALID", **make)
        self.second = nnx.Conv(first, second, (4, 4), 2, padding="VALID", **make)
        left = ((config.image - 8) // 4 + 1 - 4) // 2 + 1
        self.dense = nnx.Linear(left * left * second, config.dense, **make)
        features = config.lstm or config.dense
        if config.lstm:
            self.input = nnx.Linear(config.dense, 4 * config.lstm, **make)
            self.recurrent = nnx.Linear(config.lstm, 4 * config.lstm, use_bias=False, **make)
            self.hidden = Carry(jnp.zeros((config.batch_size, config.lstm), precision.param))
            self.cell = Carry(jnp.zeros((config.batch_size, config.lstm), precision.param))
        self.policy = nnx.Linear(features, config.actions, **make)
        self.value = nnx.Linear(features, 1, **make)
        self.config = config
        self.precision = precision

    def encode(self, frames: Array) -> Array:
        """u8[T, B, H, W, F] -> f[T, B, D]."""
        steps, rows = frames.shape[:2]
        x = frames.reshape(steps * rows, *frames.shape[2:]).astype(self.precision.compute) / 255
        x = jax.nn.relu(self.second(jax.nn.relu(self.first(x))))
        return jax.nn.relu(self.dense(x.reshape(steps, rows, -1)))

    def remember(self, x: Array, done: Array) -> Array:
        """The LSTM over f[T, B, D], reset where bool[T, B] says that a game has begun -> f[T, B, H].

        The state after the last but one step is kept: the last step is the first of the next rollout.
        """
        param = self.precision.param
        kernel = self.recurrent.kernel[...].astype(x.dtype)

        def step(carry: tuple[Array, Array], now: tuple[Array, Array]) -> tuple[tuple[Array, Array], Any]:
            projected, reset = now
            hidden, cell = (jnp.where(reset[:, None], 0, state) for state in carry)
            gates = (projected + hidden.astype(kernel.dtype) @ kernel).astype(param)
            i, f, g, o = jnp.split(gates, 4, axis=-1)
            cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
            hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)
            return (hidden, cell), (hidden, cell)

        _, (hidden, cell) = jax.lax.scan(step, (self.hidden[...], self.cell[...]), (self.input(x), done))
        self.hidden[...] = jax.lax.stop_gradient(hidden[-2])
        self.cell[...] = jax.lax.stop_gradient(cell[-2])
        return hidden.astype(x.dtype)

    def loss(self, batch: Batch, key: Array | None) -> tuple[Array, Metrics]:
        """Policy gradient with n-step returns, value and entropy terms, means over the rollouts, f[]."""
        config, param = self.config, self.precision.param
        x = self.encode(batch["frames"])
        if config.lstm:
            x = self.remember(x, batch["begins"])
        log_policy = jax.nn.log_softmax(self.policy(x[:-1]).astype(param))
        values = self.value(x).astype(param)[..., 0]

        def back(later: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
            reward, begins_next = now
            total = reward + config.discount * jnp.where(begins_next, 0, later)
            return total, total

        start = jax.lax.stop_gradient(values[-1])
        rewards = (batch["rewards"].astype(param), batch["begins"][1:])
        _, returns = jax.lax.scan(back, start, rewards, reverse=True)
        advantages = returns - values[:-1]
        chosen = jnp.take_along_axis(log_policy, batch["actions"][..., None], axis=-1)[..., 0]
        policy = -(chosen * jax.lax.stop_gradient(advantages)).mean()
        value = jnp.square(advantages).mean()
        entropy = -(jnp.exp(log_policy) * log_policy).sum(axis=-1).mean()
        total = policy + config.value * value - config.entropy * entropy
        return total, {"value_loss": value, "entropy": entropy}


def _batch_spec(config: Config) -> Batch:
    steps, rows = config.steps, config.batch_size
    frames = (steps + 1, rows, config.image, config.image, config.frames)
    return {
        "frames": ShapeDtypeStruct(frames, jnp.uint8),
        "actions": ShapeDtypeStruct((steps, rows), jnp.int32),
        "rewards": ShapeDtypeStruct((steps, rows), jnp.float32),
        "begins": ShapeDtypeStruct((steps + 1, rows), jnp.bool_),
    }


def _make_batch(config: Config, rng: np.random.Generator) -> Batch:
    """Frames of noise; rewards clipped to -1, 0 and 1, mostly 1; one step in fifty begins a game."""
    spec = _batch_spec(config)
    return {
        "frames": rng.integers(0, 256, spec["frames"].shape, np.uint8),
        "actions": rng.integers(0, config.actions, spec["actions"].shape, np.int32),
        "rewards": rng.choice(np.array([-1, 0, 1], np.float32), spec["rewards"].shape, p=[0.1, 0.2, 0.7]),
        "begins": rng.random(spec["begins"].shape) < 0.02,
    }


def build(size: str, config: Config) -> Model:
    """The model for a configuration; see `models.get`."""
    precision = make_precision(config.dtype)
    return Model(
        name="a3c",
        size=size,
        config=config,
        make_module=lambda rngs: Agent(config, precision, rngs),
        optimizer=optax.chain(
            optax.clip_by_global_norm(40.0), optax.rmsprop(config.learning_rate, decay=0.99, eps=0.1)
        ),
        batch_spec=_batch_spec(config),
        make_numpy_batch=lambda rng: _make_batch(config, rng),
    )
