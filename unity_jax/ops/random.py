"""Random numbers: the same bits for every sharding.

Threefry hashes a 64-bit counter per element, its position in the flattened array, so each device hashes the counters
of its own shard. Other generators draw the whole array on every device and keep a part.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives

from unity_jax import _compat
from unity_jax.ops.rule import Rule, Shard, make_rule, register
from unity_jax.ops.rules import pointwise_labels
from unity_jax.pcg.graph import Op, Tensor

HASH_FLOPS = 20 * 5 + 6 * 2 + 1
"""Integer operations of one threefry hash: 20 rounds that add, rotate (three) and xor, six additions of the key to both
words, and one to join them (Salmon et al. 2011, https://doi.org/10.1145/2063384.2063405)."""

POSITION_FLOPS = 6
"""Integer operations per dimension to find the position of an element: a 64-bit multiplication and addition."""


def _is_threefry(key: Tensor) -> bool:
    """Whether each key of a batch acts on its own; the rbg generators mix the keys of a batch."""
    return str(key.dtype) == "key<fry>"


class Rows(NamedTuple):
    """Rows of what is drawn: along a dimension, of every `parts` blocks one, of so many elements."""

    dim: int
    parts: int
    block: int

    def positions(self, index: Any, row: Any) -> Any:
        """Where rows are among all, by where they are among these; `index`: which these are."""
        block, every = (np.asarray(n, row.dtype) for n in (self.block, self.block * self.parts))
        return row // block * every + index * block + row % block


@register("random_bits", "random_split")
def random_bits(op: Op) -> Rule:
    # Each key draws an array of its own, in which every element depends on its position only.
    keys, result = op.inputs[0], op.outputs[0]
    counters = counts(op)
    batch = [d if _is_threefry(keys) else None for d in range(keys.rank)]
    free = counters or op.name == "random_bits"
    return make_rule(
        op,
        [batch, *([] for _ in op.inputs[1:])],
        [list(range(result.rank)) if free else [*batch, *[None] * (result.rank - keys.rank)]],
        local=_hash_counters if counters else _part_of_all,
        flops=(HASH_FLOPS + POSITION_FLOPS * result.rank) * math.prod(result.shape),
    )


def counts(op: Op) -> bool:
    """Whether bits are hashes of positions, so that any part of them can be drawn by itself."""
    return _is_threefry(op.inputs[0]) and _compat.threefry_partitionable(op.eqn)


def drawn_for(op: Op, rows: Rows, index: Tensor, drawn: Tensor) -> Op:
    """The bits of some rows of what an op draws that `counts`; of rows of rows, if it draws some already.

    **Arguments:** `op`: with the keys of these rows, where each has its own; `index`: which of `rows`, an integer.
    """
    if rows.dim < op.inputs[0].rank:
        return dataclasses.replace(op, outputs=(drawn,))
    params = {**op.params, "rows": (*op.params.get("rows", ()), rows)}
    return dataclasses.replace(op, inputs=(*op.inputs, index), outputs=(drawn,), params=params)


def _hash_counters(shard: Shard, keys: Any, *indices: Any) -> Any:
    lead = keys.ndim
    high, low = _positions(shard, lead, indices)
    words = jax.random.key_data(keys)
    k1, k2 = (jnp.expand_dims(words[..., i], range(lead, lead + low.ndim)) for i in (0, 1))
    shape = shard.result_shape()
    operands = [jnp.broadcast_to(x, shape) for x in (k1, k2, high, low)]
    high, low = primitives.threefry2x32_p.bind(*operands)
    if shard.op.name == "random_split":
        return jax.random.wrap_key_data(jnp.stack([high, low], -1), impl="threefry2x32")
    width = shard.op.params["bit_width"]
    dtype = np.dtype(f"uint{width}")
    if width == 64:
        return lax.shift_left(high.astype(dtype), np.array(32, dtype)) | low.astype(dtype)
    return (high ^ low).astype(dtype)


def _positions(shard: Shard, lead: int, indices: Sequence[Any]) -> tuple[Any, Any]:
    """High and low 32 bits of the flat position of every element of the shard, in the array that one key draws.

    Of an array of at most 2^32 elements the high bits are zero, of which no compiler would know: to add up carries
    takes 6 % of the time of a dropout mask. But XLA:GPU gets 64 bits, as from JAX itself: that all of a hash is one
    kernel hangs on its form (with 32 bits a ConvNet's mask became two, of .6 ms a step 16 us to write and read the
    words between them; no mask of five models with 64 bits did, which costs others up to .5 % of a step).
    """
    rows: tuple[Rows, ...] = shard.op.params.get("rows", ())
    part, local = shard.op.outputs[0].shape[lead:], shard.result_shape()[lead:]
    whole = tuple(n * math.prod(r.parts for r in rows if r.dim == d) for d, n in enumerate(part, lead))

    def position(operands: Sequence[Any], dtype: Any) -> Any:
        starts = [jnp.asarray(start).astype(dtype) for start in operands]
        taken = list(zip(rows, starts[len(local) :], strict=True))
        total = jnp.zeros(local, dtype)
        for d, start in enumerate(starts[: len(local)]):
            at = lax.broadcasted_iota(dtype, local, d) + start
            for r, index in reversed(taken):  # of rows of rows
                at = r.positions(index, at) if d + lead == r.dim else at
            total = total + at * np.uint64(math.prod(whole[d + 1 :])).astype(dtype)
        return total

    def narrow(*starts: Any) -> tuple[Any, Any]:
        return jnp.zeros(local, jnp.uint32), position(starts, jnp.uint32)

    def wide(*starts: Any) -> tuple[Any, Any]:
        with jax.enable_x64(True):
            found = position(starts, jnp.uint64)
            return (found >> np.uint64(32)).astype(jnp.uint32), found.astype(jnp.uint32)

    starts = [*(sum(shard.offset(f) for f in dims) for dims in shard.rule.results[0][lead:]), *indices]
    if math.prod(whole) > 2**32:
        return wide(*starts)
    return lax.platform_dependent(*starts, cuda=wide, rocm=wide, default=narrow)


def _part_of_all(shard: Shard, keys: Any) -> Any:
    (x,) = _compat.bind(shard.op.eqn, (keys,), shard.op.params)
    for d, factors in enumerate(shard.rule.results[0]):
        for f in factors:
            n, ways = shard.local_size(f), shard.ways(f)
            if ways > 1 and x.shape[d] == shard.op.outputs[0].shape[d]:  # dimensions of the keys are local already
                ends = [(0, (n * ways - m) * (i == d), 0) for i, m in enumerate(x.shape)]
                x = lax.pad(x, np.zeros((), x.dtype), ends)
                x = lax.dynamic_slice_in_dim(x, shard.offset(f), n, d)
    return x


# Keys


@register("random_fold_in", "threefry2x32", "random_seed", "random_clone")
def elementwise(op: Op) -> Rule | None:
    shape = op.outputs[0].shape
    mixed = op.name == "random_fold_in" and not _is_threefry(op.inputs[0])
    if mixed or any(t.rank not in (0, len(shape)) for t in op.inputs):
        return None
    return make_rule(
        op,
        [pointwise_labels(t.shape, shape) for t in op.inputs],
        [pointwise_labels(shape, shape) for _ in op.outputs],
        flops=HASH_FLOPS * math.prod(shape),
    )


@register("random_wrap", "random_unwrap")
def words(op: Op) -> Rule:
    # The words of a key are a minor dimension.
    labels = [*range(min(op.inputs[0].rank, op.outputs[0].rank)), None]
    return make_rule(op, [labels[: op.inputs[0].rank]], [labels[: op.outputs[0].rank]], flops=0)


@register("random_gamma")
def random_gamma(op: Op) -> Rule:
    # Each key is split over the trailing dimensions of its parameters, in a way that depends on their number.
    keys, alpha = op.inputs[0], op.inputs[1]
    labels = [d if d < keys.rank and _is_threefry(keys) else None for d in range(alpha.rank)]
    return make_rule(op, [labels[: keys.rank], labels], [labels], flops=20 * HASH_FLOPS * math.prod(alpha.shape))
