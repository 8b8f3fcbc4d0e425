"""Task mappings: which tasks each worker does, and in which order (Hidet, Ding et al., ASPLOS 2023, section 4.1).

    mapping = spatial(4, 1) * repeat(1, 8)      # four workers, each of which does a row of eight tasks
    mapping.shape, mapping.workers              # (4, 8), 4
    mapping(2)                                  # [(2, 0), (2, 1), ..., (2, 7)]

A mapping gives each of its workers a list of tasks of a grid. `spatial` gives each worker one task, `repeat` all tasks
to one worker. In a composition the tasks of the outer mapping are grids of the inner one: shapes and numbers of workers
multiply, worker `w` does the tasks `t * inner.shape + s` for each `t` of the outer worker `w // inner.workers` and each
`s` of the inner worker `w % inner.workers`. It is associative, and whatever is composed, every task is done once.

Kernels are cut by them: workers are the programs of a Pallas grid (`grid`, `first`), what a worker repeats are loops in
its program. How the threads of a block share a tile is left to Mosaic and Triton.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

Task = tuple[Any, ...]


class Part(NamedTuple):
    """A mapping that is not composed. **Fields:** `order`: dimensions of the grid, the slowest first."""

    shape: tuple[int, ...]
    order: tuple[int, ...]
    is_spatial: bool

    def tasks(self) -> Iterator[Task]:
        """All tasks, in order."""
        for at in itertools.product(*(range(self.shape[d]) for d in self.order)):
            yield tuple(at[self.order.index(d)] for d in range(len(self.shape)))


class Axis(NamedTuple):
    """One dimension of a part: the dimension of the grid that it is of, how many there are, and how many tasks of that
    dimension one stands for."""

    dim: int
    size: int
    stride: int


@dataclass(frozen=True)
class TaskMapping:
    """See the module. **Fields:** `parts`: what is composed, the outermost first."""

    parts: tuple[Part, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The grid of tasks."""
        return tuple(math.prod(sizes) for sizes in zip(*(part.shape for part in self.parts), strict=True))

    @property
    def workers(self) -> int:
        """How many workers there are."""
        return math.prod(axis.size for axis in self._axes(True))

    def __mul__(self, inner: TaskMapping) -> TaskMapping:
        if len(self.shape) != len(inner.shape):
            raise ValueError(f"{self} has {len(self.shape)} dimensions, {inner} has {len(inner.shape)}")
        return TaskMapping((*self.parts, *inner.parts))

    def __call__(self, worker: int) -> list[Task]:
        """The tasks of a worker, in the order in which it does them."""
        if not 0 <= worker < self.workers:
            raise ValueError(f"worker {worker} of {self.workers}")
        found: list[Task] = [(0,) * len(self.shape)]
        left = self.workers
        for part in self.parts:
            every = list(part.tasks())
            if part.is_spatial:
                left //= len(every)
                every = [every[worker // left % len(every)]]
            found = [
                tuple(a * n + b for a, n, b in zip(outer, part.shape, inner, strict=True))
                for outer in found
                for inner in every
            ]
        return found

    def __str__(self) -> str:
        return " * ".join(
            f"{'spatial' if part.is_spatial else 'repeat'}({', '.join(map(str, part.shape))})" for part in self.parts
        )

    def _axes(self, spatial: bool) -> list[Axis]:
        """The dimensions of parts of a kind, the slowest first."""
        found = []
        for i, part in enumerate(self.parts):
            if part.is_spatial == spatial:
                inner = [math.prod(p.shape[d] for p in self.parts[i + 1 :]) for d in range(len(part.shape))]
                found += [Axis(d, part.shape[d], inner[d]) for d in part.order]
        return found

    @property
    def grid(self) -> tuple[int, ...]:
        """The grid of programs: an axis for each dimension that workers share, the last one the fastest."""
        return tuple(axis.size for axis in self._axes(True) if axis.size > 1) or (1,)

    @property
    def loops(self) -> tuple[Axis, ...]:
        """What a worker repeats, the outermost first."""
        return tuple(axis for axis in self._axes(False) if axis.size > 1)

    def first(self, program: Sequence[Any]) -> Task:
        """The first task of the worker that is this program of the grid; numbers may be traced."""
        ids, found = iter(program), [0] * len(self.shape)
        for axis in self._axes(True):
            if axis.size > 1:
                found[axis.dim] += next(ids) * axis.stride
        return tuple(found)


def spatial(*shape: int, order: Sequence[int] | None = None) -> TaskMapping:
    """A worker for each task of a grid. **Arguments:** `order`: of dimensions, the slowest first, by default as they
    come."""
    return TaskMapping((_part(shape, order, True),))


def repeat(*shape: int, order: Sequence[int] | None = None) -> TaskMapping:
    """One worker for all tasks of a grid, `order` as of `spatial`."""
    return TaskMapping((_part(shape, order, False),))


def _part(shape: tuple[int, ...], order: Sequence[int] | None, is_spatial: bool) -> Part:
    order = tuple(range(len(shape)) if order is None else order)
    if sorted(order) != list(range(len(shape))) or any(n < 1 for n in shape):
        raise ValueError(f"a grid of {shape} in the order {order}: sizes from 1, and each dimension once")
    return Part(shape, order, is_spatial)


def auto_map(*shape: int, workers: int) -> TaskMapping:
    """A grid shared out among so many workers, the fastest dimensions first: neighbours do neighbouring tasks.

    Raises `ValueError` where the dimensions do not have the factors of `workers`.

    **Example:** `auto_map(8, 96, workers=64)` is `repeat(4, 3) * spatial(2, 32)`.
    """
    left, shared = workers, [1] * len(shape)
    for d in reversed(range(len(shape))):
        shared[d] = math.gcd(left, shape[d])
        left //= shared[d]
    if left > 1:
        raise ValueError(f"a grid of {shape} has no {workers} equal parts")
    return repeat(*(n // k for n, k in zip(shape, shared, strict=True))) * spatial(*shared)
