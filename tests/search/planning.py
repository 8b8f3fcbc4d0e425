"""What tests of the search share: a model's program, as the planner sees it."""

from __future__ import annotations

import functools
from typing import Any

import models
from unity_jax.machine.machine import Machine
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.program import Program, trace
from unity_jax.search.planner import Planner


@functools.cache
def program(name: str, size: str = "tiny", **overrides: Any) -> Program:
    """The train step of a zoo model, traced from shapes alone."""
    model = models.get(name, size, **overrides)
    return trace(model.train_step, (model.abstract_state(), model.abstract_batch()), {}, donate_argnums=0)


def planner(of: Program, machine: str = "h100:8", limit: float | None = None) -> Planner:
    """A planner on a preset machine."""
    return Planner(of, Machine.preset(machine), limit)


def mesh(*sizes: int) -> MeshAxes:
    """A mesh with the planner's axis names."""
    return MeshAxes(("x", "y", "z")[: len(sizes)], sizes)
