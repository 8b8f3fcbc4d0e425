"""Planning: the best mesh, strategies and layouts for a program on a machine, within a memory limit.

For every candidate mesh the planner builds the problem (`build`), solves it (`solver`) and turns the answer into a
planned graph (`assemble`), whose time and true peak memory decide. Expert plans are seeds: the result is never worse
than any that fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from unity_jax.cost.kernels import Traffic
from unity_jax.cost.memory import Memory, memory
from unity_jax.cost.program import ProgramCost, program_cost
from unity_jax.cost.reshard import Resharder
from unity_jax.machine.machine import Machine
from unity_jax.pcg.graph import Graph, Tensor
from unity_jax.pcg.layout import Layout
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.program import Program
from unity_jax.search.assemble import Decisions, RuleCache, assemble
from unity_jax.search.build import Builder, Built
from unity_jax.search.experts import expert_seeds, experts
from unity_jax.search.memory_model import least_peak, priced_by_memory, usage
from unity_jax.search.refine import by_axis, coarser, refined
from unity_jax.search.solver import solve


@dataclass(frozen=True, eq=False)
class Candidate:
    """One complete plan: decisions, the graph they make, what it costs, and a lower bound (0 if unknown)."""

    mesh: MeshAxes
    decisions: Decisions
    graph: Graph
    cost: ProgramCost
    memory: Memory
    label: str
    lower_bound: float = 0.0

    @property
    def seconds(self) -> float:
        return self.cost.compute_seconds + self.cost.communication_seconds

    def fits(self, limit: float) -> bool:
        return self.memory.peak_bytes <= limit


@dataclass(frozen=True, eq=False)
class Pins:
    """Layouts the caller has fixed: of graph inputs and inner tensors, and of outputs by index."""

    tensors: Mapping[Tensor, Layout]
    outputs: Mapping[int, Layout]


NO_PINS = Pins({}, {})


CLOSE = 1.1
"""How far above the solution of a problem a seed may be to be assembled and compared with it."""

MANY_CHOICES = 100_000
"""Strategies of all ops together, beyond which two axes are planned one at a time."""


def by_one_axis_at_a_time(built: Built) -> bool:
    """Whether all axes together make too many choices: three axes always, two axes for thousands of ops."""
    axes = len(built.mesh.names)
    return axes > 2 or (axes == 2 and sum(node.size for node in built.nodes) > MANY_CHOICES)


NEGLIGIBLE = 0.08
"""The part of a step that communication may take before other meshes are worth trying."""


class Solved(NamedTuple):
    """A problem without a memory limit, the best assignment found, a lower bound of its cost, and the seeds."""

    built: Built
    assignment: np.ndarray
    lower_bound: float
    seeds: dict[str, np.ndarray]


class Planner:
    """Plans one program on one machine; caches what meshes share."""

    def __init__(self, program: Program, machine: Machine, limit: float | None = None, pins: Pins = NO_PINS) -> None:
        self.program, self.machine, self.pins = program, machine, pins
        self.limit = machine.device.memory_bytes if limit is None else limit
        self.rules = RuleCache()
        self.traffic = Traffic.of(program.graph, machine.device.compiler)
        self._builders: dict[MeshAxes, Builder] = {}
        self._solutions: dict[MeshAxes, Solved] = {}

    def plan(self, meshes: Sequence[MeshAxes]) -> Candidate:
        """The best candidate over the meshes: the fastest that fits, or else the one that needs the least memory.

        Meshes are tried in order; once a plan fits that communicates little, no other mesh could save more than that.
        """
        found: list[Candidate] = []
        for mesh in meshes:
            found += self.candidates(mesh)
            now = best(found, self.limit)
            if now.fits(self.limit):
                if now.cost.communication_seconds < NEGLIGIBLE * now.seconds:
                    break
            elif len(mesh.names) == 1 and self.least_bytes(mesh) > self.limit:
                break  # finer meshes split no tensor further
        return best(found, self.limit)

    def candidates(self, mesh: MeshAxes) -> list[Candidate]:
        """The planner's answer for one mesh, after the seeds it started from."""
        builder = self._builder(mesh)
        built, assignment, bound, seeds = self._solved(mesh)
        # Assembling shares reshards that the problem prices twice, so a seed a little above the solution may still win.
        most = CLOSE * built.problem.cost(assignment)
        near = {name: s for name, s in seeds.items() if built.problem.cost(s) <= most}
        found = [self._finish(built.decisions(s, True), builder.resharder, name, 0.0) for name, s in near.items()]
        found.append(self._finish(built.decisions(assignment, True), builder.resharder, "search", bound))
        if not best(found, self.limit).fits(self.limit):
            found += self._within_limit(builder, mesh)
        return found

    def _builder(self, mesh: MeshAxes) -> Builder:
        if mesh not in self._builders:
            self._builders[mesh] = Builder(
                self.program.graph,
                self.program.ties,
                Resharder(self.machine, mesh),
                self.machine,
                self.rules,
                self.traffic,
                self.pins.tensors,
                self.pins.outputs,
            )
        return self._builders[mesh]

    def _solved(self, mesh: MeshAxes) -> Solved:
        """The problem of a mesh without a memory limit, its solution, a lower bound (0 if unknown), and the seeds."""
        if mesh not in self._solutions:
            built = self._builder(mesh).build(keep=True)
            # One axis is solved exactly, so experts cannot be better; over several they are where the search starts.
            seeds = self._seeds(built, mesh) if len(mesh.names) > 1 else {}
            if by_one_axis_at_a_time(built):
                self._solutions[mesh] = Solved(built, by_axis(built, list(seeds.values())), 0.0, seeds)
            else:
                solution = solve(built.problem, seeds=list(seeds.values()))
                self._solutions[mesh] = Solved(built, solution.assignment, solution.lower_bound, seeds)
        return self._solutions[mesh]

    def _seeds(self, built: Built, mesh: MeshAxes) -> dict[str, np.ndarray]:
        """Plans of the meshes that this one refines, and the expert plans that none of those could express."""
        lifted = {}
        if not (self.pins.tensors or self.pins.outputs):  # pins name the axes of one mesh
            for coarse, group in coarser(mesh):
                solved = self._solved(coarse)
                found = refined(solved.built, solved.assignment, built, group)
                if found is not None:
                    lifted[f"search on ({coarse})"] = found
        if len(lifted) < len(mesh.names) - 1:
            return {**expert_seeds(self.program, built, mesh, self.rules), **lifted}
        combined = [e for e in experts(mesh) if e.data and e.model] if len(mesh.names) == 2 else []
        return {**expert_seeds(self.program, built, mesh, self.rules, combined), **lifted}

    def _within_limit(self, builder: Builder, mesh: MeshAxes) -> Iterator[Candidate]:
        """Plans under the memory limit: what the problem's liveness misses tightens its limit, and it is solved
        again.
        """
        built = builder.build(keep=False)
        problem = built.problem
        problem.usage = usage(self.program, built, self.traffic.written)
        if self.least_bytes(mesh) > self.limit:
            solution = solve(priced_by_memory(problem))
            yield self._finish(built.decisions(solution.assignment, False), builder.resharder, "search", 0.0)
            return
        seeds = expert_seeds(self.program, built, mesh, self.rules)
        for name, s in seeds.items():
            yield self._finish(built.decisions(s, False), builder.resharder, name, 0.0)
        limit = self.limit
        for _ in range(3):
            problem.limit = limit
            if by_one_axis_at_a_time(built):
                assignment, bound = by_axis(built, list(seeds.values())), 0.0
                possible = problem.fits(assignment)
            else:
                solution = solve(problem, seeds=list(seeds.values()))
                assignment, bound, possible = solution.assignment, solution.lower_bound, solution.feasible
            candidate = self._finish(built.decisions(assignment, False), builder.resharder, "search", bound)
            yield candidate
            excess = candidate.memory.peak_bytes - self.limit
            limit = min(limit, problem.peak(assignment)) - excess
            if excess <= 0 or limit <= 0 or not possible:
                return

    def least_bytes(self, mesh: MeshAxes) -> float:
        """Bytes per device that any plan on as many devices keeps alive at some time: every tensor split all ways it
        can.
        """
        built = self._solved(mesh).built
        return least_peak(usage(self.program, built, self.traffic.written))

    def _finish(self, decisions: Decisions, resharder: Resharder, label: str, bound: float) -> Candidate:
        return finish(self.program, decisions, resharder, self.rules, label, bound)


def finish(
    program: Program,
    decisions: Decisions,
    resharder: Resharder,
    rules: RuleCache,
    label: str,
    bound: float = 0.0,
) -> Candidate:
    """The planned graph of some decisions, with its cost and memory."""
    mesh, machine = resharder.mesh, resharder.machine
    graph = assemble(program.graph, decisions, resharder, rules)
    return Candidate(
        mesh,
        decisions,
        graph,
        program_cost(graph, mesh, machine),
        memory(graph, mesh, machine.device, program.donated),
        label,
        bound,
    )


def best(candidates: Sequence[Candidate], limit: float) -> Candidate:
    """The fastest candidate that fits; if none does, the one that needs the least memory."""
    fitting = [c for c in candidates if c.fits(limit)]
    if fitting:
        return min(fitting, key=lambda c: (c.seconds, c.memory.peak_bytes))
    return min(candidates, key=lambda c: (c.memory.peak_bytes, c.seconds))
