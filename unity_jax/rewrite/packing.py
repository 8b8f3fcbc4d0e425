"""Some arrays held as one: how they lie in it, on one device and on many.

    q f32[8@x,4,16], k f32[8@x,2,16], v f32[8@x,2,16]    ->    f32[8@x,8,16], joined along the second dimension

In the layouts used here each device holds of the whole what it holds of the parts, so that joining and cutting never
communicate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import jax
from jax import lax

from unity_jax.ops.shape import reshape_factors
from unity_jax.pcg.layout import Layout
from unity_jax.pcg.mesh import MeshAxes

T = TypeVar("T")


@dataclass(frozen=True)
class Packing:
    """How some arrays make one: each in its shape here (its own, or with some dimensions as one), joined along one."""

    shapes: tuple[tuple[int, ...], ...]
    dimension: int

    @property
    def shape(self) -> tuple[int, ...]:
        whole = list(self.shapes[0])
        whole[self.dimension] = sum(s[self.dimension] for s in self.shapes)
        return tuple(whole)

    @property
    def blocks(self) -> tuple[int, ...]:
        """How many times one lies after the other in memory, and how much of each. Equal for packings that differ in
        shape only."""
        return (
            math.prod(self.shapes[0][: self.dimension]),
            *(math.prod(s[self.dimension :]) for s in self.shapes),
        )

    def layout(self, layouts: Sequence[Layout], shapes: Sequence[tuple[int, ...]], mesh: MeshAxes) -> Layout | None:
        """The layout in which each device holds what it holds of the arrays; None where there is none."""
        found = {carried(x, *s, mesh) for x, s in zip(layouts, zip(shapes, self.shapes, strict=True), strict=True)}
        layout = found.pop()
        return None if found or layout is None or mesh.size(layout.dims[self.dimension]) > 1 else layout

    def local(self, layout: Layout, mesh: MeshAxes) -> Packing:
        """What one device holds, for the whole in this layout."""
        return Packing(tuple(layout.local_shape(s, mesh) for s in self.shapes), self.dimension)

    def joined(self, arrays: Sequence[jax.Array]) -> jax.Array:
        return lax.concatenate([lax.reshape(x, s) for x, s in zip(arrays, self.shapes, strict=True)], self.dimension)

    def part(self, array: jax.Array, i: int, shape: tuple[int, ...]) -> jax.Array:
        start = sum(s[self.dimension] for s in self.shapes[:i])
        found = lax.slice_in_dim(array, start, start + self.shapes[i][self.dimension], axis=self.dimension)
        return lax.reshape(found, shape)


class Packed(NamedTuple):
    """Graph inputs by position, as one, and the results that replace them (none if the caller keeps them)."""

    packing: Packing
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


Group = tuple[Packing, tuple[int, ...]]
"""Arrays by position, as one."""


def others(count: int, groups: Sequence[Group]) -> list[int]:
    """The positions, of `count`, that are in no group."""
    gone = {i for _, places in groups for i in places}
    return [i for i in range(count) if i not in gone]


def gathered(items: Sequence[T], groups: Sequence[Group], join: Callable[[int, list[T]], T]) -> list[T]:
    """Items in order without those of the groups, then each group as one: `join(its number, its items)`."""
    kept = [items[i] for i in others(len(items), groups)]
    return [*kept, *(join(n, [items[i] for i in places]) for n, (_, places) in enumerate(groups))]


def spread(items: Sequence[T], groups: Sequence[Group], part: Callable[[int, int, T], T]) -> list[T]:
    """The inverse of `gathered`: `part(number of a group, place in it, what it is as one)`."""
    kept = len(items) - len(groups)
    found = {i: part(n, k, items[kept + n]) for n, (_, places) in enumerate(groups) for k, i in enumerate(places)}
    rest = iter(items)
    return [found[i] if i in found else next(rest) for i in range(kept + len(found))]


def apart(
    layouts: Sequence[Layout], groups: Sequence[Group], shapes: Sequence[tuple[int, ...]], mesh: MeshAxes
) -> list[Layout]:
    """The layouts of arrays of these shapes, from those of what is `gathered` of them."""

    def part(n: int, k: int, whole: Layout) -> Layout:
        packing, places = groups[n]
        found = carried(whole, packing.shapes[k], shapes[places[k]], mesh)
        assert found is not None
        return found

    return spread(layouts, groups, part)


def carried(layout: Layout, source: tuple[int, ...], target: tuple[int, ...], mesh: MeshAxes) -> Layout | None:
    """The layout of an array reshaped from `source` to `target` in which each device holds its own part, reshaped."""
    if source == target:
        return layout
    if 0 in source:
        return None
    ins, outs, sizes = reshape_factors(source, target)
    first = {factors[0]: d for d, factors in enumerate(outs) if factors}
    dims: list[tuple[str, ...]] = [()] * len(target)
    for axes, factors in zip(layout.dims, ins, strict=True):
        if mesh.size(axes) > 1:
            if factors[0] not in first or sizes[factors[0]] % mesh.size(axes):
                return None
            dims[first[factors[0]]] = axes
    return Layout(tuple(dims))
