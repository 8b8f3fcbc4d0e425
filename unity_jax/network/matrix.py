"""Collectives on a network that is a matrix of links, as in Yuan et al., Decentralized Training of Foundation Models in
Heterogeneous Environments (https://arxiv.org/abs/2206.01288, section 3).

A group takes the cheaper of two algorithms. *Direct exchange*: every device sends each other one its part, one after
another: the maximum over devices of the sum of `latency + bytes / n / bandwidth`. *Ring*: `n - 1` steps in each of
which every device sends a part to the next, so each step takes as long as the slowest link of the best ring found. An
all-reduce takes either twice.
"""

from __future__ import annotations

import functools

import numpy as np

from unity_jax.machine.network import Matrix

REFERENCE_BYTES = 2.0**20
"""The payload for which rings and placements are chosen: large enough that bandwidth counts, small enough that latency
does."""

Line = tuple[float, float]


def lines(network: Matrix, kind: str, groups: np.ndarray) -> tuple[tuple[Line, ...], ...]:
    """Seconds as lines in the bytes, per algorithm: the greatest is that of the slowest device of the slowest group."""
    if kind == "permute":  # to the next in order, and from the last to the first
        pairs = [(int(i), int(j)) for g in groups for i, j in zip(g, np.roll(g, -1), strict=True)]
        return (_upper([_link(network, i, j, 1) for i, j in pairs]),)
    rounds = 2 if kind == "all_reduce" else 1
    found = [_direct(network, groups, rounds)]
    if kind != "all_to_all":
        found.append(_rings(network, groups, rounds))
    return tuple(found)


def _direct(network: Matrix, groups: np.ndarray, rounds: int) -> tuple[Line, ...]:
    latency, slowness = (a[groups[:, :, None], groups[:, None, :]] for a in arrays(network))
    sums = [(latency.sum(axis).ravel(), slowness.sum(axis).ravel() / groups.shape[1]) for axis in (1, 2)]
    return _upper([(rounds * a, rounds * b) for both in sums for a, b in zip(*both, strict=True)])


def _rings(network: Matrix, groups: np.ndarray, rounds: int) -> tuple[Line, ...]:
    n = groups.shape[1]
    steps = rounds * (n - 1)
    found = []
    for g in groups:
        ring = best_ring(network, tuple(map(int, g)))
        for i, j in zip(ring, (*ring[1:], ring[0]), strict=True):
            latency, per_byte = _link(network, i, j, n)
            found.append((steps * latency, steps * per_byte))
    return _upper(found)


def _link(network: Matrix, i: int, j: int, parts: int) -> Line:
    return network.latency[i][j], 1 / network.bandwidth[i][j] / parts


@functools.lru_cache(maxsize=64)
def arrays(network: Matrix) -> tuple[np.ndarray, np.ndarray]:
    """Latency in seconds and slowness in seconds per byte of every link, zero on the diagonals."""
    latency, bandwidth = np.array(network.latency), np.array(network.bandwidth)
    np.fill_diagonal(latency, 0.0)
    np.fill_diagonal(bandwidth, np.inf)
    return latency, 1 / bandwidth


@functools.lru_cache(maxsize=4096)
def best_ring(network: Matrix, group: tuple[int, ...]) -> tuple[int, ...]:
    """The order of a group around a ring whose slowest link is fast: from each device to the nearest that is left, from
    the best start, for the reference payload."""
    latency, slowness = arrays(network)
    at = np.array(group)
    seconds = (latency + slowness * REFERENCE_BYTES / len(group))[np.ix_(at, at)]
    found = []
    for start in range(len(group)):
        ring, left = [start], set(range(len(group))) - {start}
        while left:
            ring.append(min(left, key=lambda j: (seconds[ring[-1], j], j)))
            left.remove(ring[-1])
        found.append((seconds[ring, np.roll(ring, -1)].max(), ring))
    return tuple(int(at[i]) for i in min(found)[1])


def _upper(found: list[Line]) -> tuple[Line, ...]:
    """The lines that are the greatest for some number of bytes, or nearly: those that no other one is above of."""
    kept: list[Line] = []
    for latency, per_byte in sorted({(float(a), float(b)) for a, b in found}, reverse=True):
        if not kept or per_byte > kept[-1][1]:
            kept.append((latency, per_byte))
    return tuple(kept)
