"""A denoising diffusion U-Net in linen: time embedding, group norm, attention at a low resolution, averaged weights.

The step draws its own times and noise from a key in the state; convolutions are bfloat16, parameters float32.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import struct

from .train_step import TrainStep, of

SOURCE = "DDPM (Ho et al. 2020) for 64 x 64 images in flax.linen, with an exponential moving average of the weights"
TIMES = 1000


def time_features(t, width):
    """Sines and cosines f[B, width] of i[B]."""
    frequencies = jnp.exp(-jnp.log(1e4) * jnp.arange(width // 2, dtype=jnp.float32) / (width // 2))
    angles = t.astype(jnp.float32)[:, None] * frequencies
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


class ResBlock(nn.Module):
    features: int
    groups: int
    dtype: Any

    @nn.compact
    def __call__(self, x, emb):
        h = nn.swish(nn.GroupNorm(self.groups, dtype=self.dtype)(x))
        h = nn.Conv(self.features, (3, 3), dtype=self.dtype)(h)
        h = h + nn.Dense(self.features, dtype=self.dtype)(nn.swish(emb))[:, None, None, :]
        h = nn.swish(nn.GroupNorm(self.groups, dtype=self.dtype)(h))
        h = nn.Conv(self.features, (3, 3), dtype=self.dtype, kernel_init=nn.initializers.zeros)(h)
        if x.shape[-1] != self.features:
            x = nn.Conv(self.features, (1, 1), dtype=self.dtype)(x)
        return x + h


class AttnBlock(nn.Module):
    heads: int
    groups: int
    dtype: Any

    @nn.compact
    def __call__(self, x):
        b, height, width, c = x.shape
        h = nn.GroupNorm(self.groups, dtype=self.dtype)(x).reshape(b, height * width, c)
        h = nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype)(h)
        return x + h.reshape(x.shape)


class UNet(nn.Module):
    widths: tuple[int, ...] = (128, 256, 384)
    groups: int = 32
    heads: int = 6
    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, x, t):
        emb = nn.Dense(4 * self.widths[0], dtype=self.dtype)(time_features(t, self.widths[0]))
        emb = nn.Dense(4 * self.widths[0], dtype=self.dtype)(nn.swish(emb))
        x = nn.Conv(self.widths[0], (3, 3), dtype=self.dtype)(x)
        skips = []
        for level, width in enumerate(self.widths):
            if level:
                x = nn.Conv(width, (3, 3), strides=2, dtype=self.dtype)(x)
            x = ResBlock(width, self.groups, self.dtype)(x, emb)
            skips.append(x)
        x = AttnBlock(self.heads, self.groups, self.dtype)(x)
        x = ResBlock(self.widths[-1], self.groups, self.dtype)(x, emb)
        for level, width in reversed(list(enumerate(self.widths))):
            x = jnp.concatenate([x, skips.pop()], axis=-1)
            x = ResBlock(width, self.groups, self.dtype)(x, emb)
            if level:
                b, height, across, c = x.shape
                x = jax.image.resize(x, (b, 2 * height, 2 * across, c), "nearest")
                x = nn.Conv(self.widths[level - 1], (3, 3), dtype=self.dtype)(x)
        x = nn.swish(nn.GroupNorm(self.groups, dtype=self.dtype)(x))
        return nn.Conv(3, (3, 3), dtype=jnp.float32)(x)


@struct.dataclass
class State:
    step: Any
    params: Any
    ema: Any
    opt_state: Any
    key: Any


def diffusion_linen(tiny: bool = False) -> TrainStep:
    rows, side, model = (8, 8, UNet((8, 16), groups=4, heads=2)) if tiny else (128, 64, UNet())
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(2e-3 if tiny else 2e-4))
    kept = jnp.cumprod(1.0 - jnp.linspace(1e-4, 0.02, TIMES, dtype=jnp.float32))

    def train_step(state, images):
        t_key, noise_key = jax.random.split(jax.random.fold_in(state.key, state.step))
        t = jax.random.randint(t_key, (rows,), 0, TIMES, jnp.int32)
        noise = jax.random.normal(noise_key, images.shape)
        part = kept[t][:, None, None, None]
        noisy = jnp.sqrt(part) * images + jnp.sqrt(1.0 - part) * noise

        def loss_fn(params):
            return jnp.mean(jnp.square(model.apply({"params": params}, noisy, t) - noise))

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        ema = optax.incremental_update(params, state.ema, 1e-4)
        return State(state.step + 1, params, ema, opt_state, state.key), {"loss": loss}

    def make(seed):
        init_key, state_key, data_key = jax.random.split(jax.random.key(seed), 3)
        images = jax.random.uniform(data_key, (rows, side, side, 3), minval=-1, maxval=1)
        params = model.init(init_key, images, jnp.zeros(rows, jnp.int32))["params"]
        ema = jax.tree.map(jnp.copy, params)
        return State(jnp.zeros((), jnp.int32), params, ema, tx.init(params), state_key), images

    return of(train_step, make, SOURCE)
