"""Train steps of the zoo under plans, against the unsharded steps.

reference = Reference.of(models.get("mlp", "tiny", dtype="float64"))
plan = reference.chosen((2, 4), memory_limit=2e5)
reference.errors(reference.run(plan))              # {".params['towers'][0]...": 3e-16, ...}
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from models import Model, TrainState
from tests.numerics.harness import Case, Planned, error
from unity_jax.lower.compile import spmd
from unity_jax.machine.machine import Machine
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.rewrite.library import searched
from unity_jax.search import joint
from unity_jax.search.candidate import NO_PINS
from unity_jax.search.placement import mesh_candidates

STEPS = 5
CORE = ("bert", "dlrm", "gpt", "lstm_lm", "mlp", "moe", "resnext")
"""Models that have what the others are made of: checks that take many seconds run on these alone."""
CHEAP = ("mlp", "dlrm", "lstm_lm")
"""Those that XLA compiles in seconds under any plan."""


def one_layer(name: str) -> dict[str, Any]:
    """Fields of a transformer's config: one layer where it has several, each of which takes as long again."""
    return {"layers": 1} if name in ("bert", "gpt", "llama", "moe", "vit") else {}


def slow(preset: str = "h100:8", factor: float = 1e5) -> Machine:
    """A machine so slow at everything but starting collectives and kernels that the tiny models are worth sharding.

    By some two hundred times less slow, kernels take as long to start as to run, and rewrites pay that merge them.
    """
    m = Machine.preset(preset)
    device = dataclasses.replace(
        m.device,
        peak_flops=tuple((name, rate / factor) for name, rate in m.device.peak_flops),
        memory_bandwidth=m.device.memory_bandwidth / factor,
    )
    return dataclasses.replace(
        m,
        devices=(device,),
        network=tuple(dataclasses.replace(level, bandwidth=level.bandwidth / factor * 10) for level in m.network),
    )


def fresh_state(model: Model) -> TrainState:
    """The state of seed 0, from one compilation where `make_state` alone makes one or more per leaf."""
    key = jax.random.key(0)
    return jax.jit(model.make_state).lower(key).compile()(key)


@dataclasses.dataclass(eq=False)
class Reference:
    """A model with five unsharded steps taken: the results to agree with."""

    model: Model
    case: Case
    want: list[Any]  # the leaves of (state, metrics) after the last step

    @staticmethod
    def of(model: Model) -> Reference:
        args = (fresh_state(model), model.make_batch(0))
        case = Case.traced(model.train_step, args, donate=(0,))
        step = jax.jit(model.train_step).lower(*args).compile()
        state = args[0]
        for i in range(STEPS):
            state, metrics = step(state, model.make_batch(i))
        return Reference(model, case, jax.tree.leaves((state, metrics)))

    def chosen(self, machine: Machine, sizes: tuple[int, ...] | None = None, limit: float | None = None) -> Planned:
        """The plan that users get, rewrites and layouts chosen together, on the mesh of these sizes or one of the
        planner's choosing."""
        named = (
            [MeshAxes(tuple("xyz"[: len(sizes)]), sizes)] if sizes else mesh_candidates(machine.num_devices, machine)
        )
        best = joint.plan(self.case.program, machine, limit, NO_PINS, named, searched())
        return Planned(best.mesh, best.decisions, best.graph, tuple(r.rule for r in best.program.rewrites))

    def shuffled(self, seed: int) -> list[Any]:
        """The leaves of (state, metrics) after as many unsharded steps on the same batches with their examples in
        another order, so that sums over them run in another order."""
        state = fresh_state(self.model)
        step = jax.jit(self.model.train_step).lower(state, self.model.make_batch(0)).compile()
        for i in range(STEPS):
            batch = self.model.make_batch(i)
            order = np.random.default_rng(seed).permutation(jax.tree.leaves(batch)[0].shape[0])
            state, metrics = step(state, jax.tree.map(lambda v, order=order: v[order], batch))
        return jax.tree.leaves((state, metrics))

    def run(self, plan: Planned) -> list[Any]:
        """The leaves of (state, metrics) after as many steps under a plan."""
        program, mesh = self.case.program, plan.mesh
        shardings = [NamedSharding(mesh, t.layout.spec()) for t in plan.graph.inputs]
        inputs = list(map(jax.device_put, self.case.flat, shardings))
        step = jax.jit(spmd(plan.graph, mesh)).lower(inputs).compile()
        for i in range(STEPS):
            outs = step(inputs)
            state, _ = jax.tree.unflatten(program.out_tree, outs)
            leaves = [*program.constants, *jax.tree.leaves((state, self.model.make_batch(i + 1)))]
            inputs = list(map(jax.device_put, leaves, shardings))
        return outs

    def errors(self, got: list[Any]) -> dict[str, float]:
        """The error of every leaf by path, relative to its largest magnitude.

        Adam scales the rounding noise of gradients that are zero in exact arithmetic up to full size: of such a leaf
        the moments are compared, relative to the largest of all leaves of that moment, and the parameter is not.
        """
        paths = self.case.program.out_paths
        largest: dict[str, float] = {}
        for path, want in zip(paths, self.want, strict=True):
            if moment := _moment(path):
                largest[moment] = max(largest.get(moment, 0.0), float(np.abs(np.asarray(want)).max(initial=0)))
        found = {}
        for path, want, g in zip(paths, self.want, got, strict=True):
            noise = any(part in path for part in self.model.zero_gradients)
            if not noise:
                found[path] = error(want, g)
            elif moment := _moment(path):
                found[path] = error(want, g, floor=largest[moment])
        return found


def _moment(path: str) -> str:
    """`mu` or `nu` for the paths of Adam's moments."""
    match = re.search(r"\.(mu|nu)\b", path)
    return match[1] if match else ""
