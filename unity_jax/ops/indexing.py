"""Gather and scatter: embedding lookups, their gradients, selections by index.

    table [vocab, embed], ids [batch, seq, 1] -> [batch, seq, embed]:  ([i,j], [k,l,m]) -> ([k,l,j]) sum={i}

A table split by rows answers only for the rows it holds: each device looks up its own and contributes zero elsewhere,
and the partial results are summed. The gradient is the mirror image: each device adds the updates of its own rows and
drops the others, without communication. A TPU takes as long for a row that it drops as for one that it adds, so there
those of its own are sorted out first (`own_rows`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import GatherScatterMode

from unity_jax import _compat
from unity_jax.ops.rule import Label, Rule, Shard, identity, make_rule, register
from unity_jax.pcg.graph import Op


@dataclass(frozen=True)
class Numbers:
    """What gathers and scatters have in common. A *window* is the block of the operand that one index vector selects.

    `window_dims`: where the operand's dimensions appear in the result of a gather (the updates of a scatter), in
    order, without the `dropped` (collapsed, inserted) and the `batching` ones; `indexed`: the operand dimension that
    each component of an index vector addresses; `indices_batching`: the batch dimensions of the indices, one for each
    of `batching`.
    """

    window_dims: tuple[int, ...]
    dropped: tuple[int, ...]
    indexed: tuple[int, ...]
    batching: tuple[int, ...]
    indices_batching: tuple[int, ...]

    @staticmethod
    def of(op: Op) -> Numbers:
        n = op.params["dimension_numbers"]
        if op.name == "gather":
            return Numbers(
                n.offset_dims,
                n.collapsed_slice_dims,
                n.start_index_map,
                n.operand_batching_dims,
                n.start_indices_batching_dims,
            )
        return Numbers(
            n.update_window_dims,
            n.inserted_window_dims,
            n.scatter_dims_to_operand_dims,
            n.operand_batching_dims,
            n.scatter_indices_batching_dims,
        )

    def windowed(self, rank: int) -> list[int]:
        """The operand dimensions that `window_dims` stand for."""
        return [d for d in range(rank) if d not in self.dropped and d not in self.batching]


def _labels(
    op: Op, numbers: Numbers, blocks: tuple[int, ...], window: Sequence[int]
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


def _split_rows(shard: Shard, labels: Sequence[Label]) -> list[int]:
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
    """The primitive with changed parameters; promises about the order of indices hold for untouched indices only."""
    promises = {} if ordered else {"indices_are_sorted": False, "unique_indices": False}
    return _compat.bind(shard.op.eqn, operands, {**shard.op.params, **params, **promises})


def _padded_indices(shard: Shard) -> bool:
    return any(shard.is_padded(f) for dim in shard.rule.operands[1] for f in dim)


# Gather


@register("gather")
def gather(op: Op) -> Rule:
    numbers, window = Numbers.of(op), op.params["slice_sizes"]
    operand, indices, block = _labels(op, numbers, op.outputs[0].shape, window)
    dtype = op.outputs[0].dtype
    kind = "replicate" if _compat.is_key(dtype) else "max" if dtype == np.bool_ else "sum"
    return make_rule(
        op,
        [operand, indices],
        [block],
        kinds={label: kind for label in operand if str(label).startswith("r")},
        linear=[{0}] if _compat.is_float(dtype) and not _fills(op) else [],
        local=lambda shard, table, ids: _gather_shard(shard, numbers, operand, table, ids),
        bytes=lambda shard: 2.0 * shard.result_bytes() + shard.operand_bytes(1),
        mask=False,  # an index inside the table is never one of its padding
    )


def _fills(op: Op) -> bool:
    """Whether rows outside of the table are a number, of which terms of a sum would have one each."""
    fill = op.params["fill_value"]
    return op.params["mode"] == GatherScatterMode.FILL_OR_DROP and bool(fill) and not np.isnan(fill)


def _gather_shard(shard: Shard, numbers: Numbers, labels: Sequence[Label], table: Any, ids: Any) -> Any:
    params = dict(shard.op.params)
    window = params["slice_sizes"]
    params["slice_sizes"] = tuple(
        n if str(label).startswith("w") else size for n, label, size in zip(table.shape, labels, window, strict=True)
    )
    rows = _split_rows(shard, labels)
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
    (found,) = _bind(shard, (table, clipped), params, False)
    mine = jnp.expand_dims(mine, numbers.window_dims)
    return jnp.where(mine, found, identity("max" if found.dtype == np.bool_ else "sum", found.dtype))


# Scatter


def is_scatter(op: Op) -> bool:
    return op.name.startswith("scatter")


def addresses_rows(op: Op) -> bool:
    """Whether it reads or writes parts of its first operand by index."""
    return op.name == "gather" or is_scatter(op)


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
    operand, indices, block = _labels(op, numbers, updates.shape, window)
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
        local=lambda shard, *xs: _scatter_shard(shard, numbers, operand, window, *xs),
        flops=math.prod(updates.shape),
        bytes=_scatter_bytes,
    )


def _scatter_shard(
    shard: Shard, numbers: Numbers, labels: Sequence[Label], window: Sequence[int], x: Any, ids: Any, updates: Any
) -> Any:
    axes = _summed_axes(shard)
    if axes and not shard.onto_zeros:  # the operand is one of the terms: one device adds it
        x = jnp.where(lax.axis_index(axes) == 0, x, jnp.zeros_like(x))
    params, rows = {}, _split_rows(shard, labels)
    if rows:
        clipped, inside, local = _rows(shard, numbers, rows, window, ids)
        drop = ~jnp.stack(inside, -1).all(-1)
        if shard.op.params["mode"] == GatherScatterMode.CLIP:
            drop = jnp.zeros_like(drop)
        for d, row in zip(rows, local, strict=True):
            drop |= (row < 0) | (row >= x.shape[d])
            clipped = clipped.at[..., numbers.indexed.index(d)].set(row)
        ids = jnp.where(drop[..., None], -1, clipped)
        params["mode"] = GatherScatterMode.FILL_OR_DROP
    if size := own_rows(shard):
        own = functools.partial(_add_own, rows[0], size)
        return lax.platform_dependent(x, ids, updates, tpu=own, default=lambda *xs: _bind(shard, xs, params, False)[0])
    if math.prod(ids.shape[:-1]) == 1:
        # XLA (of JAX 0.10) reads what this scatter replaces by a slice of `x`, also at an index that is dropped, and
        # merges it with the slice that made our shard by adding their starts unclamped: another shard would leak in.
        x = lax.optimization_barrier(x)
    return _bind(shard, (x, ids, updates), params, not rows and not _padded_indices(shard))


AT_ONCE = 8 * 2**20
"""A table of so many bytes lies on the chip of a TPU while rows are added to it."""
SPREAD = 1.25
"""How many times its even part of the rows a device adds at once: ids are not spread quite evenly."""
_LEAST, _LEAST_ROWS = 4, 1024
"""Shards of a table, and rows of each, from which on it takes less time to sort out a device's own: on v5e a row is
sorted in 1 cycle, added in 12, and dropped in 14 to 18, but in 6 if the table is on the chip; narrow ones are added in
37 and dropped in 25 (`experiments/tables/rows.py`)."""


def own_rows(shard: Shard) -> int:
    """How many rows each device adds at once to a table that is split by rows, on a TPU: a few more than are its own if
    ids are spread evenly over the table; if they are not, it does that several times. One of 8 devices that has all ids
    takes up to 1.35 times as long as if it went through all on v5e, 1.7 times on v6e; what is less than about half of
    them takes less. 0 where it does go through all. Looking rows up it always does: to put a few in their places takes
    as long as to mask many.
    """
    op = shard.op
    if op.name != "scatter-add" or op.outputs[0].itemsize != 4 or op.inputs[1].shape[-1] != 1:
        return 0
    numbers, batch = Numbers.of(op), op.inputs[1].rank - 1
    (d,) = numbers.indexed
    if numbers.dropped != (d,) or numbers.batching or numbers.window_dims != tuple(range(batch, op.inputs[2].rank)):
        return 0
    factors, every = shard.rule.operands[0][d], math.prod(shard.operand_shape(1))
    ways = shard.ways(factors[0]) if factors else 1
    if ways < _LEAST or every < ways * _LEAST_ROWS or shard.result_bytes() <= AT_ONCE:
        return 0
    return math.ceil(SPREAD * every / ways)


def _add_own(d: int, size: int, table: Any, ids: Any, updates: Any) -> Any:
    """A table to which its own rows are added, so many at once, and none of negative ids."""
    updates, ids = updates.reshape(ids.size, *updates.shape[ids.ndim - 1 :]), ids.reshape(-1)
    own, last = ids >= 0, np.array(table.shape[d], ids.dtype)
    held = own.sum()
    row, at = lax.sort((jnp.where(own, ids, last), lax.iota(jnp.int32, ids.size)), num_keys=1)  # others behind all
    row, at = (jnp.pad(x, (0, -ids.size % size), constant_values=n) for x, n in ((row, last), (at, 0)))
    numbers = lax.ScatterDimensionNumbers(tuple(range(1, table.ndim)), (d,), (d,))

    def add(state: tuple[Any, Any]) -> tuple[Any, Any]:
        start, table = state
        rows, places = (lax.dynamic_slice_in_dim(x, start, size) for x in (row, at))
        found, mode = updates.at[places].get(mode="promise_in_bounds"), GatherScatterMode.FILL_OR_DROP
        return start + size, lax.scatter_add(table, rows[:, None], found, numbers, indices_are_sorted=True, mode=mode)

    return lax.while_loop(lambda state: state[0] < held, add, (np.int32(0), table))[1]


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
