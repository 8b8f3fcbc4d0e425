"""Attention as several models have it: grouped queries with rotary positions, and many heads over a memory."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from models._common import Array, Precision, drop


def rotary(length: int, width: int, theta: float, precision: Precision) -> tuple[Array, Array]:
    """Cosine and sine of position x theta^(-2 i / width), f[T, W/2] each (Su et al. 2021, arXiv 2104.09864)."""
    half = width // 2
    frequency = theta ** (-jnp.arange(half, dtype=precision.param) / half)
    angles = jnp.arange(length, dtype=precision.param)[:, None] * frequency
    return jnp.cos(angles).astype(precision.compute), jnp.sin(angles).astype(precision.compute)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotary positions: x f[B, T, ..., W], cos and sin f[T, W/2] -> f[B, T, ..., W], halves rotated as pairs."""
    along = (cos.shape[0], *(1,) * (x.ndim - 3), cos.shape[1])
    cos, sin = cos.reshape(along), sin.reshape(along)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class GroupedAttention(nnx.Module):
    """Causal grouped-query attention: K key/value heads, each shared by G query heads; no biases.

    One key/value head is multi-query attention, as many as there are query heads the usual one.
    """

    def __init__(
        self, hidden: int, heads: int, kv_heads: int, width: int, precision: Precision, rngs: nnx.Rngs
    ) -> None:
        queries = (kv_heads, heads // kv_heads, width)
        make = {"use_bias": False, "kernel_init": nnx.initializers.normal(0.02), "rngs": rngs, **precision.kwargs}
        self.query = nnx.LinearGeneral(hidden, queries, **make)
        self.key = nnx.LinearGeneral(hidden, (kv_heads, width), **make)
        self.value = nnx.LinearGeneral(hidden, (kv_heads, width), **make)
        self.out = nnx.LinearGeneral(queries, hidden, axis=(-3, -2, -1), **make)
        self.precision = precision

    def __call__(self, x: Array, turn: tuple[Array, Array], mask: Array) -> Array:
        """x f[B, T, D], turn (cos, sin) f[T, W/2], mask bool[T, T] -> f[B, T, D]."""
        q, k = (rotate(project(x), *turn) for project in (self.query, self.key))
        q, k, v = checkpoint_name(q, "query_proj"), checkpoint_name(k, "key_proj"), self.value(x)
        v = checkpoint_name(v, "value_proj")
        scores = jnp.einsum("bqkgw,btkw->bkgqt", q, k, preferred_element_type=self.precision.param)
        scores = jnp.where(mask, scores / math.sqrt(q.shape[-1]), jnp.finfo(scores.dtype).min)
        weights = jax.nn.softmax(scores).astype(x.dtype)
        attended = checkpoint_name(jnp.einsum("bkgqt,btkw->bqkgw", weights, v), "context")
        return checkpoint_name(self.out(attended), "out_proj")


class Initializers(NamedTuple):
    """How the projections of an attention begin."""

    query: Any
    key_value: Any
    out: Any


class HeadedAttention(nnx.Module):
    """Multi-head attention of x over a memory, x itself or another sequence; no biases in the projections."""

    def __init__(
        self,
        hidden: int,
        heads: int,
        width: int,
        begin: Initializers,
        dropout: float,
        precision: Precision,
        rngs: nnx.Rngs,
    ) -> None:
        make = {"use_bias": False, "rngs": rngs, **precision.kwargs}
        self.query = nnx.LinearGeneral(hidden, (heads, width), kernel_init=begin.query, **make)
        self.key = nnx.LinearGeneral(hidden, (heads, width), kernel_init=begin.key_value, **make)
        self.value = nnx.LinearGeneral(hidden, (heads, width), kernel_init=begin.key_value, **make)
        self.out = nnx.LinearGeneral((heads, width), hidden, axis=(-2, -1), kernel_init=begin.out, **make)
        self.dropout = nnx.Dropout(dropout)
        self.precision = precision

    def __call__(self, x: Array, memory: Array, bias: Array | None, scale: float, key: Array | None) -> Array:
        """x f[B, Q, D], memory f[B, K, D], bias to f[B, H, Q, K] -> f[B, Q, D]; scores are scale x q k + bias."""
        q, k, v = self.query(x), self.key(memory), self.value(memory)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=self.precision.param) * scale
        weights = jax.nn.softmax(scores if bias is None else scores + bias).astype(x.dtype)
        return self.out(jnp.einsum("bhqk,bkhd->bqhd", drop(self.dropout, weights, key), v))


def as_bias(seen: Array, precision: Precision) -> Array:
    """0 where a key is seen, very negative where it is not."""
    return jnp.where(seen, 0.0, jnp.finfo(precision.param).min / 2).astype(precision.param)
