"""Loops that can run as one kernel on a TPU, whose constants stay on the chip (`kernels.persistent`).

    scan over 35 steps: V, h, xw -> h, hs        ->        persistent_scan V, h, xw -> h, hs

Any loop can whose steps keep rows apart (those of a batch), do what a kernel can do, and read no more than fits: cells
of recurrent networks as users write them, forward and backward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from unity_jax.implement.stages import can_be_cut
from unity_jax.kernels.tiles import nbytes
from unity_jax.ops.follow import Paths, factor_at
from unity_jax.ops.persistent import NAME, Body, Split
from unity_jax.ops.rules import is_pointwise, rule_of
from unity_jax.pcg.graph import Graph, Op, Tensor
from unity_jax.pcg.loops import Scan
from unity_jax.trace import has_effects

_POINTWISE = frozenset(
    "abs add add_any and convert_element_type div eq exp ge gt integer_pow le log log1p logistic lt max min mul "
    "ne neg not one_minus_square or rsqrt select_n sign sqrt square sub tanh".split()
)
_SHAPES = frozenset(["broadcast_in_dim", "concatenate", "slice", "split"])
"""What Mosaic compiles, besides products of matrices."""
Rows = Mapping[Tensor, int]
"""Which dimension of the tensors of a body has the rows."""
_FLOATS = frozenset(["float32", "float64", "bfloat16"])
_TYPES = _FLOATS | {"bool", "int32"}
_LEAST_ROWS, _MOST_ROWS = 8, 256
"""Of a block: a tile has eight; of more than 256 the products are long enough to read weights in the meantime."""


def persistable(graph: Graph, room: float) -> dict[Op, Body]:
    """The loops of a graph, and of its loops and branches, that can be kernels with so many bytes on the chip."""
    found = ((op, _body(op, room)) for op in graph.walk() if can_be_cut(op))
    return {op: body for op, body in found if body is not None}


def persisted(graph: Graph, bodies: Mapping[Op, Body]) -> Graph:
    """The graph with these loops as kernels; the same object if it has none of them."""
    ops = []
    for op in graph.ops:
        if op in bodies:
            roles = Scan.of(op.params)
            params = {k: op.params[k] for k in ("length", "reverse")} | {"body": bodies[op]}
            params = roles.with_constants(params, roles.constants.stop)
            op = dataclasses.replace(op, name=NAME, params=params, bodies=())
        elif op.bodies:
            inner = tuple(persisted(body, bodies) for body in op.bodies)
            op = op if inner == op.bodies else dataclasses.replace(op, bodies=inner)
        ops.append(op)
    return graph if ops == graph.ops else Graph(graph.inputs, graph.outputs, ops)


def _body(scan: Op, room: float) -> Body | None:
    """The body of a loop as a kernel has it; None where it cannot."""
    (graph,), roles = scan.bodies, Scan.of(scan.params)
    made = [t for op in graph.ops for t in op.outputs]
    matrices = [t for t in (*graph.inputs, *made) if t.rank or t in made or t not in graph.inputs[roles.constants]]
    if any(t.rank != 2 for t in matrices) or any(str(t.dtype) not in _TYPES for t in (*graph.inputs, *made)):
        return None
    if not all(_is_possible(op) for op in graph.ops) or any(t.literal is not None for t in graph.outputs):
        return None
    rows = _rows(graph, roles) if graph.inputs[roles.carried] else None
    most = None if rows is None else _most_rows(graph, roles, rows, room)
    return None if rows is None or most is None else Body(graph, *_split(graph, rows), most)


def _is_possible(op: Op) -> bool:
    """Whether a kernel can do an op."""
    if op.bodies or has_effects(op):
        return False
    if op.name == "dot_general":
        (lhs, rhs), (batch, _) = op.params["dimension_numbers"]
        types = {str(t.dtype) for t in op.inputs}
        return (*lhs,) == (1,) and len(rhs) == 1 and not batch and len(types) == 1 and types <= _FLOATS
    if op.name == "slice":
        return op.params["strides"] is None
    if op.name == "broadcast_in_dim":
        return op.inputs[0].rank in (0, 2)
    return op.name in _SHAPES or (op.name in _POINTWISE and is_pointwise(op))


def _rows(graph: Graph, roles: Scan) -> Rows | None:
    """Where the rows are in a body, if all that changes from step to step has them first, and nothing mixes them."""
    carried, sliced = graph.inputs[roles.carried], graph.inputs[roles.sliced]
    found = Paths(graph, rule_of).everywhere((t, 0) for t in (*carried, *sliced))
    dim, sizes = dict(found.keys()), {t.shape[d] for t, d in found}
    if len(sizes) > 1 or any(major != 1 for major in found.values()) or any(dim.get(t) != 0 for t in graph.outputs):
        return None
    if any(dim.get(t) for t in graph.inputs[roles.constants]):
        return None
    for op in graph.ops:
        rule = rule_of(op)
        sides = ((op.inputs, rule.operands), (op.outputs, rule.results))
        places = [
            (factor_at(rule, dims[dim[t]], 1) if t in dim else None)
            for tensors, side in sides
            for t, dims in zip(tensors, side, strict=True)
            if t.literal is None
        ]
        at = {place for place in places if place is not None}
        has = any(t in dim for t in (*op.inputs, *op.outputs))
        if has and (
            len(at) != 1 or rule.factors[next(iter(at))[0]].kind != "pass" or not all(t in dim for t in op.outputs)
        ):
            return None
    return dim


def _split(graph: Graph, rows: Rows) -> tuple[dict[Op, Split], tuple[tuple[int | None, ...], tuple[int | None, ...]]]:
    """How the ops of a body are split by rows, and where its inputs and outputs have them."""
    splits = dict[Op, Split]()
    for op in graph.ops:
        rule, factor = rule_of(op), None
        for t, dims in zip(op.outputs, rule.results, strict=True):
            place = factor_at(rule, dims[rows[t]], 1) if t in rows else None
            factor = place[0] if place is not None else factor
        splits[op] = Split(rule, factor)
    return splits, (tuple(map(rows.get, graph.inputs)), tuple(map(rows.get, graph.outputs)))


def _most_rows(graph: Graph, roles: Scan, rows: Rows, room: float) -> int | None:
    """How many rows a block may have: what all read is on the chip once, what a step has of its own twice, and what it
    computes once; None where not even a tile fits."""

    def held(most: int) -> int:
        def size(t: Tensor) -> int:
            return nbytes([min(most, n) if rows.get(t) == d else n for d, n in enumerate(t.shape)], t.dtype)

        constants, others = graph.inputs[roles.constants], (*graph.inputs[roles.carried], *graph.inputs[roles.sliced])
        computed = {t for op in graph.ops for t in op.outputs}
        return sum(map(size, constants)) + 2 * sum(map(size, (*others, *graph.outputs))) + sum(map(size, computed))

    most = _MOST_ROWS
    while most >= _LEAST_ROWS:
        if held(most) <= room:
            return most
        most //= 2
    return None
