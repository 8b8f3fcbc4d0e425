"""The plans that tests compare: the planner's choice, three experts' and a random one."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

from tests.numerics.harness import Planned
from unity_jax.machine.machine import Machine
from unity_jax.network.reshard import Resharder
from unity_jax.pcg.graph import Graph, Tensor
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.program import Program
from unity_jax.search.assemble import Decisions, assemble
from unity_jax.search.build import Builder
from unity_jax.search.experts import expert_seeds
from unity_jax.search.planner import Planner
from unity_jax.search.rule_cache import RuleCache
from unity_jax.search.sample import sample

EXPERTS = {"dp": "dp(", "fsdp": "fsdp(", "tp": "tp("}
"""Our names of the experts that use all mesh axes in one way, and how the planner's names of them begin."""
NAMES = ("chosen", *EXPERTS, "random")


def planned(program: Program, decisions: Decisions, machine: Machine, axes: MeshAxes) -> Planned:
    """The plan of some decisions."""
    return Planned(axes, decisions, assemble(program.graph, decisions, Resharder(machine, axes), RuleCache()))


def named_plans(
    program: Program, machine: Machine, axes: MeshAxes, names: tuple[str, ...] = NAMES, seed: int = 0
) -> Iterator[tuple[str, Planned]]:
    """Each plan with its name; an expert whose plan equals another's is left out."""
    planner = Planner(program, machine)
    resharder = Resharder(machine, axes)
    if "chosen" in names:
        best = planner.plan([axes])
        yield "chosen", Planned(axes, best.decisions, best.graph)
    if set(names) & set(EXPERTS):
        built = Builder(program.graph, program.ties, resharder, machine, planner.rules, planner.traffic).build(
            keep=False
        )
        seeds = expert_seeds(program, built, axes, planner.rules)
        for name in names:
            found = [k for k in seeds if name in EXPERTS and k.startswith(EXPERTS[name]) and " x " not in k]
            if found:
                yield name, planned(program, built.decisions(seeds[found[0]], keep=False), machine, axes)
    if "random" in names:
        decisions = sample(program.graph, program.ties, axes, planner.rules, random.Random(seed))
        yield "random", planned(program, decisions, machine, axes)


def without_barriers(graph: Graph) -> Graph:
    """A planned graph whose repeated gathers and recomputations may be merged and moved as the compiler likes."""
    behind: dict[Tensor, Tensor] = {}
    ops = []
    for op in graph.ops:
        inputs = tuple(behind.get(t, t) for t in op.inputs)
        if op.name == "optimization_barrier":
            behind.update(zip(op.outputs, inputs, strict=True))
        else:
            ops.append(dataclasses.replace(op, inputs=inputs))
    return Graph(graph.inputs, tuple(behind.get(t, t) for t in graph.outputs), ops)
