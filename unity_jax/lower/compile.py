"""From a planned graph to an ordinary jitted function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from unity_jax import _compat
from unity_jax.lower.interpreter import run
from unity_jax.pcg.graph import Graph
from unity_jax.pcg.mesh import MeshAxes


def spmd(graph: Graph, mesh: Any) -> Callable[[Sequence[Any]], list[Any]]:
    """The planned graph as a function of global arrays: one `shard_map` over all axes of `mesh`."""
    axes = MeshAxes.of(mesh)
    in_specs = tuple(t.layout.spec() for t in graph.inputs)  # type: ignore[union-attr]
    out_specs = tuple(t.layout.spec() for t in graph.outputs)  # type: ignore[union-attr]

    def body(*local: Any) -> tuple[Any, ...]:
        outs = run(graph, axes, local)
        # A result that is a literal has no type of its own yet.
        return tuple(
            o if _compat.is_key(t.dtype) else jax.lax.convert_element_type(o, t.dtype)
            for o, t in zip(outs, graph.outputs, strict=True)
        )

    mapped = _compat.shard_map(body, mesh, in_specs, out_specs)
    return lambda flat: list(mapped(*flat))
