"""Time of a collective over given mesh axes, as they lie on the machine's network.

    >>> collective_seconds(Machine.preset("h100:8"), MeshAxes(("data",), (8,)), "all_reduce", 1e9, ("data",))  # ~3.9 ms

Device `i` of the mesh (row-major, the last axis varies fastest) is device `i` of the network, so inner mesh axes lie on
inner levels. A group that spans several levels runs hierarchically, with its payload divided by the members that it has
on the levels inside. All groups of a mesh axis run at once: through a switch each device has its own bandwidth, on a
ring or line interleaved groups share the links.

Algorithms: Chan, Heimlich, Purkayastha, van de Geijn (https://doi.org/10.1002/cpe.1206); rings and lines with links in
both directions: https://jax-ml.github.io/scaling-book/sharding/ .
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

import numpy as np

from unity_jax.machine.machine import Machine
from unity_jax.machine.network import Level
from unity_jax.pcg.mesh import MeshAxes

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute")


def collective_seconds(machine: Machine, mesh: MeshAxes, kind: str, nbytes: float, axes: tuple[str, ...]) -> float:
    """Seconds of a collective in which each device has `nbytes`, the larger of its operand and its result.

    That is the result of an all-gather and the operand of all others. Nothing for a group of one device. Raises
    `ValueError` for an unknown kind or a mesh larger than the machine.
    """
    latency, per_byte = collective_line(machine, mesh, kind, axes)
    return latency + per_byte * nbytes


@functools.lru_cache(maxsize=4096)
def collective_line(machine: Machine, mesh: MeshAxes, kind: str, axes: tuple[str, ...]) -> tuple[float, float]:
    """Collective time as a line in the bytes: (seconds, seconds per byte)."""
    if kind not in KINDS:
        raise ValueError(f"unknown collective {kind!r}, expected one of {', '.join(KINDS)}")
    spans = group_spans(machine, mesh, axes)
    if not spans:
        return 0.0, 0.0
    terms = []
    inner = 1  # members of the group below the level at hand
    for level, members, stride in reversed(spans):
        latency, per_byte = _level_line(kind, level, members, stride)
        shared = inner if kind in ("all_gather", "reduce_scatter", "all_reduce") else 1
        terms.append((latency, per_byte / shared))
        inner *= members
    if kind == "permute":  # neighbours exchange at every level at the same time
        latency, per_byte = max(terms, key=lambda t: (t[1], t[0]))
    else:
        latency, per_byte = (sum(t) for t in zip(*terms, strict=True))
    return machine.device.kernel_overhead + latency, per_byte


@functools.lru_cache(maxsize=4096)
def group_spans(machine: Machine, mesh: MeshAxes, axes: tuple[str, ...]) -> tuple[tuple[Level, int, int], ...]:
    """The levels that a group over `axes` crosses, outermost first: (level, members, distance between members).

    Where groups differ (sizes that do not align with the levels), the largest count and distance of any of them.
    """
    if mesh.num_devices > machine.num_devices:
        raise ValueError(f"mesh {mesh} has {mesh.num_devices} devices, {machine.name} has {machine.num_devices}")
    ids = np.arange(mesh.num_devices).reshape(mesh.sizes)
    along = [mesh.names.index(a) for a in axes]
    groups = np.moveaxis(ids, along, range(-len(along), 0)).reshape(-1, mesh.size(axes))
    spans = []
    outer, inside = 1, machine.num_devices  # distinct positions on the levels outside, devices of one member
    for level in machine.network:
        inside //= level.size
        positions = int((np.diff(np.sort(groups // inside, axis=1), axis=1) > 0).sum(axis=1).max() + 1)
        members = -(-positions // outer)
        if members > 1:
            steps = np.diff(np.sort(groups // inside % level.size, axis=1), axis=1)
            distances = np.where(steps > 0, steps, level.size).min(axis=1)
            spans.append((level, members, int(np.where(distances < level.size, distances, 1).max())))
        outer = positions
    return tuple(spans)


def _level_line(kind: str, level: Level, n: int, stride: int) -> tuple[float, float]:
    """(seconds, seconds per byte) of a collective among `n` members of one level that are `stride` apart.

    Every device receives (n - 1) / n of the bytes. A switch joins any two devices, so halving and doubling takes
    log2(n) steps: two collectives over parts of the group are never faster. A ring or line moves data both ways at
    once, but at the end of a line all data arrive through one link; an all-to-all is bound by the bisection.
    """
    if level.links == "switch":
        hops, moved, bandwidth = math.ceil(math.log2(n)), (n - 1) / n, level.bandwidth
        if kind == "permute":
            hops, moved = 1, 1.0
    else:
        wraps = level.links == "ring" and n * stride == level.size and n > 2
        hops = (math.ceil(n / 2) if wraps else n - 1) * stride
        moved = (n - 1) / n
        if kind == "all_to_all":
            moved = (n * n // 4) / n
        bandwidth = level.bandwidth * (2 if wraps else 1) / stride
        if kind == "permute":  # one direction only; without a wrap the last member sends back along the line
            hops, moved, bandwidth = (stride if wraps else hops), 1.0, level.bandwidth / stride
    rounds = 2 if kind == "all_reduce" else 1
    return rounds * hops * level.latency, rounds * moved / bandwidth


def all_lines(machine: Machine, mesh: MeshAxes, kinds: Iterable[str]) -> dict[tuple[str, int], tuple[float, float]]:
    """`collective_line` of every kind and subset of the mesh axes, keyed by the bits of the axes (bit i: axis i)."""
    subsets = {b: tuple(a for i, a in enumerate(mesh.names) if b >> i & 1) for b in range(1, 1 << len(mesh.names))}
    return {(k, bits): collective_line(machine, mesh, k, axes) for k in kinds for bits, axes in subsets.items()}
