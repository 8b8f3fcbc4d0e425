"""Sums, and folds of which nothing is known but that order does not matter, such as a maximum: `sum(x; k, l)`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

from jax import lax

from unity_jax.pcg.graph import Op
from unity_jax.rewrite.dims import Dims, Named, Seen, Value, values
from unity_jax.rewrite.emitter import Emitter, again
from unity_jax.rewrite.language import Attrs, Dim, Term, Type, Types, are_values, need, place
from unity_jax.rewrite.meaning import Array, dimension, reduction
from unity_jax.rewrite.ops.contraction import subsets
from unity_jax.rewrite.table import Code, Letters, RuleOp, Shapes, register, traits
from unity_jax.rewrite.view import View

SUM = "sum"


def _type(types: Types, attrs: Attrs) -> Type:
    (x,) = types
    are_values(x)
    need(bool(attrs), "no dimension to reduce")
    for k in attrs:
        place(x, k)
    return Type(tuple(d for d in x.dims if d not in attrs), x.devices)


def _choices(letters: Letters, types: Sequence[Type]) -> Iterator[Attrs]:
    yield from subsets(letters.summed(types[0]), most=2)


def _summed(term: Term, x: Code, shapes: Shapes) -> Code:
    """One dimension at a time."""
    dims = [shapes.dim(k) for k in term.attrs if isinstance(k, Dim)]
    return functools.reduce(lambda inner, k: ("Sum", inner, k), dims, x)


def _sum_code(term: Term, args: Sequence[Code], shapes: Shapes) -> Code:
    return _summed(term, args[0], shapes)


def _fold_code(term: Term, args: Sequence[Code], shapes: Shapes) -> Code:
    """`F(sum(G(x)))`: a sum of the formal values `G(x)` is just the collection of the values."""
    return ("Apply", '"fold-out"', _summed(term, ("Apply", '"fold-in"', args[0]), shapes))


def _see(view: View, op: Op, value: Value, dims: Dims) -> Iterator[Seen]:
    (x,) = op.inputs
    left = iter(value.ids)
    ids = [dims.fresh(n) if d in op.params["axes"] else next(left) for d, n in enumerate(x.shape)]
    yield Seen(values(op, [ids]), (tuple(ids[d] for d in op.params["axes"]),), op)


def _emit_sum(e: Emitter, term: Term) -> Named:
    gone = e.named(term)
    (given,) = e.arguments(term, gone)
    x = e.with_ids(given, *gone)
    array = e.call(lax.reduce_sum, x.array, axes=tuple(x.ids.index(i) for i in gone))
    return Named(array, tuple(i for i in x.ids if i not in gone))


def _emit_fold(e: Emitter, term: Term) -> Named:
    gone = e.named(term)
    (x,) = e.arguments(term, gone)
    left = [i for i in gone if i in x.ids]  # folding equal values changes nothing
    array = e.call(again, x.array, op=e.matched("fold"), axes=tuple(x.ids.index(i) for i in left))
    return Named(array, tuple(i for i in x.ids if i not in left))


def _reduction(
    more: str,
    meaning: Callable[..., Array],
    code: Callable[[Term, Sequence[Code], Shapes], Code],
    primitives: Sequence[str],
    emit: Callable[[Emitter, Term], Named],
) -> RuleOp:
    return RuleOp(
        arity=1,
        naming="dims",
        traits=traits(f"reduces {more}"),
        type=_type,
        meaning=meaning,
        choices=_choices,
        core=None,
        code=code,
        seen=dict.fromkeys(primitives, _see),
        emit=emit,
    )


sums = reduction(lambda n: lambda x, axes: n.settle(x.sum(axes)), dimension)
register(SUM, _reduction("", sums, _sum_code, ["reduce_sum"], _emit_sum))
folds = reduction(lambda n: n.fold, dimension)
register("fold", _reduction("unknown", folds, _fold_code, ["reduce_max", "reduce_min"], _emit_fold))
