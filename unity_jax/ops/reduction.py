"""Rules of reductions and cumulative operations."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import numpy as np

from unity_jax import _compat
from unity_jax.ops.rule import Rule, make_rule, register
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


@register("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def cumulative(op: Op) -> Rule:
    """`([i,j]) -> ([i,j]) replicate={j}`."""
    labels = [f"d{d}" for d in range(op.inputs[0].rank)]
    linear = [{0}] if op.name == "cumsum" and _compat.is_float(op.inputs[0].dtype) else []
    return make_rule(op, [labels], [labels], kinds={labels[op.params["axis"]]: "replicate"}, linear=linear)
