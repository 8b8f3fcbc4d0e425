"""Rules of pooling: window reductions, and the gradients of max-pooling."""

from __future__ import annotations

import math
from typing import Any

import jax

from unity_jax import _compat
from unity_jax.ops.halo import Span, borrow, borrowed, span, split_axes
from unity_jax.ops.rule import InnerCollective, Rule, Shard, identity, make_rule, register
from unity_jax.pcg.graph import Op


@register("reduce_window_sum", "reduce_window_max", "reduce_window_min", "reduce_window", "select_and_gather_add")
def reduce_window(op: Op) -> Rule:
    """`([b,h,c]) -> ([b,h,c]) halo={h}`; no communication where windows do not reach into the next shard."""
    p = op.params
    arrays = len(op.inputs) // 2 if op.name == "reduce_window" else len(op.inputs)
    n, m = op.inputs[0].shape, op.outputs[0].shape
    window, strides, holes = p["window_dimensions"], p["window_strides"], p["base_dilation"]
    spans = [
        span(n[d], m[d], strides[d], window[d], p["window_dilation"][d], low, holes[d])
        for d, (low, _) in enumerate(p["padding"])
    ]

    def local(shard: Shard, *operands: Any) -> list[Any]:
        xs = [borrow(shard, i, operands[i], spans, _fill(op, i, operands)) for i in range(arrays)]
        padding = []
        for d, ((low, high), s) in enumerate(zip(p["padding"], spans, strict=True)):
            if s is not None and split_axes(shard, 0, d):
                low -= s.left * holes[d]
                reach = (shard.result_shape()[d] - 1) * strides[d] + (window[d] - 1) * p["window_dilation"][d]
                high = max(0, reach - low - (xs[0].shape[d] - 1) * holes[d])
            padding.append((low, high))
        return _compat.bind(op.eqn, [*xs, *operands[arrays:]], p | {"padding": tuple(padding)})

    return _windowed(
        op,
        [0] * arrays + [None] * (len(op.inputs) - arrays),
        spans,
        local,
        linear=[{0}] if op.name in ("reduce_window_sum", "select_and_gather_add") else [],
        inner=lambda shard: [c for i in range(arrays) for c in borrowed(shard, i, spans)],
    )


def _fill(op: Op, i: int, operands: Any) -> Any:
    """What lies beyond the ends of operand `i`: the neutral element (None for zero)."""
    if op.name == "reduce_window":
        return operands[len(operands) // 2 + i]
    if op.name == "select_and_gather_add":
        return _unselected(op, i) if i == 1 else None
    kind = {"reduce_window_max": "max", "reduce_window_min": "min"}.get(op.name)
    return kind and identity(kind, op.inputs[i].dtype)


def _unselected(op: Op, i: int) -> Any:
    """What a window never selects while it has anything else."""
    return identity({"ge": "max", "le": "min"}[op.params["select_prim"].name], op.inputs[i].dtype)


@register("select_and_scatter_add")
def select_and_scatter_add(op: Op) -> Rule:
    """The gradient of max-pooling, `(source [b,h,c], operand [b,h,c]) -> ([b,h,c]) halo={h}`.

    A device borrows the windows that reach into its shard and the operands of all its windows, and keeps what falls on
    its own shard.
    """
    p = op.params
    window, strides = p["window_dimensions"], p["window_strides"]
    m, n = op.inputs[0].shape, op.inputs[1].shape
    sources: list[Span | None] = []
    targets: list[Span | None] = []
    for d, (low, _) in enumerate(p["padding"]):
        s = span(n[d], m[d], strides[d], window[d], 1, low)
        if s is not None:
            before, after = max(0, (window[d] - 1 - low) // strides[d]), -(-low // strides[d])
            left, right = before * strides[d] + low, max(0, (after - 1) * strides[d] - low + window[d])
            sources.append(Span(s.size, s.other_minor, s.input_minor, before, after))
            targets.append(Span(s.size, s.input_minor, s.other_minor, left, right))
        else:
            sources.append(None)
            targets.append(None)

    def local(shard: Shard, source: Any, operand: Any) -> Any:
        own = operand.shape
        source = borrow(shard, 0, source, sources)
        operand = borrow(shard, 1, operand, targets, _unselected(op, 1))
        split = [s if s is not None and split_axes(shard, 1, d) else None for d, s in enumerate(targets)]
        padding = tuple(old if s is None else (0, 0) for old, s in zip(p["padding"], split, strict=True))
        (x,) = _compat.bind(op.eqn, [source, operand], p | {"padding": padding})
        starts = [s.left if s else 0 for s in split]
        return jax.lax.slice(x, starts, [a + k for a, k in zip(starts, own, strict=True)])

    def inner(shard: Shard) -> list[InnerCollective]:
        return borrowed(shard, 0, sources) + borrowed(shard, 1, targets)

    return _windowed(op, [1, 0], targets, local, linear=[{0}], inner=inner, results=0)


def _windowed(
    op: Op, sides: list[int | None], spans: list[Span | None], local: Any, *, linear: Any, inner: Any, results: int = 1
) -> Rule:
    """Dimensions split where they have a span.

    **Arguments:** `sides`: per operand, 0 if it is like the image, 1 if like the windows, None for a scalar; `results`:
    the same for the results.
    """
    labels: list[list[Any]] = [[None] * len(spans) for _ in range(2)]
    sizes: dict[str, int] = {}
    kinds: dict[str, str] = {}
    halos: dict[str, int] = {}
    even: set[str] = set()
    for d, s in enumerate(spans):
        if s is None:
            continue
        label = f"d{d}"
        labels[0][d], labels[1][d] = (label, label + "in"), (label, label + "other")
        sizes |= {label: s.size, label + "in": s.input_minor, label + "other": s.other_minor}
        kinds[label] = "halo" if s.halo else "pass"
        halos[label] = s.halo
        if op.params["window_dimensions"][d] > 1:
            even.add(label)
    return make_rule(
        op,
        [[] if side is None else labels[side] for side in sides],
        [labels[results]] * len(op.outputs),
        kinds=kinds,
        sizes=sizes,
        halos=halos,
        no_pad=even,
        linear=linear if _compat.is_float(op.outputs[0].dtype) else [],
        local=local,
        flops=math.prod(op.outputs[0].shape) * math.prod(op.params["window_dimensions"]),
        inner=inner,
    )
