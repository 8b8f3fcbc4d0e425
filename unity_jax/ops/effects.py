"""Prints and host callbacks: the first device runs them, on whole operands, so that they happen once, not once each.

What an `io_callback` returns reaches the other devices by an all-reduce, to which they contribute zeros.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from unity_jax import _compat
from unity_jax.ops.rule import InnerCollective, Rule, Shard, make_rule, register
from unity_jax.pcg.graph import Op


@register("debug_callback", "debug_print", "io_callback")
def effect(op: Op) -> Rule:
    return make_rule(
        op,
        [[None] * t.rank for t in op.inputs],
        [[None] * t.rank for t in op.outputs],
        local=_once,
        inner=_broadcasts,
    )


def _axes(shard: Shard) -> tuple[str, ...]:
    """The mesh axes that hold copies of the op."""
    return tuple(n for n, size in zip(shard.mesh.names, shard.mesh.sizes, strict=True) if size > 1)


def _once(shard: Shard, *operands: Any) -> list[Any]:
    axes, outputs = _axes(shard), shard.op.outputs

    def first(*xs: Any) -> list[Any]:
        return _compat.bind(shard.op.eqn, xs, shard.op.params)

    if not axes:
        return first(*operands)
    found = jax.lax.cond(
        jax.lax.axis_index(axes) == 0, first, lambda *_: [jnp.zeros(t.shape, t.dtype) for t in outputs], *operands
    )
    return [_broadcast(x, axes) for x in found]


def _broadcast(x: Any, axes: tuple[str, ...]) -> Any:
    """What the first device holds, where all others hold zeros. Booleans travel as bytes."""
    return jax.lax.psum(x.astype(jnp.uint8), axes) != 0 if x.dtype == jnp.bool_ else jax.lax.psum(x, axes)


def _broadcasts(shard: Shard) -> list[InnerCollective]:
    axes = _axes(shard)
    return (
        [InnerCollective("all_reduce", axes, shard.result_bytes(i)) for i in range(len(shard.op.outputs))]
        if axes
        else []
    )
