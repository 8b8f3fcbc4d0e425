"""Parts of a sum: joined by `concat(x, y; n+o)`, taken by `slice(x; n+o, 0)`, put among zeros by `pad(x; n+o, 0)`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from unity_jax.pcg.graph import Op, Tensor
from unity_jax.rewrite.dims import CannotEmit, Dims, Named, Seen, Value, put_at, values
from unity_jax.rewrite.emitter import Emitter
from unity_jax.rewrite.language import Attrs, Dim, Term, Type, Types, are_values, need, parts_of, replaced
from unity_jax.rewrite.meaning import Applied, Array, Operand
from unity_jax.rewrite.table import Code, Letters, RuleOp, Shapes, apply, register, traits
from unity_jax.rewrite.view import View

SLICE = "slice"


def _concat_type(types: Types, attrs: Attrs) -> Type:
    (whole,), parts = attrs, parts_of(attrs[0])
    need(len(parts) == len(types), f"{len(types)} operands for {whole}")
    need(not any(whole in x.dims for x in types), f"an operand already has {whole}")
    found = {replaced(x, part, [whole]) for x, part in zip(types, parts, strict=True)}
    need(len({(frozenset(t.dims), t.ids) for t in found}) == 1, "operands differ in other dimensions")
    return replaced(types[0], parts[0], [whole])


def _slice_type(types: Types, attrs: Attrs) -> Type:
    whole, which = attrs
    return replaced(types[0], whole, [parts_of(whole)[which]])  # type: ignore[index]


def _pad_type(types: Types, attrs: Attrs) -> Type:
    """The operand as one part of a sum, zeros in the others."""
    are_values(*types)
    whole, which = attrs
    return replaced(types[0], parts_of(whole)[which], [whole])  # type: ignore[index]


# In exact arithmetic


def _concat(op: Applied, *operands: Operand) -> Array:
    whole, axis = op.attrs[0], op.labels.index(op.attrs[0])
    aligned = [x.along(op.like({whole: part})) for x, part in zip(operands, whole.parts, strict=True)]
    return np.concatenate(aligned, axis)


def _span(op: Applied) -> slice:
    """Where a part of a sum lies."""
    whole, at = op.attrs
    ends = np.cumsum([0, *(op.size(d) for d in whole.parts)])
    return slice(int(ends[at]), int(ends[at + 1]))


def _slice(op: Applied, x: Operand) -> Array:
    whole, at = op.attrs
    moved = x.along(op.like({whole.parts[at]: whole}))
    return moved[(slice(None),) * op.labels.index(whole.parts[at]) + (_span(op),)]


def _pad(op: Applied, x: Operand) -> Array:
    whole, at = op.attrs
    made = np.zeros(op.shape, x.value.dtype)
    made[(slice(None),) * op.labels.index(whole) + (_span(op),)] = x.along(op.like({whole: whole.parts[at]}))
    return made


# In alphabets and proofs


def _wholes(letters: Letters, types: Sequence[Type]) -> Iterator[Attrs]:
    yield from ((d,) for d in letters.dims("sums"))


def _each_part(letters: Letters, types: Sequence[Type]) -> Iterator[Attrs]:
    yield from ((d, i) for d in letters.dims("sums") for i in range(len(d.parts)))


def _pad_core(term: Term, x: Term) -> Term:
    whole, at = term.attrs
    assert isinstance(whole, Dim) and isinstance(at, int)
    around = [
        x if i == at else apply("zeros", attrs=[part if d == whole.parts[at] else d for d in x.type.dims])
        for i, part in enumerate(whole.parts)
    ]
    return apply("concat", *around, attrs=[whole])


def joined_code(term: Term, args: Sequence[Code], shapes: Shapes) -> Code:
    """Sums of dimensions are binary: `n+o+q` is `n+(o+q)`."""

    def joined(parts: Sequence[Code], whole: Code) -> Code:
        return parts[0] if len(parts) == 1 else ("Concat", whole, parts[0], joined(parts[1:], whole[-1]))

    (whole,) = term.attrs
    assert isinstance(whole, Dim)
    return joined(args, shapes.dim(whole))


def part_code(term: Term, args: Sequence[Code], shapes: Shapes) -> Code:
    """Part `which`: the first, or a part of the rest."""

    def nth(x: Code, whole: Code, at: int, parts: int) -> Code:
        if parts == 1:
            return x
        if at == 0:
            return ("Slice", x, whole, "0")
        return nth(("Slice", x, whole, "1"), whole[-1], at - 1, parts - 1)

    whole, which = term.attrs
    assert isinstance(whole, Dim) and isinstance(which, int)
    return nth(args[0], shapes.dim(whole), which, shapes.parts(whole))


# In programs


class Cut(NamedTuple):
    """What is taken along one dimension, in order."""

    dim: int
    start: int
    limit: int


def cut_by(op: Op, result: Tensor) -> Cut | None:
    """What a slice, or a split for one of its results, takes; None where that is along several dimensions, or not all
    in a row."""
    if op.name == "split":
        sizes, i = op.params["sizes"], op.outputs.index(result)
        start = int(sum(sizes[:i]))
        return Cut(op.params["axis"], start, start + int(sizes[i]))
    cut = [d for d, n in enumerate(op.inputs[0].shape) if n != result.shape[d]]
    if len(cut) != 1 or any(s != 1 for s in op.params["strides"] or ()):
        return None
    return Cut(cut[0], op.params["start_indices"][cut[0]], op.params["limit_indices"][cut[0]])


def is_zero(t: Tensor) -> bool:
    return t.literal is not None and np.ndim(t.literal) == 0 and not np.any(t.literal)


class Pad(NamedTuple):
    """Zeros around an operand, along one dimension."""

    dim: int
    low: int
    high: int


def padded_by(view: View, op: Op) -> Pad | None:
    """The zeros that a pad puts around its operand; None where that is along several dimensions, or not zeros."""
    config = op.params["padding_config"]
    cut = [d for d, c in enumerate(config) if tuple(c) != (0, 0, 0)]
    if len(cut) != 1 or not is_zero(view.cast_from(op.inputs[1])):
        return None
    low, high, inside = map(int, config[cut[0]])
    return None if low < 0 or high < 0 or inside else Pad(cut[0], low, high)


def _see_concat(view: View, op: Op, value: Value, dims: Dims) -> Iterator[Seen]:
    """Of two: of more, the first and the rest."""
    at = op.params["dimension"]
    operands = op.inputs if len(op.inputs) == 2 else (op.inputs[0], view.rest(op).outputs[0])
    parts = [dims.fresh(t.shape[at]) for t in operands]
    args = tuple(Value(t, put_at(value.ids, at, part)) for t, part in zip(operands, parts, strict=True))
    yield Seen(args, ((value.ids[at], *parts),), op)


def _see_slice(view: View, op: Op, value: Value, dims: Dims) -> Iterator[Seen]:
    """A part of two, if it is first or last."""
    cut = cut_by(op, value.tensor)
    if cut is not None and (cut.start == 0 or cut.limit == op.inputs[0].shape[cut.dim]):
        whole = dims.fresh(op.inputs[0].shape[cut.dim])
        args = values(op, [put_at(value.ids, cut.dim, whole)])
        yield Seen(args, ((whole, value.ids[cut.dim]), 0 if cut.start == 0 else 1), op)


def _see_pad(view: View, op: Op, value: Value, dims: Dims) -> Iterator[Seen]:
    pad = padded_by(view, op)
    if pad is not None and (pad.low == 0 or pad.high == 0):
        part = dims.fresh(op.inputs[0].shape[pad.dim])
        args = (Value(op.inputs[0], put_at(value.ids, pad.dim, part)),)
        yield Seen(args, ((value.ids[pad.dim], part), 0 if pad.low == 0 else 1), op)


def _emit_concat(e: Emitter, term: Term) -> Named:
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
    array = e.call(_joined, *(arrays[::-1] if whole in e.turned else arrays), dimension=at)
    return Named(array, (*rest[:at], e.one(whole), *rest[at:]))


def _joined(*arrays: Any, dimension: int) -> Any:
    return lax.concatenate(arrays, dimension)


def _emit_slice(e: Emitter, term: Term) -> Named:
    whole, which = term.attrs
    assert isinstance(whole, Dim) and isinstance(which, int)
    x, at = e.term(term.args[0]), e.one(whole)
    part, start, limit = e.part(whole, which)
    if at not in x.ids:
        return x
    d = x.ids.index(at)
    return e.opened(Named(e.cut(x.array, start, limit, d), put_at(x.ids, d, part)))


def padded(e: Emitter, x: Named, part: int, whole: int, start: int) -> Named:
    """Zeros around a part of a whole that begins at `start`."""
    x = e.with_ids(x, part)
    d = x.ids.index(part)
    config = [(0, 0, 0)] * len(x.ids)
    config[d] = (start, e.dims.size[whole] - start - e.dims.size[part], 0)
    return Named(e.call(_among_zeros, x.array, config=tuple(config)), put_at(x.ids, d, whole))


def _among_zeros(x: Any, config: Sequence[tuple[int, int, int]]) -> Any:
    return lax.pad(x, jnp.zeros((), x.dtype), config)


def _emit_pad(e: Emitter, term: Term) -> Named:
    whole, which = term.attrs
    assert isinstance(whole, Dim) and isinstance(which, int)
    part, start, _ = e.part(whole, which)
    (x,) = e.arguments(term, (part,))
    return padded(e, x, part, e.one(whole), start)


register(
    "concat",
    RuleOp(
        arity=None,
        naming="whole",
        traits=traits(),
        type=_concat_type,
        meaning=_concat,
        choices=_wholes,
        core=None,
        code=joined_code,
        seen={"concatenate": _see_concat},
        emit=_emit_concat,
    ),
)
register(
    SLICE,
    RuleOp(
        arity=1,
        naming="part",
        traits=traits(),
        type=_slice_type,
        meaning=_slice,
        choices=_each_part,
        core=None,
        code=part_code,
        seen={"slice": _see_slice, "split": _see_slice},
        emit=_emit_slice,
    ),
)
register(
    "pad",
    RuleOp(
        arity=1,
        naming="part",
        traits=traits(),
        type=_pad_type,
        meaning=_pad,
        choices=_each_part,
        core=_pad_core,
        code=None,
        seen={"pad": _see_pad},
        emit=_emit_pad,
    ),
)
