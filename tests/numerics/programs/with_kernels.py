"""Attention as one op of each pass."""

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
