"""The devices of a plan: which of them lies where in its mesh, so that neighbours are neighbours on the network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from unity_jax import _compat
from unity_jax.machine.detect import positions
from unity_jax.machine.machine import Machine
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.plan.value import PlanValue

P = TypeVar("P", bound=PlanValue)


def placed(mesh: Mesh | AbstractMesh, machine: Machine, order: Sequence[int]) -> MeshAxes:
    """The axes of a mesh as its devices lie on the machine's network, or in this order if it has none."""
    return MeshAxes.of(mesh, _order(mesh, machine) if isinstance(mesh, Mesh) else order)


def _order(mesh: Mesh, machine: Machine) -> tuple[int, ...]:
    return positions(list(mesh.devices.flat), machine.network)


def with_devices(mesh: Any, axes: MeshAxes, machine: Machine) -> Any:
    """A mesh with these axes: the caller's, or one over the caller's devices, each in its place on the network, or an
    abstract one if they are not as many. **Arguments:** `mesh`: a mesh, a sequence of devices, or None (all)."""
    if isinstance(mesh, (Mesh, AbstractMesh)):
        return mesh
    devices = jax.devices() if mesh is None else mesh
    if len(devices) != axes.num_devices:
        return _compat.abstract_mesh(axes.names, axes.sizes)
    return Mesh(arranged(devices, axes, machine), axes.names)


def arranged(devices: Sequence[Any], axes: MeshAxes, machine: Machine) -> np.ndarray:
    """Devices in the shape of a mesh, `axes.sizes`, each at its place on the network; as many as the axes have."""
    at = dict(zip(positions(devices, machine.network), devices, strict=True))
    return np.array([at[i] for i in axes.order or range(len(devices))]).reshape(axes.sizes)


def attach_devices(plan: P) -> P:
    """A plan made without devices (offline, or inside `jit`), over those of `jax.set_mesh` or all, if their number
    agrees."""
    ambient, axes, machine = _compat.ambient_mesh(), plan.axes, plan.priced_on
    assert machine is not None
    if isinstance(ambient, Mesh) and MeshAxes.of(ambient) == MeshAxes.of(plan.mesh):
        return replace(plan, mesh=ambient, order=MeshAxes.of(ambient, _order(ambient, machine)).order)
    if len(jax.devices()) != axes.num_devices:
        return plan
    return replace(plan, mesh=mesh_over(plan, jax.devices()))


def mesh_over(plan: PlanValue, devices: Sequence[Any]) -> Mesh:
    """The mesh of a plan over as many other devices, each at its place on the network of the plan's machine."""
    assert plan.priced_on is not None
    return Mesh(arranged(devices, plan.axes, plan.priced_on), plan.axes.names, axis_types=plan.mesh.axis_types)
