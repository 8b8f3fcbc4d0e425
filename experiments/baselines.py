"""What a step would cost without the planner, or with half of it.

    data parallel, fsdp, megatron, tables   the best plan of that style over the meshes that it can use
    expert                                  the best of these, ZeRO-1 and their products: what an expert would have run,
                                            who keeps of what `jax.checkpoint` recomputes what there is memory for
    rewritten expert                        the best expert on the program as the planner rewrites it: sparse updates of
                                            tables, only masked positions onto the vocabulary, as written by hand
    search                                  the planner's answer for the program as it is written, without rewrites
    sequential                              rewritten for one device, then parallelized

Every baseline is a `Candidate`: a full plan, its seconds by the same simulation as the planner's and its peak bytes;
it may not fit. Its collectives are rings where the planner would make them rings: XLA:TPU gives those to anybody's
FSDP. `experiments/tables/zoo_table.py`, `unity_table.py`, `expert_plans.py` and `mesh_sweep.py` print them.

Where the devices do not divide the weights (1,024 rows over 96), an expert who shards weights does what FSDP does: it
pads. `padded` is the same step with the weights stored padded to the next multiple, cut back where they are used. And
it may shard them over those of two axes that divide them, and replicate over the other (hybrid sharding).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import optax

import models
from experiments.padded import padded
from unity_jax.machine.machine import Machine
from unity_jax.network.reshard import Resharder
from unity_jax.pcg.graph import nested
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.program import Program, trace
from unity_jax.rewrite.library import searched
from unity_jax.search import joint as search
from unity_jax.search.build import Builder
from unity_jax.search.candidate import NO_PINS, Candidate, best, finish
from unity_jax.search.decompose import Place
from unity_jax.search.experts import Expert, divides, expert_seeds, experts
from unity_jax.search.fold import folded
from unity_jax.search.implementing import implemented
from unity_jax.search.options import SearchOptions
from unity_jax.search.placement import mesh_candidates
from unity_jax.search.planner import Planner
from unity_jax.search.recomputing import keeping
from unity_jax.search.rings import with_rings
from unity_jax.search.rule_cache import RuleCache
from unity_jax.search.unfold import unfolded
from unity_jax.xla.op_classes import PRODUCTS
from unity_jax.xla.traffic import Traffic

STYLES: dict[str, Callable[[Expert], bool]] = {
    "data parallel": lambda e: not (e.model or e.tables or e.shard_params or e.shard_state),
    "fsdp": lambda e: not e.model and e.shard_params,
    "megatron": lambda e: bool(e.model) and not e.shard_params,
    "tables": lambda e: bool(e.tables),
    "others": lambda e: bool(e.model and e.shard_params) or (not e.model and e.shard_state and not e.shard_params),
}
"""Every expert belongs to one style. Megatron's data parallelism is plain or shards the optimizer state (ZeRO-1)."""

WHOLE = 0.95
"""The least part that data parallelism divides of the arithmetic; the rest multiplies weights alone, as LoRA does."""

BEST, REWRITTEN, SEARCH = "expert", "rewritten expert", "search"


def program_of(
    model: str, size: str = "full", optimizer: optax.GradientTransformation | None = None, **overrides: Any
) -> Program:
    """The train step of a zoo model, its state donated, traced from shapes alone.

    **Arguments:** `optimizer`: instead of the model's own; `overrides`: fields of its Config.
    """
    return _traced(models.get(model, size, **overrides), optimizer)


def padded_program(
    model: str, size: str, devices: int, optimizer: optax.GradientTransformation | None = None, **overrides: Any
) -> Program | None:
    """The same with weights stored padded, so that so many devices divide them; None if nothing is to be padded."""
    made = padded(models.get(model, size, **overrides), devices)
    return None if made is None else _traced(made, optimizer)


def _traced(made: models.Model, optimizer: optax.GradientTransformation | None) -> Program:
    if optimizer is not None:
        made = dataclasses.replace(made, optimizer=optimizer)
    return trace(made.train_step, (made.abstract_state(), made.abstract_batch()), {}, donate_argnums=0)


def columns(name: str, plan: Candidate, limit: float) -> dict[str, Any]:
    """What tables say of a plan."""
    found = {"seconds": plan.seconds, "bytes": plan.memory.peak_bytes, "fits": plan.fits(limit), "plan": plan.label}
    return {f"{name} {what}": value for what, value in found.items()}


def others(
    program: Program,
    machine: Machine,
    chosen: Candidate,
    limit: float | None = None,
    stored: Program | None = None,
) -> dict[str, Candidate]:
    """What stands beside the planner's answer: `baselines`, the best expert on the program as it was rewritten there,
    and the planner's answer without rewrites.

    **Arguments:** `chosen`: the planner's answer (`joint`).
    """
    limit = machine.device.memory_bytes if limit is None else limit
    found = baselines(program, machine, limit, stored)
    on_rewritten = [baselines(chosen.program, machine, limit)[BEST]] if chosen.program.rewrites else []
    found[REWRITTEN] = best([found[BEST], *on_rewritten], limit)
    found[SEARCH] = unrewritten(program, machine, chosen, limit)
    return found


def unrewritten(program: Program, machine: Machine, chosen: Candidate, limit: float | None = None) -> Candidate:
    """The planner's answer for a program as it is written, which is the chosen one if that rewrites nothing."""
    return _parallelized(program, machine, limit) if chosen.program.rewrites else chosen


def _parallelized(program: Program, machine: Machine, limit: float | None) -> Candidate:
    """The planner's answer for a program as it is."""
    meshes = mesh_candidates(machine.num_devices, machine)
    return search.plan(program, machine, limit, NO_PINS, meshes, (), SearchOptions(rewrite=False))


def baselines(
    program: Program, machine: Machine, limit: float | None = None, stored: Program | None = None
) -> dict[str, Candidate]:
    """The best plan of each style over the meshes that it can use, and under `BEST` the best of all.

    **Arguments:** `limit`: bytes per device, those of the machine by default; `stored`: the same step with its weights
    stored padded, where the devices do not divide them (`padded_program`).
    """
    limit = machine.device.memory_bytes if limit is None else limit
    of = {e.program: e for e in (Experts(p, machine) for p in (program, stored) if p is not None)}
    found: dict[str, Candidate] = {}
    for style in STYLES:
        if plans := [c for experts_of in of.values() for c in experts_of(style, limit)]:
            chosen = ringed(plans, limit)
            found[style] = of[chosen.program].whole(chosen)
    found[BEST] = remembering(best(list(found.values()), limit), limit)
    return {name: c for name, c in found.items() if name != "others"}


def remembering(plan: Candidate, limit: float) -> Candidate:
    """A plan that keeps what `jax.checkpoint` would have computed again, as far as there is memory for it."""
    return keeping(plan, limit, Planner(plan.program, plan.machine, limit).following)


def ringed(plans: Sequence[Candidate], limit: float) -> Candidate:
    """The best of some plans, with rings where the simulated step gains by them, as the planner gives itself."""
    rules = RuleCache()

    def make(base: Candidate, places: frozenset[Place]) -> Candidate:
        decisions = dataclasses.replace(base.decisions, rings=places)
        return finish(base.program, decisions, Resharder(base.machine, base.mesh), rules, base.label)

    return with_rings(plans, best(plans, limit), limit, make)


def divided(plan: Candidate) -> float:
    """The part of the arithmetic of all matmuls and convolutions that a device would do if all shared it evenly, over
    what it does: 1 for data parallelism, unless a batch does not divide or weights alone are multiplied."""
    ops = [(op, n) for _, graph, n in nested(plan.graph) for op in graph.ops if op.name in PRODUCTS]
    whole, own = (sum(n * flops(op.shard) for op, n in ops) for flops in (lambda s: s.rule.flops, lambda s: s.flops))
    return whole / (own * plan.mesh.num_devices) if own else 1.0


def checked(plan: Candidate) -> float:
    """What data parallelism divides, of batches that the devices divide.

    **Raises:** `ValueError` if that is not the whole: a baseline that repeats work on every device is none.
    """
    part = divided(plan)
    if part < WHOLE:
        raise ValueError(f"{plan.label}: data parallelism divides only {part:.2f} of the arithmetic")
    return part


class Experts:
    """Completes experts to plans; holds what styles share. They have the kernels that the planner has. Of a deep
    program the folded one is planned for, as the planner does, and the best of a style is done on the whole."""

    def __init__(self, traced: Program, machine: Machine) -> None:
        whole = implemented(traced, machine, SearchOptions())
        self.deep = folded(whole, NO_PINS)
        program = whole if self.deep is None else self.deep.program
        self.of, self.program, self.machine, self.rules = whole, program, machine, RuleCache()
        self.uneven = not divides(program, machine.num_devices)
        self.traffic = Traffic.of(program.graph, machine.device.compiler)
        self.builders = {
            mesh: Builder(program.graph, program.ties, Resharder(machine, mesh), machine, self.rules, self.traffic)
            for mesh in mesh_candidates(machine.num_devices, machine)
        }
        self.built = functools.cache(lambda mesh, keep: self.builders[mesh].build(keep))

    def __call__(self, style: str, limit: float) -> Iterator[Candidate]:
        """All plans of a style: the backward pass keeps what the forward pass gathered, and where nothing fits a mesh
        so, it gathers it again."""
        for mesh in self.builders:
            one = len(mesh.names) == 1
            styles = [e for e in experts(mesh) if STYLES[style](e) and (one or e.is_combined or self.uneven)]
            kept = self._plans(mesh, styles, keep=True)
            yield from kept
            if kept and not any(c.fits(limit) for c in kept):
                yield from self._plans(mesh, styles, keep=False)

    def whole(self, plan: Candidate) -> Candidate:
        """A plan done on the whole program."""
        return plan if self.deep is None else unfolded([(self.of, self.deep)], plan, math.inf, NO_PINS, ())

    def _plans(self, mesh: MeshAxes, styles: Sequence[Expert], keep: bool) -> list[Candidate]:
        if not styles:
            return []
        built, resharder = self.built(mesh, keep), self.builders[mesh].resharder
        seeds = expert_seeds(self.program, built, mesh, self.rules, styles)
        return [
            finish(self.program, built.decisions(seed, keep), resharder, self.rules, f"{name} on {mesh}")
            for name, seed in seeds.items()
        ]


def alone(program: Program, machine: Machine) -> Candidate:
    """The program rewritten for one device of the machine, whatever that holds."""
    return search.alone(program, machine, searched())


def joint(program: Program, machine: Machine, limit: float | None = None, spare: float = 0.0) -> Candidate:
    """The planner's answer: rewrites and parallelization chosen together. **Arguments:** `spare`: see `search.plan`."""
    meshes = mesh_candidates(machine.num_devices, machine)
    return search.plan(program, machine, limit, NO_PINS, meshes, searched(), spare=spare)


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
    return _parallelized(rewritten, machine, limit)
