"""Rows by number: `take(x, i)` of a table, `put(u, i; n)` into zeros, `scatter(t, u, i; n)` onto a table.

A gather or scatter-add selects rows by numbers, a slice or a pad in order, a dynamic slice in order from a number on,
an unstack one row, of which no dimension is left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from unity_jax.pcg.graph import Op
from unity_jax.rewrite.dims import CannotEmit, Dims, Ids, Named, Seen, Selection, Value, put_at, values
from unity_jax.rewrite.emitter import Emitter
from unity_jax.rewrite.language import Attrs, Dim, Term, Type, Types, are_values, need, replaced
from unity_jax.rewrite.meaning import Applied, Array, Operand
from unity_jax.rewrite.ops.contraction import product, subsets
from unity_jax.rewrite.ops.parts import cut_by, is_zero, padded, padded_by
from unity_jax.rewrite.table import Code, Letters, RuleOp, Shapes, apply, register, traits
from unity_jax.rewrite.view import View

TAKE, PUT = "take", "put"


def _rows(i: Type) -> Dim:
    """The dimension that row numbers count in."""
    need(i.ids is not None and i.ids not in i.dims, f"{i} holds no numbers of rows elsewhere")
    return i.ids  # type: ignore[return-value]


def _take_type(types: Types, attrs: Attrs) -> Type:
    """`take(x, i)`: rows of `x` by number; dimensions that both have are a batch."""
    x, i = types
    return replaced(x, _rows(i), [d for d in i.dims if d not in x.dims])


def _onehot_type(types: Types, attrs: Attrs) -> Type:
    """One at each row number, zero elsewhere."""
    (i,) = types
    return Type((*i.dims, _rows(i)), i.devices)


def _put_type(types: Types, attrs: Attrs) -> Type:
    """`put(u, i; p)`: the rows `p` of `u` added up at their numbers, zeros elsewhere; other dimensions of `i` are a
    batch."""
    u, i = types
    are_values(u)
    rows = _rows(i)
    need(bool(attrs) and set(attrs) <= set(i.dims) <= set(u.dims), f"rows of {u} by the numbers {i}")
    return Type((*(d for d in u.dims if d not in attrs), rows), u.devices)


def _scatter_type(types: Types, attrs: Attrs) -> Type:
    """`scatter(t, u, i; p)`: `add(t, put(u, i; p))`."""
    t, u, i = types
    need(set(_put_type((u, i), attrs).dims) == set(t.dims), f"{t} does not take rows of {u}")
    return t


# In exact arithmetic, alphabets and proofs


def _take(op: Applied, x: Operand, i: Operand) -> Array:
    return op.contract(x, op.one_hot(i), [i.type.ids])


def _put(op: Applied, u: Operand, i: Operand) -> Array:
    return op.contract(u, op.one_hot(i), op.attrs)


def _scatter(op: Applied, t: Operand, u: Operand, i: Operand) -> Array:
    return op.numbers.settle(t.value + _put(op, u, i))


def _nothing(letters: Letters, types: Sequence[Type]) -> Iterator[Attrs]:
    yield ()


def _of_numbers(letters: Letters, types: Sequence[Type]) -> Iterator[Attrs]:
    yield from subsets(types[-1].dims)


def _put_core(term: Term, u: Term, i: Term) -> Term:
    return apply("sum", product(u, apply("onehot", i)), attrs=term.attrs)


def _scatter_core(term: Term, x: Term, u: Term, i: Term) -> Term:
    return apply("add", x, _put_core(term, u, i))


def _take_code(term: Term, args: Sequence[Code], shapes: Shapes) -> Code:
    return ("Take", *args, shapes.dim(_rows(term.args[1].type)))


def _onehot_code(term: Term, args: Sequence[Code], shapes: Shapes) -> Code:
    return ("OneHot", *args, shapes.dim(_rows(term.args[0].type)))


# As ops of a program


def _see_part(view: View, op: Op, value: Value, dims: Dims) -> Iterator[Seen]:
    cut = cut_by(op, value.tensor)
    if cut is not None:
        whole = dims.fresh(op.inputs[0].shape[cut.dim])
        rows = Selection("slice", (value.ids[cut.dim],), None, int(cut.start))
        yield Seen(values(op, [put_at(value.ids, cut.dim, whole)]), ((whole,),), rows)


def _see_one(view: View, op: Op, value: Value, dims: Dims) -> Iterator[Seen]:
    at = op.params.get("axis", 0)
    whole = dims.fresh(len(op.outputs))
    rows = Selection("slice", (), None, op.outputs.index(value.tensor))
    yield Seen(values(op, [(*value.ids[:at], whole, *value.ids[at:])]), ((whole,),), rows)


def _see_pad(view: View, op: Op, value: Value, dims: Dims) -> Iterator[Seen]:
    pad = padded_by(view, op)
    if pad is not None:
        part = dims.fresh(op.inputs[0].shape[pad.dim])
        args = (Value(op.inputs[0], put_at(value.ids, pad.dim, part)),)
        yield Seen(args, ((part,), (value.ids[pad.dim],)), Selection("slice", (part,), None, pad.low))


def _see_dynamic_slice(view: View, op: Op, value: Value, dims: Dims) -> Iterator[Seen]:
    x, *starts = op.inputs
    cut = [d for d, n in enumerate(x.shape) if n != op.outputs[0].shape[d]]
    if len(cut) != 1 or any(not is_zero(s) for d, s in enumerate(starts) if d != cut[0]):
        return
    (at,) = cut
    whole = dims.fresh(x.shape[at])
    rows = Selection("dynamic_slice", (value.ids[at],), Value(starts[at], ()))
    yield Seen((Value(x, put_at(value.ids, at, whole)),), ((whole,),), rows)


def _see_gather(view: View, op: Op, value: Value, dims: Dims) -> Iterator[Seen]:
    """Rows of one dimension, by numbers; dimensions that operand and numbers share are a batch."""
    x, numbered = op.inputs
    n = op.params["dimension_numbers"]
    batch = tuple(n.operand_batching_dims)
    if len(n.start_index_map) != 1 or n.collapsed_slice_dims != n.start_index_map:
        return
    (rows,) = n.start_index_map
    sizes = op.params["slice_sizes"]
    if any(sizes[d] != x.shape[d] for d in range(x.rank) if d != rows and d not in batch):
        return
    found = [dims.fresh(x.shape[d]) for d in range(x.rank)]
    kept = [d for d in range(x.rank) if d != rows and d not in batch]
    for d, out in zip(kept, n.offset_dims, strict=True):
        found[d] = value.ids[out]
    numbers = [i for d, i in enumerate(value.ids) if d not in n.offset_dims]
    for d, at in zip(batch, n.start_indices_batching_dims, strict=True):
        found[d] = numbers[at]
    indices = Value(view.same.get(numbered, numbered), (*numbers, dims.fresh(1)))
    selection = Selection("gather", tuple(numbers), indices, 0, _settings(op))
    yield Seen((Value(x, tuple(found)),), ((found[rows],),), selection)


def _see_put(view: View, op: Op, value: Value, dims: Dims) -> Iterator[Seen]:
    if is_zero(view.cast_from(view.source(op.inputs[0]))):
        for updates, attrs, selection in _scattered(view, op, value, dims):
            yield Seen((updates,), attrs, selection)


def _see_scatter(view: View, op: Op, value: Value, dims: Dims) -> Iterator[Seen]:
    table = op.inputs[0]
    if not is_zero(view.cast_from(view.source(table))):
        for updates, attrs, selection in _scattered(view, op, value, dims):
            yield Seen((Value(table, value.ids), updates), attrs, selection)


def _scattered(view: View, op: Op, value: Value, dims: Dims) -> Iterator[tuple[Value, tuple[Ids, Ids], Selection]]:
    """The rows that are added at their numbers, the dimensions that are added up and that numbers count in, and how."""
    table, numbered, updates = op.inputs
    n = op.params["dimension_numbers"]
    batch = tuple(n.operand_batching_dims)
    if len(n.scatter_dims_to_operand_dims) != 1 or n.inserted_window_dims != n.scatter_dims_to_operand_dims:
        return
    (rows,) = n.scatter_dims_to_operand_dims
    kept = [d for d in range(table.rank) if d != rows and d not in batch]
    windows = [updates.shape[d] for d in n.update_window_dims]
    if windows != [table.shape[d] for d in kept]:
        return
    found = [-1] * updates.rank
    for d, at in zip(kept, n.update_window_dims, strict=True):
        found[at] = value.ids[d]
    places = [d for d in range(updates.rank) if d not in n.update_window_dims]
    for d, at in zip(batch, n.scatter_indices_batching_dims, strict=True):
        found[places[at]] = value.ids[d]
    added = tuple(at for at in places if found[at] < 0)
    for at in added:
        found[at] = dims.fresh(updates.shape[at])
    numbers = tuple(found[at] for at in places)
    indices = Value(view.same.get(numbered, numbered), (*numbers, dims.fresh(1)))
    selection = Selection("gather", numbers, indices, 0, _settings(op))
    yield Value(updates, tuple(found)), (tuple(found[at] for at in added), (value.ids[rows],)), selection


def _settings(op: Op) -> tuple[tuple[str, Any], ...]:
    keys = ("mode", "fill_value", "unique_indices", "indices_are_sorted")
    return tuple((k, op.params[k]) for k in keys if k in op.params)


def _emit_take(e: Emitter, term: Term) -> Named:
    x, how, rows = e.term(term.args[0]), e.selection(term), e.one(_rows(term.args[-1].type))
    ids = e.plain(how.ids)
    if rows not in x.ids:
        return x  # all rows are equal
    d = x.ids.index(rows)
    if not ids and how.kind == "slice":
        return Named(e.at(x.array, how.start, d), (*x.ids[:d], *x.ids[d + 1 :]))
    if how.kind == "slice":
        array = e.cut(x.array, how.start, how.start + e.dims.size[ids[0]], d)
    elif how.kind == "dynamic_slice":
        assert how.indices is not None
        start, size = e.arrays[how.indices.tensor], e.dims.size[ids[0]]
        array = e.call(lax.dynamic_slice_in_dim, x.array, start, slice_size=size, axis=d)
    else:
        return _gathered(e, x, d, how, ids)
    return Named(array, put_at(x.ids, d, ids[0]))


def _gathered(e: Emitter, x: Named, at: int, how: Selection, ids: Ids) -> Named:
    assert how.indices is not None
    batch = [d for d, i in enumerate(x.ids) if i in ids]
    kept = [d for d in range(len(x.ids)) if d != at and d not in batch]
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(len(ids), len(ids) + len(kept))),
        collapsed_slice_dims=(at,),
        start_index_map=(at,),
        operand_batching_dims=tuple(batch),
        start_indices_batching_dims=tuple(ids.index(x.ids[d]) for d in batch),
    )
    sizes = tuple(n if d in kept else 1 for d, n in enumerate(x.array.shape))
    params = {"dimension_numbers": numbers, "slice_sizes": sizes, **dict(how.params)}
    array = e.call(lax.gather, x.array, e.arrays[how.indices.tensor], **params)
    return Named(array, (*ids, *(x.ids[d] for d in kept)))


def _rows_of(e: Emitter, term: Term) -> tuple[Named, Ids]:
    """What is put somewhere, and the dimensions of its row numbers: it has them all, also where its rows are equal."""
    ids = e.plain(e.selection(term).ids)
    return e.with_ids(e.arguments(term, ids)[-1], *ids), ids


def _emit_put(e: Emitter, term: Term) -> Named:
    how, rows = e.selection(term), e.one(_rows(term.args[-1].type))
    u, ids = _rows_of(e, term)
    if how.kind == "slice":
        return padded(e, u, ids[0], rows, how.start)
    added = e.named(term)
    kept = tuple(i for i in u.ids if i not in added)
    shape = tuple(e.dims.size[i] for i in (rows, *kept))
    zeros = e.call(jnp.zeros, shape=shape, dtype=u.array.dtype)
    return _added(e, Named(zeros, (rows, *kept)), u, how, ids, rows, added)


def _emit_scatter(e: Emitter, term: Term) -> Named:
    t = e.term(term.args[0])
    how, rows = e.selection(term), e.one(_rows(term.args[-1].type))
    if how.kind != "gather":
        raise CannotEmit("rows in order are added, not scattered")
    u, ids = _rows_of(e, term)
    added = e.named(term)
    return _added(e, e.with_ids(t, rows, *(i for i in u.ids if i not in added)), u, how, ids, rows, added)


def _added(e: Emitter, t: Named, u: Named, how: Selection, ids: Ids, rows: int, added: Sequence[int]) -> Named:
    """Rows added to `t` at their numbers; what operand and numbers share is a batch."""
    assert how.indices is not None
    if how.kind != "gather" or t.array.dtype != u.array.dtype:
        raise CannotEmit("rows of another dtype, or in order")
    batch = [i for i in ids if i not in added]
    windows = [i for i in t.ids if i != rows and i not in batch]
    u = Named(e.aligned(u, (*ids, *windows)), (*ids, *windows))
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(len(ids), len(u.ids))),
        inserted_window_dims=(t.ids.index(rows),),
        scatter_dims_to_operand_dims=(t.ids.index(rows),),
        operand_batching_dims=tuple(sorted(t.ids.index(i) for i in batch)),
        scatter_indices_batching_dims=tuple(ids.index(i) for i in sorted(batch, key=t.ids.index)),
    )
    params = {"dimension_numbers": numbers, **{k: v for k, v in how.params if k != "fill_value"}}
    array = e.call(lax.scatter_add, t.array, e.arrays[how.indices.tensor], u.array, **params)
    return Named(array, t.ids)


register(
    TAKE,
    RuleOp(
        arity=2,
        naming="nothing",
        traits=traits("rows"),
        type=_take_type,
        meaning=_take,
        choices=_nothing,
        core=None,
        code=_take_code,
        seen={
            "gather": _see_gather,
            "dynamic_slice": _see_dynamic_slice,
            "slice": _see_part,
            "split": _see_part,
            "unstack": _see_one,
        },
        emit=_emit_take,
    ),
)
register(
    "onehot",
    RuleOp(
        arity=1,
        naming="nothing",
        traits=traits("rows"),
        type=_onehot_type,
        meaning=lambda op, i: op.one_hot(i).along(op.labels),
        choices=None,
        core=None,
        code=_onehot_code,
        seen={},
        emit=None,
    ),
)
register(
    PUT,
    RuleOp(
        arity=2,
        naming="dims",
        traits=traits("rows"),
        type=_put_type,
        meaning=_put,
        choices=_of_numbers,
        core=_put_core,
        code=None,
        seen={"scatter-add": _see_put, "pad": _see_pad},
        emit=_emit_put,
    ),
)
register(
    "scatter",
    RuleOp(
        arity=3,
        naming="dims",
        traits=traits("rows"),
        type=_scatter_type,
        meaning=_scatter,
        choices=_of_numbers,
        core=_scatter_core,
        code=None,
        seen={"scatter-add": _see_scatter},
        emit=_emit_scatter,
    ),
)
