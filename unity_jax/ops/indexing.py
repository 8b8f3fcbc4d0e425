"""Gather and scatter: embedding lookups, their gradients, selections by index.

    table [vocab, embed], ids [batch, seq, 1] -> [batch, seq, embed]:  ([i,j], [k,l,m]) -> ([k,l,j]) sum={i}

A table split by rows answers only for the rows it holds: each device looks up its own and contributes zero elsewhere,
and the partial results are summed. The gradient is the mirror image: each device adds the updates of its own rows and
drops the others, without communication. A TPU takes as long for a row that it drops as for one that it adds, so there
those of its own are sorted out first (`ops.own_rows`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import GatherScatterMode

from unity_jax import _compat
from unity_jax.ops.numbers import Numbers, is_gather, is_scatter
from unity_jax.ops.own_rows import SUMMED, add_own, own_rows
from unity_jax.ops.rule import Label, Rule, Shard, identity, make_rule, register
from unity_jax.pcg.graph import Op


def labels_of(
    op: Op, numbers: Numbers, blocks: Sequence[int], window: Sequence[int]
) -> tuple[list[Label], list[Label], list[Label]]:
    """The labels of operand, indices and blocks (the result of a gather, the updates of a scatter).

    A batch dimension of the indices is `b0`, a window dimension taken whole is `w0`, one from which a single row is
    taken by index is `r0`; a partly covered one must not be split.
    """
    operand, indices = op.inputs[0], op.inputs[1]
    batch = [f"b{i}" for i in range(indices.rank - 1)]
    labels: list[Label] = []
    for d, size in enumerate(window):
        if d in numbers.batching:
            labels.append(batch[numbers.indices_batching[numbers.batching.index(d)]])
        elif size == operand.shape[d]:
            labels.append(f"w{d}")
        else:
            labels.append(f"r{d}" if size == 1 and d in numbers.indexed else None)
    windows = dict(zip(numbers.window_dims, numbers.windowed(operand.rank), strict=True))
    rest = iter(batch)
    block: list[Label] = [labels[windows[i]] if i in windows else next(rest) for i in range(len(blocks))]
    return labels, [*batch, None], block


def split_rows(shard: Shard, labels: Sequence[Label]) -> list[int]:
    """The operand dimensions that are split by rows."""
    dims = shard.operand_layouts[0].dims
    return [d for d, label in enumerate(labels) if str(label).startswith("r") and dims[d]]


def _rows(
    shard: Shard, numbers: Numbers, rows: Sequence[int], window: Sequence[int], indices: Any
) -> tuple[Any, list[Any], list[Any]]:
    """Index vectors clipped into the whole operand; per component, whether it was inside; per split row, local ones."""
    shape = shard.op.inputs[0].shape
    limits = [shape[d] - window[d] for d in numbers.indexed]
    top = np.array([min(n, jnp.iinfo(indices.dtype).max) for n in limits], indices.dtype)
    clipped = jnp.clip(indices, jnp.zeros_like(top), top)
    inside = clipped == indices
    clipped = clipped.astype(jnp.int64 if indices.dtype.itemsize == 8 else jnp.int32)
    local = []
    for d in rows:
        component = clipped[..., numbers.indexed.index(d)]
        local.append(component - jnp.asarray(shard.offset(shard.rule.operands[0][d][0]), component.dtype))
    return clipped, [inside[..., i] for i in range(len(limits))], local


def _bind(shard: Shard, operands: Sequence[Any], params: Mapping[str, Any], ordered: bool) -> Any:
    """What the primitive makes with changed parameters; promises about the order of indices hold for untouched ones."""
    promises = {} if ordered else {"indices_are_sorted": False, "unique_indices": False}
    params = {**shard.op.params, **params, **promises}
    (found,) = _compat.bind(shard.op.eqn, operands, {name: value for name, value in params.items() if name != SUMMED})
    return found


def _padded_indices(shard: Shard) -> bool:
    return any(shard.is_padded(f) for dim in shard.rule.operands[1] for f in dim)


# Gather


@register("gather")
def gather(op: Op) -> Rule:
    numbers, window = Numbers.of(op), op.params["slice_sizes"]
    operand, indices, block = labels_of(op, numbers, op.outputs[0].shape, window)
    dtype = op.outputs[0].dtype
    kind = "replicate" if _compat.is_key(dtype) else "max" if dtype == np.bool_ else "sum"
    return make_rule(
        op,
        [operand, indices],
        [block],
        kinds={label: kind for label in operand if str(label).startswith("r")},
        linear=[{0}] if _compat.is_float(dtype) and not fills(op) else [],
        local=lambda shard, table, ids: gather_shard(shard, numbers, operand, table, ids),
        bytes=lambda shard: 2.0 * shard.result_bytes() + shard.operand_bytes(1),
        mask=False,  # an index inside the table is never one of its padding
    )


def fills(op: Op) -> bool:
    """Whether rows outside of the table are a number, of which terms of a sum would have one each."""
    fill = op.params["fill_value"]
    return op.params["mode"] == GatherScatterMode.FILL_OR_DROP and bool(fill) and not np.isnan(fill)


def gather_shard(shard: Shard, numbers: Numbers, labels: Sequence[Label], table: Any, ids: Any) -> Any:
    """What a device looks up of its part; zero, or false, where another one has it."""
    params = dict(shard.op.params)
    window = params["slice_sizes"]
    params["slice_sizes"] = tuple(
        n if str(label).startswith("w") else size for n, label, size in zip(table.shape, labels, window, strict=True)
    )
    rows = split_rows(shard, labels)
    if not rows:
        if params["mode"] == GatherScatterMode.CLIP and math.prod(ids.shape[:-1]) == 1:
            ids = _rows(shard, numbers, [], window, ids)[0]  # XLA makes a slice of it; see `ops.shape._clamped`
        return _bind(shard, (table, ids), params, not _padded_indices(shard))
    clipped, inside, local = _rows(shard, numbers, rows, window, ids)
    fill = params["mode"] == GatherScatterMode.FILL_OR_DROP
    if fill:
        clipped = jnp.where(jnp.stack(inside, -1), clipped, -1)
    mine = True
    for d, row in zip(rows, local, strict=True):
        at = numbers.indexed.index(d)
        held = (row >= 0) & (row < table.shape[d])
        if fill:
            # Outside of the whole table, the first device alone answers, with the fill value.
            first = shard.offset(shard.rule.operands[0][d][0]) == 0
            row = jnp.where(inside[at], row, -1)
            held = jnp.where(inside[at], held, first)
        mine &= held
        clipped = clipped.at[..., at].set(row)
    found = _bind(shard, (table, clipped), params, False)
    mine = jnp.expand_dims(mine, numbers.window_dims)
    return jnp.where(mine, found, identity("max" if found.dtype == np.bool_ else "sum", found.dtype))


# Scatter


def addresses_rows(op: Op) -> bool:
    """Whether it reads or writes parts of its first operand by index."""
    return is_gather(op) or is_scatter(op)


def compares(op: Op) -> bool:
    """Whether a scatter changes one element of each row at most, as the gradient of `take_along_axis` over the last
    dimension does: each element can tell by comparing its own position with the index of its row."""
    if not is_scatter(op) or not op.inputs[0].rank:
        return False
    numbers, operand, indices = Numbers.of(op), op.inputs[0], op.inputs[1]
    rows = math.prod(operand.shape[d] for d in numbers.batching)
    return not numbers.window_dims and len(numbers.indexed) == 1 and math.prod(indices.shape[:-1]) == rows


_REDUCTION = {"scatter-add": "sum", "scatter-sub": "sum", "scatter-max": "max", "scatter-min": "min"}


@register("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-max", "scatter-min")
def scatter(op: Op) -> Rule:
    numbers, updates = Numbers.of(op), op.inputs[2]
    window = [1] * op.inputs[0].rank
    for i, d in zip(numbers.window_dims, numbers.windowed(op.inputs[0].rank), strict=True):
        window[d] = updates.shape[i]
    operand, indices, block = labels_of(op, numbers, updates.shape, window)
    # Updates of one row by several devices are reduced afterwards; which of several `set`s comes last is not known.
    reduction = _REDUCTION.get(op.name, "replicate")
    kinds = {b: reduction for b in indices[:-1] if b not in operand}
    sums = op.name in ("scatter-add", "scatter-sub") or (op.name == "scatter" and op.params["unique_indices"])
    shared = [label if label is not None else f"p{d}" for d, label in enumerate(operand)]
    return make_rule(
        op,
        [shared, indices, block],
        [shared],
        kinds={**kinds, **{label: "replicate" for label in shared if str(label).startswith("p")}},
        linear=[{0, 2}] if sums and _compat.is_float(op.outputs[0].dtype) else [],
        local=lambda shard, x, *xs: scattered(shard, numbers, operand, window, as_term(shard, x), *xs),
        flops=math.prod(updates.shape),
        bytes=_scatter_bytes,
    )


def as_term(shard: Shard, x: Any) -> Any:
    """The operand of a scatter as one of the terms of a sum that its results are: one device adds it."""
    axes = _summed_axes(shard)
    return jnp.where(lax.axis_index(axes) == 0, x, jnp.zeros_like(x)) if axes and not shard.onto_zeros else x


def held_ids(
    shard: Shard, numbers: Numbers, rows: Sequence[int], window: Sequence[int], x: Any, ids: Any
) -> tuple[Any, Any]:
    """Index vectors into a device's part of an operand that is split by `rows`, negative where another device has what
    they address or nothing is there; and whether the whole operand has it."""
    clipped, inside, local = _rows(shard, numbers, rows, window, ids)
    whole = jnp.stack(inside, -1).all(-1)
    mode = shard.op.params["mode"]  # a promise that is not kept: XLA clips what it reads, and drops what it writes
    drops = mode == GatherScatterMode.FILL_OR_DROP if is_gather(shard.op) else mode != GatherScatterMode.CLIP
    drop = ~whole if drops else jnp.zeros_like(whole)
    for d, row in zip(rows, local, strict=True):
        drop |= (row < 0) | (row >= x.shape[d])
        clipped = clipped.at[..., numbers.indexed.index(d)].set(row)
    return jnp.where(drop[..., None], -1, clipped), whole


def scattered(
    shard: Shard, numbers: Numbers, labels: Sequence[Label], window: Sequence[int], x: Any, ids: Any, updates: Any
) -> Any:
    """What a device adds to its part, or puts there."""
    params, rows = {}, split_rows(shard, labels)
    if rows:
        ids, params["mode"] = held_ids(shard, numbers, rows, window, x, ids)[0], GatherScatterMode.FILL_OR_DROP
    if size := 0 if SUMMED in shard.op.params else own_rows(shard):

        def own(x: Any, ids: Any, updates: Any) -> Any:
            return add_own(rows[0], size, x, ids.reshape(-1), updates.reshape(ids.size, *updates.shape[ids.ndim - 1 :]))

        return lax.platform_dependent(x, ids, updates, tpu=own, default=lambda *xs: _bind(shard, xs, params, False))
    if math.prod(ids.shape[:-1]) == 1:
        # XLA (of JAX 0.10) reads what this scatter replaces by a slice of `x`, also at an index that is dropped, and
        # merges it with the slice that made our shard by adding their starts unclamped: another shard would leak in.
        x = lax.optimization_barrier(x)
    return _bind(shard, (x, ids, updates), params, not rows and not _padded_indices(shard))


def _summed_axes(shard: Shard) -> tuple[str, ...]:
    """The mesh axes over which the updates are shared out as terms of a sum."""
    kinds = (f.kind for f in shard.rule.factors)
    return tuple(a for axes, kind in zip(shard.factor_axes, kinds, strict=True) if kind == "sum" for a in axes)


def _scatter_bytes(shard: Shard) -> float:
    """Rows that are read and written where updates go; besides, updates and indices are read."""
    return 2.0 * shard.operand_bytes(2)


def masking_bytes(shard: Shard) -> float:
    """What is read and written to mask the result of a gather, or the operand of a scatter, that is one term of a sum;
    of zeros XLA masks nothing."""
    return 2.0 * shard.result_bytes() if _summed_axes(shard) else 0.0
