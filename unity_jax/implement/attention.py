"""Attention that a step computes by operations of its own, as one op of each pass (`kernels.primitive`).

    s = q @ k.T / 8; s = where(causal, s, -1e9)          o, sums = attention(q, k, v)
    p = softmax(s); o = p @ v                      ->
    dp = do @ v.T; ds = p * (dp - sum(p * dp)) ...       dq, dk, dv = attention_back(q, k, v, o, sums, do)

Arrays are brought into the order of the kernels, and back. What depends on all heads alike stays as small as it was.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from unity_jax.implement.arrange import Arrangement
from unity_jax.implement.constants import Constants
from unity_jax.implement.group import Group, groups
from unity_jax.kernels import primitive
from unity_jax.kernels.spec import Operands, Residuals, Spec
from unity_jax.pcg.graph import Graph, Op, Tensor
from unity_jax.residuals.loop import computed
from unity_jax.rewrite.apply import in_order
from unity_jax.trace import without_dead_code


def attentions(graph: Graph, constants: Constants) -> list[Group]:
    """Those attentions of a graph of which nothing is needed but what the kernels compute."""
    found = groups(graph, constants)
    made = {of.tensor for group in found for of in (group.out, *group.gradients.values()) if of is not None}
    live = set(graph.outputs) - made
    for op in reversed(graph.ops) if found else ():
        if not live.isdisjoint(op.outputs):
            live.update(t for t in op.inputs if t not in made)
    return [group for group in found if group.place not in live]


def with_kernels(graph: Graph, chosen: Sequence[Group]) -> Graph:
    """The graph with these attentions as ops of their own."""
    replaced, ops = dict[Tensor, Tensor](), list[Op]()
    for group in chosen:
        made, instead = _written(group)
        ops += made
        replaced |= instead
    every = [op.reading(replaced) for op in (*graph.ops, *ops)]
    order = in_order(every, {op: i for i, op in enumerate(graph.ops)})
    return without_dead_code(Graph(graph.inputs, tuple(replaced.get(t, t) for t in graph.outputs), order))


def _written(group: Group) -> tuple[list[Op], dict[Tensor, Tensor]]:
    """The ops of an attention, and what tensors are now."""
    scores, out, drop, arrangement = group.scores, group.out, group.drop, Arrangement.of(group)
    assert scores.q is not None and scores.k is not None
    spec = Spec(scores.scale, scores.causal, drop.keep if drop else 1.0, scores.fill)
    arrays = (scores.q, scores.k, group.v, *scores.biases, *(mask.which for mask in scores.hiding))
    reads, masks = [of.tensor for of in arrays], 3 + len(scores.biases)

    def operands(given: Sequence[Any]) -> Operands:
        q, k, v = (arrangement.turned(name, of.dims, x) for name, of, x in zip("qkv", arrays, given, strict=False))
        others = [arrangement.small(of.dims, x) for of, x in zip(arrays[3:], given[3:], strict=False)]
        biases, seen = others[: masks - 3], others[masks - 3 :]
        seen = [x if mask.case else jnp.logical_not(x) for mask, x in zip(scores.hiding, seen, strict=True)]
        bias, mask = (_together(by, of, k) for by, of in ((jnp.add, biases), (jnp.logical_and, seen)))
        return Operands(q, k, v, bias, mask)

    def forward(*given: Any) -> list[Any]:
        x = operands(given)
        if drop is not None:
            words = *jax.random.key_data(given[-1]), *arrangement.first_bits(drop.bits.dims)
            x = x._replace(seeds=jnp.stack([jnp.broadcast_to(t, arrangement.counts) for t in words], axis=-1))
        found = primitive.forward(spec, x)
        output = found.output if out is None else arrangement.back("out", found.output, out).astype(out.tensor.dtype)
        return [output, found.sums, *([] if found.kept is None else [found.kept])]

    def backward(*given: Any) -> list[Any]:
        x, (output, sums, *kept, cotangent) = operands(given), given[len(reads) :]
        if out is not None:
            output = arrangement.turned("out", out.dims, output).astype(x.q.dtype)
        assert group.cotangent is not None
        cotangent = arrangement.turned("out", group.cotangent.dims, cotangent)
        made = primitive.backward(spec, x, Residuals(output, sums, kept[0] if kept else None), cotangent)
        named = dict(zip("qkv", made, strict=True))
        gradients = group.gradients.items()
        return [arrangement.back(name, named[name], of).astype(of.tensor.dtype) for name, of in gradients]

    ops, kept = computed(forward, [*reads, *([drop.key] if drop else [])], scores.exp)
    replaced = {} if out is None else {out.tensor: kept[0]}
    if group.cotangent is not None and group.gradients:
        late = dataclasses.replace(scores.exp, backward=True)
        more, made = computed(backward, [*reads, *kept, group.cotangent.tensor], late)
        ops += more
        replaced.update((of.tensor, t) for of, t in zip(group.gradients.values(), made, strict=True))
    return ops, replaced


def _together(by: Callable[[Any, Any], Any], arrays: Sequence[Any], keys: Any) -> Any:
    """Biases or masks as one, as long as there are keys; None of none."""
    if not arrays:
        return None
    made = functools.reduce(by, arrays)
    return jnp.broadcast_to(made, (*made.shape[:3], keys.shape[2]))
