"""Sums of products: `dot(x, w; k)`, and `conv(x, w; c, h, r)`, which slides windows of `r` along `h`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from jax import lax

from unity_jax.pcg.graph import Op
from unity_jax.rewrite.dims import CannotEmit, Dims, Named, Seen, Value, values
from unity_jax.rewrite.emitter import Emitter, again
from unity_jax.rewrite.language import Attrs, Dim, Term, Type, Types, are_values, need, place, replaced
from unity_jax.rewrite.meaning import Applied, Array, Operand
from unity_jax.rewrite.table import Code, Letters, RuleOp, Shapes, apply, register, traits
from unity_jax.rewrite.view import View


def subsets(dims: Sequence[Dim], least: int = 1, most: int | None = None) -> Iterator[Attrs]:
    """Sets of dimensions, small ones first."""
    for n in range(least, min(len(dims), len(dims) if most is None else most) + 1):
        yield from itertools.combinations(dims, n)


def wide(x: Term, dims: Sequence[Dim]) -> Term:
    """With these dimensions as well."""
    more = [d for d in dims if d not in x.type.dims]
    return apply("broadcast", x, attrs=more) if more else x


def product(x: Term, y: Term) -> Term:
    """At each place of all dimensions, in core ops."""
    every = list(dict.fromkeys((*x.type.dims, *y.type.dims)))
    return apply("mul", wide(x, every), wide(y, every))


# dot


def _dot_type(types: Types, attrs: Attrs) -> Type:
    are_values(*types)
    x, y = types
    for k in attrs:
        place(x, k), place(y, k)
    batch = [d for d in x.dims if d in y.dims and d not in attrs]
    free = [d for t in types for d in t.dims if d not in attrs and d not in batch]
    return Type((*batch, *free), x.devices)


def _dot_choices(letters: Letters, types: Sequence[Type]) -> Iterator[Attrs]:
    yield from subsets([d for d in letters.summed(types[0]) if d in types[1].dims], least=0)


def _dot_core(term: Term, x: Term, y: Term) -> Term:
    return apply("sum", product(x, y), attrs=term.attrs) if term.attrs else product(x, y)


def _see_dot(view: View, op: Op, value: Value, dims: Dims) -> Iterator[Seen]:
    (lhs_k, rhs_k), (lhs_b, rhs_b) = op.params["dimension_numbers"]
    ids: list[list[int]] = [[-1] * t.rank for t in op.inputs]
    left = iter(value.ids)
    for a, b in zip(lhs_b, rhs_b, strict=True):
        ids[0][a] = ids[1][b] = next(left)
    contracted = []
    for a, b in zip(lhs_k, rhs_k, strict=True):
        contracted.append(dims.fresh(op.inputs[0].shape[a]))
        ids[0][a] = ids[1][b] = contracted[-1]
    for side in ids:
        for d, i in enumerate(side):
            if i < 0:
                side[d] = next(left)
    yield Seen(values(op, ids), (tuple(contracted),), op)


def _emit_dot(e: Emitter, term: Term) -> Named:
    like = e.every("dot")
    settings = {(str(op.params["precision"]), str(op.outputs[0].dtype)) for op in like}
    if len(settings) != 1:
        raise CannotEmit("products of different precision")
    contracted = e.named(term)
    x, y = e.arguments(term, contracted)
    contracted = tuple(i for i in contracted if e.dims.size[i] > 1 or i in (*x.ids, *y.ids))
    x, y = (e.with_ids(a, *contracted) for a in (x, y))
    batch = tuple(i for i in x.ids if i in y.ids and i not in contracted)
    pairs = tuple(tuple(tuple(map(side.ids.index, ids)) for side in (x, y)) for ids in (contracted, batch))
    precision, wide = like[0].params["precision"], like[0].outputs[0].dtype
    if precision is not None and not isinstance(precision, tuple):
        raise CannotEmit("a dot algorithm may treat its operands differently")
    array = e.call(
        lax.dot_general,
        x.array,
        y.array,
        like=(("precision", precision), ("preferred_element_type", wide)),
        dimension_numbers=pairs,
    )
    free = [i for side in (x, y) for i in side.ids if i not in contracted and i not in batch]
    return Named(array, (*batch, *free))


register(
    "dot",
    RuleOp(
        arity=2,
        naming="dims",
        traits=traits("commutes multiplies reduces settings"),
        type=_dot_type,
        meaning=lambda op, x, y: op.contract(x, y, op.attrs),
        choices=_dot_choices,
        core=_dot_core,
        code=None,
        seen={"dot_general": _see_dot},
        emit=_emit_dot,
    ),
)


# conv and, in proofs, what a window sees


def _conv_type(types: Types, attrs: Attrs) -> Type:
    """`conv(x, w; c, h, r)`: features `c` contracted, windows of `r` at every place of `h`, zeros around."""
    are_values(*types)
    (x, w), (c, h, r) = types, attrs
    place(x, h), place(w, r), place(x, c), place(w, c)
    need(h not in w.dims and r not in x.dims, f"{h} belongs to the image and {r} to the window")
    free = [d for d in w.dims if d not in (c, r) and d not in x.dims]
    return Type((*(d for d in x.dims if d != c), *free), x.devices)


def _window_type(types: Types, attrs: Attrs) -> Type:
    """`window(x; h, r)`: what a window of `r` sees at each place of `h`, zeros around."""
    are_values(*types)
    (x,), (h, r) = types, attrs
    return replaced(x, h, [h, r])


def _windows(op: Applied, x: Operand, h: Dim, r: Dim) -> Operand:
    """Windows that start (r - 1) // 2 places before theirs, as XLA pads for stride one."""
    axis, at, window, length = x.labels.index(h), x.type.dims.index(h) + 1, op.size(r), op.size(h)
    around = [(0, 0)] * len(x.labels)
    around[axis] = ((window - 1) // 2, window // 2)
    places = np.arange(length)[:, None] + np.arange(window)
    windows = np.take(np.pad(x.value, around), places.ravel(), axis)
    windows = windows.reshape((*x.value.shape[:axis], length, window, *x.value.shape[axis + 1 :]))
    return Operand(Type((*x.type.dims[:at], r, *x.type.dims[at:]), x.type.devices), windows)


def _conv_meaning(op: Applied, x: Operand, w: Operand) -> Array:
    c, h, r = op.attrs
    return op.contract(_windows(op, x, h, r), w, (c, r))


def _conv_choices(letters: Letters, types: Sequence[Type]) -> Iterator[Attrs]:
    yield from ((c, Dim("h"), Dim("r")) for c in types[0].dims if c in types[1].dims)


def _conv_core(term: Term, x: Term, w: Term) -> Term:
    c, h, r = term.attrs
    return apply("sum", product(apply("window", x, attrs=(h, r)), w), attrs=(c, r))


def _window_code(term: Term, args: Sequence[Code], shapes: Shapes) -> Code:
    return ("Window", *args, *(shapes.dim(d) for d in term.attrs if isinstance(d, Dim)))


def _see_conv(view: View, op: Op, value: Value, dims: Dims) -> Iterator[Seen]:
    """Images and windows have identities of their own; places of the result are not places of the image."""
    numbers = op.params["dimension_numbers"]
    if op.params["feature_group_count"] != 1 or op.params["batch_group_count"] != 1:
        return
    features = dims.fresh(op.inputs[0].shape[numbers.lhs_spec[1]])
    lhs = [dims.fresh(n) for n in op.inputs[0].shape]
    rhs = [dims.fresh(n) for n in op.inputs[1].shape]
    lhs[numbers.lhs_spec[0]], rhs[numbers.rhs_spec[0]] = (value.ids[d] for d in numbers.out_spec[:2])
    lhs[numbers.lhs_spec[1]] = rhs[numbers.rhs_spec[1]] = features
    image = tuple(lhs[d] for d in numbers.lhs_spec[2:])
    window = tuple(rhs[d] for d in numbers.rhs_spec[2:])
    yield Seen(values(op, [lhs, rhs]), ((features,), image, window), op)


def _emit_conv(e: Emitter, term: Term) -> Named:
    like = e.matched("conv")
    source, seen = next(found for t, found in e.match.terms.items() if t.op == "conv")
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
    operands = [e.aligned(x, (alone[0], features, *image)), e.aligned(w, (alone[1], features, *window))]
    array = e.call(again, *operands, op=like, dimension_numbers=numbers)
    return e.opened(Named(array, (*alone, *places)))


register(
    "conv",
    RuleOp(
        arity=2,
        naming="windows",
        traits=traits("multiplies reduces settings"),
        type=_conv_type,
        meaning=_conv_meaning,
        choices=_conv_choices,
        core=_conv_core,
        code=None,
        seen={"conv_general_dilated": _see_conv},
        emit=_emit_conv,
    ),
)
register(
    "window",
    RuleOp(
        arity=1,
        naming="windows",
        traits=traits(),
        type=_window_type,
        meaning=lambda op, x: _windows(op, x, *op.attrs).along(op.labels),
        choices=None,
        core=None,
        code=_window_code,
        seen={},
        emit=None,
    ),
)
