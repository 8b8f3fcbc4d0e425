"""Which arrays lie row by row, because some op addresses their rows or multiplies them.

    gather    table [250000, 16] of ids [4096] -> [4096, 16]      both with the 16 last in memory
    mul, add  table [250000, 16] and its state                    as the table, so that nothing has to be turned
    dot       [4, 1024, 2, 8] and [4, 1024, 2, 320], 4096 products of depth 2: both with the 8 and the 320 last

XLA:TPU keeps a narrow array with its long dimension last, since the last one is padded to the 128 lanes of a tile. Rows
cannot be read or written so: what gathers and scatters address, and what is computed from it element by element, has
its rows last and is padded, and arguments and results of the program are turned.

So do the operands of a batch of thin products, less deep than a tile has rows: the batch does not come last. Seen in
plans for a mixture of experts compiled for v5e: a pass over its one-hot array of [32, 1024, 2, 8] takes 270 to 400 us
where a part of it is multiplied so, and 6 to 8 where it is only multiplied with vectors (`products.is_vector_product`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from unity_jax.ops.indexing import compares
from unity_jax.ops.numbers import is_gather, is_scatter
from unity_jax.ops.rules import is_pointwise
from unity_jax.pcg.graph import Graph, Op, Tensor
from unity_jax.xla.dots import is_vector_product
from unity_jax.xla.op_classes import KERNELS, ROW_PRESERVING

Rows = tuple[int, ...]
"""Per operand and result of an op, whether it lies row by row: 0 no, 1 yes, 2 yes and it is turned here, `THIN` yes,
for a batch of thin products."""
THIN = 3
_DEPTH = 8
"""Rows of a tile."""


def rows(graph: Graph) -> dict[Op, Rows]:
    """The ops with operands or results that lie row by row."""
    marked = _spread(graph, {t for op in graph.ops for t in addressed(op)})
    thin = _spread(graph, {t for op in graph.ops for t in _thin(op)}) - marked
    if not marked and not thin:
        return {}
    ends = {*graph.inputs, *graph.outputs}
    found: dict[Op, Rows] = {}
    for op in graph.ops:
        tensors = (*op.inputs, *op.outputs)
        if marked.isdisjoint(tensors) and thin.isdisjoint(tensors):
            continue
        lie = tuple(THIN if t in thin else int(t in marked) for t in tensors)
        found[op] = tuple(n + (n == 1 and t in ends) for n, t in zip(lie, tensors, strict=True))
        ends.difference_update(op.inputs)  # once per argument
    return found


def is_partition(op: Op) -> bool:
    """Whether every device takes its part of an array."""
    return op.move is not None and op.move.kind == "partition"


def addressed(op: Op) -> Iterable[Tensor]:
    """The operands and results of which an op reads or writes whole rows by index, or as a kernel does."""
    if is_gather(op):
        return [op.inputs[0], op.outputs[0]] if op.inputs[0].rank > 1 and op.params["slice_sizes"][-1] > 1 else []
    if is_scatter(op) and not compares(op) and op.params["dimension_numbers"].update_window_dims:
        return [op.inputs[0], op.inputs[2], op.outputs[0]]
    return [t for t in (*op.inputs, *op.outputs) if t.rank] if op.name in KERNELS else []


def _thin(op: Op) -> Iterable[Tensor]:
    """The operands of a batch of thin products."""
    if op.name != "dot_general" or (op.shard is not None and is_vector_product(op.shard)):
        return []
    (lhs_k, _), (lhs_b, _) = op.params["dimension_numbers"]
    return op.inputs if lhs_b and math.prod(op.inputs[0].shape[d] for d in lhs_k) < _DEPTH else []


def _spread(graph: Graph, marked: set[Tensor]) -> set[Tensor]:
    """These and all that are computed from them, or they from, element by element."""
    if not marked:
        return marked
    near: dict[Tensor, list[Tensor]] = {}
    widths = {t.shape[-1:] for t in marked}
    for op in graph.ops:
        width = op.outputs[0].shape[-1:] if op.outputs else ()
        if width in widths and (op.name in ROW_PRESERVING or is_pointwise(op) or is_partition(op)):
            alike = [t for t in (*op.inputs, *op.outputs) if t.shape[-1:] == width and t.literal is None]
            for t in alike:
                near.setdefault(t, []).extend(alike)
    stack, found = list(marked), set(marked)
    while stack:
        for t in near.get(stack.pop(), ()):
            if t not in found:
                found.add(t)
                stack.append(t)
    return found
