"""Rows chosen from a value or put into one, and parts cut out of a sum: how such ops are seen and how they are made.

A slice or a pad is a selection of rows in order, and, at either end, a part of a sum (`slice`, `pad` of the language);
a gather or scatter-add selects rows by numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from unity_jax.pcg.graph import Op, Tensor
from unity_jax.rewrite.dims import CannotEmit, Dims, Ids, Named, Seen, Selection, Value, put_at, values
from unity_jax.rewrite.language import Dim, Term

if TYPE_CHECKING:
    from unity_jax.rewrite.emit import Emitter
    from unity_jax.rewrite.view import View

# As ops of the language: each function takes the op, its result as a value, and makes the values of its operands.


def seen_slice(view: View, op: Op, value: Value, dims: Dims) -> Iterator[Seen]:
    shape, start = op.inputs[0].shape, op.params["start_indices"]
    cut = [d for d, n in enumerate(shape) if n != op.outputs[0].shape[d]]
    if len(cut) == 1 and not any(s != 1 for s in op.params["strides"] or ()):
        yield from _cut(op, value, dims, cut[0], start[cut[0]], op.params["limit_indices"][cut[0]])


def seen_split(view: View, op: Op, value: Value, dims: Dims) -> Iterator[Seen]:
    at, sizes = op.params["axis"], op.params["sizes"]
    i = op.outputs.index(value.tensor)
    start = int(sum(sizes[:i]))
    yield from _cut(op, value, dims, at, start, start + int(sizes[i]))


def _cut(op: Op, value: Value, dims: Dims, at: int, start: int, limit: int) -> Iterator[Seen]:
    """Rows from `start` to `limit`: a part of a sum if they are first or last, and a selection; one of two is what is
    left of a stack."""
    whole = dims.fresh(op.inputs[0].shape[at])
    args = values(op, [put_at(value.ids, at, whole)])
    if start == 0 or limit == dims.size[whole]:
        yield Seen("slice", args, ((whole, value.ids[at]), 0 if start == 0 else 1), op)
    if dims.size[whole] == 2:
        yield Seen("unstack", args, ((whole,), int(start)), op)
    yield Seen("take", args, ((whole,),), Selection("slice", (value.ids[at],), None, int(start)))


def seen_pad(view: View, op: Op, value: Value, dims: Dims) -> Iterator[Seen]:
    config = op.params["padding_config"]
    cut = [d for d, c in enumerate(config) if tuple(c) != (0, 0, 0)]
    if len(cut) != 1 or not _is_zero(view.cast_from(op.inputs[1])):
        return
    (at,) = cut
    low, high, inside = map(int, config[at])
    if low < 0 or high < 0 or inside:
        return
    part = dims.fresh(op.inputs[0].shape[at])
    args = (Value(op.inputs[0], put_at(value.ids, at, part)),)
    if low == 0 or high == 0:
        yield Seen("pad", args, ((value.ids[at], part), 0 if low == 0 else 1), op)
    yield Seen("put", args, ((part,), (value.ids[at],)), Selection("slice", (part,), None, low))


def seen_dynamic_slice(view: View, op: Op, value: Value, dims: Dims) -> Iterator[Seen]:
    x, *starts = op.inputs
    cut = [d for d, n in enumerate(x.shape) if n != op.outputs[0].shape[d]]
    if len(cut) != 1 or any(not _is_zero(s) for d, s in enumerate(starts) if d != cut[0]):
        return
    (at,) = cut
    whole = dims.fresh(x.shape[at])
    rows = Selection("dynamic_slice", (value.ids[at],), Value(starts[at], ()))
    yield Seen("take", (Value(x, put_at(value.ids, at, whole)),), ((whole,),), rows)


def seen_gather(view: View, op: Op, value: Value, dims: Dims) -> Iterator[Seen]:
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
    selection = Selection("gather", tuple(numbers), indices, 0, _rows(op))
    yield Seen("take", (Value(x, tuple(found)),), ((found[rows],),), selection)


def seen_scatter(view: View, op: Op, value: Value, dims: Dims) -> Iterator[Seen]:
    """Rows added at their numbers: into zeros, or into a table."""
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
    selection = Selection("gather", numbers, indices, 0, _rows(op))
    attrs = (tuple(found[at] for at in added), (value.ids[rows],))
    if _is_zero(view.cast_from(view.source(table))):
        yield Seen("put", (Value(updates, tuple(found)),), attrs, selection)
    else:
        yield Seen("scatter", (Value(table, value.ids), Value(updates, tuple(found))), attrs, selection)


def _rows(op: Op) -> tuple[tuple[str, Any], ...]:
    keys = ("mode", "fill_value", "unique_indices", "indices_are_sorted")
    return tuple((k, op.params[k]) for k in keys if k in op.params)


def _is_zero(t: Tensor) -> bool:
    return t.literal is not None and np.ndim(t.literal) == 0 and not np.any(t.literal)


# As ops of a program


def emit_pad(e: Emitter, term: Term) -> Named:
    whole, which = term.attrs
    assert isinstance(whole, Dim) and isinstance(which, int)
    part, start, _ = e.part(whole, which)
    return _padded(e, *e.arguments(term, (part,)), part, e.one(whole), start)


def _padded(e: Emitter, x: Named, part: int, whole: int, start: int) -> Named:
    x = e.with_ids(x, part)
    d = x.ids.index(part)
    config = [(0, 0, 0)] * len(x.ids)
    config[d] = (start, e.dims.size[whole] - start - e.dims.size[part], 0)
    return Named(lax.pad(x.array, jnp.zeros((), x.array.dtype), config), (*x.ids[:d], whole, *x.ids[d + 1 :]))


def emit_take(e: Emitter, term: Term) -> Named:
    x, how, rows = e.term(term.args[0]), e.selection(term), e.one(term.args[-1].type.ids)  # type: ignore[arg-type]
    ids = e.plain(how.ids)
    if rows not in x.ids:
        return x  # all rows are equal
    d = x.ids.index(rows)
    if how.kind == "slice":
        array = lax.slice_in_dim(x.array, how.start, how.start + e.dims.size[ids[0]], axis=d)
    elif how.kind == "dynamic_slice":
        assert how.indices is not None
        array = lax.dynamic_slice_in_dim(x.array, e.arrays[how.indices.tensor], e.dims.size[ids[0]], axis=d)
    else:
        return _gathered(e, x, d, how, ids)
    return Named(array, (*x.ids[:d], ids[0], *x.ids[d + 1 :]))


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
    sizes = [n if d in kept else 1 for d, n in enumerate(x.array.shape)]
    indices = e.arrays[how.indices.tensor]
    array = lax.gather(x.array, indices, numbers, tuple(sizes), **dict(how.params))
    return Named(array, (*ids, *(x.ids[d] for d in kept)))


def _rows_of(e: Emitter, term: Term) -> tuple[Named, Ids]:
    """What is put somewhere, and the dimensions of its row numbers: it has them all, also where its rows are equal."""
    ids = e.plain(e.selection(term).ids)
    return e.with_ids(e.arguments(term, ids)[-1], *ids), ids


def emit_put(e: Emitter, term: Term) -> Named:
    how, rows = e.selection(term), e.one(term.args[-1].type.ids)  # type: ignore[arg-type]
    u, ids = _rows_of(e, term)
    if how.kind == "slice":
        return _padded(e, u, ids[0], rows, how.start)
    added = e.named(term)
    kept = tuple(i for i in u.ids if i not in added)
    zeros = Named(jnp.zeros([e.dims.size[i] for i in (rows, *kept)], u.array.dtype), (rows, *kept))
    return _added(e, zeros, u, how, ids, rows, added)


def emit_scatter(e: Emitter, term: Term) -> Named:
    t = e.term(term.args[0])
    how, rows = e.selection(term), e.one(term.args[-1].type.ids)  # type: ignore[arg-type]
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
    params = {k: v for k, v in how.params if k != "fill_value"}
    array = lax.scatter_add(t.array, e.arrays[how.indices.tensor], u.array, numbers, **params)
    return Named(array, t.ids)
