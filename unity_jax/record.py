"""The decisions of a plan by their positions in the program, without the program: what a plan file holds."""

from __future__ import annotations

from dataclasses import dataclass

from unity_jax.errors import PlanError
from unity_jax.pcg.graph import Graph, Tensor
from unity_jax.pcg.layout import Layout
from unity_jax.search.assemble import Decisions


@dataclass(frozen=True)
class Record:
    """The decisions in a form that does not need the program: strategies in program order, layouts by position, rings
    by the position of the contraction."""

    keep: bool
    strategies: tuple[tuple[int, ...] | None, ...]
    layouts: tuple[Layout | None, ...]
    outputs: tuple[Layout, ...]
    rings: tuple[tuple[int, int], ...] = ()


def to_record(graph: Graph, decisions: Decisions) -> Record:
    """Decisions by position in the program."""
    position = {op: i for i, op in enumerate(graph.walk())}
    return Record(
        decisions.keep,
        tuple(decisions.strategies.get(op) for op in position),
        tuple(decisions.layouts.get(t) for t in _places(graph)),
        decisions.outputs,
        tuple(sorted((position[op], side) for op, side in decisions.rings)),
    )


def from_record(graph: Graph, record: Record) -> Decisions:
    """The decisions of a record about this program. Raises `PlanError` if it is about another one."""
    ops, places = list(graph.walk()), _places(graph)
    if len(ops) != len(record.strategies) or len(places) != len(record.layouts):
        raise PlanError(f"the plan has {len(record.strategies)} ops, this program has {len(ops)}: plan again")
    return Decisions(
        {op: s for op, s in zip(ops, record.strategies, strict=True) if s is not None},
        {t: lay for t, lay in zip(places, record.layouts, strict=True) if lay is not None},
        record.outputs,
        record.keep,
        frozenset((ops[i], side) for i, side in record.rings),
    )


def _places(graph: Graph) -> list[Tensor]:
    """Every tensor that may have a layout of its own, in program order."""
    found = dict.fromkeys(graph.inputs)
    for op in graph.walk():
        for body in op.bodies:
            found.update(dict.fromkeys(body.inputs))
        found.update(dict.fromkeys(op.outputs))
    return list(found)
