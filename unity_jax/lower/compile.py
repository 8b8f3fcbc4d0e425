"""From a planned graph to an ordinary jitted function, and to the program that a compiler gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from unity_jax import _compat
from unity_jax.lower.host import sharding
from unity_jax.lower.interpreter import run
from unity_jax.lower.target import target
from unity_jax.pcg.graph import Graph, Tensor
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.program import Program
from unity_jax.rewrite.packing import Group, apart, gathered, others, spread


def spmd(graph: Graph, mesh: Any) -> Callable[[Sequence[Any]], list[Any]]:
    """The planned graph as a function of global arrays: one `shard_map` over all axes of `mesh`."""
    axes = MeshAxes.of(mesh)
    in_specs = tuple(t.layout.spec() for t in graph.inputs)  # type: ignore[union-attr]
    out_specs = tuple(t.layout.spec() for t in graph.outputs)  # type: ignore[union-attr]

    platform = jax.default_backend() if isinstance(mesh, jax.sharding.AbstractMesh) else mesh.devices.flat[0].platform
    needs = target(platform)
    graph, until = needs.suited(graph), True if needs.ordered else None

    def body(*local: Any) -> tuple[Any, ...]:
        outs = run(graph, axes, local, until)
        # A result that is a literal has no type of its own yet.
        return tuple(
            o if _compat.is_key(t.dtype) else jax.lax.convert_element_type(o, t.dtype)
            for o, t in zip(outs, graph.outputs, strict=True)
        )

    mapped = _compat.shard_map(body, mesh, in_specs, out_specs)
    return lambda flat: list(mapped(*flat))


def planned(
    program: Program, graph: Graph, mesh: Any, unpacked: bool = False, weak: Sequence[bool] = ()
) -> Callable[..., Any]:
    """The planned graph of a program as a function of its arguments that are not static; captured arrays, if there are
    any, are a tuple before them. Packed state is given and returned as it is held, or `unpacked`, as the caller has
    it; the types of results are `weak` where `Program.weak` says so."""
    step, first = spmd(graph, _compat.auto_mesh(mesh)), int(bool(program.constants))
    caller, entering, leaving = _caller(program, unpacked)
    alone = others(len(weak), program.leaving) if caller is program else range(len(weak))  # held first, by themselves
    given_way = {i for i, result in enumerate(alone) if weak[result]}

    def joined(n: int, arrays: Sequence[Any]) -> Any:
        return entering[n][0].joined(arrays)

    def part(n: int, k: int, whole: Any) -> Any:
        packing, places = leaving[n]
        return packing.part(whole, k, caller.graph.outputs[places[k]].shape)

    def planned(*args: Any, **kwargs: Any) -> Any:
        constants = args[0] if first else ()
        flat = step(gathered([*constants, *jax.tree.leaves((args[first:], kwargs))], entering, joined))
        found = spread(flat, leaving, part)
        found = [_compat.weakened(x) if i in given_way else x for i, x in enumerate(found)]
        return jax.tree_util.tree_unflatten(caller.out_tree, found)

    planned.__name__ = planned.__qualname__ = program.name
    return planned


def jitted(program: Program, graph: Graph, mesh: Mesh, unpacked: bool = False, weak: Sequence[bool] = ()) -> Any:
    """`planned` under `jax.jit`, with the caller's donation; results are on the caller's mesh, whatever the type of its
    axes."""
    caller, _, outs = _boundary(program, graph, mesh, unpacked)
    first, constants = int(bool(caller.constants)), len(caller.constants)
    donated = [i in caller.donated for i in range(constants, len(caller.graph.inputs))]
    args, kwargs = jax.tree_util.tree_unflatten(caller.in_tree, donated)
    return jax.jit(
        planned(program, graph, mesh, unpacked, weak),
        out_shardings=jax.tree_util.tree_unflatten(caller.out_tree, outs),
        donate_argnums=tuple(first + i for i, a in enumerate(args) if any(jax.tree.leaves(a))),
        donate_argnames=tuple(k for k, a in kwargs.items() if any(jax.tree.leaves(a))),
    )


def lower(
    program: Program, graph: Graph, mesh: Mesh, unpacked: bool = False, weak: Sequence[bool] = ()
) -> jax.stages.Lowered:
    """The program that runs, for arguments in their planned layouts; `mesh` may be of devices that are not there."""
    args, kwargs = arguments(program, graph, mesh, unpacked)
    with jax.sharding.use_abstract_mesh(_compat.auto_mesh(mesh).abstract_mesh):
        return jitted(program, graph, mesh, unpacked, weak).lower(*args, **kwargs)


def arguments(
    program: Program, graph: Graph, mesh: Mesh, unpacked: bool = False
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The shapes of a program's arguments, in their planned layouts."""
    caller, shardings, _ = _boundary(program, graph, mesh, unpacked)
    structs = [
        jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=s) for t, s in zip(caller.graph.inputs, shardings, strict=True)
    ]
    n = len(caller.constants)
    args, kwargs = jax.tree_util.tree_unflatten(caller.in_tree, structs[n:])
    if n:
        args = (tuple(structs[:n]), *args)
    return args, kwargs


def _caller(program: Program, unpacked: bool) -> tuple[Program, list[Group], list[Group]]:
    """Whose arguments and results cross the boundary, and what is packed of them behind it."""
    if unpacked and program.unpacked is not None:
        return program.unpacked, program.entering, program.leaving
    return program, [], []


def _boundary(
    program: Program, graph: Graph, mesh: Mesh, unpacked: bool
) -> tuple[Program, list[NamedSharding], list[NamedSharding]]:
    """Whose arguments and results cross the boundary, and how they lie."""
    caller, entering, leaving = _caller(program, unpacked)

    def shardings(planned: Sequence[Tensor], groups: list[Group], given: Sequence[Tensor]) -> list[NamedSharding]:
        layouts = [t.layout for t in planned if t.layout is not None]
        found = apart(layouts, groups, [t.shape for t in given], MeshAxes.of(mesh))
        hosted = [False] * len(found) if groups else [t.on_host for t in planned]
        return [sharding(mesh, layout, on_host) for layout, on_host in zip(found, hosted, strict=True)]

    ins = shardings(graph.inputs, entering, caller.graph.inputs)
    return caller, ins, shardings(graph.outputs, leaving, caller.graph.outputs)
