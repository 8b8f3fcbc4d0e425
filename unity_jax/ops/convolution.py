"""Rule of `conv_general_dilated`: forward convolutions and both of their gradients, grouped or not."""

from __future__ import annotations

import math
from typing import Any

from unity_jax import _compat
from unity_jax.ops.contraction import bilinear
from unity_jax.ops.halo import Span, borrow, borrowed, span, split_axes
from unity_jax.ops.rule import Rule, Shard, make_rule, register
from unity_jax.pcg.graph import Op


@register("conv_general_dilated")
def conv_general_dilated(op: Op) -> Rule:
    """`([b,c,h], [o,c,w]) -> ([b,o,h]) sum={c} halo={h}`; with groups, `([b,gc,h], [go,c,w]) -> ([b,go,h])`.

    In a kernel gradient the window is as large as the image, and both are split: `([b,c,h], [o,c,h]) -> ([b,o,w])
    sum={c,h}`. Either way `ops.halo` moves the borders. Groups of the batch (`batch_group_count`, in the kernel
    gradients of grouped convolutions) divide the batch of the left operand and the output features of the right one.
    """
    p = op.params
    lhs_spec, rhs_spec, out_spec = p["dimension_numbers"]
    lhs, rhs, out = op.inputs[0].shape, op.inputs[1].shape, op.outputs[0].shape
    groups, batch_groups = p["feature_group_count"], p["batch_group_count"]
    labels: list[list[Any]] = [[None] * len(lhs) for _ in range(3)]
    sizes = {"b": out[out_spec[0]], "c": rhs[rhs_spec[1]], "o": rhs[rhs_spec[0]] // (groups * batch_groups)}
    sizes |= {"g": groups, "a": batch_groups}
    labels[0][lhs_spec[0]], labels[0][lhs_spec[1]] = ("a", "b"), ("g", "c")
    labels[1][rhs_spec[0]], labels[1][rhs_spec[1]] = ("a", "g", "o"), "c"
    labels[2][out_spec[0]], labels[2][out_spec[1]] = "b", ("a", "g", "o")
    kinds, halos = {"c": "sum"}, {}
    even = {"g", "a"}  # compilers may expand groups to zeros in a dense kernel, and zero times garbage may be NaN

    spans: list[Span | None] = [None] * len(lhs)
    for i, (stride, (low, _)) in enumerate(zip(p["window_strides"], p["padding"], strict=True)):
        at, window_at, out_at = lhs_spec[2 + i], rhs_spec[2 + i], out_spec[2 + i]
        n, w, m = lhs[at], rhs[window_at], out[out_at]
        forward, backward = (m, stride), (w, p["rhs_dilation"][i])
        for gradient in (w > m, w <= m):  # the likelier first
            split, whole = (backward, forward) if gradient else (forward, backward)
            if s := span(n, *split, *whole, low, p["lhs_dilation"][i]):
                break
        else:
            continue
        h, spans[at] = f"h{i}", s
        sizes |= {h: s.size, h + "in": s.input_minor, h + "other": s.other_minor}
        labels[0][at] = (h, h + "in")
        labels[1 if gradient else 2][window_at if gradient else out_at] = (h, h + "other")
        kinds[h] = "sum" if gradient else "halo" if s.halo else "pass"
        halos[h] = s.halo
        if (w, stride, low, n) != (1, 1, 0, m):
            even.add(h)

    def local(shard: Shard, x: Any, y: Any) -> list[Any]:
        padding = []
        x = borrow(shard, 0, x, spans)
        result = shard.result_shape()
        for i, (low, high) in enumerate(p["padding"]):
            at, window_at, out_at = lhs_spec[2 + i], rhs_spec[2 + i], out_spec[2 + i]
            if spans[at] and split_axes(shard, 0, at):
                low -= spans[at].left * p["lhs_dilation"][i]
            sizes = x.shape[at], y.shape[window_at], result[out_at]
            if sizes != (lhs[at], rhs[window_at], out[out_at]):
                reach = (sizes[2] - 1) * p["window_strides"][i] + (sizes[1] - 1) * p["rhs_dilation"][i]
                high = reach - low - (sizes[0] - 1) * p["lhs_dilation"][i]
            padding.append((low, high))
        params = p | {
            "padding": tuple(padding),
            "feature_group_count": shard.local_size(shard.rule.operands[0][lhs_spec[1]][0]) if groups > 1 else 1,
            "batch_group_count": shard.local_size(shard.rule.operands[0][lhs_spec[0]][0]) if batch_groups > 1 else 1,
        }
        return _compat.bind(op.eqn, [x, y], params)

    # Zeros between dilated inputs are never multiplied.
    taps = math.prod(rhs[d] for d in rhs_spec[1:]) / math.prod(p["lhs_dilation"])
    return make_rule(
        op,
        labels[:2],
        labels[2:],
        kinds=kinds,
        sizes=sizes,
        no_pad=even,
        halos=halos,
        linear=bilinear(op),
        local=local,
        flops=2 * math.prod(out) * taps,
        inner=lambda shard: borrowed(shard, 0, spans),
    )
