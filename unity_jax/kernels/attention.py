"""Attention for users: a function of JAX arrays that is planned as one op, and runs as a kernel.

    y = unity_jax.kernels.attention(q, k, v, causal=True)    # jax.nn.dot_product_attention(q, k, v, is_causal=True)
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unity_jax.kernels import primitive, xla
from unity_jax.kernels.bits import product
from unity_jax.kernels.spec import LEAST, Operands, Residuals, Spec


def attention(
    query: jax.typing.ArrayLike,
    key: jax.typing.ArrayLike,
    value: jax.typing.ArrayLike,
    bias: jax.typing.ArrayLike | None = None,
    mask: jax.typing.ArrayLike | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
) -> jax.Array:
    """`jax.nn.dot_product_attention`, with dropout: softmax(scale * query @ key.T + bias) @ value, by heads.

    Scores are computed block by block and never in memory on TPUs and GPUs, forward and backward (FlashAttention-2,
    Dao 2023, https://arxiv.org/abs/2307.08691), on GPUs by cuDNN what that takes (`cudnn`), whose gradients are added
    up in any order unless `xla_gpu_deterministic_ops` is set; on CPUs by plain JAX operations. In a step that is
    planned it is one op of each pass, which the batch and the heads may be split of.

    **Arguments:**
    - `query`: [batch, queries, heads, features]. `key`, `value`: [batch, keys, groups, features], where heads are a
      multiple of groups: so many heads in a row share the keys of a group.
    - `bias`: added to the scaled scores; `mask`: false where a key is not seen. Both of a shape that broadcasts to
      [batch, heads, queries, keys].
    - `scale`: by default one over the square root of the features.
    - `causal`: query i sees keys up to i.
    - `dropout_rate`: of the probabilities, zeroed as `jax.random.bernoulli(dropout_key, 1 - rate)` on the array
      [batch, heads, queries, keys] tells, the others scaled up. `dropout_key`: of Threefry.

    **Raises:** `ValueError` and `TypeError` for arguments that do not go together.
    """
    q, k, v = (jnp.swapaxes(_checked(t, of), 1, 2) for t, of in ((query, "query"), (key, "key"), (value, "value")))
    _check(q, k, v, dropout_rate, dropout_key)
    shape = (*q.shape[:3], k.shape[2])
    bias, mask = (_broadcastable(t, shape, of) for t, of in ((bias, "bias"), (mask, "mask")))
    if mask is not None and mask.dtype != np.bool_:
        raise TypeError(f"mask is of {mask.dtype}: true where a key is seen, so of bool; pass others as bias")
    seeds = None if dropout_key is None or not dropout_rate else _seeds(dropout_key, shape)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    spec = Spec(scale, bool(causal), 1.0 if seeds is None else 1 - float(dropout_rate), LEAST)
    return jnp.swapaxes(_attention(spec, Operands(q, k, v, bias, mask, seeds)), 1, 2)


def _checked(t: Any, of: str) -> jax.Array:
    t = jnp.asarray(t)
    if t.ndim != 4:
        raise ValueError(f"{of} has the shape {t.shape}: [batch, positions, heads, features] is needed")
    if not jnp.issubdtype(t.dtype, jnp.floating):
        raise TypeError(f"{of} is of {t.dtype}: convert it to a floating-point type first")
    return t


def _check(q: jax.Array, k: jax.Array, v: jax.Array, rate: float, key: Any) -> None:
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[-1] != k.shape[-1] or q.shape[1] % k.shape[1]:
        turned = ((t.shape[0], t.shape[2], t.shape[1], t.shape[3]) for t in (q, k, v))
        shapes = ", ".join(f"{of} {s}" for of, s in zip(("query", "key", "value"), turned, strict=True))
        raise ValueError(
            f"{shapes} do not go together: [batch, queries, heads, features], [batch, keys, groups, features] and "
            "[batch, keys, groups, any], heads being a multiple of groups"
        )
    if not 0 <= rate < 1:
        raise ValueError(f"dropout_rate={rate}: at least 0, and less than 1")
    if rate and key is None:
        raise ValueError(f"dropout_rate={rate} without dropout_key: pass a key of jax.random.key")


def _broadcastable(given: jax.typing.ArrayLike | None, shape: tuple[int, ...], of: str) -> jax.Array | None:
    """With four dimensions, the last one as long as there are keys."""
    if given is None:
        return None
    t = jnp.asarray(given)
    t = t.reshape((1,) * (4 - t.ndim) + t.shape)
    if t.ndim != 4 or any(n not in (1, m) for n, m in zip(t.shape, shape, strict=True)):
        raise ValueError(f"{of} has the shape {t.shape}, which does not broadcast to {shape}")
    return jnp.broadcast_to(t, (*t.shape[:3], shape[3]))


def _seeds(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`Operands.seeds`."""
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    if str(jax.random.key_impl(key)) != "threefry2x32":
        raise ValueError(f"dropout_key is a key of {jax.random.key_impl(key)}: one of threefry2x32 is needed")
    batch, heads, queries, keys = shape
    first = product(jax.lax.iota(jnp.uint32, batch * heads), queries * keys)
    words = *jax.random.key_data(key), *(t.reshape(batch, heads) for t in first)
    return jnp.stack([jnp.broadcast_to(t, (batch, heads)) for t in words], axis=-1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(spec: Spec, x: Operands) -> jax.Array:
    return primitive.forward(spec, x).output


def _forward(spec: Spec, x: Operands) -> tuple[jax.Array, tuple[Operands, Residuals]]:
    found = primitive.forward(spec, x)
    return found.output, (x, found)


def _backward(spec: Spec, kept: tuple[Operands, Residuals], cotangent: jax.Array) -> tuple[Operands]:
    x, found = kept
    gradients = primitive.backward(spec, x, found, cotangent)
    bias = None if x.bias is None else xla.of_bias(spec, x, found, cotangent)
    mask, seeds = (None if t is None else np.zeros(t.shape, jax.dtypes.float0) for t in (x.mask, x.seeds))
    return (Operands(*gradients, bias, mask, seeds),)


_attention.defvjp(_forward, _backward)
