"""Which tensors reach memory: XLA fuses chains of elementwise ops, so most intermediate values never do."""

from __future__ import annotations

from unity_jax.ops.rule import is_pointwise
from unity_jax.pcg.graph import Graph, Op, Tensor

_FREE_SHAPES = frozenset(
    [
        "broadcast_in_dim",
        "iota",
        "reshape",
        "squeeze",
        "expand_dims",
        "transpose",
        "slice",
        "rev",
        "pad",
        "sharding_constraint",
    ]
)
_REDUCTIONS = frozenset(["reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or"])


def fuses_into_consumers(op: Op) -> bool:
    """Whether XLA computes the op where its value is used (loop fusion)."""
    return not op.bodies and (op.name in _FREE_SHAPES or is_pointwise(op))


def materialized(graph: Graph) -> set[Tensor]:
    """The tensors of the traced graph, sub-graphs included, that are written to memory.

    A value stays in registers when its producer fuses and every consumer is an elementwise op or a reduction of the
    same pass; what the backward pass reads again, or a matmul, convolution or gather reads at all, is written.
    """
    found: set[Tensor] = set()
    _collect(graph, found)
    return found


def _collect(graph: Graph, found: set[Tensor]) -> None:
    found.update(graph.inputs)
    found.update(graph.outputs)
    producer = graph.producer
    for op in graph.ops:
        if not fuses_into_consumers(op):
            found.update(op.outputs)
        for t in op.inputs:
            made_by = producer.get(t)
            if made_by is not None and not _fused(made_by, op):
                found.add(t)
        for body in op.bodies:
            _collect(body, found)


def _fused(made_by: Op, used_by: Op) -> bool:
    if made_by.name in ("broadcast_in_dim", "iota") and all(t.rank == 0 for t in made_by.inputs):
        return True
    same_pass = made_by.backward == used_by.backward
    return same_pass and (fuses_into_consumers(used_by) or used_by.name in _REDUCTIONS)
