"""Rows of a table that a device has itself, among those that all devices look up or add to.

    rows of all     5  1  7  1  4  9        the device has 4 to 7
    sorted          4  5  7  -  -  -        of places 4, 0, 2: in parts, while there are own ones

A TPU takes as long for a row that it drops as for one that it adds, and longer for rows in any order.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import GatherScatterMode

from unity_jax.ops.numbers import Numbers, is_scatter
from unity_jax.ops.rule import Shard

SUMMED = "summed"
"""The parameter of ops on bags (`ops.bags`): which dimensions of their indices are those of bags."""
AT_ONCE = 8 * 2**20
"""A table of so many bytes lies on the chip of a TPU while rows are added to it."""
SPREAD = 1.25
"""How many times its even part of the rows a device adds at once: ids are not spread quite evenly."""
_LEAST, _LEAST_ROWS = 4, 1024
"""Shards of a table, and rows of each, from which on it takes less time to sort out a device's own: on v5e a row is
sorted in 1 cycle, added in 12, and dropped in 14 to 18, but in 6 if the table is on the chip; narrow ones are added in
37 and dropped in 25 (`experiments/tables/rows.py`)."""
_TURNS = 12
"""In how many parts all rows of bags are added: what is looked up for one of them takes memory."""


def own_rows(shard: Shard) -> int:
    """How many rows are a device's own, on a TPU that sorts them out: a few more than its part of all if ids are spread
    evenly over the table; if they are not, it does that several times. One of 8 devices that has all ids takes up to
    1.35 times as long as if it went through all on v5e, 1.7 times on v6e; what is less than about half of them takes
    less. 0 where it does go through all. Looking rows up it always does: to put a few in their places takes as long as
    to mask many. Their sums, of bags, it does not; and the gradient of bags is added row by row, sorted, even if all
    are its own: then nothing is in memory of the rows in between.
    """
    op, bags = shard.op, SUMMED in shard.op.params
    if op.name != "scatter-add" and not bags:
        return 0
    if op.outputs[0].itemsize != 4 or op.inputs[1].shape[-1] != 1:
        return 0
    numbers, batch = Numbers.of(op), op.inputs[1].rank - 1
    (d,) = numbers.indexed
    window = tuple(range(batch, batch + len(numbers.window_dims)))
    if numbers.dropped != (d,) or numbers.batching or numbers.window_dims != window:
        return 0
    factors, every = shard.rule.operands[0][d], math.prod(shard.operand_shape(1))
    ways, least = shard.ways(factors[0]) if factors else 1, 1 if bags and is_scatter(op) else _LEAST
    if ways < least or every < ways * _LEAST_ROWS or shard.operand_bytes(0) <= AT_ONCE:
        return 0
    return min(math.ceil(SPREAD * every / ways), every)


def at_once(shard: Shard, own: int) -> int:
    """How many of them are looked up, or added, at once."""
    turns = math.ceil(_TURNS * own / math.prod(shard.operand_shape(1))) if SUMMED in shard.op.params else 1
    return math.ceil(own / turns)


def row_bytes(shard: Shard) -> float:
    """Of a device's part of a row of what is addressed by rows."""
    dropped = Numbers.of(shard.op).dropped
    sizes = (n for d, n in enumerate(shard.operand_shape(0)) if d not in dropped)
    return math.prod(sizes) * shard.op.inputs[0].itemsize


def _in_order(rows: Any, size: int, behind: int) -> tuple[Any, Any, Any]:
    """How many rows are not negative; these in order, `behind` behind them; and the place that each had; as many as
    parts of this size have."""
    own, last = rows >= 0, np.array(behind, rows.dtype)
    row, at = lax.sort((jnp.where(own, rows, last), lax.iota(jnp.int32, rows.size)), num_keys=1)
    row, at = (jnp.pad(x, (0, -rows.size % size), constant_values=n) for x, n in ((row, last), (at, 0)))
    return own.sum(), row, at


def add_own(d: int, size: int, table: Any, rows: Any, updates: Any) -> Any:
    """A table to which updates are added, so many at once, and none of negative rows.

    **Arguments:** `d`: the dimension of the table that is addressed; `rows`: int [n]; `updates`: [m, ...], each of as
    many rows in turn as there are for it.
    """
    held, row, at = _in_order(rows, size, table.shape[d])
    each = rows.size // updates.shape[0]
    numbers = lax.ScatterDimensionNumbers(tuple(range(1, table.ndim)), (d,), (d,))

    def add(state: tuple[Any, Any]) -> tuple[Any, Any]:
        start, table = state
        here, places = (lax.dynamic_slice_in_dim(x, start, size) for x in (row, at))
        found, mode = updates.at[places // each].get(mode="promise_in_bounds"), GatherScatterMode.FILL_OR_DROP
        return start + size, lax.scatter_add(table, here[:, None], found, numbers, indices_are_sorted=True, mode=mode)

    return lax.while_loop(lambda state: state[0] < held, add, (np.int32(0), table))[1]


def sum_own(size: int, table: Any, rows: Any, each: int) -> Any:
    """Sums of rows of a table [n, ...], so many added at once, and none of negative ones: [m, ...].

    **Arguments:** `rows`: int [m * each], those of one sum in turn.
    """
    held, row, at = _in_order(rows, size, table.shape[0])
    bag = jnp.where(row < table.shape[0], at // each, rows.size)  # others are dropped
    numbers = lax.ScatterDimensionNumbers(tuple(range(1, table.ndim)), (0,), (0,))

    def add(state: tuple[Any, Any]) -> tuple[Any, Any]:
        start, sums = state
        here, places = (lax.dynamic_slice_in_dim(x, start, size) for x in (row, bag))
        found = table.at[here].get(mode="clip")
        sums = lax.scatter_add(sums, places[:, None], found, numbers, mode=GatherScatterMode.FILL_OR_DROP)
        return start + size, sums

    sums = jnp.zeros((rows.size // each, *table.shape[1:]), table.dtype)
    return lax.while_loop(lambda state: state[0] < held, add, (np.int32(0), sums))[1]
