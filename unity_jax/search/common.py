"""What the planners of a program and of its variants share: all that follows from ops, layouts and meshes alone."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from unity_jax.machine.machine import Machine
from unity_jax.network.reshard import Resharder
from unity_jax.pcg.graph import Graph
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.program import Program
from unity_jax.search.assemble import Decisions
from unity_jax.search.built import Built
from unity_jax.search.candidate import Candidate, finish
from unity_jax.search.decompose import Place
from unity_jax.search.rule_cache import RuleCache
from unity_jax.search.solver import store_for
from unity_jax.search.tables import Store
from unity_jax.xla.targets import target_of


@dataclass(frozen=True, eq=False)
class Common:
    """**Fields:** `interned`: arrays of planning problems by mesh (`Builder`); `stores`: tables of their solutions."""

    machine: Machine
    rules: RuleCache = field(default_factory=RuleCache)
    interned: defaultdict[MeshAxes, dict[Hashable, Any]] = field(default_factory=lambda: defaultdict(dict))
    stores: dict[MeshAxes, Store] = field(default_factory=dict)
    _resharders: dict[tuple[MeshAxes, bool], Resharder] = field(default_factory=dict)
    _finished: WeakKeyDictionary[Graph, WeakSet[Candidate]] = field(default_factory=WeakKeyDictionary)

    def resharder(self, mesh: MeshAxes, sure: bool = False) -> Resharder:
        """Prices of moves on a mesh; `sure`: only what they cost in any case."""
        if (mesh, sure) not in self._resharders:
            combined = target_of(self.machine.device).combined if sure else None
            self._resharders[mesh, sure] = Resharder(self.machine, mesh, combined)
        return self._resharders[mesh, sure]

    def store(self, built: Built) -> Store:
        """The tables of the problems of a mesh, in which the sums of this one are exact."""
        found = self.stores[built.mesh] = store_for(built.problem, self.stores.get(built.mesh))
        return found

    def finished(self, program: Program, decisions: Decisions, mesh: MeshAxes, label: str, bound: float) -> Candidate:
        """The plan of some decisions, for a lower bound of all plans; what is known of it, if it is there already."""
        there = self._finished.get(program.graph, ())
        made = next((c for c in there if c.mesh == mesh and c.program is program and c.decisions == decisions), None)
        if made is not None:
            return made.noting(label=label, lower_bound=bound)
        return self.known(finish(program, decisions, self.resharder(mesh), self.rules, label, bound))

    def known(self, plan: Candidate) -> Candidate:
        """A plan, which is not made again as long as it is there."""
        self._finished.setdefault(plan.program.graph, WeakSet()).add(plan)
        return plan

    def ringed(self, plan: Candidate, places: frozenset[Place]) -> Candidate:
        """A plan with the collectives of some places as rings."""
        decisions = dataclasses.replace(plan.decisions, rings=places)
        return self.finished(plan.program, decisions, plan.mesh, plan.label, plan.lower_bound)
