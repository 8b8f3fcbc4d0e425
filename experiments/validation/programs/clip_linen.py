"""A contrastive model of images and captions in linen: two towers, and a loss over all pairs of the batch.

Parameters are float32, layers bfloat16; the temperature is learned and clipped after each step, as in the paper.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from .train_step import TrainStep, of

SOURCE = "CLIP (Radford et al. 2021), ViT-B/32 and its text encoder with three of 12 layers each, in flax.linen"
HOTTEST = 4.6052  # log(100)


class Mlp(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, x):
        h = nn.Dense(4 * x.shape[-1], dtype=self.dtype)(x)
        h = h * nn.sigmoid(1.702 * h)
        return nn.Dense(x.shape[-1], dtype=self.dtype)(h)


class Encoder(nn.Module):
    layers: int
    heads: int
    dtype: Any

    @nn.compact
    def __call__(self, x, mask=None):
        for _ in range(self.layers):
            h = nn.LayerNorm(epsilon=1e-5, dtype=self.dtype)(x)
            x = x + nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype)(h, mask=mask)
            x = x + Mlp(self.dtype)(nn.LayerNorm(epsilon=1e-5, dtype=self.dtype)(x))
        return x


class Clip(nn.Module):
    layers: int = 3
    widths: tuple[int, int] = (768, 512)
    heads: tuple[int, int] = (12, 8)
    joint: int = 512
    patch: int = 32
    vocab: int = 49_408
    dtype: Any = jnp.bfloat16

    def setup(self):
        wide, narrow = self.widths
        init = nn.initializers.normal
        self.patches = nn.Conv(wide, (self.patch,) * 2, strides=self.patch, use_bias=False, dtype=self.dtype)
        self.first = self.param("first", init(wide**-0.5), (wide,))
        self.image_norms = [nn.LayerNorm(epsilon=1e-5, dtype=self.dtype) for _ in range(2)]
        self.image_tower = Encoder(self.layers, self.heads[0], self.dtype)
        self.image_out = nn.Dense(self.joint, use_bias=False, dtype=self.dtype)
        self.words = nn.Embed(self.vocab, narrow, embedding_init=init(0.02), dtype=self.dtype)
        self.text_norm = nn.LayerNorm(epsilon=1e-5, dtype=self.dtype)
        self.text_tower = Encoder(self.layers, self.heads[1], self.dtype)
        self.text_out = nn.Dense(self.joint, use_bias=False, dtype=self.dtype)
        self.temperature = self.param("temperature", nn.initializers.constant(2.6593), ())

    def positions(self, name, x):
        return x + self.param(name, nn.initializers.normal(0.01), x.shape[1:]).astype(x.dtype)

    def of_images(self, images):
        x = self.patches(images.astype(self.dtype))
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        first = jnp.broadcast_to(self.first.astype(x.dtype), (x.shape[0], 1, x.shape[-1]))
        x = self.image_norms[0](self.positions("image_positions", jnp.concatenate([first, x], axis=1)))
        return self.image_out(self.image_norms[1](self.image_tower(x)[:, 0]))

    def of_texts(self, tokens):
        x = self.positions("text_positions", self.words(tokens))
        x = self.text_norm(self.text_tower(x, nn.make_causal_mask(tokens)))
        last = tokens.argmax(-1)  # the end of a text has the highest number
        return self.text_out(jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0])

    @nn.compact
    def __call__(self, images, tokens):
        a, b = (x.astype(jnp.float32) for x in (self.of_images(images), self.of_texts(tokens)))
        a, b = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (a, b))
        return jnp.exp(self.temperature) * a @ b.T


def contrastive(logits):
    labels = jnp.arange(logits.shape[0])
    rows = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    columns = optax.softmax_cross_entropy_with_integer_labels(logits.T, labels)
    return (rows.mean() + columns.mean()) / 2


def train_step(state, batch):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, batch["images"], batch["tokens"])
        return contrastive(logits), jnp.mean(logits.argmax(-1) == jnp.arange(logits.shape[0]))

    (loss, accuracy), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    state = state.apply_gradients(grads=grads)
    temperature = jnp.clip(state.params["temperature"], 0.0, HOTTEST)
    state = state.replace(params={**state.params, "temperature": temperature})
    return state, {"loss": loss, "accuracy": accuracy}


def clip_linen(tiny: bool = False) -> TrainStep:
    if tiny:
        rows, side, length = 8, 16, 12
        model = Clip(layers=2, widths=(32, 16), heads=(4, 2), joint=16, patch=8, vocab=61, dtype=jnp.float32)
    else:
        rows, side, length, model = 1024, 224, 77, Clip()
    tx = optax.adamw(
        optax.warmup_cosine_decay_schedule(0.0, 3e-3 if tiny else 5e-4, 2, 1000),
        b2=0.98,
        eps=1e-6,
        weight_decay=0.2,
        mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
    )

    def make(seed):
        init_key, image_key, text_key = jax.random.split(jax.random.key(seed), 3)
        batch = {
            "images": jax.random.normal(image_key, (rows, side, side, 3)),
            "tokens": jax.random.randint(text_key, (rows, length), 0, model.vocab, jnp.int32),
        }
        params = model.init(init_key, batch["images"][:1], batch["tokens"][:1])["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx), batch

    return of(train_step, make, SOURCE)
