"""Pins: layouts that the caller has fixed, from `in_shardings`, `ShapeDtypeStruct.sharding` and constraints in the code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from unity_jax.errors import PinError
from unity_jax.pcg.graph import Graph, Op, Tensor, format_tensor
from unity_jax.pcg.layout import Layout
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.program import Program
from unity_jax.search.planner import Pins

CONSTRAINTS = ("sharding_constraint", "reshard", "mesh_cast")


def is_sharding(x: Any) -> bool:
    return isinstance(x, (jax.sharding.Sharding, PartitionSpec)) or x is None


def resolve(
    program: Program,
    mesh: MeshAxes,
    in_shardings: Any = None,
    out_shardings: Any = None,
    leaves: Sequence[Any] = (),
    inherited: Mapping[Any, Layout] | None = None,
) -> Pins:
    """Every pin of a call, checked.

    **Arguments:** `in_shardings`: a tree prefix of the positional arguments, of shardings, specs or None (free); `leaves`: the argument
    leaves, whose `ShapeDtypeStruct.sharding` pins them; `inherited`: layouts by (suffix, shape, dtype), used where they still
    divide.
    **Raises:** `PinError` naming the path.
    """
    graph = program.graph
    inputs, first = graph.inputs, len(program.constants)
    pins: dict[Tensor, Layout] = {}
    for i, t in enumerate(inputs[first:]):
        key = (program.in_suffixes[i], t.shape, str(t.dtype))
        if inherited and key in inherited and program.in_suffixes[i]:
            pins[t] = inherited[key]
    for t, leaf, path in zip(inputs[first:], leaves, program.in_paths, strict=False):
        if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is not None:
            pins[t] = pin_layout(leaf.sharding, t, mesh, f"argument {path}")
    if in_shardings is not None:
        given = _broadcast(in_shardings, program.in_tree, "in_shardings")
        for t, sharding, path in zip(inputs[first:], given, program.in_paths, strict=True):
            if sharding is not None:
                layout = pin_layout(sharding, t, mesh, f"in_shardings of {path}")
                if t in pins and pins[t] != layout and not (inherited and pins[t] in inherited.values()):
                    raise PinError(f"{path} is pinned twice: {pins[t]} by its ShapeDtypeStruct, {layout} by in_shardings")
                pins[t] = layout
    outputs: dict[int, Layout] = {}
    if out_shardings is not None:
        given = _broadcast(out_shardings, program.out_tree, "out_shardings")
        for i, (t, sharding) in enumerate(zip(graph.outputs, given, strict=True)):
            if sharding is None:
                continue
            layout = pin_layout(sharding, t, mesh, f"out_shardings of {program.out_paths[i]}")
            if i in program.ties:
                source = inputs[program.ties[i]]
                if pins.setdefault(source, layout) != layout:
                    raise PinError(
                        f"{program.out_paths[i]} replaces {source.name}, so they need one layout, but they are pinned to "
                        f"{layout} and {pins[source]}"
                    )
            outputs[i] = layout
    for op in _constraints(graph):
        pins[op.outputs[0]] = pin_layout(op.params.get("sharding") or op.params["dst_sharding"], op.outputs[0], mesh, op.source)
    return Pins(pins, outputs)


def pin_layout(sharding: Any, t: Tensor, mesh: MeshAxes, where: str) -> Layout:
    """The layout that a sharding or spec asks for. Raises `PinError`."""
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):
        return Layout.replicated(t.rank)
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    if not isinstance(spec, PartitionSpec):
        raise PinError(f"{where}: a NamedSharding or PartitionSpec is needed, not {type(sharding).__name__}")
    if len(spec) > t.rank:
        raise PinError(f"{where}: {spec} has {len(spec)} entries for {format_tensor(t)} of rank {t.rank}")
    if any(e is PartitionSpec.UNCONSTRAINED for e in spec):
        raise PinError(f"{where}: {spec} leaves a dimension unconstrained; pin every dimension, or drop the pin")
    layout = Layout.from_spec(spec, t.rank)
    if isinstance(sharding, NamedSharding):
        theirs = {a: sharding.mesh.shape[a] for dims in layout.dims for a in dims}
        wrong = {a: n for a, n in theirs.items() if a not in mesh.names or mesh[a] != n}
    else:
        wrong = {a: 0 for dims in layout.dims for a in dims if a not in mesh.names}
    if wrong:
        raise PinError(f"{where}: {spec} uses mesh axes {sorted(wrong)}, but the plan is for the mesh ({mesh}); pass mesh=")
    layout = Layout(tuple(tuple(a for a in axes if mesh[a] > 1) for axes in layout.dims))
    for d, axes in enumerate(layout.dims):
        if t.shape[d] % mesh.size(axes):
            raise PinError(
                f"{where}: dimension {d} of {format_tensor(t)} has {t.shape[d]} elements, which mesh axes {list(axes)} "
                f"({mesh.size(axes)} shards) do not divide; pin another dimension"
            )
        if axes != mesh.ordered(axes):
            raise PinError(f"{where}: axes {list(axes)} of dimension {d} must be in mesh order {list(mesh.ordered(axes))}")
    return layout


def _broadcast(tree: Any, target: Any, name: str) -> list[Any]:
    """A tree prefix, one entry per leaf of `target`."""
    if name == "in_shardings":
        args, kwargs = jax.tree_util.tree_unflatten(target, range(target.num_leaves))
        if isinstance(tree, list):
            tree = tuple(tree)
        tree = (tree if isinstance(tree, tuple) and not isinstance(tree, PartitionSpec) else (tree,) * len(args), jax.tree.map(lambda _: None, kwargs))
        full: Any = (tuple(args), kwargs)
    else:
        full = jax.tree_util.tree_unflatten(target, range(target.num_leaves))
    try:
        return jax.tree_util.tree_leaves(
            jax.tree_util.tree_broadcast(tree, full, is_leaf=is_sharding), is_leaf=is_sharding
        )
    except ValueError as error:
        raise PinError(f"{name} is no tree prefix of the {'arguments' if name == 'in_shardings' else 'results'}: {error}") from None


def _constraints(graph: Graph) -> Iterator[Op]:
    return (op for op in graph.walk() if op.name in CONSTRAINTS)


def constraint_mesh(graph: Graph) -> Any | None:
    """The mesh of the first sharding constraint in the code, which then is the mesh of the plan."""
    for op in _constraints(graph):
        sharding = op.params.get("sharding") or op.params.get("dst_sharding")
        mesh = getattr(sharding, "mesh", None)
        if mesh is not None and not mesh.empty:
            return mesh
    return None


