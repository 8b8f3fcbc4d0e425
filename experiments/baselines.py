"""What a step would cost without the planner: what an expert would have run, and rewriting before parallelization.

Every baseline is a `Candidate`: a full plan, its seconds by the same simulation as the planner's and its peak bytes;
it may not fit. `experiments/unity_table.py` and `experiments/mesh_sweep.py` print them side by side.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import optax

import models
from unity_jax.cost.reshard import Resharder
from unity_jax.cost.traffic import Traffic
from unity_jax.machine.machine import Machine
from unity_jax.program import Program, trace
from unity_jax.rewrite.library import searched
from unity_jax.search import joint as search
from unity_jax.search.assemble import RuleCache
from unity_jax.search.build import Builder
from unity_jax.search.candidate import NO_PINS, Candidate, best, finish
from unity_jax.search.experts import Expert, expert_seeds, experts
from unity_jax.search.placement import mesh_candidates
from unity_jax.search.planner import Planner

STYLES: dict[str, Callable[[Expert], bool]] = {
    "data parallel": lambda e: not (e.model or e.tables or e.shard_params or e.shard_state),
    "fsdp": lambda e: not e.model and e.shard_params,
    "megatron": lambda e: bool(e.model) and not e.shard_params,
    "others": lambda e: bool(e.tables or (e.model and e.shard_params) or (not e.model and e.shard_state)),
}
"""Every expert belongs to one style. Megatron's data parallelism is plain or shards the optimizer state (ZeRO-1)."""

BEST = "expert"


def program_of(
    model: str, size: str = "full", optimizer: optax.GradientTransformation | None = None, **overrides: Any
) -> Program:
    """The train step of a zoo model, its state donated, traced from shapes alone.

    **Arguments:** `optimizer`: instead of the model's own; `overrides`: fields of its Config.
    """
    made = models.get(model, size, **overrides)
    if optimizer is not None:
        made = dataclasses.replace(made, optimizer=optimizer)
    return trace(made.train_step, (made.abstract_state(), made.abstract_batch()), {}, donate_argnums=0)


def columns(name: str, plan: Candidate, limit: float) -> dict[str, Any]:
    """What tables say of a plan."""
    found = {"seconds": plan.seconds, "bytes": plan.memory.peak_bytes, "fits": plan.fits(limit), "plan": plan.label}
    return {f"{name} {what}": value for what, value in found.items()}


def baselines(program: Program, machine: Machine, limit: float | None = None) -> dict[str, Candidate]:
    """The best plan of each style over the meshes that it can use, and under `BEST` the best of all.

    **Arguments:** `limit`: bytes per device, those of the machine by default.
    """
    limit = machine.device.memory_bytes if limit is None else limit
    experts_of = _Experts(program, machine)
    found: dict[str, Candidate] = {}
    for style in STYLES:
        plans = list(experts_of(style, keep=True))
        if not any(c.fits(limit) for c in plans):
            plans += experts_of(style, keep=False)
        if plans:
            found[style] = best(plans, limit)
    found[BEST] = best(list(found.values()), limit)
    return {name: c for name, c in found.items() if name != "others"}


class _Experts:
    """Completes experts to plans; holds what styles share."""

    def __init__(self, program: Program, machine: Machine) -> None:
        self.program, self.machine, self.rules = program, machine, RuleCache()
        self.traffic = Traffic.of(program.graph, machine.device.compiler)
        self.builders = {
            mesh: Builder(program.graph, program.ties, Resharder(machine, mesh), machine, self.rules, self.traffic)
            for mesh in mesh_candidates(machine.num_devices, machine)
        }
        self.built = functools.cache(lambda mesh, keep: self.builders[mesh].build(keep))

    def __call__(self, style: str, keep: bool) -> Iterator[Candidate]:
        """All plans of a style.

        **Arguments:** `keep`: whether the backward pass keeps what the forward pass gathered, or gathers it again.
        """
        for mesh, builder in self.builders.items():
            one = len(mesh.names) == 1
            styles = [e for e in experts(mesh) if STYLES[style](e) and (one or e.is_combined)]
            if not styles:
                continue
            built = self.built(mesh, keep)
            for name, seed in expert_seeds(self.program, built, mesh, self.rules, styles).items():
                decisions = built.decisions(seed, keep)
                label = f"{name} on {mesh}"
                yield finish(self.program, decisions, builder.resharder, self.rules, label)


def additive_seconds(plan: Candidate) -> float:
    """A step in which nothing is hidden: its arithmetic, then all of its communication.

    What Unity's simulator and those before it count (OSDI 22, section 5). Of the data-parallel plan of a program as it
    is written this is the baseline that such papers compare with: gradients of tables are dense, and summed whole.
    """
    return plan.timeline.compute_seconds + plan.timeline.communication_seconds


def alone(program: Program, machine: Machine) -> Candidate:
    """The program rewritten for one device of the machine, whatever that holds."""
    return search.alone(program, machine, searched())


def joint(program: Program, machine: Machine, limit: float | None = None) -> Candidate:
    """The planner's answer: rewrites and parallelization chosen together."""
    meshes = mesh_candidates(machine.num_devices, machine)
    return search.plan(program, machine, limit, NO_PINS, meshes, searched())


def sequential(
    program: Program, machine: Machine, limit: float | None = None, known: Candidate | None = None
) -> Candidate:
    """First the rewrites that are best for one device, whatever it holds, then the best parallelization of the result:
    what TASO in front of FlexFlow does (Unity, section 6).

    **Arguments:** `known`: the joint answer, which this one is too if neither rewrites anything.
    """
    rewritten = alone(program, machine).program
    if known is not None and not rewritten.rewrites and not known.program.rewrites:
        return known
    meshes = mesh_candidates(machine.num_devices, machine)
    return Planner(rewritten, machine, limit).plan(meshes)
