"""Sorting and selection: the sorted dimension must be whole on every device, all others pass."""

from __future__ import annotations

import math

from unity_jax.ops.rule import Label, Rule, make_rule, register
from unity_jax.pcg.graph import Op


def _labels(rank: int, whole: int) -> list[Label]:
    return [None if d == whole % rank else d for d in range(rank)]


def _comparisons(op: Op, dim: int) -> float:
    """n log n along the dimension."""
    shape = op.inputs[0].shape
    return math.prod(shape) * math.log2(max(2, shape[dim]))


@register("sort")
def sort(op: Op) -> Rule:
    dim = op.params["dimension"]
    labels = _labels(op.inputs[0].rank, dim)
    return make_rule(op, [labels] * len(op.inputs), [labels] * len(op.outputs), flops=_comparisons(op, dim))


@register("top_k", "approx_top_k")
def top_k(op: Op) -> Rule:
    dim = op.params.get("axis", op.params.get("reduction_dimension", -1))
    labels = _labels(op.inputs[0].rank, dim)
    return make_rule(op, [labels] * len(op.inputs), [labels] * len(op.outputs), flops=_comparisons(op, dim))
