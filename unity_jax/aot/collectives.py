"""The collectives a program contains, read from its StableHLO; `aot.sites` reads them from optimized HLO.

    stablehlo_collectives(jax.jit(step).lower(x).as_text(), MeshAxes(("data", "model"), (2, 4)))
    # [Collective(kind='all_gather', axes=('model',), bytes=1024, count=2), ...]

Both readers name a collective by the mesh axes it spans, so a program can be compared with a plan (`count_difference`,
exact) and with what a compiler made of it (`bytes_difference`, blind to combining).

Device numbers in both texts are positions in the mesh, row by row (partition numbers, not device ids), so the order of
the mesh's devices plays no part. A collective counts once per place in the program: a loop body once however often it
runs, every branch of a conditional, and a function once per call. Groups that no set of mesh axes makes get the axes
`("?",)`; groups of one device are no communication and are left out.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from jax.extend.lowering import JaxIrContext, upstream_dialects
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import chlo, sdy, stablehlo

from unity_jax.aot.hlo import element_bytes
from unity_jax.pcg.mesh import MeshAxes


@dataclass(frozen=True, order=True)
class Collective:
    """`count` collectives of one kind over the same mesh axes with the same payload.

    **Fields:** `kind`: `all_gather`, `all_reduce`, `reduce_scatter`, `all_to_all`, `permute` or `broadcast`; `axes` in
    mesh order, without axes of size 1; `bytes` of one of them: the larger of its operands and its results, per device.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    count: int = 1

    def __str__(self) -> str:
        return f"{self.count} x {self.kind} over {_axes_text(self.axes)}, {self.bytes:,} bytes"


UNKNOWN_AXES = ("?",)
KINDS = {
    "all_gather": "all_gather",
    "all_reduce": "all_reduce",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "ragged_all_to_all": "all_to_all",
    "collective_permute": "permute",
    "collective_broadcast": "broadcast",
}
Key = tuple[str, tuple[str, ...], int]
K = TypeVar("K", bound=Hashable)
Groups = np.ndarray | list[list[int]]


# Comparing


def merged(collectives: Iterable[Collective]) -> list[Collective]:
    """Equal collectives as one entry with their total count, sorted."""
    counts: Counter[Key] = Counter()
    for c in collectives:
        counts[c.kind, c.axes, c.bytes] += c.count
    return [Collective(*key, count) for key, count in sorted(counts.items())]


def count_difference(
    left: Iterable[Collective], right: Iterable[Collective], names: tuple[str, str] = ("planned", "lowered")
) -> list[str]:
    """One line for each (kind, axes, bytes) whose counts differ; empty when the two are the same multiset."""
    a, b = ({(c.kind, c.axes, c.bytes): c.count for c in merged(side)} for side in (left, right))
    return [
        f"{kind} over {_axes_text(axes)}, {size:,} bytes: {names[0]} {a.get(key, 0)}, {names[1]} {b.get(key, 0)}"
        for key in sorted(a.keys() | b.keys())
        for kind, axes, size in [key]
        if a.get(key, 0) != b.get(key, 0)
    ]


def bytes_difference(
    left: Iterable[Collective], right: Iterable[Collective], names: tuple[str, str] = ("planned", "compiled")
) -> list[str]:
    """One line for each (kind, axes) whose total bytes differ; combining several into one is no difference."""
    a, b = _totals(left), _totals(right)
    none = (0, 0)
    return [
        f"{key[0]} over {_axes_text(key[1])}: "
        + ", ".join(f"{name} {size:,} bytes in {n}" for name, (size, n) in zip(names, sides, strict=True))
        for key in sorted(a.keys() | b.keys())
        for sides in [(a.get(key, none), b.get(key, none))]
        if sides[0][0] != sides[1][0]
    ]


def _totals(collectives: Iterable[Collective]) -> dict[tuple[str, tuple[str, ...]], tuple[int, int]]:
    totals: dict[tuple[str, tuple[str, ...]], tuple[int, int]] = {}
    for c in collectives:
        size, count = totals.get((c.kind, c.axes), (0, 0))
        totals[c.kind, c.axes] = (size + c.bytes * c.count, count + c.count)
    return totals


def _axes_text(axes: tuple[str, ...]) -> str:
    return "+".join(axes)


# Groups of devices to mesh axes


@functools.lru_cache
def _axes_of_groups(mesh: MeshAxes) -> dict[frozenset[frozenset[int]], tuple[str, ...]]:
    """For every set of mesh axes larger than 1, the groups of devices that differ only along these axes."""
    axes = [a for a, n in zip(mesh.names, mesh.sizes, strict=True) if n > 1]
    subsets = itertools.chain.from_iterable(itertools.combinations(axes, k) for k in range(len(axes) + 1))
    return {_canonical(_mesh_groups(mesh, subset)): subset for subset in subsets}


def _mesh_groups(mesh: MeshAxes, axes: Iterable[str], device_ids: Iterable[int] | None = None) -> np.ndarray:
    """One row per group of devices that differ only along `axes`."""
    devices = np.arange(mesh.num_devices) if device_ids is None else np.array(list(device_ids))
    positions = [mesh.names.index(a) for a in axes]
    rest = [i for i in range(len(mesh.sizes)) if i not in positions]
    return devices.reshape(mesh.sizes).transpose(rest + positions).reshape(-1, math.prod(mesh[a] for a in axes))


def _canonical(groups: Groups) -> frozenset[frozenset[int]]:
    return frozenset(frozenset(int(d) for d in group if d >= 0) for group in groups)


def group_axes(groups: Groups, mesh: MeshAxes) -> tuple[str, ...]:
    groups = groups if len(groups) else [list(range(mesh.num_devices))]  # `{}` means all devices
    return _axes_of_groups(mesh).get(_canonical(groups), UNKNOWN_AXES)


def permute_axes(pairs: Groups, mesh: MeshAxes) -> tuple[str, ...]:
    """The axes along which some device sends to another coordinate."""
    source, target = (np.array(np.unravel_index(side, mesh.sizes)) for side in np.array(pairs).reshape(-1, 2).T)
    return tuple(a for a, moved in zip(mesh.names, (source != target).any(axis=1), strict=True) if moved)


def mesh_axes_groups(axes_and_sizes: list[tuple[str, int]], picked: list[str], device_ids: list[int]) -> np.ndarray:
    """Groups from a program's own mesh, whose axes may be named otherwise than ours.

    A picked axis is a name, or `name:(pre)size` for the part of an axis that has `size` shards after `pre` larger ones
    (https://openxla.org/shardy/sharding_representation, sub-axes).
    """
    names = [n for n, _ in axes_and_sizes]
    sizes = [s for _, s in axes_and_sizes]
    for i, text in enumerate(picked):
        if part := re.fullmatch(r"(.*):\((\d+)\)(\d+)", text):
            at, pre, size = names.index(part[1]), int(part[2]), int(part[3])
            names[at : at + 1] = [f"{part[1]}<{i}", picked[i], f"{part[1]}>{i}"]
            sizes[at : at + 1] = [pre, size, sizes[at] // (pre * size)]
    return _mesh_groups(MeshAxes(tuple(names), tuple(sizes)), picked, device_ids or None)


# StableHLO


def stablehlo_collectives(program: str | ir.Module, mesh: MeshAxes) -> list[Collective]:
    """The collectives of `jax.stages.Lowered.as_text()` or `.compiler_ir("stablehlo")`, merged and sorted.

    JAX 0.10 writes replica groups as numbers, 0.12 as axes of a mesh declared in the module; both are read.
    """
    module = parse_stablehlo(program)
    meshes = declared_meshes(module)
    return counted(places(module, lambda op: collective_key(op, meshes, mesh)))


def places(module: ir.Module, key: Callable[[ir.Operation], K | None]) -> Counter[K]:
    """How many operations of a module have each key, functions counted once per call."""
    functions = _named(module, "func.func")

    @functools.cache
    def of_function(name: str) -> Counter[K]:
        total: Counter[K] = Counter()
        for op in _nested(functions[name]):
            if (found := key(op)) is not None:
                total[found] += 1
            for attribute in ("callee", "decomposition"):
                if attribute in op.attributes:
                    total.update(of_function(ir.FlatSymbolRefAttr(op.attributes[attribute]).value))
        return total

    return of_function("main")


def collective_key(op: ir.Operation, meshes: dict[str, ir.Operation], mesh: MeshAxes) -> Key | None:
    """Kind, axes and bytes of an operation; None if it is no collective. `meshes`: those that the module declares."""
    kind = KINDS.get(op.name.removeprefix("stablehlo."))
    return None if kind is None else (kind, _mlir_axes(op, meshes, mesh), _mlir_bytes(op))


def declared_meshes(module: ir.Module) -> dict[str, ir.Operation]:
    """The meshes that a module declares, by name."""
    return _named(module, "sdy.mesh")


def _named(module: ir.Module, kind: str) -> dict[str, ir.Operation]:
    ops = (op.operation for op in module.body.operations if op.operation.name == kind)
    return {ir.StringAttr(op.attributes["sym_name"]).value: op for op in ops}


def parse_stablehlo(program: str | ir.Module) -> ir.Module:
    """A module from its text; a module as it is."""
    if isinstance(program, ir.Module):
        return program
    context = JaxIrContext()
    context.append_dialect_registry(upstream_dialects)
    context.load_all_available_dialects()
    for dialect in (sdy, stablehlo, chlo):
        dialect.register_dialect(context)
    with context:
        return ir.Module.parse(program)


def _nested(op: ir.Operation) -> Iterator[ir.Operation]:
    for region in op.regions:
        for block in region:
            for inner in block.operations:
                yield inner.operation
                yield from _nested(inner.operation)


def _mlir_axes(op: ir.Operation, meshes: dict[str, ir.Operation], mesh: MeshAxes) -> tuple[str, ...]:
    if "source_target_pairs" in op.attributes:
        return permute_axes(_dense(op.attributes["source_target_pairs"]), mesh)
    groups = op.attributes["replica_groups"]
    if isinstance(groups, ir.DenseIntElementsAttr):
        return group_axes(_dense(groups), mesh)
    axes: Any = stablehlo.ReplicaGroupMeshAxesAttr(groups)
    declared: Any = sdy.MeshAttr(meshes[ir.FlatSymbolRefAttr(axes.mesh).value].attributes["mesh"])
    sizes = [(a.name, a.size) for a in (sdy.MeshAxisAttr(a) for a in declared.axes)]
    return group_axes(mesh_axes_groups(sizes, [_axis_text(a) for a in axes.axes], list(declared.device_ids)), mesh)


def _axis_text(attribute: ir.Attribute) -> str:
    axis: Any = stablehlo.AxisRefAttr(attribute)
    part = axis.sub_axis_info
    return axis.name if part is None else f"{axis.name}:({part.pre_size}){part.size}"


def _dense(attribute: ir.Attribute) -> np.ndarray:
    values: Any = ir.DenseIntElementsAttr(attribute)
    return np.array(list(values)).reshape(ir.RankedTensorType(values.type).shape)


def _mlir_bytes(op: ir.Operation) -> int:
    return max(sum(tensor_bytes(value.type) for value in side) for side in (op.operands, op.results))


def tensor_bytes(type_: ir.Type) -> int:
    """Of a ranked tensor."""
    tensor = ir.RankedTensorType(type_)
    return element_bytes(str(tensor.element_type), tensor.shape)


def counted(counts: Counter[Key]) -> list[Collective]:
    """Collectives from their counts, without those of one device."""
    return [Collective(*key, count) for key, count in sorted(counts.items()) if key[1]]
