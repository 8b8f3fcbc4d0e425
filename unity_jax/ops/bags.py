"""Bags of embeddings: sums of rows that are looked up, and their gradients, as one op each (`implement.bags`).

    gather_bags        table [vocab, embed], ids [batch, bag, 1] -> sums [batch, embed]
    scatter-add_bags   table [vocab, embed], ids [batch, bag, 1], sums [batch, embed] -> table

The parameters are those of the gather or scatter of all rows, and which dimensions of the indices are those of bags.
The rows of a bag are never in memory together: they are looked up and added one position of all bags after the other,
or those that a device has itself, sorted (`ops.own_rows`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import GatherScatterMode

from unity_jax.ops import indexing
from unity_jax.ops.numbers import Numbers
from unity_jax.ops.own_rows import SUMMED, add_own, at_once, own_rows, row_bytes, sum_own
from unity_jax.ops.rule import Label, Rule, Shard, make_rule, register
from unity_jax.pcg.graph import Op

GATHER, SCATTER = "gather_bags", "scatter-add_bags"


@register(GATHER)
def sums(op: Op) -> Rule:
    """`([r,w], [b,k,1]) -> ([b,w]) sum={r,k}`: rows of others count as zero, as does the rest of a bag."""
    numbers, window = Numbers.of(op), op.params["slice_sizes"]
    operand, indices, block = _labels(op, numbers, window)
    bags = [indices[d] for d in op.params[SUMMED]]
    return make_rule(
        op,
        [operand, indices],
        [[label for label in block if label not in bags]],
        kinds=dict.fromkeys([*(label for label in operand if str(label).startswith("r")), *bags], "sum"),
        no_pad=bags,  # of which ids would be rows
        linear=[{0}],
        local=lambda shard, *xs: _sum(shard, numbers, window, operand, *xs),
        flops=row_elements(op) * math.prod(op.inputs[1].shape),
        bytes=_sum_bytes,
        mask=False,
    )


@register(SCATTER)
def gradients(op: Op) -> Rule:
    """`([r,w], [b,k,1], [b,w]) -> ([r,w]) sum={b,k}`: each device adds to its own rows, without communication."""
    numbers, (_, *rest) = Numbers.of(op), op.inputs[0].shape
    operand, indices, block = _labels(op, numbers, (1, *rest))
    bags = [indices[d] for d in op.params[SUMMED]]
    return make_rule(
        op,
        [operand, indices, [label for label in block if label not in bags]],
        [operand],
        kinds=dict.fromkeys(indices[:-1], "sum"),
        no_pad=bags,
        linear=[{0, 2}],
        local=lambda shard, *xs: _add(shard, numbers, (1, *rest), operand, *xs),
        flops=row_elements(op) * math.prod(op.inputs[1].shape),
        bytes=lambda shard: 2.0 * row_bytes(shard) * math.prod(shard.operand_shape(1)),
    )


def _labels(op: Op, numbers: Numbers, window: Sequence[int]) -> tuple[list[Label], list[Label], list[Label]]:
    """As of the gather or scatter of all rows."""
    block = range(op.inputs[1].rank - 1 + len(numbers.window_dims))
    return indexing.labels_of(op, numbers, block, window)


def row_elements(op: Op) -> int:
    """Of the whole of a row."""
    return math.prod(op.inputs[0].shape[1:])


def _sum_bytes(shard: Shard) -> float:
    """Rows are read and written, masked where others have them, and read to be added to sums."""
    return 5.0 * row_bytes(shard) * math.prod(shard.operand_shape(1))


def _sum(shard: Shard, numbers: Numbers, window: Sequence[int], labels: Sequence[Label], table: Any, ids: Any) -> Any:
    summed = shard.op.params[SUMMED]
    if own := own_rows(shard):
        rows, whole = indexing.held_ids(shard, numbers, indexing.split_rows(shard, labels), window, table, ids)
        found = sum_own(at_once(shard, own), table, *_in_turn(rows[..., 0], summed))
        found = found.reshape(*(n for d, n in enumerate(whole.shape) if d not in summed), *table.shape[1:])
        if shard.op.params["mode"] != GatherScatterMode.FILL_OR_DROP or shard.op.params["fill_value"] == 0:
            return found
        first = shard.offset(shard.rule.operands[0][0][0]) == 0  # others add zeros to what is no number
        missing = jnp.expand_dims(first & ~whole.all(summed), range(ids.ndim - 1 - len(summed), found.ndim))
        return jnp.where(missing, np.nan, found)
    longest = max(summed, key=lambda d: ids.shape[d])

    def add(i: Any, sums: Any) -> Any:
        one = lax.dynamic_slice_in_dim(ids, i, 1, longest)
        return sums + indexing.gather_shard(shard, numbers, labels, table, one).sum(summed)

    return lax.fori_loop(0, ids.shape[longest], add, jnp.zeros(shard.result_shape(), table.dtype))


def _add(
    shard: Shard, numbers: Numbers, window: Sequence[int], labels: Sequence[Label], table: Any, ids: Any, updates: Any
) -> Any:
    summed, table = shard.op.params[SUMMED], indexing.as_term(shard, table)
    if own := own_rows(shard):
        rows, _ = indexing.held_ids(shard, numbers, indexing.split_rows(shard, labels), window, table, ids)
        rows, each = _in_turn(rows[..., 0], summed)
        return add_own(0, at_once(shard, own), table, rows, updates.reshape(rows.size // each, *table.shape[1:]))
    longest = max(summed, key=lambda d: ids.shape[d])
    shape = [1 if d == longest else n for d, n in enumerate(ids.shape[:-1])]
    every = jnp.broadcast_to(jnp.expand_dims(updates, summed), (*shape, *table.shape[1:]))

    def add(i: Any, table: Any) -> Any:
        one = lax.dynamic_slice_in_dim(ids, i, 1, longest)
        return indexing.scattered(shard, numbers, labels, window, table, one, every)

    return lax.fori_loop(0, ids.shape[longest], add, table)


def _in_turn(rows: Any, summed: Sequence[int]) -> tuple[Any, int]:
    """Rows with those of a bag in turn, and how many a bag has."""
    last = range(rows.ndim - len(summed), rows.ndim)
    return jnp.moveaxis(rows, summed, last).reshape(-1), math.prod(rows.shape[d] for d in summed)
