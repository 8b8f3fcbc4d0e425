"""Clusters: elementwise ops that share one layout, so that the search decides it once.

An elementwise op joins the cluster of its latest operand of equal shape, and a cluster that nothing else reads but
another one is part of that: of an optimizer's update all but what it does with partial sums. Ops that are linear in
what flows through them (sums of gradients, scaling) form clusters of their own, which may carry partial sums; all other
ops may not.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from unity_jax.ops.rules import is_pointwise, linear_sets
from unity_jax.pcg.graph import Graph, Op, Tensor
from unity_jax.search.assemble import is_free


@dataclass(eq=False)
class Cluster:
    """Elementwise ops over one shape, in program order. `linear`: may carry partial sums. `through`: which set of
    operands (`linear_set`) of each op that has one; `made`: what they compute."""

    shape: tuple[int, ...]
    linear: bool
    backward: bool
    ops: list[Op] = field(default_factory=list)
    through: dict[Op, int] = field(default_factory=dict)

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


_known: WeakKeyDictionary[Graph, dict[Op, Cluster]] = WeakKeyDictionary()
"""All meshes, and variants that have a body in common, share its clusters."""


def clusters(graph: Graph, ends: Collection[Tensor]) -> dict[Op, Cluster]:
    """The cluster of every elementwise op of one graph (its sub-graphs have their own).

    **Arguments:** `ends`: what is no partial sum in any case: arguments and results of a program, but not what a loop
    carries.
    """
    if graph not in _known:
        _known[graph] = _clusters(graph, ends)
    return _known[graph]


def _clusters(graph: Graph, ends: Collection[Tensor]) -> dict[Op, Cluster]:
    uniform = {t for op in graph.ops if is_free(op) for t in op.outputs}  # they hold one value everywhere
    found: dict[Op, Cluster] = {}
    through: dict[Op, int] = {}
    home: dict[Tensor, tuple[int, Cluster]] = {}
    for i, op in enumerate(graph.ops):
        if is_free(op) or op.bodies or not is_pointwise(op):
            continue
        shape = op.outputs[0].shape
        operands = linear_set(op, uniform)
        linear = operands is not None
        if operands:
            through[op] = operands
        near = [home[t] for t in op.inputs if t in home and t.shape == shape]
        near = [(j, c) for j, c in near if c.backward == op.backward and (linear or not c.linear)]
        cluster = max(near, key=lambda jc: jc[0])[1] if near else Cluster(shape, linear, op.backward)
        cluster.ops.append(op)
        found[op] = cluster
        home.update((t, (i, cluster)) for t in op.outputs)
    return _merged(graph, found, through, ends)


def _merged(
    graph: Graph, found: dict[Op, Cluster], through: dict[Op, int], ends: Collection[Tensor]
) -> dict[Op, Cluster]:
    """The same with those that only one other cluster reads as parts of that."""
    readers: dict[Tensor, list[Op]] = {}
    for op in graph.ops:
        for t in op.inputs:
            readers.setdefault(t, []).append(op)
    every = list(dict.fromkeys(found.values()))
    handed_on = set(graph.outputs).difference(ends)
    _keep_useful(every, found, readers, ends, handed_on)
    part_of: dict[Cluster, Cluster] = {}
    for cluster in reversed(every):
        near = {found.get(op) for t in cluster.made for op in readers.get(t, ())} - {cluster}
        whole = {None if c is None else part_of.get(c, c) for c in near}
        other = whole.pop() if len(whole) == 1 else None
        if other is not None and (cluster.shape, cluster.linear, cluster.backward) == (
            other.shape,
            other.linear,
            other.backward,
        ):
            part_of[cluster] = other
    made = {op: part_of.get(cluster, cluster) for op, cluster in found.items()}
    fresh = {c: Cluster(c.shape, c.linear, c.backward, through=through) for c in made.values()}
    for op, cluster in made.items():  # in program order
        fresh[cluster].ops.append(op)
    return {op: fresh[cluster] for op, cluster in made.items()}


def _keep_useful(
    every: Sequence[Cluster],
    found: dict[Op, Cluster],
    readers: dict[Tensor, list[Op]],
    ends: Collection[Tensor],
    handed_on: Collection[Tensor],
) -> None:
    """Let only those clusters carry partial sums that gain by it: that add several up, or that hand one on to what may
    make it smaller, or to the next iteration. Others are read by what needs it reduced, and reduce no more than what
    they read."""
    several: dict[Cluster, int] = {}
    whole = set(ends)
    for cluster in every:
        read = {t for op in cluster.ops for t in op.inputs if t.shape == cluster.shape and t.literal is None}
        several[cluster] = len(read - cluster.made - whole)
        if not (cluster.linear and several[cluster]):
            whole |= cluster.made
    for cluster in reversed(every):
        after = [found.get(op) for t in cluster.made for op in readers.get(t, ())]
        hands_on = any(c is None or c.linear for c in after if c is not cluster)
        hands_on |= not cluster.made.isdisjoint(handed_on)
        cluster.linear &= several[cluster] > (0 if hands_on else 1)
