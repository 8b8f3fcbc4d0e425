"""Random valid plans, for tests and as candidates to judge a cost model by."""

from __future__ import annotations

import random
from collections.abc import Sequence

from unity_jax import _compat
from unity_jax.pcg.graph import Graph, Tensor
from unity_jax.pcg.layout import Layout, layouts
from unity_jax.pcg.loops import Scan
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.search.assemble import Decisions, is_free, lift, passes_layouts
from unity_jax.search.rule_cache import RuleCache

HELD = 0.1
"""How often a result is held in a layout of its own."""


def sample(graph: Graph, ties: dict[int, int], mesh: MeshAxes, rules: RuleCache, rng: random.Random) -> Decisions:
    """A plan in which every op draws one of its strategies, and every input and loop value one of its layouts.

    **Arguments:** `ties`: graph output index to the graph input it replaces, which fixes its layout.
    """
    decisions = Decisions(keep=rng.random() < 0.5)
    for t in graph.inputs:
        decisions.layouts[t] = rng.choice(storable(t, mesh))
    _draw(graph, mesh, rules, rng, decisions)
    decisions.outputs = tuple(
        decisions.layouts[graph.inputs[ties[i]]] if i in ties else rng.choice(storable(t, mesh))
        for i, t in enumerate(graph.outputs)
    )
    return decisions


def storable(tensor: Tensor, mesh: MeshAxes) -> Sequence[Layout]:
    """The layouts a program input or output may have."""
    if _compat.is_key(tensor.dtype):
        return (Layout.replicated(tensor.rank),)
    return layouts(tensor.shape, mesh, even=True)


def internal(tensor: Tensor, mesh: MeshAxes) -> Sequence[Layout]:
    """The layouts a value may have inside a loop."""
    if _compat.is_key(tensor.dtype):
        return (Layout.replicated(tensor.rank),)
    return layouts(tensor.shape, mesh, partial=_compat.is_float(tensor.dtype))


def _draw(graph: Graph, mesh: MeshAxes, rules: RuleCache, rng: random.Random, decisions: Decisions) -> None:
    for op in graph.ops:
        if is_free(op) or passes_layouts(op):
            continue
        if not op.bodies:
            decisions.strategies[op] = rng.choice(rules.strategies(op, mesh))
            held = [t for t in op.outputs if rng.random() < HELD]
            decisions.layouts.update((t, rng.choice(internal(t, mesh))) for t in held)
            continue
        for body in op.bodies:
            for t in body.inputs:
                decisions.layouts[t] = rng.choice(internal(t, mesh))
            _draw(body, mesh, rules, rng, decisions)
        if op.name == "scan":
            stacked = Scan.of(op.params).stacked
            for t, inner in zip(op.outputs[stacked], op.bodies[0].outputs[stacked], strict=True):
                decisions.layouts[t] = lift(rng.choice(internal(inner, mesh)))
        if op.name == "cond":
            decisions.layouts.update((t, rng.choice(internal(t, mesh))) for t in op.outputs)
