"""Which ops can run by rows, a chunk of them after the other: those around the largest array of a step.

    x, W -> logits -> softmax -> loss        forward     rows of x, logits, dx; W whole; terms of the sums loss and dW
         -> dlogits -> dx, dW                backward

The ops that make or read arrays as large as that one are the region, with what lies on a path from one to another: no
path may leave it and come back. A dimension is followed through their rules (`ops.rule`): an array in which it occurs
is cut along it, one in which it does not is whole, or, if it was summed over, the sum of what the chunks give. What
reads such a sum within the region needs the whole batch in the middle: then there is none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from unity_jax.ops.indexing import is_scatter
from unity_jax.ops.rule import Dims, Rule, Shard
from unity_jax.ops.rules import rule_of
from unity_jax.ops.strategies import strategies
from unity_jax.pcg.graph import Graph, Op, Tensor
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.residuals.recompute import can_repeat, is_constant
from unity_jax.xla.op_classes import PRODUCTS

TIME = "time"
"""The axis over which chunks are one after the other, as those of a mesh axis are side by side."""


@dataclass(frozen=True, eq=False)
class Region:
    """Ops that run by rows.

    **Fields:** `ops` in the order of the program; `size`: how many rows there are; `rows`: of each array that is cut
    the dimension whose major part they are, those of loops too; `factors`: of each op that is cut the factor of its
    rule that they are; `rules`: of these ops; `cut`: arguments that are cut, `whole`: those that are not; `stacked`:
    results that are put together, `sums`: those that are added up; `spaced`: whether a chunk has every so many rows,
    since devices hold a block of them each, not consecutive ones; `alone`: ops that are nowhere but here.
    """

    ops: tuple[Op, ...]
    size: int
    rows: Mapping[Tensor, int]
    factors: Mapping[Op, int]
    rules: Mapping[Op, Rule]
    cut: tuple[Tensor, ...]
    whole: tuple[Tensor, ...]
    stacked: tuple[Tensor, ...]
    sums: tuple[Tensor, ...]
    spaced: bool
    alone: frozenset[Op]


class NoRegionError(Exception):
    """What stands in the way of a region; its text is a line of the user."""


def around(graph: Graph, seed: Tensor, dim: int, parts: int) -> Region | None:
    """The region around an array that is cut along a dimension; None if there is none, or not in so many parts."""
    if seed.shape[dim] % parts:
        return None
    ops = _convex(graph, _beside(graph, seed))
    if ops is None:
        return None
    try:
        rows, _ = _followed(ops, seed, dim)
        ops = _narrowed(graph, ops, rows)
        rows, factors = _followed(ops, seed, dim)
        rules = {op: rule_of(op) for op in factors}
        for op, factor in factors.items():
            if op.name.startswith("random_"):  # bits are drawn at once
                return None
            check_apart(op, rules[op], factor, parts)
        if dim == 0 and any(t.shape[d] % seed.shape[0] for t, d in rows.items()):
            return None
        return _region(graph, ops, rules, rows, factors, seed.shape[dim], dim == 0)
    except NoRegionError:
        return None


def _beside(graph: Graph, seed: Tensor) -> set[Op]:
    """The ops that make or read arrays with as many elements, reached from one by such arrays."""
    size = math.prod(seed.shape)
    found, waiting = set[Op](), [seed]
    known = {seed}
    while waiting:
        t = waiting.pop()
        maker = graph.producer.get(t)
        for op in (*([maker] if maker is not None else []), *graph.readers.get(t, ())):
            if op not in found:
                found.add(op)
                large = {u for u in (*op.inputs, *op.outputs) if u.literal is None and math.prod(u.shape) >= size}
                waiting += [u for u in large - known if u in graph.producer]
                known |= large
    return found


def _convex(graph: Graph, core: set[Op]) -> tuple[Op, ...] | None:
    """Ops with all that lie between them, and constants that they read; None where those between are no small part of
    a step, or the forward or the backward pass is missing."""
    if not all(map(can_repeat, core)) or len({op.backward for op in core}) < 2:
        return None
    after: set[Tensor] = set()
    below = set[Op]()
    for op in graph.ops:
        if op in core or not after.isdisjoint(op.inputs):
            below.add(op)
            after.update(op.outputs)
    before: set[Tensor] = set()
    found = set[Op]()
    for op in reversed(graph.ops):
        if op in core or (op in below and not before.isdisjoint(op.outputs)):
            found.add(op)
            before.update(op.inputs)
    between = found - core
    if any(op.name in PRODUCTS or not can_repeat(op) for op in between) or any(op.times > 1 for op in found):
        return None
    read = {t for op in found for t in op.inputs}
    found.update(op for op in graph.ops if is_constant(op) and not read.isdisjoint(op.outputs))
    return tuple(op for op in graph.ops if op in found)


def _narrowed(graph: Graph, ops: Sequence[Op], rows: Mapping[Tensor, int]) -> tuple[Op, ...]:
    """Ops, with the casts of what they make by rows that nobody else reads and that make it smaller."""
    made, found = {t for op in ops for t in op.outputs if t in rows}, set(ops)
    for t in made.difference(graph.outputs):
        readers = graph.readers.get(t, ())
        if len(readers) == 1 and readers[0].name == "convert_element_type" and readers[0].outputs[0].nbytes < t.nbytes:
            found.update(readers)
    return tuple(op for op in graph.ops if op in found)


def _followed(ops: Sequence[Op], seed: Tensor, dim: int) -> tuple[dict[Tensor, int], dict[Op, int]]:
    """Where the rows are in each array, and which factor of each op they are."""
    rules = {op: rule_of(op) for op in ops}
    near: dict[Tensor, list[Op]] = {}
    for op in ops:
        for t in dict.fromkeys((*op.inputs, *op.outputs)):
            near.setdefault(t, []).append(op)
    rows, factors, waiting = {seed: dim}, dict[Op, int](), [seed]
    while waiting:
        t = waiting.pop()
        for op in near[t]:
            sides = list(_sides(op, rules[op]))
            for major in {dims[rows[t]][:1] for u, dims in sides if u is t}:
                if not major or factors.setdefault(op, major[0]) != major[0]:
                    raise NoRegionError
            for u, dims in sides:
                at = [d for d, held in enumerate(dims) if factors[op] in held]
                if at and (u.literal is not None or dims[at[0]][0] != factors[op] or rows.get(u, at[0]) != at[0]):
                    raise NoRegionError
                if at and u not in rows:
                    rows[u] = at[0]
                    waiting.append(u)
    return rows, factors


def _sides(op: Op, rule: Rule) -> Iterator[tuple[Tensor, Dims]]:
    yield from zip(op.inputs, rule.operands, strict=True)
    yield from zip(op.outputs, rule.results, strict=True)


def check_apart(op: Op, rule: Rule, factor: int, parts: int) -> None:
    """Raise `NoRegionError` where a part of an op cannot be computed without the others."""
    kind, mesh = rule.factors[factor].kind, MeshAxes((TIME,), (parts,))
    apart = kind == "pass" or (kind == "sum" and not is_scatter(op))  # whose operand one device adds to
    if not apart or rule.fixed is not None or (factor,) not in strategies(rule, mesh):
        raise NoRegionError
    if rule.inner is not None and rule.inner(Shard(op, rule, mesh, (factor,))):
        raise NoRegionError


def _region(
    graph: Graph,
    ops: tuple[Op, ...],
    rules: Mapping[Op, Rule],
    rows: Mapping[Tensor, int],
    factors: Mapping[Op, int],
    size: int,
    first: bool,
) -> Region:
    inside, made = set(ops), {t for op in ops for t in op.outputs}
    terms = {t for op in factors for t in op.outputs if t not in rows}
    if any(not terms.isdisjoint(op.inputs) for op in ops):
        raise NoRegionError
    read = {t for op in graph.ops if op not in inside for t in op.inputs}.union(graph.outputs)
    results = [t for op in factors for t in op.outputs if t in read]
    cut, whole = operands(ops, made, rows)
    return Region(
        ops,
        size,
        rows,
        factors,
        rules,
        cut,
        whole,
        tuple(t for t in results if t in rows),
        tuple(t for t in results if t in terms),
        first,
        frozenset(factors),
    )


def operands(
    ops: Sequence[Op], made: Set[Tensor], rows: Mapping[Tensor, int]
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """What ops read that they do not make: that which is cut, and that which is whole."""
    taken = dict.fromkeys(t for op in ops for t in op.inputs if t.literal is None and t not in made)
    return tuple(t for t in taken if t in rows), tuple(t for t in taken if t not in rows)
