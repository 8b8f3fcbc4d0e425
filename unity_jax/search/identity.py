"""The plan of one device: nothing is split, so there is nothing to search.

Pins change nothing: axes of size 1 split nothing, and layouts do not name them.

    y: f32[32,16] = dot_general x w        every op in full, every array whole
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from unity_jax.machine.machine import Machine
from unity_jax.network.reshard import Resharder
from unity_jax.pcg.layout import Layout
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.program import Program
from unity_jax.search.assemble import Decisions, is_free, passes_layouts
from unity_jax.search.candidate import Candidate, finish
from unity_jax.search.rule_cache import RuleCache
from unity_jax.search.searched import Searched


def identity(program: Program, machine: Machine, mesh: MeshAxes, rules: RuleCache | None = None) -> Candidate:
    """The only plan for a mesh of one device, and so its own lower bound."""
    graph, decisions = program.graph, Decisions()
    whole = (-1,) * len(mesh.names)
    places = list(graph.inputs)
    for op in graph.walk():
        if op.bodies:
            places += [*op.outputs, *(t for body in op.bodies for t in body.inputs)]
        elif not is_free(op) and not passes_layouts(op):
            decisions.strategies[op] = whole
    decisions.layouts = {t: Layout.replicated(t.rank) for t in places}
    decisions.outputs = tuple(Layout.replicated(t.rank) for t in graph.outputs)
    made = finish(program, decisions, Resharder(machine, mesh), RuleCache() if rules is None else rules, "search")
    return made.noting(lower_bound=made.seconds, searched=Searched((str(mesh),)))


@dataclass(frozen=True, eq=False)
class Alone:
    """Plans a program, and its variants, for one device, whatever that holds: a `Planner` that has nothing to search.

    **Fields:** `rules`: those of ops, also of those of other variants.
    """

    program: Program
    machine: Machine
    rules: RuleCache
    limit: float = math.inf
    held: frozenset[MeshAxes] = frozenset()

    def like(self, program: Program, follows: bool = False) -> Alone:
        """The same for a variant of the program."""
        return Alone(program, self.machine, self.rules)

    def promising(self, mesh: MeshAxes, most: float = math.inf) -> Candidate:
        """The plan, however slow."""
        return identity(self.program, self.machine, mesh, self.rules)

    def added(self, mesh: MeshAxes) -> None:
        """Nothing is known of a plan before it is made."""
