"""A complete plan of a program, and how two are compared.

Its graph is the program as every device runs it; its peak memory and the simulation of a step are found when asked for.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unity_jax.cost.layers import simulated
from unity_jax.cost.memory import Memory, memory
from unity_jax.cost.tasks import tasks
from unity_jax.cost.timeline import Timeline
from unity_jax.machine.machine import Machine
from unity_jax.network.reshard import Resharder
from unity_jax.pcg.graph import Graph, Tensor
from unity_jax.pcg.layout import Layout
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.program import Program
from unity_jax.search.assemble import Decisions, assemble
from unity_jax.search.decompose import decompose
from unity_jax.search.in_turn import in_turn
from unity_jax.search.limits import LIMITS
from unity_jax.search.rule_cache import RuleCache
from unity_jax.search.searched import UNKNOWN, Searched
from unity_jax.search.used_up import used_up
from unity_jax.xla.traffic import Traffic


@dataclass(frozen=True, eq=False)
class Candidate:
    """One complete plan: the program, rewritten or not, decisions, the graph they make, what it costs, a lower bound
    (0 if unknown) of the seconds of every plan of that program for its mesh, and what it was chosen from."""

    program: Program
    mesh: MeshAxes
    machine: Machine
    decisions: Decisions
    graph: Graph
    traffic: Traffic
    label: str
    lower_bound: float = 0.0
    rivals: tuple[Candidate, ...] = ()
    searched: Searched = UNKNOWN

    @functools.cached_property
    def memory(self) -> Memory:
        """What a device holds over one step."""
        return memory(self.graph, self.traffic, self.mesh, self.machine, self.program.donated)

    @functools.cached_property
    def timeline(self) -> Timeline:
        """One step, simulated."""
        return simulated(tasks(self.graph, self.traffic, self.mesh, self.machine), self.machine)

    @property
    def seconds(self) -> float:
        """Of one step, as simulated."""
        return self.timeline.step_seconds

    def fits(self, limit: float) -> bool:
        """Whether its peak memory is within so many bytes per device."""
        return limit == math.inf or self.memory.peak_bytes <= limit

    def noting(self, **notes: Any) -> Candidate:
        """The same plan with other `searched` or `rivals`; what has been found of it is not found again."""
        other = dataclasses.replace(self, **notes)
        found = ("memory", "timeline")
        other.__dict__.update({name: self.__dict__[name] for name in found if name in self.__dict__})
        return other


@dataclass(frozen=True, eq=False)
class Pins:
    """Layouts the caller has fixed: of graph inputs and inner tensors, and of outputs by index."""

    tensors: Mapping[Tensor, Layout]
    outputs: Mapping[int, Layout]


NO_PINS = Pins({}, {})


def finish(
    program: Program,
    decisions: Decisions,
    resharder: Resharder,
    rules: RuleCache,
    label: str,
    bound: float = 0.0,
) -> Candidate:
    """The planned graph of some decisions; its memory and its timeline when asked for."""
    mesh, machine = resharder.mesh, resharder.machine
    made = assemble(program.graph, decisions, resharder, rules, program.on_host, program.spilled)
    if program.hosted:
        made = in_turn(made)
    graph = used_up(decompose(made, decisions.rings, mesh, machine))
    return Candidate(program, mesh, machine, decisions, graph, Traffic.of(graph, machine.device.compiler), label, bound)


def best(candidates: Sequence[Candidate], limit: float) -> Candidate:
    """The fastest candidate that fits; if none does, the one that needs the least memory."""
    fastest = sorted(candidates, key=lambda c: c.seconds)
    for c in fastest:
        if c.fits(limit):  # only of what is as fast the memory matters
            as_fast = [d for d in fastest if d.seconds == c.seconds and d.fits(limit)]
            return min(as_fast, key=lambda d: d.memory.peak_bytes)
    return min(candidates, key=lambda c: (c.memory.peak_bytes, c.seconds))


def sparing(candidates: Sequence[Candidate], limit: float, spare: float) -> Candidate:
    """The best candidate within a limit, or rather the best of those that leave so many bytes of it, as compilers may
    need beyond what is predicted, unless that costs too much time."""
    found, other = best(candidates, limit), best(candidates, limit - spare)
    return other if other.fits(limit - spare) and other.seconds <= LIMITS.reserved * found.seconds else found
