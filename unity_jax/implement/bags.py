"""Sums of rows that are looked up, and the gradients of tables by such sums, as one op each (`ops.bags`).

    gather [b, 100, 128], reduce_sum [b, 128]                     ->   gather_bags [b, 128]
    broadcast_in_dim [b, 100, 128], scatter-add to a table        ->   scatter-add_bags to a table

XLA:TPU has all rows in memory twice, padded, and takes as long to sum them as to look them up.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping

import numpy as np

from unity_jax.ops.bags import GATHER, SCATTER
from unity_jax.ops.indexing import fills
from unity_jax.ops.numbers import Numbers
from unity_jax.ops.own_rows import SUMMED
from unity_jax.pcg.graph import Graph, Op, Tensor


def baggable(graph: Graph) -> dict[Op, tuple[Op, Op]]:
    """By the op that makes a sum of looked-up rows, or a gradient of such sums: what the rows in between are made by,
    and the op that needs none. Those of a graph, and of its loops and branches."""
    graphs = [graph, *(body for op in graph.walk() for body in op.bodies)]
    return {op: found for inner in graphs for op in inner.ops if (found := _bag(inner, op)) is not None}


def bagged(graph: Graph, made: Collection[Tensor]) -> Graph:
    """The graph with those ops on bags that make these; the same object if it has none of them."""
    found = {op: bag for op, bag in baggable(graph).items() if op.outputs[0] in made}
    return _replaced(graph, found) if found else graph


def _replaced(graph: Graph, found: Mapping[Op, tuple[Op, Op]]) -> Graph:
    ops = []
    for op in graph.ops:
        if op in found:
            op = found[op][1]
        elif op.bodies:
            bodies = tuple(_replaced(body, found) for body in op.bodies)
            op = op if bodies == op.bodies else dataclasses.replace(op, bodies=bodies)
        ops.append(op)
    if ops == graph.ops:
        return graph
    read = {t for op in ops for t in op.inputs}.union(graph.outputs)
    rows = {op for op, _ in found.values() if read.isdisjoint(op.outputs)}
    return Graph(graph.inputs, graph.outputs, [op for op in ops if op not in rows])


def _bag(graph: Graph, op: Op) -> tuple[Op, Op] | None:
    find = _FINDS.get(op.name)
    return find(graph, op) if find is not None else None


def _sum(graph: Graph, op: Op) -> tuple[Op, Op] | None:
    """Of a reduction of looked-up rows that nothing else reads."""
    (rows,), summed = op.inputs, tuple(op.params["axes"])
    gather = graph.producer.get(rows)
    if gather is None or gather.name != "gather" or rows in graph.outputs or graph.readers[rows] != [op]:
        return None
    if not _is_possible(gather, summed) or fills(gather):
        return None
    params = {**gather.params, SUMMED: summed}
    return gather, dataclasses.replace(gather, name=GATHER, params=params, outputs=op.outputs, backward=op.backward)


def _gradient(graph: Graph, op: Op) -> tuple[Op, Op] | None:
    """Of a scatter of rows that are alike in each bag."""
    table, ids, rows = op.inputs
    made = graph.producer.get(rows)
    if made is None or made.name != "broadcast_in_dim" or made.inputs[0].literal is not None:
        return None
    (sums,), dims = made.inputs, made.params["broadcast_dimensions"]
    summed = tuple(d for d in range(rows.rank) if d not in dims)
    if sums.shape != tuple(rows.shape[d] for d in dims) or not _is_possible(op, summed):
        return None
    return made, dataclasses.replace(op, name=SCATTER, params={**op.params, SUMMED: summed}, inputs=(table, ids, sums))


_FINDS: Mapping[str, Callable[[Graph, Op], tuple[Op, Op] | None]] = {"reduce_sum": _sum, "scatter-add": _gradient}


def _is_possible(op: Op, summed: tuple[int, ...]) -> bool:
    """Whether a gather or scatter, of bags along these dimensions of its ids, addresses whole rows of float32 numbers,
    by one index each, with their dimensions behind those of the ids."""
    (table, ids, *_), numbers, batch = op.inputs, Numbers.of(op), op.inputs[1].rank - 1
    rows = numbers.dropped == numbers.indexed == (0,) and not numbers.batching
    behind = numbers.window_dims == tuple(range(batch, batch + table.rank - 1))
    whole = tuple(op.params["slice_sizes"][1:]) == table.shape[1:] if "slice_sizes" in op.params else True
    along = max(summed, default=batch) < batch and math.prod(ids.shape[d] for d in summed) > 1
    return rows and behind and whole and along and table.dtype == np.float32
