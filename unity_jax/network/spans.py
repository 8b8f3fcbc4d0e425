"""The levels of a network that groups of devices cross.

Two nodes of eight devices, groups of four that begin with (0, 4, 8, 12): two nodes, next to each other, with two
devices of a group in each; and two devices of a node, four apart.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from unity_jax.machine.network import Level

TORUS = ("ring", "line")
"""Links between neighbours, which groups share."""


class Span(NamedTuple):
    """A level that groups cross: into how many members of the level, how far apart, and how many of a group's devices
    are inside each of them."""

    level: Level
    members: int
    stride: int
    inside: int


def spans(network: tuple[Level, ...], groups: np.ndarray) -> list[Span]:
    """The levels that groups cross, outermost first.

    Where groups differ (sizes that do not align with the levels), the most members and the greatest distance of any of
    them, and the fewest devices inside.
    """
    found = []
    outer, below = 1, math.prod(level.size for level in network)  # distinct positions outside, devices of one member
    for level in network:
        below //= level.size
        where = np.sort(groups // below, axis=1)
        positions = int((np.diff(where, axis=1) > 0).sum(axis=1).max() + 1)
        members = -(-positions // outer)
        if members > 1:
            steps = np.diff(np.sort(where % level.size, axis=1), axis=1)
            distances = np.where(steps > 0, steps, level.size).min(axis=1)
            stride = int(np.where(distances < level.size, distances, 1).max())
            rows = np.arange(len(where))[:, None] * (where.max() + 1) + where
            found.append(Span(level, members, stride, int(np.unique(rows, return_counts=True)[1].min())))
        outer = positions
    return found


def is_grid(crossed: list[Span]) -> bool:
    """Whether a group fills levels of links between neighbours, without leaving out a device."""
    return all(s.level.links in TORUS and s.stride == 1 for s in crossed)
