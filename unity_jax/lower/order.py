"""Which collectives must wait for which, and how they are made to, where the compiler does not see to it.

    y, _ = scan(layer, x, weights)    # reduces inside
    z = reduce(w)                     # does not depend on y: waits for it all the same

XLA:CPU runs what is ready at the same time, and orders collectives by when they start. A loop has started when the
thread that runs it has handed some of its body to others, so the collectives behind it start while those of its body
still run. Devices then meet in different collectives: all of JAX's manual ones share one channel, and those of one kind
take each other's operands. (With a channel each, the devices wait for each other forever.) So a collective and a loop
that has collectives are ordered here, by data, in program order. Straight-line collectives keep their order by
themselves, and may still be combined.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from unity_jax import _compat
from unity_jax.pcg.graph import Graph, Op, Tensor


def waits(graph: Graph) -> dict[Op, tuple[Tensor, ...]]:
    """The results that an op of the graph must wait for, beyond those that it depends on anyway.

    Ops that communicate have a bit each; sets of them are integers.
    """
    ops = [op for op in graph.ops if communicates(op)]
    if not any(map(_has_own, ops)):
        return {}
    bit = {op: 1 << i for i, op in enumerate(ops)}
    before: dict[Tensor, int] = {}  # what a tensor depends on
    through: dict[Op, int] = {}  # what an op that communicates depends on, itself included
    loops = everything = 0
    found: dict[Op, tuple[Tensor, ...]] = {}
    for op in graph.ops:
        known = _union(before.get(t, 0) for t in op.inputs)
        if op in bit:
            missing = (everything if _has_own(op) else loops) & ~known
            added = []
            while missing:  # the latest first, which may have waited for others
                last = ops[missing.bit_length() - 1]
                added.append(_decided(last))
                known |= through[last]
                missing &= ~known
            if added:
                found[op] = tuple(added)
            known |= bit[op]
            through[op] = known
            everything |= bit[op]
            loops |= bit[op] if _has_own(op) else 0
        before.update((t, known) for t in op.outputs)
    return found


def communicates(op: Op) -> bool:
    """Whether the op, or one of its bodies, has a collective."""
    if op.move is not None:
        return op.move.collective is not None
    if op.shard is not None and op.shard.rule.inner is not None and op.shard.rule.inner(op.shard):
        return True
    return _has_own(op)


def _has_own(op: Op) -> bool:
    """Whether collectives run inside the op: a loop, a branch, or a `shard_map` that the user wrote."""
    return op.name == "shard_map" or any(communicates(inner) for body in op.bodies for inner in body.ops)


def _decided(op: Op) -> Tensor:
    """A result that a collective of the op decides, so that the compiler cannot know it before."""
    for body in op.bodies:
        if len(body.outputs) == len(op.outputs):
            late: set[Tensor] = set()
            for inner in body.ops:
                if communicates(inner) or late.intersection(inner.inputs):
                    late.update(inner.outputs)
            for result, t in zip(op.outputs, body.outputs, strict=True):
                if t in late:
                    return result
    return op.outputs[0]


def _union(sets: Iterable[int]) -> int:
    total = 0
    for s in sets:
        total |= s
    return total


def arrived(until: Any, values: Iterable[Any]) -> Any:
    """A boolean that is true, and that is there once `until` and these values are."""
    for x in values:
        x = jax.random.key_data(x) if _compat.is_key(x.dtype) else x
        if x.size:
            first = lax.slice(x, (0,) * x.ndim, (1,) * x.ndim).reshape(())
            number = (first.real if jnp.iscomplexobj(first) else first).astype(jnp.float32)
            until = until & ((number == number) | (number != number))  # the compiler may not reason so: not-a-number
    return until


def held(x: Any, until: Any) -> Any:
    """`x`, which is there once `until` is: a boolean that is true."""
    if until is True:
        return x
    if _compat.is_key(x.dtype):
        return jax.random.wrap_key_data(held(jax.random.key_data(x), until), impl=str(jax.random.key_impl(x)))
    return jnp.where(until, x, jnp.zeros_like(x))
