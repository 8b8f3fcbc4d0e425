"""Rules of reductions and cumulative operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from unity_jax import _compat
from unity_jax.ops.rule import InnerCollective, Rule, Shard, identity, make_rule, register
from unity_jax.pcg.graph import Op


def _reduction(op: Op, axes: Collection[int], kind: str, arrays: int = 1, linear: bool = False) -> Rule:
    """`([i,j]) -> ([i])` with the reduced dimensions of one kind; scalar operands follow the arrays."""
    labels: list[Any] = [f"d{d}" for d in range(op.inputs[0].rank)]
    kept = [x for d, x in enumerate(labels) if d not in axes]
    return make_rule(
        op,
        [labels] * arrays + [[]] * (len(op.inputs) - arrays),
        [kept] * len(op.outputs),
        kinds={labels[d]: kind for d in axes},
        linear=[{0}] if linear else [],
        flops=math.prod(op.inputs[0].shape) * len(op.outputs),
    )


@register("reduce_sum")
def reduce_sum(op: Op) -> Rule:
    """`([i,j]) -> ([i]) sum={j}`."""
    return _reduction(op, op.params["axes"], "sum", linear=_compat.is_float(op.inputs[0].dtype))


@register("reduce_max", "reduce_min", "reduce_or", "reduce_and")
def reduce_extremum(op: Op) -> Rule:
    """`([i,j]) -> ([i]) max={j}`; over booleans, any is the greatest and all the least."""
    bitwise = op.name in ("reduce_or", "reduce_and") and np.dtype(op.inputs[0].dtype) != np.bool_
    kind = "replicate" if bitwise else "max" if op.name in ("reduce_max", "reduce_or") else "min"
    return _reduction(op, op.params["axes"], kind)


@register("reduce_prod", "reduce_xor", "argmax", "argmin")
def reduce_whole(op: Op) -> Rule:
    """`([i,j]) -> ([i]) replicate={j}`: no collective finishes these reductions."""
    return _reduction(op, op.params["axes"], "replicate")


@register("reduce")
def reduce(op: Op) -> Rule:
    """`([i,j], []) -> ([i]) replicate={j}`, over any number of arrays and their initial values."""
    return _reduction(op, op.params["dimensions"], "replicate", arrays=len(op.outputs))


# Cumulative operations


_SCANS: dict[str, tuple[str, Callable[..., Any], Callable[..., Any]]] = {
    "cumsum": ("sum", jnp.add, jnp.sum),
    "cumprod": ("product", jnp.multiply, jnp.prod),
    "cummax": ("max", jnp.maximum, jnp.max),
    "cummin": ("min", jnp.minimum, jnp.min),
    "cumlogsumexp": ("max", jnp.logaddexp, jax.nn.logsumexp),
}
"""What changes nothing (the identity of a reduction, or one), what joins two results, and what joins many."""


@register(*_SCANS)
def cumulative(op: Op) -> Rule:
    """`([i,j]) -> ([i,j])`. Where `j` is split, a device's results are joined with the totals of those before it."""
    labels = [f"d{d}" for d in range(op.inputs[0].rank)]
    linear = [{0}] if op.name == "cumsum" and _compat.is_float(op.inputs[0].dtype) else []
    return make_rule(op, [labels], [labels], linear=linear, local=_scan_shard, inner=_totals)


def _split(shard: Shard) -> tuple[int, tuple[str, ...]]:
    """The factor along which results accumulate, and the axes that split it."""
    dims = shard.rule.operands[0][shard.op.params["axis"]]
    return (dims[0], shard.factor_axes[dims[0]]) if dims else (-1, ())


def _scan_shard(shard: Shard, x: Any) -> Any:
    axis, reverse = shard.op.params["axis"], shard.op.params["reverse"]
    kind, join, join_all = _SCANS[shard.op.name]
    factor, axes = _split(shard)
    nothing = np.ones((), x.dtype) if kind == "product" else identity(kind, x.dtype)
    if axes and shard.is_padded(factor):
        x = jnp.where(shard.valid(factor, x, axis), x, nothing)
    (y,) = _compat.bind(shard.op.eqn, (x,), shard.op.params)
    if not axes:
        return y
    last = 0 if reverse else y.shape[axis] - 1
    total = lax.slice_in_dim(y, last, last + 1, axis=axis)
    totals, here = lax.all_gather(total, axes), lax.axis_index(axes)
    others = lax.broadcasted_iota(here.dtype, totals.shape, 0)
    before = others > here if reverse else others < here
    return join(y, join_all(jnp.where(before, totals, nothing), axis=0).astype(y.dtype))


def _totals(shard: Shard) -> list[InnerCollective]:
    factor, axes = _split(shard)
    if not axes:
        return []
    total = shard.operand_bytes(0) // shard.local_size(factor)
    return [InnerCollective("all_gather", axes, shard.ways(factor) * total)]
