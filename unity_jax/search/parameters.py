"""Parameters that experts treat in a way of their own: tables of which rows are looked up, and stacks of layers."""

from __future__ import annotations

from collections.abc import Collection

from unity_jax.pcg.graph import Graph, Op, Tensor
from unity_jax.pcg.loops import Scan


def looked_up(graph: Graph, params: set[Tensor]) -> set[Tensor]:
    """The parameters of which only rows are read, by index; none, unless they are most of the parameters."""
    read: dict[Tensor, list[Op]] = {}
    for op in graph.ops:
        for t in op.inputs if not op.backward else ():
            read.setdefault(t, []).append(op)

    def only_rows(t: Tensor) -> bool:
        readers = read.get(t, ())
        rows = (
            (op.name == "gather" and op.inputs[0] is t and op.inputs[1] is not t)
            or (op.name == "convert_element_type" and only_rows(op.outputs[0]))
            for op in readers
        )
        return t not in graph.outputs and bool(readers) and all(rows)

    found = set(filter(only_rows, params))
    return found if 2 * sum(t.nbytes for t in found) > sum(t.nbytes for t in params) else set()


def stacked(graph: Graph, shapes: Collection[tuple[int, ...]]) -> set[Tensor]:
    """Where scans take one layer of what has one of these shapes, and where they stack such layers up again (their
    gradients): FSDP keeps both sharded, and gathers the weights of one layer at a time.
    """
    found: set[Tensor] = set()
    for op in graph.walk():
        if op.name == "scan":
            roles, (body,) = Scan.of(op.params), op.bodies
            taken = zip(body.inputs[roles.sliced], op.inputs[roles.sliced], strict=True)
            found |= {layer for layer, whole in taken if whole.shape in shapes}
            found |= {whole for whole in op.outputs[roles.stacked] if whole.shape in shapes}
    return found
