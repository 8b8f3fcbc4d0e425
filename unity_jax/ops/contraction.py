"""Rules of matrix products: `dot_general` and the grouped products of mixture-of-experts layers."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from unity_jax import _compat
from unity_jax.ops.rule import Rule, Shard, make_rule, register
from unity_jax.pcg.graph import Op


def bilinear(op: Op) -> list[set[int]]:
    """The linear operand sets of a product of two floating-point operands."""
    return [{0}, {1}] if _compat.is_float(op.outputs[0].dtype) else []


@register("dot_general")
def dot_general(op: Op) -> Rule:
    """`([b,m,k], [b,n,k]) -> ([b,m,n]) sum={k}`, with any number of dimensions of each kind, in any order."""
    (lhs_k, rhs_k), (lhs_b, rhs_b) = op.params["dimension_numbers"]
    lhs = [f"m{d}" for d in range(op.inputs[0].rank)]
    rhs = [f"n{d}" for d in range(op.inputs[1].rank)]
    for i, (a, b) in enumerate(zip(lhs_k, rhs_k, strict=True)):
        lhs[a] = rhs[b] = f"k{i}"
    for i, (a, b) in enumerate(zip(lhs_b, rhs_b, strict=True)):
        lhs[a] = rhs[b] = f"b{i}"
    batch, free = [lhs[d] for d in lhs_b], [x for x in lhs + rhs if x[0] in "mn"]
    reduced = {lhs[d]: "sum" for d in lhs_k}
    flops = 2 * math.prod(op.outputs[0].shape) * math.prod(op.inputs[0].shape[d] for d in lhs_k)
    return make_rule(op, [lhs, rhs], [batch + free], kinds=reduced, linear=bilinear(op), flops=flops)


@register("ragged_dot_general")
def ragged_dot_general(op: Op) -> Rule | None:
    """Rows times the matrix of their group: `([m,k], [g,k,n], [g]) -> ([m,n]) sum={k} replicate={g}`.

    Where the ragged dimension is contracted (the gradient), `([k,m], [k,n], [g]) -> ([g,m,n]) sum={k} replicate={g}`.
    A shard of the ragged dimension holds a part of every group; the local program counts the rows of each part.
    """
    numbers = op.params["ragged_dot_dimension_numbers"]
    (lhs_k, rhs_k), (lhs_b, rhs_b) = numbers.dot_dimension_numbers
    (ragged,) = numbers.lhs_ragged_dimensions
    if op.inputs[2].rank != 1 or ragged in lhs_b:
        return None
    lhs = [f"m{d}" for d in range(op.inputs[0].rank)]
    rhs: list[Any] = [f"n{d}" for d in range(op.inputs[1].rank)]
    for i, (a, b) in enumerate(zip(lhs_k, rhs_k, strict=True)):
        lhs[a] = rhs[b] = f"k{i}"
    for i, (a, b) in enumerate(zip(lhs_b, rhs_b, strict=True)):
        lhs[a] = rhs[b] = f"b{i}"
    for d in numbers.rhs_group_dimensions:
        rhs[d] = "group"
    result = [lhs[d] for d in lhs_b] + [x for x in lhs + rhs if x[0] in "mn"]
    if ragged in lhs_k:
        result = ["group", *result]
    reduced = {lhs[d]: "sum" for d in lhs_k}

    def local(shard: Shard, x: Any, y: Any, group_sizes: Any) -> list[Any]:
        if factor := shard.rule.operands[0][ragged]:
            first, rows = shard.offset(factor[0]), shard.local_size(factor[0])
            ends = jnp.cumsum(group_sizes)
            here = [jnp.clip(e - first, 0, rows) for e in (ends - group_sizes, ends)]
            group_sizes = (here[1] - here[0]).astype(group_sizes.dtype)
        return _compat.bind(op.eqn, [x, y, group_sizes], op.params)

    sizes = dict(zip(lhs, op.inputs[0].shape, strict=True))
    sizes |= {label: n for label, n in zip(rhs, op.inputs[1].shape, strict=True) if label != "group"}
    return make_rule(
        op,
        [lhs, rhs, ["group"]],
        [result],
        kinds=reduced | {"group": "replicate"},
        linear=bilinear(op),
        local=local,
        flops=2 * math.prod(sizes.values()),
    )
