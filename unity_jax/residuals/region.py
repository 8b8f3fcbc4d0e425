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

from unity_jax.ops.numbers import is_scatter
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
    since devices hold a block of them each, not consecutive ones; `alone`: ops that are nowhere but here; `times`: how
    many such regions it stands for in a folded program, of layers that are alike.
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
    times: int = 1


class NoRegionError(Exception):
    """What stands in the way of a region; its text is a line of the user."""


def around(graph: Graph, seed: Tensor, dim: int, parts: int) -> Region | None:
    """The last region around an array that is cut along a dimension; None if there is none, or not in so many parts.

    Where ops that belong together are apart, since what comes between them cannot run by rows (the forward and the
    backward pass of attention), the last of them are a region, which computes again what it needs of the others.
    """
    if parts < 2 or seed.shape[dim] % parts or seed not in graph.producer:
        return None
    core = beside(graph, seed)
    alone = _last(graph, core)
    if alone is None:
        return None
    every = {*core, *alone, *_again(graph, alone, math.prod(seed.shape))}
    try:
        rows, _ = _followed(_ordered(graph, every), seed, dim)
        more = _casts(graph, alone, rows)
        rows, factors = _followed(_ordered(graph, every | more), seed, dim)
        ops = _ordered(graph, {*alone, *more, *_again(graph, alone, math.prod(seed.shape))})
        factors = {op: factors[op] for op in ops if op in factors}
        rules = {op: rule_of(op) for op in factors}
        for op, factor in factors.items():
            check_apart(op, rules[op], factor, parts)
        if dim == 0 and any(t.shape[d] % seed.shape[0] for t, d in rows.items()):
            return None
        apart = (alone | more) & factors.keys()
        return _region(graph, ops, rules, rows, factors, seed.shape[dim], dim == 0, apart)
    except NoRegionError:
        return None


def _ordered(graph: Graph, ops: Set[Op]) -> tuple[Op, ...]:
    return tuple(op for op in graph.ops if op in ops)


def beside(graph: Graph, seed: Tensor) -> set[Op]:
    """The ops that make or read arrays with as many elements, reached from one by such arrays, but not what makes one
    of smaller ones: masks and noise, which others read as well."""
    size = math.prod(seed.shape)
    found, waiting = set[Op](), [seed]
    known = {seed}
    while waiting:
        t = waiting.pop()
        maker = graph.producer[t]
        if _is_spread(maker, size):
            continue
        for op in (maker, *graph.readers.get(t, ())):
            if op not in found:
                found.add(op)
                large = {u for u in (*op.inputs, *op.outputs) if u.literal is None and math.prod(u.shape) >= size}
                waiting += [u for u in large - known if u in graph.producer]
                known |= large
    return found


def _is_spread(op: Op, size: int) -> bool:
    """Whether an op makes of small arrays larger ones."""
    return op.name not in PRODUCTS and can_repeat(op) and all(math.prod(t.shape) < size for t in op.inputs)


def _last(graph: Graph, core: set[Op]) -> set[Op] | None:
    """Of some ops the last ones, with all that lies between them: those behind what cannot run by rows, if there are
    any. None where what lies between those cannot either."""
    if not core or not all(map(can_repeat, core)):
        return None
    below, beyond, late = set[Tensor](), set[Tensor](), set[Op]()
    for op in graph.ops:
        if not beyond.isdisjoint(op.inputs):
            beyond.update(op.outputs)
            late |= {op} & core
        elif op in core or not below.isdisjoint(op.inputs):
            stops = op not in core and (op.name in PRODUCTS or not can_repeat(op))
            (beyond if stops else below).update(op.outputs)
    last = late or core
    found = _between(graph, last)
    if any(op.name in PRODUCTS or not can_repeat(op) for op in found - last) or len({op.times for op in found}) > 1:
        return None
    return found


def _between(graph: Graph, core: set[Op]) -> set[Op]:
    """Ops with all that lie on a path from one of them to another."""
    after, below = set[Tensor](), set[Op]()
    for op in graph.ops:
        if op in core or not after.isdisjoint(op.inputs):
            below.add(op)
            after.update(op.outputs)
    before, found = set[Tensor](), set[Op]()
    for op in reversed(graph.ops):
        if op in core or (op in below and not before.isdisjoint(op.outputs)):
            found.add(op)
            before.update(op.inputs)
    return found


def _again(graph: Graph, ops: Set[Op], size: int) -> set[Op]:
    """What makes the constants and the large arrays that ops read, others than these ops."""
    found, waiting = set[Op](), [t for op in ops for t in op.inputs]
    while waiting:
        t = waiting.pop()
        op = graph.producer.get(t)
        if op is None or op in ops or op in found or not can_repeat(op):
            continue
        if is_constant(op) or math.prod(t.shape) >= size:
            found.add(op)
            waiting += op.inputs
    return found


def _casts(graph: Graph, ops: Set[Op], rows: Mapping[Tensor, int]) -> set[Op]:
    """The casts of what ops make by rows that nobody else reads and that make it smaller."""
    found = set[Op]()
    for t in {t for op in ops for t in op.outputs if t in rows}.difference(graph.outputs):
        readers = graph.readers.get(t, ())
        if len(readers) == 1 and readers[0].name == "convert_element_type" and readers[0].outputs[0].nbytes < t.nbytes:
            found.update(readers)
    return found


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
    alone: Set[Op],
) -> Region:
    """Raise `NoRegionError` where nothing is `alone` in it, or it reads what is a sum over all its rows."""
    made = {t for op in ops for t in op.outputs}
    terms = {t for op in factors for t in op.outputs if t not in rows}
    if not alone or any(not terms.isdisjoint(op.inputs) for op in ops):
        raise NoRegionError
    read = {t for op in graph.ops if op not in alone for t in op.inputs}.union(graph.outputs)
    results = [t for op in ops if op in alone for t in op.outputs if t in read]
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
        frozenset(alone),
        next(op.times for op in alone),
    )


def operands(
    ops: Sequence[Op], made: Set[Tensor], rows: Mapping[Tensor, int]
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """What ops read that they do not make: that which is cut, and that which is whole."""
    taken = dict.fromkeys(t for op in ops for t in op.inputs if t.literal is None and t not in made)
    return tuple(t for t in taken if t in rows), tuple(t for t in taken if t not in rows)
