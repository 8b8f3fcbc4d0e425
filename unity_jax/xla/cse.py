"""Elementwise ops that do what an earlier one does: XLA computes them once (`HloCSE`).

x -> f32 -> mean        a normalization casts its operand for the mean,
x -> f32 -> subtract    and again for the distance from it
"""

from __future__ import annotations

from unity_jax.pcg.graph import Graph, Op, Tensor
from unity_jax.xla.aliases import base_tensors, is_alias
from unity_jax.xla.op_classes import elements, is_loop
from unity_jax.xla.targets import Fusing


def cse(graph: Graph, fusing: Fusing) -> Graph:
    """The graph with a copy in place of each elementwise op that does what an earlier one does. Constants are no
    matter: every reader makes its own."""
    base = base_tensors(graph)
    outputs = {base.get(t, t) for t in graph.outputs}
    made: dict[object, list[Op]] = {}
    first: dict[Tensor, Tensor] = {}
    ops: list[Op] = []
    for op in graph.ops:
        ops.append(op)
        same = op.name != "optimization_barrier" and (is_alias(op) or is_loop(op, fusing))
        if not same or all(t.literal is not None for t in op.inputs):
            continue
        view = is_alias(op) or (op.name == "broadcast_in_dim" and elements(op.inputs[0]) == elements(op.outputs[0]))
        read = tuple(None if t.literal is not None and t.rank == 0 else first.get(t, t) for t in op.inputs)
        given = tuple((t.shape, t.dtype, t.layout) for t in op.outputs)
        alike = made.setdefault(("view" if view else op.name, read, given), [])
        earlier = next((e for e in alike if view or e.signature == op.signature), None)
        if earlier is None:
            alike.append(op)
        elif outputs.isdisjoint(op.outputs):
            first.update(zip(op.outputs, earlier.outputs, strict=True))
            ops[-1] = Op("copy", earlier.outputs, op.outputs)
    return Graph(graph.inputs, graph.outputs, ops)
