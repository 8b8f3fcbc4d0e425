"""Attention as one op of each pass, and as it is written by hand."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tests.numerics.programs.drawer import FLOAT, SIZES, Drawer, entry
from unity_jax.kernels import attention


def _attended(d: Drawer) -> tuple[list[Any], bool]:
    """Queries, keys and values of a drawn shape, and whether no query sees a later key."""
    batch, queries, keys, features = d.choice(SIZES), d.choice((3, 4, 8)), d.choice((2, 5, 8)), d.choice((2, 4))
    groups, shared = d.choice((1, 2, 4)), d.choice((1, 1, 3))
    shapes = (batch, queries, groups * shared, features), *[(batch, keys, groups, features)] * 2
    return [d.value(FLOAT, shape=shape) for shape in shapes], d.variant("all keys", "causal") == "causal"


@entry("attention")
def attended(d: Drawer) -> None:
    operands, causal = _attended(d)
    d.apply("attention", lambda q, *kv: attention(q, *(t.astype(q.dtype) for t in kv), causal=causal), *operands)


@entry("attention_back")
def attended_back(d: Drawer) -> None:
    operands, causal = _attended(d)

    def gradient(q: Any, k: Any, v: Any) -> Any:
        of = jax.grad(lambda k: jnp.sin(attention(q, k, v.astype(q.dtype), causal=causal)).sum())
        return of(k.astype(q.dtype))

    d.apply("attention_back", gradient, *operands)


@entry("attention:written")
def attended_by_hand(d: Drawer) -> None:
    """Of which a kernel may be made (`Case.implemented`)."""
    operands, causal = _attended(d)
    back, hides = d.variant("forward", "backward") == "backward", d.variant("mask", "no mask") == "mask"

    def written(q: Any, k: Any, v: Any) -> Any:
        k, v = k.astype(q.dtype), v.astype(q.dtype)
        grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
        s = jnp.einsum("bqgrf,bkgf->bgrqk", grouped, k) / q.shape[3] ** 0.5
        if causal:
            s = jnp.where(jnp.tril(jnp.ones(s.shape[3:], bool)), s, -1e30)
        if hides:
            s = jnp.where(jnp.arange(s.shape[-1]) % 3 < 2, s, -1e30)
        return jnp.einsum("bgrqk,bkgf->bqgrf", jax.nn.softmax(s), v).reshape(q.shape)

    def gradients(q: Any, k: Any, v: Any) -> Any:
        return jax.grad(lambda *x: jnp.sin(written(*x)).sum(), (0, 1, 2))(q, k, v)

    d.apply("attention by hand", gradients if back else written, *operands)
