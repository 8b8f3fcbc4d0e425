"""Meshes worth planning for, with their place on the network.

    >>> [str(mesh) for mesh in mesh_candidates(8, Machine.preset("h100:8"))]
    ['x=8', 'x=4, y=2', 'x=2, y=4']

On a network of levels a mesh axis takes whole levels or a part of the innermost, or of one of many nodes. On a matrix
the devices that the inner axis joins are found: clusters of near devices, then swaps that make the slowest of them
faster (the device assignment of https://arxiv.org/abs/2206.01288, section 3, by local search).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import squareform

from unity_jax.machine.machine import Machine
from unity_jax.machine.network import Level, Matrix
from unity_jax.network.matrix import REFERENCE_BYTES, arrays
from unity_jax.network.spans import TORUS
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.search.limits import LIMITS

NAMES = ("x", "y", "z")


def mesh_candidates(devices: int, machine: Machine) -> list[MeshAxes]:
    """One axis over all devices, two axes as the network suggests, then three where it has as many levels; on a matrix
    in the device order found for it."""
    if devices == 1:
        return [MeshAxes(("x",), (1,))]
    find = _on_matrix if isinstance(machine.network, Matrix) else _on_levels
    return list(dict.fromkeys(MeshAxes(NAMES[: len(sizes)], sizes, order) for sizes, order in find(machine)))


Placed = tuple[tuple[int, ...], tuple[int, ...]]
"""Sizes of mesh axes, and the device order."""


def _on_levels(machine: Machine) -> Iterator[Placed]:
    """Two axes split at a level of the network or inside its innermost, and each axis of a torus against the others.

    An inner axis that spans more than one node and not all of them is as slow as an outer one, but where there are many
    nodes its collectives have fewer members: what is split over it and repeated over the outer one is gathered sooner.
    Behind one switch it makes a difference all the same which axis is the inner one: it splits last what both split.
    """
    levels, n = machine.network, machine.num_devices
    assert isinstance(levels, tuple)
    yield (n,), ()
    suffixes = [math.prod(level.size for level in levels[i:]) for i in range(1, len(levels))]
    for k in range(2, n):
        if n % k == 0 and (k in suffixes or levels[-1].size % k == 0):
            yield (n // k, k), ()
    for level, inside in zip(levels[:-1], suffixes, strict=True):
        if level.size >= LIMITS.many_nodes and level.links not in TORUS:
            some = _about_half(level.size)
            yield (n // (some * inside), some * inside), ()
    ids = np.arange(n).reshape([level.size for level in levels])
    for i in _distinct_axes(levels):
        order = np.moveaxis(ids, i, -1).ravel()
        yield (n // levels[i].size, levels[i].size), tuple(map(int, order))
    yield from ((sizes, ()) for sizes in _three_axes(levels))


def _three_axes(levels: tuple[Level, ...]) -> Iterator[tuple[int, ...]]:
    """Each axis of a torus by itself. Of many nodes two, then about as many as there are parts of so many: a batch
    that the outer parts split, weights that each part has once, and what the devices of a node share."""
    sizes = tuple(level.size for level in levels)
    if len(sizes) == len(NAMES) and min(sizes) > 2:  # two chips are no more than part of another axis
        yield sizes
    if len(sizes) == 2 and sizes[0] >= LIMITS.many_nodes and min(sizes) > 1 and levels[0].links not in TORUS:
        for k in (2, _about_half(sizes[0])):
            if sizes[0] % k == 0 and 1 < k < sizes[0]:
                yield sizes[0] // k, k, sizes[1]


def _about_half(size: int) -> int:
    """The greatest divisor that is not greater than what it leaves."""
    return max(k for k in range(1, size) if size % k == 0 and k * k <= size)


def _distinct_axes(levels: tuple[Level, ...]) -> Iterator[int]:
    """The torus axes that are neither outermost nor innermost: no split between levels has one of them alone."""
    alike = {(level.size, level.links, level.bandwidth) for level in (levels[0], levels[-1])}
    for i, level in enumerate(levels[1:-1], 1):
        kind = (level.size, level.links, level.bandwidth)
        if level.links in TORUS and level.size > 1 and kind not in alike:
            alike.add(kind)
            yield i


def _on_matrix(machine: Machine) -> Iterator[Placed]:
    n = machine.num_devices
    assert isinstance(machine.network, Matrix)
    latency, slowness = arrays(machine.network)
    near = clustered(_pair_seconds(latency, slowness, 1))
    yield (n,), near
    for k in range(2, n):
        if n % k == 0:
            yield (n // k, k), device_order(machine.network, near, k)


def _pair_seconds(latency: np.ndarray, slowness: np.ndarray, parts: int) -> np.ndarray:
    """Seconds to send one of so many parts of the reference payload, in the slower direction."""
    seconds = latency + slowness * REFERENCE_BYTES / parts
    return np.maximum(seconds, seconds.T)


def clustered(seconds: np.ndarray) -> tuple[int, ...]:
    """All devices in an order in which near ones are neighbours: the leaves of an average-linkage clustering."""
    if len(seconds) < 3:
        return tuple(range(len(seconds)))
    tree = linkage(squareform(seconds, checks=False), method="average", optimal_ordering=True)
    return tuple(map(int, leaves_list(tree)))


def device_order(network: Matrix, start: tuple[int, ...], k: int) -> tuple[int, ...]:
    """A device order for an inner mesh axis of size `k`, from a first guess.

    Swaps two devices as long as that helps: first the slowest group of the inner axis, then all of its groups together,
    then likewise the outer axis, whose groups are the devices at equal places of the inner groups. Deterministic.
    """
    inner, outer = (_pair_seconds(*arrays(network), parts) for parts in (k, len(start) // k))

    def cost(grid: np.ndarray) -> tuple[float, ...]:
        return (*_group_seconds(inner, grid), *_group_seconds(outer, grid.T))

    grid = np.array(start).reshape(-1, k)
    now = cost(grid)
    while True:
        best = min(((cost(_swapped(grid, a, b)), a, b) for a, b in _swaps(inner, outer, grid)), default=None)
        if best is None or not _less(best[0], now):
            return tuple(map(int, grid.ravel()))
        now, grid = best[0], _swapped(grid, best[1], best[2])


def _group_seconds(seconds: np.ndarray, groups: np.ndarray) -> tuple[float, float]:
    """The direct exchange of the slowest group, and of all groups together."""
    each = seconds[groups[:, :, None], groups[:, None, :]].sum(axis=2).max(axis=1)
    return float(each.max()), float(each.sum())


def _swaps(inner: np.ndarray, outer: np.ndarray, grid: np.ndarray) -> Iterator[tuple[int, int]]:
    """Pairs of places: of the slowest inner group and any other, of the slowest outer group and the same inner one."""
    rows, k = grid.shape
    slow = int(inner[grid[:, :, None], grid[:, None, :]].sum(axis=2).max(axis=1).argmax())
    for j, other in itertools.product(range(k), range(rows * k)):
        if other // k != slow:
            yield slow * k + j, other
    column = int(outer[grid.T[:, :, None], grid.T[:, None, :]].sum(axis=2).max(axis=1).argmax())
    for row, j in itertools.product(range(rows), range(k)):
        if j != column:
            yield row * k + column, row * k + j


def _swapped(grid: np.ndarray, a: int, b: int) -> np.ndarray:
    flat = grid.ravel().copy()
    flat[[a, b]] = flat[[b, a]]
    return flat.reshape(grid.shape)


def _less(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    """Lexicographically, rounding aside."""
    for x, y in zip(a, b, strict=True):
        if abs(x - y) > 1e-9 * max(x, y):
            return x < y
    return False
