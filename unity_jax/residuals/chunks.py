"""A chunked loss: the ops around the largest array of a step run by rows, a chunk of them after the other.

    logits = x W                         for each of 8 chunks of rows of x and labels:
    loss = sum(cross entropy(logits))        logits = x W, its part of loss and dlogits
    dx, dW = ...                             a chunk of dx; loss and dW: what there was, and its part

Forward and backward of a chunk are one iteration of one scan, so that an eighth of the logits is there at a time, and
nothing is computed twice. Exact up to the order of sums. A chunk is a part of the rows as a mesh axis splits them
(`ops.rule`), on an axis of time: the same local programs compute it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from unity_jax import _compat
from unity_jax.ops.rule import Shard
from unity_jax.pcg.graph import Graph, Op, Tensor
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.residuals.change import Change, made
from unity_jax.residuals.region import TIME, Region
from unity_jax.rewrite.apply import in_order
from unity_jax.trace import build, without_dead_code

PARTS = 8
"""How many chunks: an eighth of the largest array is no longer the largest."""


class _NeedsPositionsError(Exception):
    """An op of a region numbers its rows, of which a chunk has every eighth."""


@dataclass(frozen=True, eq=False)
class _Turn(Shard):
    """An op on one chunk of its rows. **Fields:** `index`: which; None where a chunk is no block of rows."""

    index: Any = None

    def offset(self, factor: int) -> Any:
        if not self.factor_axes[factor]:
            return 0
        if self.index is None:
            raise _NeedsPositionsError
        return self.index * self.local_size(factor)


def chunked(graph: Graph, region: Region, seed: Tensor, parts: int) -> Change | None:
    """The graph with a region as a loop over chunks of its rows; None where an op must know which rows it has and they
    are not consecutive.

    **Arguments:** `seed`: the array that the region is around, whose line its ops belong to.
    """
    arguments, results = (*region.cut, *region.whole), (*region.stacked, *region.sums)
    try:
        jaxpr = jax.make_jaxpr(lambda *arrays: _loop(region, parts, arrays))(
            *(jax.ShapeDtypeStruct(t.shape, t.dtype) for t in arguments)
        )
    except _NeedsPositionsError:
        return None
    loop = build(jaxpr)
    inside = _of(loop, dict(zip(loop.inputs, arguments, strict=True)), graph.producer[seed])
    replaced = dict(zip(results, inside.outputs, strict=True))
    gone = set(region.factors)
    left = [op for op in graph.ops if op not in gone]
    left = [dataclasses.replace(op, inputs=tuple(replaced.get(t, t) for t in op.inputs)) for op in left]
    order = in_order([*left, *inside.ops], {op: i for i, op in enumerate(graph.ops)})
    outputs = tuple(replaced.get(t, t) for t in graph.outputs)
    whole = without_dead_code(Graph(graph.inputs, outputs, _behind(order, set(inside.outputs))))
    return Change(whole, {t: i for i, t in enumerate(made(inside))})


def _loop(region: Region, parts: int, arrays: Sequence[Any]) -> list[Any]:
    """The results of a region, by chunks."""
    cut, whole = arrays[: len(region.cut)], arrays[len(region.cut) :]

    def step(sums: list[Any], chunk: tuple[Any, list[Any]]) -> tuple[list[Any], list[Any]]:
        index, slices = chunk
        env = dict(zip((*region.cut, *region.whole), (*slices, *whole), strict=True))
        _run(region, parts, env, index)
        added = [x + env[t].astype(x.dtype) for x, t in zip(sums, region.sums, strict=True)]
        return added, [env[t] for t in region.stacked]

    zeros = [jnp.zeros(t.shape, _wide(t.dtype)) for t in region.sums]
    index = None if region.first else jnp.arange(parts)
    slices = [_split(region, t, x, parts) for t, x in zip(region.cut, cut, strict=True)]
    sums, stacks = jax.lax.scan(step, zeros, (index, slices))
    joined = [_join(region, t, x) for t, x in zip(region.stacked, stacks, strict=True)]
    return [*joined, *(x.astype(t.dtype) for t, x in zip(region.sums, sums, strict=True))]


def _run(region: Region, parts: int, env: dict[Tensor, Any], index: Any) -> None:
    """Compute the ops of a region on one chunk."""
    mesh = MeshAxes((TIME,), (parts,))
    for op in region.ops:
        turn = _Turn(op, region.rules[op], mesh, (region.factors.get(op, -1),), index=index)
        operands = [t.literal if t.literal is not None else env[t] for t in op.inputs]
        env.update(zip(op.outputs, turn.run(operands), strict=True))


def _wide(dtype: Any) -> Any:
    """The type in which parts are added up: rounded to half of it, eight parts would lose what one sum does not."""
    return jnp.float32 if _compat.is_float(dtype) and jnp.dtype(dtype).itemsize < 4 else dtype


def _split(region: Region, t: Tensor, x: Any, parts: int) -> Any:
    """An array as a stack of its chunks: blocks of rows, or, where devices hold blocks, every eighth row."""
    dim, before = region.rows[t], x.shape[: region.rows[t]]
    rest, after = x.shape[dim] // region.size, x.shape[dim + 1 :]
    if region.first:
        x = x.reshape(*before, region.size // parts, parts, rest, *after)
        return jnp.moveaxis(x, dim + 1, 0).reshape(parts, *before, x.shape[dim] * rest, *after)
    return jnp.moveaxis(x.reshape(*before, parts, -1, *after), dim, 0)


def _join(region: Region, t: Tensor, x: Any) -> Any:
    """The array of a stack of its chunks."""
    dim, (parts, *shape) = region.rows[t], x.shape
    if region.first:
        rows = region.size // parts
        x = x.reshape(parts, *shape[:dim], rows, shape[dim] // rows, *shape[dim + 1 :])
        return jnp.moveaxis(x, 0, dim + 1).reshape(t.shape)
    return jnp.moveaxis(x, 0, dim).reshape(t.shape)


def _of(graph: Graph, names: dict[Tensor, Tensor], source: Op) -> Graph:
    """A traced graph with other tensors for its arguments, its ops of the backward pass and of the line of an op."""
    info = source.eqn.source_info if source.eqn is not None else None
    ops = [
        dataclasses.replace(
            op,
            inputs=tuple(names.get(t, t) for t in op.inputs),
            bodies=tuple(_of(body, {}, source) for body in op.bodies),
            eqn=op.eqn.replace(source_info=info) if op.eqn is not None and info is not None else op.eqn,
            callers=source.callers,
            backward=True,
        )
        for op in graph.ops
    ]
    return Graph(tuple(names.get(t, t) for t in graph.inputs), tuple(names.get(t, t) for t in graph.outputs), ops)


def _behind(ops: Sequence[Op], late: set[Tensor]) -> list[Op]:
    """Ops, of which those that read what is made in the backward pass belong to that."""
    found = []
    for op in ops:
        if not op.backward and not late.isdisjoint(op.inputs):
            op = dataclasses.replace(op, backward=True)
        if op.backward:
            late.update(op.outputs)
        found.append(op)
    return found
