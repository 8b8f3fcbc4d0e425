"""The ops of the language as JAX computes them: one function for each, for the arrays of an `emit.Emitter`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax

from unity_jax import _compat
from unity_jax.rewrite import selections
from unity_jax.rewrite.dims import CannotEmit, Named, put_at
from unity_jax.rewrite.language import Dim, Term

if TYPE_CHECKING:
    from unity_jax.rewrite.emit import Emitter


def _dot(e: Emitter, term: Term) -> Named:
    like = [seen.symbol for _, seen in e.match.terms.values() if seen.op == "dot"]
    settings = {(str(op.params["precision"]), str(op.outputs[0].dtype)) for op in like}
    if len(settings) != 1:
        raise CannotEmit("products of different precision")
    contracted = e.named(term)
    x, y = e.arguments(term, contracted)
    contracted = tuple(i for i in contracted if e.dims.size[i] > 1 or i in (*x.ids, *y.ids))
    x, y = (e.with_ids(a, *contracted) for a in (x, y))
    batch = tuple(i for i in x.ids if i in y.ids and i not in contracted)
    contracting, batching = ([[side.ids.index(i) for i in ids] for side in (x, y)] for ids in (contracted, batch))
    precision, wide = like[0].params["precision"], like[0].outputs[0].dtype
    if precision is not None and not isinstance(precision, tuple):
        raise CannotEmit("a dot algorithm may treat its operands differently")
    array = lax.dot_general(
        x.array,
        y.array,
        (contracting, batching),
        precision=precision,
        preferred_element_type=wide,
    )
    free = [i for side in (x, y) for i in side.ids if i not in contracted and i not in batch]
    return Named(array, (*batch, *free))


def _conv(e: Emitter, term: Term) -> Named:
    like = e.matched("conv")
    source, seen = next((v, s) for v, s in e.match.terms.values() if s.op == "conv")
    features = e.one(term.attrs[0])
    image, window = (e.plain(ids) for ids in seen.attrs[1:])
    x, w = e.arguments(term, (features, *image, *window))
    places = e.plain(tuple(source.ids[d] for d in like.params["dimension_numbers"].out_spec[2:]))
    batch = tuple(i for i in x.ids if i not in (features, *image))
    channels = tuple(i for i in w.ids if i not in (features, *window))
    if not set(batch).isdisjoint(channels):
        raise CannotEmit("a convolution of which both operands have a dimension more, as a grouped one")
    alone = e.dims.product(batch), e.dims.product(channels)
    numbers = lax.ConvDimensionNumbers(*[tuple(range(2 + len(image)))] * 3)
    params = {**like.params, "dimension_numbers": numbers}
    operands = [e.aligned(x, (alone[0], features, *image)), e.aligned(w, (alone[1], features, *window))]
    (array,) = _compat.bind(like.eqn, operands, params)
    return e.opened(Named(array, (*alone, *places)))


def _pointwise(function: Callable[..., Any]) -> Callable[[Emitter, Term], Named]:
    def emit(e: Emitter, term: Term) -> Named:
        arrays, ids = e.together(*e.arguments(term))
        return Named(function(*arrays), ids)

    return emit


def _function(e: Emitter, term: Term) -> Named:
    """The op that the function stands for, on other operands; its constants stay."""
    op = e.matched(term.op)
    arrays, ids = e.together(*e.arguments(term))
    shape, left = tuple(e.dims.size[i] for i in ids), iter(arrays)
    operands: list[Any] = []
    for t in op.inputs:
        constant = e.view.source(t).literal
        if constant is not None:
            operands.append(jnp.full(shape if t.rank else (), constant, t.dtype))
        else:
            operands.append(next(left) if len(arrays) > 1 else arrays[0])
    (array,) = _compat.bind(op.eqn, operands, op.params)
    return Named(array, ids)


def _sum(e: Emitter, term: Term) -> Named:
    gone = e.named(term)
    x = e.with_ids(*e.arguments(term, gone), *gone)
    array = lax.reduce_sum(x.array, [x.ids.index(i) for i in gone])
    return Named(array, tuple(i for i in x.ids if i not in gone))


def _fold(e: Emitter, term: Term) -> Named:
    gone = e.named(term)
    (x,) = e.arguments(term, gone)
    left = [i for i in gone if i in x.ids]  # folding equal values changes nothing
    op = e.matched("fold")
    (array,) = _compat.bind(op.eqn, [x.array], {**op.params, "axes": tuple(x.ids.index(i) for i in left)})
    return Named(array, tuple(i for i in x.ids if i not in left))


def _concat(e: Emitter, term: Term) -> Named:
    """In the order of the first operand: what is joined there, what is not where it is."""
    whole = term.attrs[0]
    assert isinstance(whole, Dim)
    parts = [e.one(p) for p in whole.parts]
    arguments = e.arguments(term, e.dims.all(parts))
    operands = [e.with_ids(x, *e.dims.all([p])) for x, p in zip(arguments, parts, strict=True)]
    joined = {i for p in parts for i in e.dims.all([p])}
    first = operands[0].ids
    at = sum(i not in joined for i in first[: min(first.index(i) for i in e.dims.all(parts[:1]))])
    rest = tuple(dict.fromkeys(i for x in operands for i in x.ids if i not in joined))
    arrays = [e.aligned(x, (*rest[:at], p, *rest[at:])) for x, p in zip(operands, parts, strict=True)]
    if len({a.dtype for a in arrays}) > 1:
        raise CannotEmit("a concatenation of different dtypes")
    return Named(
        lax.concatenate(arrays[::-1] if whole in e.turned else arrays, at), (*rest[:at], e.one(whole), *rest[at:])
    )


def _slice(e: Emitter, term: Term) -> Named:
    whole, which = term.attrs
    assert isinstance(whole, Dim) and isinstance(which, int)
    x, at = e.term(term.args[0]), e.one(whole)
    part, start, limit = e.part(whole, which)
    if at not in x.ids:
        return x
    d = x.ids.index(at)
    return e.opened(Named(lax.slice_in_dim(x.array, start, limit, axis=d), put_at(x.ids, d, part)))


def _stack(e: Emitter, term: Term) -> Named:
    name = term.attrs[0]
    assert isinstance(name, Dim)
    arrays, ids = e.together(*e.arguments(term))
    if len({a.dtype for a in arrays}) > 1:
        raise CannotEmit("a stack of different dtypes")
    if name not in e.match.names:
        e.fresh.setdefault(name, e.dims.fresh(len(arrays)))
    at = e.one(name)
    if e.dims.size[at] != len(arrays):
        raise CannotEmit(f"{name} has another size")
    return Named(jnp.stack(arrays), (at, *ids))


def _unstack(e: Emitter, term: Term) -> Named:
    name, which = term.attrs
    assert isinstance(name, Dim) and isinstance(which, int)
    x = e.term(term.args[0])
    at = e.one(name)
    if at not in x.ids:
        return x
    d = x.ids.index(at)
    return Named(lax.index_in_dim(x.array, which, d, keepdims=False), (*x.ids[:d], *x.ids[d + 1 :]))


EMIT: dict[str, Callable[[Emitter, Term], Named]] = {
    "dot": _dot,
    "conv": _conv,
    "add": _pointwise(lax.add),
    "sub": _pointwise(lax.sub),
    "mul": _pointwise(lax.mul),
    "neg": _pointwise(lax.neg),
    "f": _function,
    "g": _function,
    "h": _function,
    "convert": _function,
    "sum": _sum,
    "fold": _fold,
    "concat": _concat,
    "slice": _slice,
    "pad": selections.emit_pad,
    "stack": _stack,
    "unstack": _unstack,
    "take": selections.emit_take,
    "put": selections.emit_put,
    "scatter": selections.emit_scatter,
}
