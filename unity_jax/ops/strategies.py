"""The strategies of an op, and what each of them means for its tensors and its work: all of them at once.

    >>> from unity_jax.ops.rule import Factor
    >>> rule = Rule((Factor("m", 8), Factor("k", 8, "sum")), (((0,), (1,)),), (((0,),),))
    >>> strategies(rule, MeshAxes(("x",), (2,)))
    [(-1,), (0,), (1,)]
    >>> [str(layout) for layout in port_layouts(rule, MeshAxes(("x",), (2,)), [(-1,), (0,), (1,)])[1][0]]
    ['[.]', '[x]', '[.]{sum:x}']

On three axes an op has hundreds of strategies. Those that do the same with a tensor make one layout of it, and those
that cut an op into shards of the same sizes are one amount of work.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np

from unity_jax.ops.rule import REDUCTIONS, Dims, Rule, Strategy
from unity_jax.pcg.layout import Layout, interned
from unity_jax.pcg.mesh import MeshAxes

Layouts = tuple[Layout, ...]


def making(rule: Rule, mesh: MeshAxes, layout: Layout, linear: int = 0) -> Strategy:
    """How an op makes its first result in a layout, if it can: partial sums come through `linear[linear]`, a dimension
    made of several factors is split by the major one. Whether it is legal `strategies` says."""
    factor = {d: dims[0] for d, dims in enumerate(rule.results[0]) if dims}
    partial, where = dict(layout.partial), layout.axis_dim
    through = len(rule.factors) + linear
    return tuple(through if a in partial else factor.get(where.get(a, -1), -1) for a in mesh.names)


def strategies(rule: Rule, mesh: MeshAxes) -> list[Strategy]:
    """Every legal assignment of mesh axes to factors, the fully replicated one first; deterministic."""
    frozen = {
        d[0] for dims in (*rule.operands, *rule.results) for d in dims if len(d) > 1 and rule.factors[d[0]].size == 1
    }
    minor = {f for dims in (*rule.operands, *rule.results) for d in dims for f in d[1:]} | frozen
    compound = {d[0] for dims in (*rule.operands, *rule.results) for d in dims if len(d) > 1}
    choices = [-1]
    for f, factor in enumerate(rule.factors):
        # A layout splits a dimension into contiguous blocks, so only the major factor of a compound one can be split.
        if factor.kind != "replicate" and f not in minor:
            choices.append(f)
    choices += range(len(rule.factors), len(rule.factors) + len(rule.linear))
    found = []
    for strategy in itertools.product(choices, repeat=len(mesh.names)):
        for f in set(strategy):
            if not 0 <= f < len(rule.factors):
                continue
            factor = rule.factors[f]
            axes = [size for size, s in zip(mesh.sizes, strategy, strict=True) if s == f]
            ways = math.prod(axes)
            even = factor.size % ways == 0
            if ways > factor.size or (not even and (not factor.pad or f in compound)):
                break
            if factor.halo and (len(axes) > 1 or factor.size // ways < factor.halo):
                break
        else:
            if all(size > 1 or s == -1 for size, s in zip(mesh.sizes, strategy, strict=True)):
                found.append(strategy)
    return found


def port_layouts(rule: Rule, mesh: MeshAxes, choices: Sequence[Strategy]) -> tuple[list[Layouts], list[Layouts]]:
    """Of each operand and each result, its layout under each of some strategies (`Shard.operand_layouts`)."""
    if rule.fixed is not None:
        return [(lay,) * len(choices) for lay in rule.fixed[0]], [(lay,) * len(choices) for lay in rule.fixed[1]]
    n, splits = len(rule.factors), np.array(choices, np.int64).reshape(len(choices), -1)
    through = {n + j: operands for j, operands in enumerate(rule.linear)}
    sums = {f: factor.kind for f, factor in enumerate(rule.factors) if factor.kind in REDUCTIONS}
    every = {**dict.fromkeys(through, "sum"), **sums}
    carried = [{s: "sum" for s, of in through.items() if i in of} for i in range(len(rule.operands))]
    sides = [*zip(rule.operands, carried, strict=True), *((dims, every) for dims in rule.results)]
    rows, axes = splits.tobytes(), mesh.names
    found = [_layouts(dims, tuple(kinds.items()), axes, rows) for dims, kinds in sides]
    return found[: len(carried)], found[len(carried) :]


@functools.lru_cache(maxsize=4096)
def _layouts(dims: Dims, partial: tuple[tuple[int, str], ...], names: tuple[str, ...], rows: bytes) -> Layouts:
    """Of a tensor with these factors, which holds partial sums along axes that do what is in `partial`; `rows`: what
    every strategy does with each axis."""
    kinds, splits = dict(partial), np.frombuffer(rows, np.int64).reshape(-1, len(names))
    own = np.array(sorted({d[0] for d in dims if d} | set(kinds)), np.int64)
    base = int(splits.max(initial=0)) + 2
    codes = np.where(np.isin(splits, own), splits + 1, 0) @ base ** np.arange(splits.shape[1])
    _, first, which = np.unique(codes, return_index=True, return_inverse=True)
    made = []
    for row in splits[first].tolist():
        does = list(zip(names, row, strict=True))
        where = [tuple([a for a, s in does if s == d[0]]) if d else () for d in dims]
        made.append(interned(tuple(where), tuple([(a, kinds[s]) for a, s in does if s in kinds])))
    return tuple([made[i] for i in which.tolist()])


def alike(rule: Rule, mesh: MeshAxes, choices: Sequence[Strategy]) -> tuple[Sequence[int], Sequence[int]]:
    """Of some strategies, the first of each amount of work (`Shard.works`), and for each which of these it is."""
    if not rule.is_shared:
        return range(len(choices)), range(len(choices))
    splits = np.array(choices, np.int64).reshape(len(choices), -1, 1)
    ways = np.where(splits == np.arange(len(rule.factors)), np.reshape(mesh.sizes, (-1, 1)), 1).prod(axis=1)
    first = dict[tuple[int, ...], int]()
    which = [first.setdefault(tuple(row), i) for i, row in enumerate(ways.tolist())]
    numbers = {i: n for n, i in enumerate(first.values())}
    return list(numbers), [numbers[i] for i in which]
