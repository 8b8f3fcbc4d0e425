"""Which arrays lie row by row, because some op addresses their rows.

    gather    table [250000, 16] of ids [4096] -> [4096, 16]      both with the 16 last in memory
    mul, add  table [250000, 16] and its state                    as the table, so that nothing has to be turned

XLA:TPU keeps a narrow array with its long dimension last, since the last one is padded to the 128 lanes of a tile. Rows
cannot be read or written so: what gathers and scatters address, and what is computed from it element by element, has
its rows last and is padded, and arguments and results of the program are turned.
"""

from __future__ import annotations

from collections.abc import Iterable

from unity_jax.ops.indexing import compares, is_scatter
from unity_jax.ops.rule import is_pointwise
from unity_jax.pcg.graph import Graph, Op, Tensor

Rows = tuple[int, ...]
"""Per operand and result of an op, whether it lies row by row: 0 no, 1 yes, 2 yes and it is turned here."""


def rows(graph: Graph) -> dict[Op, Rows]:
    """The ops with operands or results that lie row by row."""
    marked = _spread(graph, {t for op in graph.ops for t in _addressed(op)})
    if not marked:
        return {}
    ends = {*graph.inputs, *graph.outputs}
    found: dict[Op, Rows] = {}
    for op in graph.ops:
        lie = tuple(int(t in marked) for t in (*op.inputs, *op.outputs))
        if any(lie):
            turned = (t in ends for t in (*op.inputs, *op.outputs))
            found[op] = tuple(n + (n and end) for n, end in zip(lie, turned, strict=True))
            ends.difference_update(op.inputs)  # once per argument
    return found


_SEEN = frozenset("reshape optimization_barrier copy".split())


def _addressed(op: Op) -> Iterable[Tensor]:
    if op.name == "gather":
        return [op.inputs[0], op.outputs[0]] if op.inputs[0].rank > 1 and op.params["slice_sizes"][-1] > 1 else []
    if is_scatter(op) and not compares(op) and op.params["dimension_numbers"].update_window_dims:
        return [op.inputs[0], op.inputs[2], op.outputs[0]]
    return []


def _spread(graph: Graph, marked: set[Tensor]) -> set[Tensor]:
    """These and all that are computed from them, or they from, element by element."""
    if not marked:
        return marked
    near: dict[Tensor, list[Tensor]] = {}
    widths = {t.shape[-1:] for t in marked}
    for op in graph.ops:
        width = op.outputs[0].shape[-1:] if op.outputs else ()
        if width in widths and (op.name in _SEEN or is_pointwise(op)):
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
