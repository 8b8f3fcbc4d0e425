"""From a planned graph to an ordinary jitted function, and to the program that a compiler gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from unity_jax import _compat
from unity_jax.lower.interpreter import run
from unity_jax.pcg.graph import Graph
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.program import Program


def spmd(graph: Graph, mesh: Any) -> Callable[[Sequence[Any]], list[Any]]:
    """The planned graph as a function of global arrays: one `shard_map` over all axes of `mesh`."""
    axes = MeshAxes.of(mesh)
    in_specs = tuple(t.layout.spec() for t in graph.inputs)  # type: ignore[union-attr]
    out_specs = tuple(t.layout.spec() for t in graph.outputs)  # type: ignore[union-attr]

    platform = jax.default_backend() if isinstance(mesh, jax.sharding.AbstractMesh) else mesh.devices.flat[0].platform
    until = True if platform == "cpu" else None

    def body(*local: Any) -> tuple[Any, ...]:
        outs = run(graph, axes, local, until)
        # A result that is a literal has no type of its own yet.
        return tuple(
            o if _compat.is_key(t.dtype) else jax.lax.convert_element_type(o, t.dtype)
            for o, t in zip(outs, graph.outputs, strict=True)
        )

    mapped = _compat.shard_map(body, mesh, in_specs, out_specs)
    return lambda flat: list(mapped(*flat))


def planned(program: Program, graph: Graph, mesh: Any) -> Callable[..., Any]:
    """The planned graph of a program as a function of its arguments that are not static; captured arrays, if there are
    any, are a tuple before them."""
    step = spmd(graph, _compat.auto_mesh(mesh))
    first = int(bool(program.constants))

    def planned(*args: Any, **kwargs: Any) -> Any:
        constants = args[0] if first else ()
        flat = step([*constants, *jax.tree.leaves((args[first:], kwargs))])
        return jax.tree_util.tree_unflatten(program.out_tree, flat)

    planned.__name__ = planned.__qualname__ = program.name
    return planned


def jitted(program: Program, graph: Graph, mesh: Mesh) -> Any:
    """`planned` under `jax.jit`, with the caller's donation; results are on the caller's mesh, whatever the type of its
    axes."""
    first, constants = int(bool(program.constants)), len(program.constants)
    outs = [NamedSharding(mesh, t.layout.spec()) for t in graph.outputs]  # type: ignore[union-attr]
    donated = [i in program.donated for i in range(constants, len(graph.inputs))]
    args, kwargs = jax.tree_util.tree_unflatten(program.in_tree, donated)
    return jax.jit(
        planned(program, graph, mesh),
        out_shardings=jax.tree_util.tree_unflatten(program.out_tree, outs),
        donate_argnums=tuple(first + i for i, a in enumerate(args) if any(jax.tree.leaves(a))),
        donate_argnames=tuple(k for k, a in kwargs.items() if any(jax.tree.leaves(a))),
    )


def lower(program: Program, graph: Graph, mesh: Mesh) -> jax.stages.Lowered:
    """The program that runs, for arguments in their planned layouts; `mesh` may be of devices that are not there."""
    structs = [
        jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=NamedSharding(mesh, t.layout.spec()))  # type: ignore[union-attr]
        for t in graph.inputs
    ]
    n = len(program.constants)
    args, kwargs = jax.tree_util.tree_unflatten(program.in_tree, structs[n:])
    if n:
        args = (tuple(structs[:n]), *args)
    with jax.sharding.use_abstract_mesh(_compat.auto_mesh(mesh).abstract_mesh):
        return jitted(program, graph, mesh).lower(*args, **kwargs)
