"""The rule of a loop that is one kernel (`kernels.persistent`): split by rows, which no step mixes.

    persistent_scan    constants, carried, sliced -> last, stacked        as of a scan (`pcg.loops`)

The body is no graph of the program any more, but a parameter: nothing is moved inside, and all ops are split alike.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from unity_jax import _compat
from unity_jax.kernels.persistent import Persistent, Step
from unity_jax.kernels.tiles import SUBLANES
from unity_jax.ops.rule import Rule, Shard, make_rule, register
from unity_jax.pcg.graph import Graph, Op, Tensor
from unity_jax.pcg.loops import Scan
from unity_jax.pcg.mesh import MeshAxes

NAME = "persistent_scan"
ROWS = "b"
_BLOCKS = "blocks of rows"
"""The axis of a mesh that splits rows further, one block after the other."""


class Split(NamedTuple):
    """How an op of a body is split: its factor that the rows are, None if it has none."""

    rule: Rule
    factor: int | None


@dataclass(frozen=True, eq=False)
class Body:
    """What a loop does in each step.

    **Fields:** `splits`: by op; `rows`: of the inputs and of the outputs of the graph, the dimension that has the rows;
    `most`: how many rows a block may have.
    """

    graph: Graph
    splits: Mapping[Op, Split]
    rows: tuple[tuple[int | None, ...], tuple[int | None, ...]]
    most: int

    def __repr__(self) -> str:
        return f"{self._text} {self.most}"  # loops that are written alike are alike

    @functools.cached_property
    def _text(self) -> str:
        params = (str(sorted((k, str(v)) for k, v in op.params.items())) for op in self.graph.ops)
        return "\n".join((str(self.graph), *params))

    @functools.cached_property
    def size(self) -> int:
        """How many rows there are."""
        return next(t.shape[d] for t, d in zip(self.graph.inputs, self.rows[0], strict=True) if d is not None)

    def blocks(self, rows: int) -> int:
        """How many blocks so many rows are cut into: as few as may be, of as many rows each, in whole tiles; 0 where
        that cannot be."""
        if rows <= self.most:
            return 1
        return next(
            (n for n in range(2, rows // SUBLANES + 1) if rows % (n * SUBLANES) == 0 and rows <= n * self.most), 0
        )

    def shards(self, mesh: MeshAxes, axes: Sequence[str], blocks: int = 1) -> list[Shard]:
        """The ops of the body on one device, of one block of the rows that these axes split."""
        mesh = MeshAxes((*mesh.names, _BLOCKS), (*mesh.sizes, blocks))
        found = []
        for op in self.graph.ops:
            rule, factor = self.splits[op]
            own = -1 if factor is None else factor
            found.append(Shard(op, rule, mesh, tuple(own if a in axes or a == _BLOCKS else -1 for a in mesh.names)))
        return found


@register(NAME)
def persistent_scan(op: Op) -> Rule:
    """`([h,k], [b,h], [t,b,k], ...) -> ([b,h], [t,b,h], ...)`"""
    body, roles = op.params["body"], Scan.of(op.params)
    stacked = range(len(op.outputs))[roles.stacked], range(len(op.inputs))[roles.sliced]
    sides = [
        [_labels(t, d, i in of) for i, (t, d) in enumerate(zip(tensors, dims, strict=True))]
        for tensors, dims, of in ((op.inputs, body.rows[0], stacked[1]), (op.outputs, body.rows[1], stacked[0]))
    ]
    flops = op.params["length"] * sum(split.rule.flops for split in body.splits.values())
    return make_rule(op, *sides, sizes={ROWS: body.size}, local=_local, flops=flops)


def _labels(t: Tensor, rows: int | None, by_step: bool) -> list[Any]:
    return [ROWS if rows is not None and d == rows + by_step else None for d in range(t.rank)]


def row_axes(shard: Shard) -> tuple[str, ...]:
    """The mesh axes that split the rows of a loop."""
    return tuple(
        a for f, axes in zip(shard.rule.factors, shard.factor_axes, strict=True) if f.kind == "pass" for a in axes
    )


def local_blocks(shard: Shard) -> tuple[int, int]:
    """The rows of a device, and how many blocks they are cut into; 0 where they cannot be."""
    body, sizes = shard.op.params["body"], dict(zip(shard.mesh.names, shard.mesh.sizes, strict=True))
    rows = -(-body.size // math.prod(sizes[a] for a in row_axes(shard)))
    return rows, body.blocks(rows)


def loop(shard: Shard) -> tuple[Persistent, Step, Step]:
    """The loop on one device, and its steps: of a block of rows as a kernel computes them, and of all rows."""
    body, axes, (_, blocks) = shard.op.params["body"], row_axes(shard), local_blocks(shard)
    every, block = (body.shards(shard.mesh, axes, n) for n in (1, blocks or 1))
    shapes = {t: s.result_shape(i) for s in every for i, t in enumerate(s.op.outputs)}
    roles = Scan.of(shard.op.params)
    for i, t in enumerate(body.graph.inputs):
        shapes[t] = shard.operand_shape(i)[int(i >= roles.sliced.start) :]
    results = tuple(jax.ShapeDtypeStruct(shapes[t], t.dtype) for t in body.graph.outputs)
    counts = roles.constants.stop, roles.last.stop
    made = Persistent(*counts, shard.op.params["length"], shard.op.params["reverse"], body.rows, results, blocks)
    return made, functools.partial(_step, body.graph, block, True), functools.partial(_step, body.graph, every, False)


def _local(shard: Shard, *operands: Any) -> list[Any]:
    made, block, every = loop(shard)
    return made.run(block, every, operands)


def _step(graph: Graph, shards: Sequence[Shard], wide: bool, values: Sequence[Any]) -> list[Any]:
    """The outputs of a body. **Arguments:** `wide`: computes in float32 what is of less, and rounds it (not all TPUs
    have a unit for bfloat16, and none adds up products in it)."""
    known = dict(zip(graph.inputs, values, strict=True))

    def read(t: Tensor) -> Any:
        return jnp.asarray(t.literal, t.dtype) if t.literal is not None else known[t]

    for shard in shards:
        operands = list(map(read, shard.op.inputs))
        made = _widely(shard, operands) if wide else shard.run(operands)
        known.update(zip(shard.op.outputs, made, strict=True))
    return list(map(read, graph.outputs))


def _widely(shard: Shard, operands: Sequence[Any]) -> list[Any]:
    op = shard.op
    types = [t.dtype for t in op.outputs]
    if op.name == "dot_general":
        x, y = operands
        numbers = op.params["dimension_numbers"]
        made = jax.lax.dot_general(x, y, numbers, preferred_element_type=jnp.float32)
        return [made.astype(types[0])]
    if op.name == "convert_element_type":
        return [operands[0].astype(types[0])]
    if op.name == "one_minus_square":  # JAX 0.12's gradient of tanh, which its kernels have not
        x = operands[0].astype(jnp.float32)
        return [(1 - x * x).astype(types[0])]
    narrow = [_compat.is_float(t.dtype) and t.dtype.itemsize < 4 for t in op.inputs]
    given = [x.astype(jnp.float32) if n else x for x, n in zip(operands, narrow, strict=True)]
    return [x.astype(dtype) for x, dtype in zip(shard.run(given), types, strict=True)]
