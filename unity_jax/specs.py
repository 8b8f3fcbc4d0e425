"""From the user's `PartitionSpec`s to layouts, checked: `P(("data", "model"), None)` -> `[data+model,.]`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from unity_jax.errors import PinError
from unity_jax.pcg.layout import Layout


def layout_of(spec: Any, axes: Mapping[str, int], shape: Sequence[int], where: str) -> Layout:
    """The layout that a spec asks for, on a mesh with these axes (in order) and sizes; axes of size 1 do not count.

    **Arguments:** `where`: what the error starts with, the user's line or the name of an argument.
    **Raises:** `PinError`.
    """
    __tracebackhide__ = True
    if not isinstance(spec, PartitionSpec):
        raise PinError(f"{where}: a NamedSharding or PartitionSpec is needed, not {type(spec).__name__}")
    if len(spec) > len(shape):
        raise PinError(f"{where}: {spec} has {len(spec)} entries, the array {list(shape)} has {len(shape)} dimensions")
    if any(e is PartitionSpec.UNCONSTRAINED for e in spec):
        raise PinError(
            f"{where}: {spec} leaves a dimension unconstrained; name every dimension, or drop the constraint"
        )
    if getattr(spec, "unreduced", None):
        raise PinError(f"{where}: {spec} asks for unreduced values, which arrays at a boundary cannot hold")
    asked = Layout.from_spec(spec, len(shape))
    unknown = sorted({a for dim in asked.dims for a in dim if a not in axes})
    if unknown:
        mesh = ", ".join(f"{a}={n}" for a, n in axes.items())
        raise PinError(
            f"{where}: {spec} names mesh axes {unknown}, the mesh has ({mesh}); pass the mesh you mean as mesh="
        )
    named = [a for dim in asked.dims for a in dim]
    twice = sorted({a for a in named if named.count(a) > 1})
    if twice:
        raise PinError(f"{where}: {spec} names mesh axes {twice} twice; an axis splits one dimension, once")
    layout = Layout(tuple(tuple(a for a in dim if axes[a] > 1) for dim in asked.dims))
    order = list(axes)
    for d, dim in enumerate(layout.dims):
        ways = 1
        for a in dim:
            ways *= axes[a]
        if shape[d] % ways:
            raise PinError(
                f"{where}: dimension {d} of {list(shape)} has {shape[d]} elements, which mesh axes {list(dim)} "
                f"({ways} shards) "
                "do not divide; shard another dimension"
            )
        if list(dim) != sorted(dim, key=order.index):
            raise PinError(
                f"{where}: axes {list(dim)} of dimension {d} must be in the order of the mesh, "
                f"{sorted(dim, key=order.index)}; or pass a mesh of the same devices whose axes are in the order that "
                "you want (mesh.devices transposed) as mesh="
            )
    return layout
