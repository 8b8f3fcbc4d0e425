"""Clusters: elementwise ops that share one layout, so that the search decides it once.

An elementwise op joins the cluster of its latest operand of equal shape. Ops that are linear in what flows through them
(sums of gradients, scaling) form clusters of their own, which may carry partial sums; all other ops may not.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

from unity_jax.ops.rules import is_pointwise, linear_sets
from unity_jax.pcg.graph import Graph, Op, Tensor
from unity_jax.search.assemble import is_free


@dataclass(eq=False)
class Cluster:
    """Elementwise ops over one shape, in program order. `linear`: may carry partial sums. `made`: what they compute."""

    shape: tuple[int, ...]
    linear: bool
    backward: bool
    ops: list[Op] = field(default_factory=list)

    @functools.cached_property
    def made(self) -> frozenset[Tensor]:
        return frozenset(t for op in self.ops for t in op.outputs)


def linear_set(op: Op, uniform: set[Tensor]) -> int | None:
    """The index in `rule.linear` of the set of operands that vary over the shape, zeros aside."""
    shape = op.outputs[0].shape
    full = {i for i, t in enumerate(op.inputs) if t.shape == shape and t not in uniform and t.literal is None}
    for index, operands in enumerate(linear_sets(op)):
        if full and full <= operands and all(_is_zero(op.inputs[i]) for i in operands - full):
            return index
    return None


def _is_zero(t: Tensor) -> bool:
    return t.literal is not None and not t.literal.any()


def clusters(graph: Graph, uniform: set[Tensor]) -> dict[Op, Cluster]:
    """The cluster of every elementwise op of one graph (its sub-graphs have their own).

    **Arguments:** `uniform`: tensors that hold one value everywhere (broadcast scalars).
    """
    found: dict[Op, Cluster] = {}
    home: dict[Tensor, tuple[int, Cluster]] = {}
    for i, op in enumerate(graph.ops):
        if is_free(op) or op.bodies or not is_pointwise(op):
            continue
        shape = op.outputs[0].shape
        linear = linear_set(op, uniform) is not None
        near = [home[t] for t in op.inputs if t in home and t.shape == shape]
        near = [(j, c) for j, c in near if c.backward == op.backward and (linear or not c.linear)]
        cluster = max(near, key=lambda jc: jc[0])[1] if near else Cluster(shape, linear, op.backward)
        cluster.ops.append(op)
        found[op] = cluster
        home.update((t, (i, cluster)) for t in op.outputs)
    return found
