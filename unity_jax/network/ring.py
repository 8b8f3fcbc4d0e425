"""Rings: the order in which the members of a group pass shards on, and what one pass takes.

    >>> ring_of(Machine.preset("v5e:2x4"), MeshAxes(("x",), (8,)), ("x",))  # once around the grid
    Ring(members=(0, 1, 2, 3, 7, 6, 5, 4), ways=2)

Device `members[p]` is at position `p`. An all-gather or a reduce-scatter that is decomposed takes `n - 1` such passes
(Wang et al., Overlap communication with dependent computation via decomposition, ASPLOS 2023,
https://doi.org/10.1145/3567955.3567959).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from unity_jax.machine.machine import Machine
from unity_jax.machine.network import Matrix
from unity_jax.network.communication import groups_of
from unity_jax.network.spans import Span, is_grid, spans
from unity_jax.pcg.mesh import MeshAxes


@dataclass(frozen=True)
class Ring:
    """`members`: the members of a group (by their row-major position in its mesh axes) in the order of the ring;
    `ways`: in how many directions it carries shards at once without sharing links."""

    members: tuple[int, ...]
    ways: int

    @functools.cached_property
    def position(self) -> tuple[int, ...]:
        """Of each member."""
        return tuple(int(p) for p in np.argsort(self.members))

    def ahead(self, distance: int) -> tuple[int, ...]:
        """For each member, the member so many positions ahead of it."""
        n = len(self.members)
        return tuple(self.members[(p + distance) % n] for p in self.position)


@functools.lru_cache(maxsize=4096)
def ring_of(machine: Machine, mesh: MeshAxes, axes: tuple[str, ...]) -> Ring:
    """The ring of the groups over these axes.

    On levels: in the order of the network, on a grid once around it, so that every pass goes one hop. Both directions
    are free where such a ring has links of its own; a line carries one direction on its way back, and through a switch
    one direction already takes all of a device's port.
    """
    groups = groups_of(machine, mesh, axes)
    n = groups.shape[1]
    orders = np.argsort(groups, axis=1)
    if isinstance(machine.network, Matrix) or (orders != orders[0]).any():
        return Ring(tuple(range(n)), 1)
    order = tuple(map(int, orders[0]))
    crossed = spans(machine.network, groups)
    if len(crossed) == 1:
        return Ring(order, 2 if n > 2 and _wraps(crossed[0]) else 1)
    if len(crossed) == 2 and is_grid(crossed) and n % 2 == 0 and n == crossed[0].members * crossed[1].members:
        return Ring(tuple(order[i] for i in _around(crossed[0].members, crossed[1].members)), 2)
    return Ring(order, 1)


def _wraps(span: Span) -> bool:
    return span.level.links == "ring" and span.members * span.stride == span.level.size


def _around(rows: int, columns: int) -> list[int]:
    """A closed way through all of a grid with an even side, from neighbour to neighbour."""
    if rows % 2:
        return [columns * r + c for c, r in (divmod(i, rows) for i in _around(columns, rows))]
    inner = list(range(1, columns))
    forth = [r * columns + c for r in range(rows) for c in (reversed(inner) if r % 2 else inner)]
    return [0, *forth, *(r * columns for r in range(rows - 1, 0, -1))]
