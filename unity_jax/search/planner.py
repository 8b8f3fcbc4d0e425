"""Planning: the best mesh, strategies and layouts for a program on a machine, within a memory limit.

For every candidate mesh the planner builds the problem (`build`), solves it (`solver`) and turns the answer into a planned graph (`assemble`),
whose time and true peak memory decide. Expert plans are seeds: the result is never worse than any that fits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass


from unity_jax.cost.fusion import materialized
from unity_jax.cost.program import Memory, ProgramCost, memory, program_cost
from unity_jax.cost.reshard import Resharder
from unity_jax.machine.machine import Machine
from unity_jax.pcg.graph import Graph, Tensor
from unity_jax.pcg.layout import Layout
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.program import Program
from unity_jax.search.assemble import Decisions, RuleCache, assemble
from unity_jax.search.build import Builder, Built
from unity_jax.search.experts import expert_seeds
from unity_jax.search.memory_model import usage
from unity_jax.search.problem import Solution
from unity_jax.search.solver import solve


@dataclass(frozen=True, eq=False)
class Candidate:
    """One complete plan: decisions, the graph they make, what it costs, and how far it may be from the model's optimum."""

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


class Planner:
    """Plans one program on one machine; caches what meshes share."""

    def __init__(self, program: Program, machine: Machine, limit: float | None = None, pins: Pins = NO_PINS) -> None:
        self.program, self.machine, self.pins = program, machine, pins
        self.limit = machine.memory_bytes if limit is None else limit
        self.rules = RuleCache()
        self.written = materialized(program.graph)

    def plan(self, meshes: Sequence[MeshAxes]) -> Candidate:
        """The best candidate over the meshes: the fastest that fits, or else the one that needs the least memory."""
        candidates = [c for mesh in meshes for c in self.candidates(mesh)]
        return best(candidates, self.limit)

    def candidates(self, mesh: MeshAxes) -> list[Candidate]:
        """The planner's answer for one mesh, after the seeds it started from."""
        resharder = Resharder(self.machine, mesh)
        builder = Builder(
            self.program.graph, self.program.ties, resharder, self.machine, self.rules, self.written,
            self.pins.tensors, self.pins.outputs,
        )  # fmt: skip
        built = builder.build(keep=True)
        # One axis is solved exactly, so experts cannot be better; over several they are where the search starts.
        seeds = expert_seeds(self.program, built, mesh, self.rules) if len(mesh.names) > 1 else {}
        solution = solve(built.problem, seeds=list(seeds.values()))
        found = [self._finish(built.decisions(s, True), resharder, name, 0.0) for name, s in seeds.items()]
        found.append(self._candidate(built, solution, True, resharder, "search"))
        if not best(found, self.limit).fits(self.limit):
            found += self._within_limit(builder, resharder, mesh)
        return found

    def _within_limit(self, builder: Builder, resharder: Resharder, mesh: MeshAxes) -> Iterator[Candidate]:
        """Plans under the memory limit: what the liveness model of the problem misses tightens its limit and it is solved again."""
        built = builder.build(keep=False)
        built.problem.usage = usage(self.program, built, self.written)
        seeds = expert_seeds(self.program, built, mesh, self.rules)
        experts = [self._finish(built.decisions(s, False), resharder, name, 0.0) for name, s in seeds.items()]
        yield from experts
        limit = self.limit
        for _ in range(3):
            built.problem.limit = limit
            solution = solve(built.problem, seeds=list(seeds.values()))
            candidate = self._candidate(built, solution, False, resharder, "search")
            yield candidate
            excess = candidate.memory.peak_bytes - self.limit
            if excess <= 0:
                return
            limit = min(limit, solution.peak) - excess
            if limit <= 0:
                return

    def _candidate(self, built: Built, solution: Solution, keep: bool, resharder: Resharder, label: str) -> Candidate:
        return self._finish(built.decisions(solution.assignment, keep), resharder, label, solution.lower_bound)

    def _finish(self, decisions: Decisions, resharder: Resharder, label: str, bound: float) -> Candidate:
        return finish(self.program, decisions, resharder, self.rules, self.written, label, bound)


def finish(
    program: Program, decisions: Decisions, resharder: Resharder, rules: RuleCache, written: set[Tensor], label: str, bound: float = 0.0
) -> Candidate:
    """The planned graph of some decisions, with its cost and memory."""
    mesh, machine = resharder.mesh, resharder.machine
    graph = assemble(program.graph, decisions, resharder, rules)
    return Candidate(
        mesh,
        decisions,
        graph,
        program_cost(graph, mesh, machine, written),
        memory(graph, mesh, written, program.donated),
        label,
        bound,
    )


def best(candidates: Sequence[Candidate], limit: float) -> Candidate:
    """The fastest candidate that fits; if none does, the one that needs the least memory."""
    fitting = [c for c in candidates if c.fits(limit)]
    if fitting:
        return min(fitting, key=lambda c: (c.seconds, c.memory.peak_bytes))
    return min(candidates, key=lambda c: (c.memory.peak_bytes, c.seconds))


AXIS_NAMES = ("x", "y", "z")


def mesh_candidates(devices: int, machine: Machine) -> list[MeshAxes]:
    """The meshes worth planning for: one axis, and two axes split where the network or a power of two allows.

    An axis boundary inside a network level is kept to even powers of its size, so that few meshes cover all orders of size.
    """
    if devices == 1:
        return [MeshAxes(("x",), (1,))]
    found = [(devices,)]
    inner = [math.prod(level.size for level in machine.network[i:]) for i in range(1, len(machine.network))]
    splits = sorted({k for k in _divisors(devices) if k in inner or _useful(k, devices)})
    found += [(devices // k, k) for k in splits]
    return [MeshAxes(AXIS_NAMES[: len(sizes)], sizes) for sizes in found]


def _divisors(n: int) -> list[int]:
    return [k for k in range(2, n) if n % k == 0]


def _useful(k: int, devices: int) -> bool:
    """Inner axes of 2, 4, 8, ... and those that leave a small outer axis."""
    return k in (2, 4, 8, 16) or (devices <= 12)


