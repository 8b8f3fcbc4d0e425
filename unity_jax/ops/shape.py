"""Ops that only move elements: broadcasts, reshapes, slices, concatenations.

    reshape [batch*seq, embed] -> [batch, seq, heads, head_dim]:  ([ij,kl]) -> ([i,j,k,l])

A dimension whose elements keep their places relative to each other may be split; one whose elements move (the dimension
along which a slice cuts or a concatenation joins) may not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from unity_jax import _compat
from unity_jax.ops.rule import Label, Rule, Shard, make_rule, register
from unity_jax.pcg.graph import Op


def _linear(op: Op, *operands: int) -> list[set[int]]:
    """Partial sums pass through, for numbers that have them."""
    return [set(operands)] if all(_compat.is_float(t.dtype) for t in op.outputs) else []


def _with(shard: Shard, *operands: Any, **params: Any) -> list[Any]:
    """The primitive itself, with these parameters changed."""
    return _compat.bind(shard.op.eqn, operands, {**shard.op.params, **params})


def _same(op: Op, moved: Sequence[int] = ()) -> list[Label]:
    """A label for every dimension of the first operand, except those along which elements move."""
    return [None if d in moved else d for d in range(op.inputs[0].rank)]


def _result_bytes(shard: Shard) -> float:
    """A slice reads no more than it writes."""
    return 2.0 * shard.result_bytes()


# New and vanishing dimensions


@register("broadcast_in_dim")
def broadcast_in_dim(op: Op) -> Rule:
    # An operand dimension of size 1 that grows has no factor; the result's dimension is free.
    labels = list(op.params["broadcast_dimensions"])
    return make_rule(
        op,
        [labels, *([[]] * (len(op.inputs) - 1))],
        [list(range(op.outputs[0].rank))],
        linear=_linear(op, 0),
        local=lambda shard, *xs: _with(shard, *xs, shape=shard.result_shape()),
        flops=0,
    )


@register("squeeze")
def squeeze(op: Op) -> Rule:
    labels = _same(op)
    kept = [label for d, label in enumerate(labels) if d not in op.params["dimensions"]]
    return make_rule(op, [labels], [kept], linear=_linear(op, 0), flops=0)


@register("transpose")
def transpose(op: Op) -> Rule:
    return make_rule(op, [_same(op)], [list(op.params["permutation"])], linear=_linear(op, 0), flops=0)


@register("reshape")
def reshape(op: Op) -> Rule | None:
    if op.params.get("dimensions") is not None or 0 in op.inputs[0].shape:
        return None
    source, target, sizes = reshape_factors(op.inputs[0].shape, op.outputs[0].shape)
    shared = {f for dim in source for f in dim} & {f for dim in target for f in dim}
    return make_rule(
        op,
        [source],
        [target],
        sizes=sizes,
        kinds={f: "replicate" for f in sizes if f not in shared},
        linear=_linear(op, 0),
        local=lambda shard, x: _with(shard, x, new_sizes=shard.result_shape()),
        flops=0,
    )


def reshape_factors(
    source: tuple[int, ...], target: tuple[int, ...]
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], dict[int, int]]:
    """The factors of the dimensions of a reshape, major to minor, and the sizes of all factors.

    `(6, 4) -> (2, 3, 4)` gives `[(0, 1), (2,)], [(0,), (1,), (2,)], {0: 2, 1: 3, 2: 4}`. Where the sizes do not nest,
    as in `(4, 6) -> (6, 4)`, the common divisor of the major dimensions is shared and the rest is not.
    """
    sizes: dict[int, int] = {}
    sides: tuple[list[list[int]], list[list[int]]] = ([[] for _ in source], [[] for _ in target])

    def new(n: int) -> int:
        sizes[len(sizes)] = n
        return len(sizes) - 1

    ins = [(d, n) for d, n in enumerate(source) if n > 1]
    outs = [(d, n) for d, n in enumerate(target) if n > 1]
    while ins:
        # The shortest runs of dimensions with equal products.
        a, b = 1, 1
        while math.prod(n for _, n in ins[:a]) != math.prod(n for _, n in outs[:b]):
            if math.prod(n for _, n in ins[:a]) < math.prod(n for _, n in outs[:b]):
                a += 1
            else:
                b += 1
        runs, ins, outs = ([list(p) for p in ins[:a]], [list(p) for p in outs[:b]]), ins[a:], outs[b:]
        while runs[0] and (g := math.gcd(runs[0][0][1], runs[1][0][1])) > 1:
            factor = new(g)
            for side, run in zip(sides, runs, strict=True):
                side[run[0][0]].append(factor)
                run[0][1] //= g
                if run[0][1] == 1:
                    run.pop(0)
        for side, run in zip(sides, runs, strict=True):
            for d, n in run:
                side[d].append(new(n))
    source_factors, target_factors = ([tuple(dim) for dim in side] for side in sides)
    return source_factors, target_factors, sizes


# Parts and wholes


@register("rev")
def rev(op: Op) -> Rule:
    labels = _same(op, op.params["dimensions"])
    return make_rule(op, [labels], [labels], linear=_linear(op, 0), flops=0)


@register("slice")
def slice_(op: Op) -> Rule:
    (x,), (y,) = op.inputs, op.outputs
    labels = _same(op, [d for d in range(x.rank) if x.shape[d] != y.shape[d]])

    def local(shard: Shard, x: Any) -> Any:
        ends = [x.shape[d] if labels[d] is not None else end for d, end in enumerate(op.params["limit_indices"])]
        return _with(shard, x, limit_indices=tuple(ends))

    return make_rule(op, [labels], [labels], linear=_linear(op, 0), local=local, flops=0, bytes=_result_bytes)


@register("dynamic_slice")
def dynamic_slice(op: Op) -> Rule:
    x, y = op.inputs[0], op.outputs[0]
    labels = _same(op, [d for d in range(x.rank) if x.shape[d] != y.shape[d]])
    limits = [n - m for n, m in zip(x.shape, y.shape, strict=True)]
    return make_rule(
        op,
        [labels, *([[]] * (len(op.inputs) - 1))],
        [labels],
        linear=_linear(op, 0),
        local=lambda shard, x, *starts: _with(shard, x, *_clamped(starts, limits), slice_sizes=shard.result_shape()),
        flops=0,
        bytes=_result_bytes,
    )


def _clamped(starts: Sequence[Any], limits: Sequence[int]) -> list[Any]:
    """The starts of a slice of the whole, in `[0, limit]`.

    That is where the slice clamps them, but XLA (of JAX 0.10) merges it with the slice that makes a shard of its
    operand or its result by adding their starts unclamped.
    """
    tops = [min(n, int(jnp.iinfo(s.dtype).max)) for s, n in zip(starts, limits, strict=True)]
    return [jnp.clip(s, 0, n) if n else jnp.zeros_like(s) for s, n in zip(starts, tops, strict=True)]


@register("dynamic_update_slice")
def dynamic_update_slice(op: Op) -> Rule:
    x, update = op.inputs[:2]
    cut = [d for d in range(x.rank) if x.shape[d] != update.shape[d]]
    labels = list(range(x.rank))
    return make_rule(
        op,
        [labels, _same(op, cut), *([[]] * (len(op.inputs) - 2))],
        [labels],
        linear=_linear(op, 0, 1),
        local=lambda shard, *xs: _update_shard(shard, cut, *xs),
        flops=0,
        bytes=lambda shard: 2.0 * min(shard.operand_bytes(1), shard.result_bytes()),
    )


def _update_shard(shard: Shard, cut: Sequence[int], x: Any, update: Any, *starts: Any) -> Any:
    """Each device writes the part of the update that falls into its shard."""
    shape = shard.op.inputs[0].shape
    starts = _clamped(starts, [n - m for n, m in zip(shape, shard.op.inputs[1].shape, strict=True)])
    split = [d for d in cut if shard.operand_layouts[0].dims[d]]
    inside = True
    for d in split:
        n, size = x.shape[d], update.shape[d]
        start = starts[d].astype(jnp.int32)
        position = shard.offset(shard.rule.operands[0][d][0]) + lax.iota(jnp.int32, n) - start
        update = jnp.take(update, jnp.clip(position, 0, size - 1), axis=d)
        within = (position >= 0) & (position < size)
        inside &= jnp.expand_dims(within, [i for i in range(x.ndim) if i != d])
        starts[d] = jnp.zeros_like(starts[d])
    if split:
        update = jnp.where(inside, update, lax.dynamic_slice(x, starts, update.shape))
    return lax.dynamic_update_slice(x, update, starts)


@register("pad")
def pad(op: Op) -> Rule:
    labels = _same(op, [d for d, config in enumerate(op.params["padding_config"]) if any(config)])
    value = op.inputs[1].literal
    zero = value is not None and not value.any()
    return make_rule(op, [labels, []], [labels], linear=_linear(op, *([0] if zero else [0, 1])), flops=0)


@register("concatenate")
def concatenate(op: Op) -> Rule:
    labels = _same(op, [op.params["dimension"]])
    return make_rule(op, [labels] * len(op.inputs), [labels], linear=_linear(op, *range(len(op.inputs))), flops=0)


@register("split")
def split(op: Op) -> Rule:
    labels = _same(op, [op.params["axis"]])
    return make_rule(op, [labels], [labels] * len(op.outputs), linear=_linear(op, 0), flops=0)


@register("unstack")
def unstack(op: Op) -> Rule:
    labels = _same(op, [op.params["axis"]])
    kept = [label for label in labels if label is not None]
    return make_rule(op, [labels], [kept] * len(op.outputs), linear=_linear(op, 0), flops=0)


@register("stack")
def stack(op: Op) -> Rule:
    labels = _same(op)
    stacked = [*labels[: op.params["axis"]], None, *labels[op.params["axis"] :]]
    return make_rule(op, [labels] * len(op.inputs), [stacked], linear=_linear(op, *range(len(op.inputs))), flops=0)


@register("tile")
def tile(op: Op) -> Rule:
    shape, reps = op.inputs[0].shape, op.params["reps"]
    labels = [d if n == 1 or r == 1 else None for d, (n, r) in enumerate(zip(shape, reps, strict=True))]

    def local(shard: Shard, x: Any) -> Any:
        target = shard.result_shape()
        return _with(shard, x, reps=tuple(m // k for m, k in zip(target, x.shape, strict=True)))

    return make_rule(op, [labels], [labels], linear=_linear(op, 0), local=local, flops=0)


@register("bitcast_convert_type")
def bitcast_convert_type(op: Op) -> Rule | None:
    # Between widths, the parts of an element are an extra minor dimension.
    (x,), (y,) = op.inputs, op.outputs
    if x.rank == y.rank:
        return None
    labels = [*range(min(x.rank, y.rank)), None]
    return make_rule(op, [labels[: x.rank]], [labels[: y.rank]], flops=0)


# New values


@register("iota")
def iota(op: Op) -> Rule:
    def local(shard: Shard) -> Any:
        shape, dtype, d = shard.result_shape(), op.params["dtype"], op.params["dimension"]
        wide = dtype if jnp.issubdtype(dtype, jnp.unsignedinteger) else jax.dtypes.canonicalize_dtype(np.int64)
        start = sum(shard.offset(f) for f in shard.rule.results[0][d])  # a dimension of size 1 has no factor
        return (lax.broadcasted_iota(wide, shape, d) + jnp.asarray(start, wide)).astype(dtype)

    return make_rule(op, [], [list(range(op.outputs[0].rank))], local=local, flops=0)


@register("empty", "empty2")
def empty(op: Op) -> Rule:
    def local(shard: Shard) -> Any:
        return jnp.zeros(shard.result_shape(), op.outputs[0].dtype)

    return make_rule(op, [], [list(range(op.outputs[0].rank))], local=local, flops=0)
