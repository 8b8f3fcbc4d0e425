"""Mesh axes as planning sees them: ordered names with sizes, and where they lie on the network; no devices."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MeshAxes:
    """The axes of a device mesh, outermost (slowest varying device index) first.

    `MeshAxes(("data", "model"), (2, 4))` prints as `data=2, model=4`. Position `i` of the mesh (row-major) lies at
    position `order[i]` of the machine's network; an empty order is the network's own.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    order: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.names) != len(self.sizes) or len(set(self.names)) != len(self.names):
            raise ValueError(f"mesh axes need one size per distinct name, got {self.names} and {self.sizes}")
        if self.order and sorted(self.order) != list(range(self.num_devices)):
            raise ValueError(f"the order of mesh ({self}) must name each of {self.num_devices} positions once")
        if self.order == tuple(range(len(self.order))):
            object.__setattr__(self, "order", ())

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:  # a mesh is part of the key of most caches
        return hash((self.names, self.sizes, self.order))

    @staticmethod
    def of(mesh: Any, order: Iterable[int] = ()) -> MeshAxes:
        """The axes of a `Mesh` or `AbstractMesh`, whose devices lie at these positions of the network."""
        return MeshAxes(tuple(mesh.axis_names), tuple(mesh.shape[a] for a in mesh.axis_names), tuple(order))

    def __getitem__(self, name: str) -> int:
        return self.sizes[self.names.index(name)]

    def __str__(self) -> str:
        return ", ".join(f"{n}={s}" for n, s in zip(self.names, self.sizes, strict=True))

    @property
    def num_devices(self) -> int:
        """The product of the sizes."""
        return math.prod(self.sizes)

    def size(self, axes: Iterable[str]) -> int:
        """The number of shards made by splitting over `axes` together."""
        return math.prod([self[a] for a in axes])

    def ordered(self, axes: Iterable[str]) -> tuple[str, ...]:
        """`axes` from major to minor, the one order in which a dimension is ever split."""
        wanted = set(axes)
        return tuple(n for n in self.names if n in wanted)


WHOLE = MeshAxes((), ())
"""The mesh on which nothing is split."""
