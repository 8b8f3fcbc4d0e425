"""Attention of plain JAX operations, forward and backward: what the kernels (`flash`) compute, on any platform.

All scores are in memory, in float32 at least.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from unity_jax.kernels.bits import is_kept, threefry
from unity_jax.kernels.spec import WORD, Operands, Residuals, Spec


def forward(spec: Spec, x: Operands) -> Residuals:
    """As `flash.forward`."""
    scores = _scores(spec, x)
    most = jnp.max(scores, axis=-1, keepdims=True)
    p = jnp.exp(scores - most)
    total = jnp.sum(p, axis=-1, keepdims=True)
    sums = jnp.swapaxes(jnp.concatenate([most, total], axis=-1), 2, 3)
    kept = None if x.seeds is None else _packed(_drawn(spec, x.seeds, scores.shape))
    p = _dropped(spec, kept, p / total).astype(x.v.dtype)
    return Residuals(_over_keys(p, x.v).astype(x.q.dtype), sums, kept)


def backward(spec: Spec, x: Operands, found: Residuals, cotangent: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `flash.backward`."""
    p, ds = _gradients(spec, x, found, cotangent)
    ds = (ds * spec.scale).astype(x.q.dtype)
    dv = _over_queries(_dropped(spec, found.kept, p).astype(x.v.dtype), cotangent, x.v.shape[1])
    dk = _over_queries(ds, x.q, x.k.shape[1])
    return _over_keys(ds, x.k).astype(x.q.dtype), dk.astype(x.k.dtype), dv.astype(x.v.dtype)


def of_bias(spec: Spec, x: Operands, found: Residuals, cotangent: jax.Array) -> jax.Array:
    """The cotangent of the bias, which kernels do not compute."""
    _, ds = _gradients(spec, x, found, cotangent)
    summed = tuple(i for i, n in enumerate(x.bias.shape) if n != ds.shape[i])
    return jnp.sum(ds, axis=summed, keepdims=True).astype(x.bias.dtype)


def _gradients(spec: Spec, x: Operands, found: Residuals, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Probabilities before dropout, and the cotangent of the scores."""
    most, total = (t[..., None] for t in (found.sums[:, :, 0], found.sums[:, :, 1]))
    p = jnp.exp(_scores(spec, x) - most) / total
    dp = _dropped(spec, found.kept, _products(cotangent, x.v))
    wide = p.dtype
    delta = jnp.sum(found.output.astype(wide) * cotangent.astype(wide), axis=-1, keepdims=True)
    ds = p * (dp - delta)
    return p, ds if x.mask is None else jnp.where(x.mask, ds, 0)


def _scores(spec: Spec, x: Operands) -> jax.Array:
    """[batch, heads, queries, keys]"""
    s = _products(x.q, x.k) * spec.scale
    if x.bias is not None:
        s += x.bias.astype(s.dtype)
    if x.mask is not None:
        s = jnp.where(x.mask, s, spec.fill)
    if spec.causal:
        query, key = (lax.broadcasted_iota(jnp.int32, s.shape[2:], d) for d in range(2))
        s = jnp.where(key <= query, s, -jnp.inf)
    return s


def _products(q: jax.Array, k: jax.Array) -> jax.Array:
    """Of each query and each key of its group, in float32 at least."""
    batch, heads, queries, _ = q.shape
    _, groups, keys, _ = k.shape
    s = jnp.einsum("bgrqf,bgkf->bgrqk", _grouped(q, groups), k, preferred_element_type=_wide(q.dtype))
    return s.reshape(batch, heads, queries, keys)


def _over_keys(p: jax.Array, v: jax.Array) -> jax.Array:
    found = jnp.einsum("bgrqk,bgkf->bgrqf", _grouped(p, v.shape[1]), v, preferred_element_type=_wide(v.dtype))
    return found.reshape(*p.shape[:3], v.shape[-1])


def _over_queries(p: jax.Array, x: jax.Array, groups: int) -> jax.Array:
    p, x = _grouped(p, groups), _grouped(x, groups)
    return jnp.einsum("bgrqk,bgrqf->bgkf", p, x.astype(p.dtype), preferred_element_type=_wide(p.dtype))


def _grouped(x: jax.Array, groups: int) -> jax.Array:
    return x.reshape(x.shape[0], groups, -1, *x.shape[2:])


def _wide(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


def _drawn(spec: Spec, seeds: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    index = lax.iota(jnp.uint32, shape[2] * shape[3]).reshape(shape[2:])
    *key, high, low = (seeds[..., n, None, None] for n in range(4))
    low = low + index
    return is_kept(threefry((key[0], key[1]), high + (low < index).astype(jnp.uint32), low), spec.keep)


def _packed(kept: jax.Array) -> jax.Array:
    """A bit for each key, [batch, heads, words, queries]."""
    batch, heads, queries, keys = kept.shape
    bits = jnp.pad(jnp.swapaxes(kept, 2, 3), ((0, 0), (0, 0), (0, -keys % WORD), (0, 0))).astype(jnp.uint32)
    bits = bits.reshape(batch, heads, -1, WORD, queries)
    return jnp.sum(bits << lax.broadcasted_iota(jnp.uint32, bits.shape, 3), axis=3, dtype=jnp.uint32)


def _dropped(spec: Spec, kept: jax.Array | None, t: jax.Array) -> jax.Array:
    """What dropout leaves of probabilities, or of their cotangents."""
    if kept is None:
        return t
    *_, queries, keys = t.shape
    words = jnp.broadcast_to(kept[:, :, :, None], (*kept.shape[:3], WORD, queries))
    bits = lax.shift_right_logical(words, lax.broadcasted_iota(jnp.uint32, words.shape, 3)) & 1
    bits = jnp.swapaxes(bits.reshape(*kept.shape[:2], -1, queries)[:, :, :keys], 2, 3)
    return jnp.where(bits != 0, t / spec.keep, 0)
