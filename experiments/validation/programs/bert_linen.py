"""BERT as users of Flax linen write it: stock modules, a TrainState with the dropout key, optax from the shelf.

Masked language modelling over all positions: labels are -100 where a token counts for nothing.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training import train_state

from .train_step import TrainStep, of

SOURCE = "BERT base (Devlin et al. 2018) with two layers, in flax.linen, with flax's TrainState and optax.adamw"
IGNORED = -100


class EncoderLayer(nn.Module):
    heads: int
    mlp_dim: int
    rate: float
    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, x, mask, train: bool):
        attended = nn.MultiHeadDotProductAttention(
            num_heads=self.heads, dropout_rate=self.rate, deterministic=not train, dtype=self.dtype
        )(x, mask=mask)
        attended = nn.Dropout(self.rate, deterministic=not train)(attended)
        x = nn.LayerNorm(epsilon=1e-12, dtype=self.dtype)(x + attended)
        h = nn.gelu(nn.Dense(self.mlp_dim, dtype=self.dtype)(x))
        h = nn.Dense(x.shape[-1], dtype=self.dtype)(h)
        h = nn.Dropout(self.rate, deterministic=not train)(h)
        return nn.LayerNorm(epsilon=1e-12, dtype=self.dtype)(x + h)


class BertForMaskedLM(nn.Module):
    vocab: int = 30_522
    max_length: int = 512
    hidden: int = 768
    layers: int = 2
    heads: int = 12
    mlp_dim: int = 3072
    rate: float = 0.1
    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, input_ids, attention_mask, token_type_ids, train: bool = True):
        words = nn.Embed(self.vocab, self.hidden, dtype=self.dtype, name="word_embeddings")
        positions = self.param("positions", nn.initializers.normal(0.02), (self.max_length, self.hidden))
        x = words(input_ids) + nn.Embed(2, self.hidden, dtype=self.dtype)(token_type_ids)
        x = x + positions[: input_ids.shape[1]].astype(self.dtype)
        x = nn.LayerNorm(epsilon=1e-12, dtype=self.dtype)(x)
        x = nn.Dropout(self.rate, deterministic=not train)(x)
        mask = nn.make_attention_mask(attention_mask > 0, attention_mask > 0)
        for i in range(self.layers):
            x = EncoderLayer(self.heads, self.mlp_dim, self.rate, self.dtype, name=f"layer_{i}")(x, mask, train)
        x = nn.gelu(nn.Dense(self.hidden, dtype=self.dtype, name="transform")(x))
        x = nn.LayerNorm(epsilon=1e-12, dtype=self.dtype)(x)
        return words.attend(x) + self.param("bias", nn.initializers.zeros, (self.vocab,)).astype(self.dtype)


class TrainState(train_state.TrainState):
    dropout_key: Any


def masked_lm_loss(logits, labels):
    counted = labels != IGNORED
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), jnp.where(counted, labels, 0))
    return jnp.sum(losses * counted) / jnp.maximum(counted.sum(), 1)


def train_step(state, batch):
    dropout_key = jax.random.fold_in(state.dropout_key, state.step)

    def loss_fn(params):
        logits = state.apply_fn(
            {"params": params},
            batch["input_ids"],
            batch["attention_mask"],
            batch["token_type_ids"],
            rngs={"dropout": dropout_key},
        )
        return masked_lm_loss(logits, batch["labels"])

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def bert_linen(tiny: bool = False) -> TrainStep:
    if tiny:
        rows, model = 8, BertForMaskedLM(vocab=97, max_length=16, hidden=32, layers=2, heads=4, mlp_dim=64)
    else:
        rows, model = 64, BertForMaskedLM()
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-4, 2 if tiny else 10_000, 1_000_000)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01))

    def make(seed):
        init_key, dropout_key, data_key = jax.random.split(jax.random.key(seed), 3)
        ids_key, length_key, mask_key = jax.random.split(data_key, 3)
        shape = rows, model.max_length
        tokens = jax.random.randint(ids_key, shape, 0, model.vocab, jnp.int32)
        lengths = jax.random.randint(length_key, (rows, 1), shape[1] // 2, shape[1] + 1, jnp.int32)
        inside = jnp.arange(shape[1], dtype=jnp.int32) < lengths
        hidden = inside & jax.random.bernoulli(mask_key, 0.15, shape)
        batch = {
            "input_ids": jnp.where(hidden, 0, tokens),
            "attention_mask": inside.astype(jnp.int32),
            "token_type_ids": jnp.zeros(shape, jnp.int32),
            "labels": jnp.where(hidden, tokens, IGNORED),
        }
        inputs = batch["input_ids"], batch["attention_mask"], batch["token_type_ids"]
        params = model.init(init_key, *inputs, train=False)["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx, dropout_key=dropout_key), batch

    return of(train_step, make, SOURCE)
