"""Layouts: where a tensor lives along each mesh axis (sharded, replicated or partial).

>>> print(Layout((("data",), ()), (("model", "sum"),)).typeof((8, 64), "float32"))
f32[8@data,64]{sum:model}
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import numpy as np
from jax.sharding import PartitionSpec

from unity_jax.pcg.mesh import MeshAxes


@dataclass(frozen=True)
class Layout:
    """The state of a tensor along every mesh axis.

    A mesh axis that appears in `dims[d]` shards dimension `d` (axes of one dimension run major to minor, in mesh
    order); one that appears in `partial` holds terms of an unfinished reduction (`"sum"`, `"max"` or `"min"`); every
    other axis holds equal copies. A dimension of `n` elements split `k` ways has `ceil(n / k)` elements on each device;
    where `k` does not divide `n`, the elements beyond `n` are padding of unspecified value.
    """

    dims: tuple[tuple[str, ...], ...]
    partial: tuple[tuple[str, str], ...] = ()

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.dims, self.partial))

    def __hash__(self) -> int:
        return self._hash  # layouts are keys everywhere

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Layout) and self.dims == other.dims and self.partial == other.partial
        )

    @functools.cached_property
    def axis_dim(self) -> dict[str, int]:
        """The dimension that each sharding axis splits."""
        return {a: d for d, axes in enumerate(self.dims) for a in axes}

    @property
    def partial_axes(self) -> tuple[str, ...]:
        """The mesh axes that hold terms of an unfinished reduction."""
        return tuple(a for a, _ in self.partial)

    @property
    def is_replicated(self) -> bool:
        """Whether every device holds the whole tensor."""
        return not self.partial and not any(self.dims)

    def local_shape(self, shape: tuple[int, ...], mesh: MeshAxes) -> tuple[int, ...]:
        """The per-device shape, padding included."""
        return tuple([-(-n // mesh.size(axes)) if axes else n for n, axes in zip(shape, self.dims, strict=True)])

    def divides(self, shape: tuple[int, ...], mesh: MeshAxes) -> bool:
        """Whether every sharded dimension splits evenly, as arrays at a jit boundary must."""
        return all(n % mesh.size(axes) == 0 for n, axes in zip(shape, self.dims, strict=True))

    def spec(self) -> PartitionSpec:
        """The equal `PartitionSpec`; a partial layout has none."""
        if self.partial:
            raise ValueError(f"a partial layout has no PartitionSpec: {self}")
        entries: list[str | tuple[str, ...] | None] = [a[0] if len(a) == 1 else (a or None) for a in self.dims]
        while entries and entries[-1] is None:
            entries.pop()
        return PartitionSpec(*entries)

    @staticmethod
    def from_spec(spec: PartitionSpec, rank: int) -> Layout:
        """The layout of a rank-`rank` array under `spec`."""
        entries = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in spec]
        return Layout(tuple(entries) + ((),) * (rank - len(entries)))

    @staticmethod
    def replicated(rank: int) -> Layout:
        """Every device holds the whole tensor."""
        return Layout(((),) * rank)

    def typeof(self, shape: tuple[int, ...], dtype: object) -> str:
        """`jax.typeof` notation: `f32[8@data,64@model]`, with partial axes as `{sum:model}`."""
        dims = []
        for n, axes in zip(shape, self.dims, strict=True):
            where = f"@{axes[0]}" if len(axes) == 1 else f"@({','.join(axes)})" if axes else ""
            dims.append(f"{n}{where}")
        return f"{short_dtype(dtype)}[{','.join(dims)}]{self._partial_text()}"

    def _partial_text(self) -> str:
        reductions = dict.fromkeys(r for _, r in self.partial)
        return "".join(f"{{{r}:{','.join(a for a, q in self.partial if q == r)}}}" for r in reductions)

    def __str__(self) -> str:
        return "[" + ",".join("+".join(a) or "." for a in self.dims) + "]" + self._partial_text()


interned = functools.cache(Layout)
"""`Layout`, equal ones as one object: those of shards are keys of many tables."""


@functools.lru_cache(maxsize=4096)
def layouts(shape: tuple[int, ...], mesh: MeshAxes, *, even: bool = False, partial: bool = False) -> tuple[Layout, ...]:
    """Every layout of a tensor, the replicated one first.

    **Arguments:** `even`: only splits that divide (what can be stored); `partial`: also partial sums.
    """
    found = []
    choices = [-1, *(d for d, n in enumerate(shape) if n > 1 and 0 not in shape), *([len(shape)] if partial else [])]
    for where in itertools.product(*(choices if size > 1 else [-1] for size in mesh.sizes)):
        placed = list(zip(mesh.names, where, strict=True))
        dims = tuple(tuple(a for a, d in placed if d == i) for i in range(len(shape)))
        ways = [mesh.size(axes) for axes in dims]
        if all(k <= max(n, 1) and (n % k == 0 or not even) for n, k in zip(shape, ways, strict=True)):
            found.append(Layout(dims, tuple((a, "sum") for a, d in placed if d == len(shape))))
    return tuple(found)


@functools.lru_cache(maxsize=256)
def short_dtype(dtype: object) -> str:
    """`float32` -> `f32`, `bfloat16` -> `bf16`; other names stay as they are."""
    name = str(np.dtype(dtype)) if isinstance(dtype, type) else str(dtype)
    for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c")):
        if name.startswith(long):
            return short + name[len(long) :]
    return name
