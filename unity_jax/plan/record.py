"""The decisions of a plan by their positions in the program, without the program: what a plan file holds."""

from __future__ import annotations

from dataclasses import dataclass

from unity_jax.errors import PlanError
from unity_jax.pcg.graph import Graph, Tensor
from unity_jax.pcg.layout import Layout
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.search.assemble import Decisions, is_free, passes_layouts
from unity_jax.search.rule_cache import RuleCache


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


def from_record(graph: Graph, record: Record, mesh: MeshAxes, rules: RuleCache) -> Decisions:
    """The decisions of a record about this program.

    Raises `PlanError` if it is about another one, or says of an op or a tensor what cannot be.
    """
    ops, places = list(graph.walk()), _places(graph)
    if len(ops) != len(record.strategies) or len(places) != len(record.layouts):
        raise PlanError(f"the plan has {len(record.strategies)} ops, this program has {len(ops)}: plan again")
    if len(graph.outputs) != len(record.outputs):
        raise PlanError(f"the plan has {len(record.outputs)} results, this program has {len(graph.outputs)}")
    for i, (op, strategy) in enumerate(zip(ops, record.strategies, strict=True)):
        if strategy is None:
            legal = bool(op.bodies) or passes_layouts(op) or is_free(op)
        else:
            legal = strategy in rules.strategies(op, mesh)
        if not legal:
            raise PlanError(
                f"strategy {i} of the plan, {strategy}, is none of {op.name} ({op.source}) on the mesh ({mesh}): plan "
                "again"
            )
    given = set(graph.inputs)
    for i, (t, layout) in enumerate(zip(places, record.layouts, strict=True)):
        if layout is not None:
            check(layout, t.shape, mesh, f"layout {i} of the plan, of {t.name or t}", t in given)
        elif t in given:
            raise PlanError(f"layout {i} of the plan, of {t.name or t}, is missing: plan again")
    for i, (t, layout) in enumerate(zip(graph.outputs, record.outputs, strict=True)):
        check(layout, t.shape, mesh, f"the layout of result {i} in the plan", boundary=True)
    wrong = next((ring for ring in record.rings if not 0 <= ring[0] < len(ops)), None)
    if wrong is not None:
        raise PlanError(f"the plan has a ring at op {wrong[0]}, the program {len(ops)} ops: plan again")
    return Decisions(
        {op: s for op, s in zip(ops, record.strategies, strict=True) if s is not None},
        {t: lay for t, lay in zip(places, record.layouts, strict=True) if lay is not None},
        record.outputs,
        record.keep,
        frozenset((ops[i], side) for i, side in record.rings),
    )


def check(layout: Layout, shape: tuple[int, ...], mesh: MeshAxes, where: str, boundary: bool = False) -> None:
    """Raise `PlanError`, which starts with `where`, if no array of this shape lies so; at a boundary shards are equal
    and sums are complete."""
    fault = _fault(layout, shape, mesh, boundary)
    if fault:
        raise PlanError(f"{where}, {layout}, {fault}: plan again")


def _fault(layout: Layout, shape: tuple[int, ...], mesh: MeshAxes, boundary: bool) -> str:
    used = [*(a for dim in layout.dims for a in dim), *layout.partial_axes]
    if len(layout.dims) != len(shape):
        return f"has {len(layout.dims)} dimensions, the array {list(shape)} has {len(shape)}"
    if not set(used) <= set(mesh.names):
        return f"names axes that the mesh ({mesh}) lacks"
    if len(set(used)) < len(used):
        return "names an axis twice"
    if any(mesh.ordered(dim) != dim for dim in layout.dims):
        return f"names axes in another order than the mesh ({mesh})"
    if boundary and layout.partial:
        return "is not summed"
    if boundary and not layout.divides(shape, mesh):
        return f"does not divide {list(shape)}"
    return ""


def _places(graph: Graph) -> list[Tensor]:
    """Every tensor that may have a layout of its own, in program order."""
    found = dict.fromkeys(graph.inputs)
    for op in graph.walk():
        for body in op.bodies:
            found.update(dict.fromkeys(body.inputs))
        found.update(dict.fromkeys(op.outputs))
    return list(found)
