"""Pins: layouts that the caller has fixed, by `in_shardings`, `out_shardings` or `ShapeDtypeStruct.sharding`.

Constraints inside the code are ops of the graph (`ops/constraint.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import NamedSharding, PartitionSpec

from unity_jax import objects
from unity_jax.errors import PinError, UnsupportedError
from unity_jax.ops.constraint import CODE
from unity_jax.ops.rules import rule_of
from unity_jax.pcg.graph import Graph, Tensor
from unity_jax.pcg.layout import Layout
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.program import Program
from unity_jax.search.candidate import Pins
from unity_jax.specs import layout_of

T = TypeVar("T")
Key = tuple[str, tuple[int, ...], str]
"""Path, shape and dtype of a leaf."""
Inherited = Mapping[Key, T]
"""Layouts, and whatever else one plan hands on to another, by path, shape and dtype (`Plan.named`)."""


def resolve(program: Program, mesh: MeshAxes, in_shardings: Any, out_shardings: Any, structs: Sequence[Any]) -> Pins:
    """Every pin of a call, checked.

    **Arguments:** `in_shardings`, `out_shardings`: tree prefixes, of shardings, specs or None (free); `structs`: a
    sharding or None per argument leaf, from `ShapeDtypeStruct`s.
    **Raises:** `PinError` naming the path.
    """
    __tracebackhide__ = True
    inputs: dict[Tensor, Layout] = {}
    for t, sharding in zip(program.leaves, structs, strict=True):
        if sharding is not None:
            inputs[t] = _layout(sharding, t, mesh, f"argument {t.name}")
    for t, sharding in zip(program.leaves, _in_shardings(program, in_shardings), strict=True):
        if sharding is not None:
            layout = _layout(sharding, t, mesh, f"in_shardings of {t.name}")
            if inputs.setdefault(t, layout) != layout:
                raise PinError(
                    f"{t.name} is pinned twice: {inputs[t]} by its ShapeDtypeStruct, {layout} by in_shardings"
                )
    outputs: dict[int, Layout] = {}
    graph = program.graph
    for i, (t, sharding) in enumerate(zip(graph.outputs, _out_shardings(program, out_shardings), strict=True)):
        if sharding is not None:
            outputs[i] = _layout(sharding, t, mesh, f"out_shardings of result {program.out_paths[i]}")
            source = graph.inputs[program.ties[i]] if i in program.ties else None
            if source is not None and inputs.setdefault(source, outputs[i]) != outputs[i]:
                raise PinError(
                    f"result {program.out_paths[i]} replaces argument {source.name}, so they need one layout, but "
                    f"they are pinned "
                    f"to {outputs[i]} and {inputs[source]}"
                )
    _check_code(graph, mesh)
    for op in graph.walk():  # their rules fix these layouts; as pins they also say that the plan is for this mesh only
        if op.name in CODE:
            fixed = rule_of(op).fixed
            assert fixed is not None
            inputs.update(zip(op.outputs, fixed[1], strict=True))
    return Pins(inputs, outputs)


def inherit(pins: Pins, program: Program, layouts: Inherited[Layout]) -> Pins:
    """The pins, and the inherited layouts of the arguments that they leave free."""
    inputs = dict(pins.tensors)
    for t, path, suffix in zip(program.leaves, program.in_paths, program.in_suffixes, strict=True):
        found = find(layouts, path, suffix, t.shape, str(t.dtype))
        if found is not None:
            inputs.setdefault(t, found)
    return Pins(inputs, pins.outputs)


def find(given: Inherited[T], path: str, suffix: str, shape: tuple[int, ...], dtype: str) -> T | None:
    """What a leaf inherits: from the same argument path, or from the same path below another argument."""
    return given.get((path, shape, dtype), given.get((suffix, shape, dtype)) if suffix else None)


def meshes_of(shardings: Any) -> Iterator[Any]:
    """The meshes that shardings in a tree are for."""
    for sharding in jax.tree.leaves(shardings, is_leaf=_is_sharding):
        if isinstance(sharding, NamedSharding):
            yield sharding.mesh


def _check_code(graph: Graph, mesh: MeshAxes) -> None:
    """Constraints and `shard_map`s in the code must be for the mesh of the plan."""
    ours = {n: s for n, s in zip(mesh.names, mesh.sizes, strict=True) if s > 1}
    for op in graph.walk():
        if op.name == "sharding_constraint":
            theirs = op.params["sharding"].mesh.shape
            used = {a for dim in op.params["layout"].dims for a in dim}
            wrong = {a: theirs[a] for a in used if ours.get(a) != theirs[a]}
            if wrong:
                raise PinError(
                    f"{op.source}: the sharding constraint is for mesh axes {wrong}, the plan for the mesh "
                    f"({mesh}); pass the mesh "
                    "of the constraint as mesh="
                )
        elif op.name == "shard_map":
            theirs = {a: n for a, n in op.params["mesh"].shape.items() if n > 1}
            if theirs != ours:
                raise UnsupportedError(
                    f"{op.source}: shard_map over the mesh {theirs}, the plan is for the mesh ({mesh}); pass the "
                    f"mesh of the "
                    "shard_map as mesh="
                )


def _layout(sharding: Any, t: Tensor, mesh: MeshAxes, where: str) -> Layout:
    __tracebackhide__ = True
    axes = dict(zip(mesh.names, mesh.sizes, strict=True))
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):
        return Layout.replicated(t.rank)
    if not isinstance(sharding, NamedSharding):
        return layout_of(sharding, axes, t.shape, where)
    layout = layout_of(sharding.spec, sharding.mesh.shape, t.shape, where)
    wrong = {a: sharding.mesh.shape[a] for dim in layout.dims for a in dim if axes.get(a) != sharding.mesh.shape[a]}
    if wrong:
        raise PinError(f"{where}: {sharding.spec} is for mesh axes {wrong}, the plan for the mesh ({mesh}); pass mesh=")
    return layout_of(sharding.spec, {**dict.fromkeys(sharding.mesh.axis_names, 1), **axes}, t.shape, where)


def _is_sharding(x: Any) -> bool:
    return x is None or isinstance(x, (jax.sharding.Sharding, PartitionSpec))


def _in_shardings(program: Program, given: Any) -> list[Any]:
    if given is None:
        return [None] * program.in_tree.num_leaves
    args, kwargs = jax.tree_util.tree_unflatten(program.in_tree, range(program.in_tree.num_leaves))
    if isinstance(given, list):
        given = tuple(given)
    if not isinstance(given, tuple) or isinstance(given, PartitionSpec):
        given = (given,) * len(args)
    if len(given) != len(args):
        raise PinError(f"in_shardings has {len(given)} entries for {len(args)} positional arguments")
    return _broadcast((given, None), (args, kwargs), "in_shardings", "arguments")


def _out_shardings(program: Program, given: Any) -> list[Any]:
    if given is None:
        return [None] * program.out_tree.num_leaves
    full = jax.tree_util.tree_unflatten(program.out_tree, range(program.out_tree.num_leaves))
    if isinstance(full, objects.Outcome):
        given = objects.Outcome(None, None, given)
    return _broadcast(given, full, "out_shardings", "results")


def _broadcast(prefix: Any, full: Any, name: str, of: str) -> list[Any]:
    """A tree prefix, one entry per leaf of `full`."""
    __tracebackhide__ = True
    try:
        found = jax.tree_util.tree_broadcast(prefix, full, is_leaf=_is_sharding)
        tree: Any = jax.tree.structure(full)
        return tree.flatten_up_to(found)  # a None is a leaf of the prefix, not of `full`
    except ValueError as error:
        raise PinError(f"{name} is not a tree prefix of the {of}: {error}") from None
