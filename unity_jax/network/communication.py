"""Time of a collective over given mesh axes, as they lie on the machine's network.

    >>> round(collective_seconds(Machine.preset("h100:8"), MeshAxes(("data",), (8,)), "all_reduce", 1e9, ("data",)), 4)
    0.0048

Position `i` of the mesh (row-major, the last axis varies fastest) is position `mesh.order[i]` of the network. All
groups of a mesh axis run at once and end with the slowest. `levels` and `matrix` have the algorithms of either network.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import numpy as np

from unity_jax.machine.machine import Machine
from unity_jax.machine.network import Matrix
from unity_jax.network import levels, matrix
from unity_jax.pcg.mesh import MeshAxes

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute")

Lines = tuple[tuple[tuple[float, float], ...], ...]
"""Seconds as a function of bytes: the least, over algorithms, of the greatest of some lines (seconds, seconds per
byte). On levels an algorithm is one line."""


def collective_seconds(machine: Machine, mesh: MeshAxes, kind: str, nbytes: float, axes: tuple[str, ...]) -> float:
    """Seconds of a collective in which each device has `nbytes`, the larger of its operand and its result.

    That is the result of an all-gather and the operand of all others. Nothing for a group of one device. Raises
    `ValueError` for an unknown kind or a mesh larger than the machine.
    """
    lines = collective_lines(machine, mesh, kind, axes)
    return min(max(latency + per_byte * nbytes for latency, per_byte in algorithm) for algorithm in lines)


@functools.lru_cache(maxsize=4096)
def collective_lines(machine: Machine, mesh: MeshAxes, kind: str, axes: tuple[str, ...]) -> Lines:
    """Collective time as lines in the bytes."""
    if kind not in KINDS:
        raise ValueError(f"unknown collective {kind!r}, expected one of {', '.join(KINDS)}")
    groups = groups_of(machine, mesh, axes)
    if groups.shape[1] < 2:
        return (((0.0, 0.0),),)
    if isinstance(machine.network, Matrix):
        lines = matrix.lines(machine.network, kind, groups)
    else:
        lines = tuple((line,) for line in levels.lines(machine.network, kind, groups))
    start = machine.device.kernel_overhead
    return tuple(tuple((start + latency, per_byte) for latency, per_byte in algorithm) for algorithm in lines)


def groups_of(machine: Machine, mesh: MeshAxes, axes: tuple[str, ...]) -> np.ndarray:
    """(groups, members): the network positions of every group over `axes`, members in row-major order of the axes."""
    if mesh.num_devices > machine.num_devices:
        raise ValueError(f"mesh {mesh} has {mesh.num_devices} devices, {machine.name} has {machine.num_devices}")
    ids = np.array(mesh.order or range(mesh.num_devices)).reshape(mesh.sizes)
    along = [mesh.names.index(a) for a in axes]
    return np.moveaxis(ids, along, range(-len(along), 0)).reshape(-1, mesh.size(axes))


def all_lines(machine: Machine, mesh: MeshAxes, kinds: Iterable[str]) -> dict[tuple[str, int], Lines]:
    """`collective_lines` of every kind and subset of the mesh axes, keyed by the bits of the axes (bit i: axis i)."""
    subsets = {b: tuple(a for i, a in enumerate(mesh.names) if b >> i & 1) for b in range(1, 1 << len(mesh.names))}
    return {(k, bits): collective_lines(machine, mesh, k, axes) for k in kinds for bits, axes in subsets.items()}
