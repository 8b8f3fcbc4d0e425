"""WGAN-GP: a generator and a critic of residual convolutions; the critic's gradient is penalized; images in NHWC.

Source: Gulrajani et al. 2017, "Improved Training of Wasserstein GANs" (arXiv 1704.00028), the residual networks for
64 x 64 pixels of the authors' released code (`gan_64x64.py`, which the TBD benchmarks run): batch normalization in the
generator, layer normalization in the critic, penalty weight 10, Adam at 1e-4 with betas 0 and 0.9, batches of 64. One
step makes five updates of the critic, scanned, each on its own batch, then one of the generator. The penalty is the
norm of the critic's gradient by its input, so its gradient takes second derivatives through every convolution. Biases
that cannot matter are left out: of the generator's blocks, since a normalization follows, and of the critic's score.

| size | image | blocks | width | latent | critic updates | generator | critic    |
|------|-------|--------|-------|--------|----------------|-----------|-----------|
| full | 64    | 4      | 64    | 128    | 5              | 8,538,563 | 7,491,840 |
| tiny | 8     | 1      | 8     | 16     | 2              |           |           |
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

from models._common import Array, Batch, Metrics, Model, Precision, TrainState, make_precision
from models._image import batch_norm


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes and recipe; see the table above. blocks: each halves (doubles) the image, between 4 pixels and its size."""

    blocks: int = 4
    width: int = 64
    latent: int = 128
    critic_updates: int = 5
    penalty: float = 10.0
    batch_size: int = 64
    learning_rate: float = 1e-4
    dtype: Any = jnp.bfloat16

    @property
    def image(self) -> int:
        """Height and width."""
        return 4 * 2**self.blocks

    @property
    def widths(self) -> list[int]:
        """Channels of the critic before and after each block; the generator has them in reverse."""
        return [self.width * min(2**i, 8) for i in range(self.blocks)] + [self.width * min(2 ** (self.blocks - 1), 8)]


SIZES = {
    "full": Config(),
    "tiny": Config(
        blocks=1, width=8, latent=16, critic_updates=2, batch_size=16, learning_rate=1e-3, dtype=jnp.float32
    ),
}


def _conv(inputs: int, outputs: int, size: int, precision: Precision, rngs: nnx.Rngs, *, bias: bool = True) -> nnx.Conv:
    he = nnx.initializers.he_uniform()
    return nnx.Conv(inputs, outputs, (size, size), use_bias=bias, kernel_init=he, rngs=rngs, **precision.kwargs)


def _double(x: Array) -> Array:
    """f[B, H, W, C] -> f[B, 2 H, 2 W, C], every pixel four times."""
    rows, height, width, channels = x.shape
    x = jnp.broadcast_to(x[:, :, None, :, None], (rows, height, 2, width, 2, channels))
    return x.reshape(rows, 2 * height, 2 * width, channels)


def _halve(x: Array) -> Array:
    """f[B, H, W, C] -> f[B, H / 2, W / 2, C], means of 2 x 2."""
    rows, height, width, channels = x.shape
    return x.reshape(rows, height // 2, 2, width // 2, 2, channels).mean(axis=(2, 4))


class Up(nnx.Module):
    """The generator's block: norm, ReLU, 3x3, twice, at twice the size; a 1x1 shortcut."""

    def __init__(self, inputs: int, outputs: int, precision: Precision, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List([batch_norm(channels, precision, rngs) for channels in (inputs, outputs)])
        self.first = _conv(inputs, outputs, 3, precision, rngs, bias=False)
        self.second = _conv(outputs, outputs, 3, precision, rngs, bias=False)
        self.shortcut = _conv(inputs, outputs, 1, precision, rngs, bias=False)

    def __call__(self, x: Array, train: bool) -> Array:
        """f[B, H, W, inputs] -> f[B, 2 H, 2 W, outputs]."""
        y = self.first(_double(jax.nn.relu(self.norms[0](x, use_running_average=not train))))
        y = self.second(jax.nn.relu(self.norms[1](y, use_running_average=not train)))
        return y + self.shortcut(_double(x))


class Down(nnx.Module):
    """The critic's block: layer norm, ReLU, 3x3, twice, then half the size; a 1x1 shortcut."""

    def __init__(self, inputs: int, outputs: int, precision: Precision, rngs: nnx.Rngs) -> None:
        whole = {"reduction_axes": (1, 2, 3), "feature_axes": -1, "use_fast_variance": False}
        self.norms = nnx.List([nnx.LayerNorm(inputs, **whole, rngs=rngs, **precision.kwargs) for _ in range(2)])
        self.first = _conv(inputs, inputs, 3, precision, rngs, bias=False)
        self.second = _conv(inputs, outputs, 3, precision, rngs)
        self.shortcut = _conv(inputs, outputs, 1, precision, rngs)

    def __call__(self, x: Array) -> Array:
        """f[B, H, W, inputs] -> f[B, H / 2, W / 2, outputs]."""
        y = self.first(jax.nn.relu(self.norms[0](x)))
        y = self.second(jax.nn.relu(self.norms[1](y)))
        return _halve(y) + _halve(self.shortcut(x))


class Generator(nnx.Module):
    """A linear layer to 4 x 4 pixels, blocks, norm, ReLU, 3x3, tanh."""

    def __init__(self, config: Config, precision: Precision, rngs: nnx.Rngs) -> None:
        widths = config.widths[::-1]
        self.start = nnx.Linear(config.latent, 16 * widths[0], rngs=rngs, **precision.kwargs)
        self.blocks = nnx.List([Up(a, b, precision, rngs) for a, b in itertools.pairwise(widths)])
        self.norm = batch_norm(widths[-1], precision, rngs)
        self.end = _conv(widths[-1], 3, 3, precision, rngs)

    def __call__(self, noise: Array, train: bool) -> Array:
        """f[B, latent] -> f[B, H, W, 3] in (-1, 1)."""
        x = self.start(noise)
        x = x.reshape(x.shape[0], 4, 4, -1)
        for block in self.blocks:
            x = block(x, train)
        return jnp.tanh(self.end(jax.nn.relu(self.norm(x, use_running_average=not train))))


class Critic(nnx.Module):
    """3x3, blocks, a linear layer over all that is left."""

    def __init__(self, config: Config, precision: Precision, rngs: nnx.Rngs) -> None:
        widths = config.widths
        self.start = _conv(3, widths[0], 3, precision, rngs)
        self.blocks = nnx.List([Down(a, b, precision, rngs) for a, b in itertools.pairwise(widths)])
        self.end = nnx.Linear(16 * widths[-1], 1, use_bias=False, rngs=rngs, **precision.kwargs)

    def __call__(self, x: Array) -> Array:
        """f[B, H, W, 3] -> scores f[B]."""
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        return self.end(x.reshape(x.shape[0], -1))[:, 0]


class Wgan(nnx.Module):
    """Both networks, and the loss of each."""

    def __init__(self, config: Config, precision: Precision, rngs: nnx.Rngs) -> None:
        self.critic = Critic(config, precision, rngs)
        self.generator = Generator(config, precision, rngs)
        self.config = config
        self.precision = precision

    def generate(self, rows: int, key: Array, train: bool) -> Array:
        """f[rows, H, W, 3] from standard normal noise."""
        noise = jax.random.normal(key, (rows, self.config.latent), self.precision.param)
        return self.generator(noise.astype(self.precision.compute), train)

    def critic_loss(self, images: Array, key: Array, train: bool) -> Array:
        """Mean score of made images less that of real ones, plus the penalty on made-to-real lines, f[]."""
        compute, param = self.precision.compute, self.precision.param
        for_noise, for_mixing = jax.random.split(key)
        made = jax.lax.stop_gradient(self.generate(images.shape[0], for_noise, train))
        real = images.astype(compute)
        share = jax.random.uniform(for_mixing, (images.shape[0], 1, 1, 1), param).astype(compute)
        slopes = jax.grad(lambda x: self.critic(x).sum())(real + share * (made - real)).astype(param)
        norms = jnp.sqrt(jnp.square(slopes).sum(axis=(1, 2, 3)))
        penalty = self.config.penalty * jnp.square(norms - 1).mean()
        return self.critic(made).astype(param).mean() - self.critic(real).astype(param).mean() + penalty

    def generator_loss(self, rows: int, key: Array) -> Array:
        """Minus the mean score of made images, f[]."""
        return -self.critic(self.generate(rows, key, train=True)).astype(self.precision.param).mean()

    def loss(self, batch: Batch, key: Array | None) -> tuple[Array, Metrics]:
        """The critic's loss on the first batch, f[]; in evaluation always with the same noise."""
        key, train = (jax.random.key(0), False) if key is None else (key, True)
        return self.critic_loss(batch["images"][0], key, train), {}


class WganModel(Model):
    """A `Model` whose step trains two networks in turn."""

    def train_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Critic updates, one per batch of images f[N, B, H, W, 3], then one generator update."""
        images = batch["images"]
        key = jax.random.fold_in(state.key, state.step)

        def updated(part: str, loss: Any, params: dict, opt_state: Any) -> tuple[dict, Any, Array, dict]:
            def of(own: dict) -> tuple[Array, dict]:
                module = nnx.merge(self._graphdef, {**params, part: own}, state.variables)
                value = loss(module)
                return value, nnx.to_pure_dict(nnx.split(module, nnx.Param, ...)[2])

            (value, variables), grads = jax.value_and_grad(of, has_aux=True)(params[part])
            updates, opt_state = self.optimizer.update({part: grads}, opt_state, params)
            return {**params, **optax.apply_updates({part: params[part]}, updates)}, opt_state, value, variables

        def critic_update(carry: tuple[dict, Any], inputs: tuple[Array, Array]) -> tuple[tuple[dict, Any], Array]:
            real, index = inputs
            params, opt_state, value, _ = updated(
                "critic", lambda m: m.critic_loss(real, jax.random.fold_in(key, index), train=True), *carry
            )
            return (params, opt_state), value

        order = jnp.arange(images.shape[0], dtype=jnp.int32)
        carry, losses = jax.lax.scan(critic_update, (state.params, state.opt_state), (images, order))
        last = jax.random.fold_in(key, images.shape[0])
        params, opt_state, value, variables = updated(
            "generator", lambda m: m.generator_loss(images.shape[1], last), *carry
        )
        metrics = {"loss": losses[-1], "generator_loss": value}
        return TrainState(state.step + 1, params, opt_state, state.key, variables), metrics


def _of_each(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """An optimizer with a state per network, that updates the networks which it gets gradients of."""

    def init(params: dict) -> dict:
        return {part: inner.init(params[part]) for part in params}

    def update(grads: dict, state: dict, params: dict) -> tuple[dict, dict]:
        done = {part: inner.update(grads[part], state[part], params[part]) for part in grads}
        return {part: u for part, (u, _) in done.items()}, {**state, **{part: s for part, (_, s) in done.items()}}

    return optax.GradientTransformation(init, update)


def build(size: str, config: Config) -> Model:
    """The model for a configuration; see `models.get`."""
    precision = make_precision(config.dtype)
    shape = (config.critic_updates, config.batch_size, config.image, config.image, 3)
    return WganModel(
        name="wgan",
        size=size,
        config=config,
        make_module=lambda rngs: Wgan(config, precision, rngs),
        optimizer=_of_each(optax.adam(config.learning_rate, b1=0.0, b2=0.9)),
        batch_spec={"images": ShapeDtypeStruct(shape, jnp.float32)},
        make_numpy_batch=lambda rng: {"images": rng.uniform(-1, 1, shape).astype(np.float32)},
    )
