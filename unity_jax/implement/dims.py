"""What the dimensions of arrays mean: each has a label, or None where the array is the same along it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from unity_jax.pcg.graph import Op, Tensor

Dims = tuple[Any, ...]
"""A label for each dimension."""

SAME = frozenset("convert_element_type copy stop_gradient optimization_barrier reduce_precision".split())
"""Ops whose results are their operands, in exact arithmetic."""


def is_same(op: Op) -> bool:
    """Whether the results of an op are its operands; a constraint that names no mesh axis is no wish for a layout."""
    return op.name in SAME or (op.name == "sharding_constraint" and not any(op.params["layout"].dims))


_SHAPED = frozenset("reshape squeeze expand_dims".split())


class Labelled(NamedTuple):
    """A tensor, and what its dimensions mean."""

    tensor: Tensor
    dims: Dims


def varying(t: Tensor, dims: Sequence[Any]) -> Dims:
    """Without labels of dimensions of one element."""
    return tuple(label if n > 1 else None for label, n in zip(dims, t.shape, strict=True))


def relabelled(op: Op, dims: Dims) -> Dims | None:
    """The dimensions of what an op makes that only moves an array; None for other ops."""
    x, made = op.inputs[0], op.outputs[0]
    if is_same(op):
        return dims
    if op.name == "transpose":
        return tuple(dims[d] for d in op.params["permutation"])
    if op.name in _SHAPED:
        return _reshaped(x, dims, made)
    if op.name == "broadcast_in_dim":
        found = [None] * made.rank
        for d, label, n in zip(op.params["broadcast_dimensions"], dims, x.shape, strict=True):
            found[d] = label if made.shape[d] == n else None
        return tuple(found)
    return None


def labelled_before(op: Op, dims: Dims) -> Dims | None:
    """The dimensions of what an op moves, of those of what it makes; None for other ops."""
    x, made = op.inputs[0], op.outputs[0]
    if is_same(op):
        return dims
    if op.name == "transpose":
        found: list[Any] = [None] * x.rank
        for label, d in zip(dims, op.params["permutation"], strict=True):
            found[d] = label
        return tuple(found)
    if op.name in _SHAPED:
        return _reshaped(made, dims, x)
    if op.name == "broadcast_in_dim":
        at = zip(op.params["broadcast_dimensions"], x.shape, strict=True)
        return tuple(dims[d] if made.shape[d] == n else None for d, n in at)
    return None


def _reshaped(x: Tensor, dims: Dims, to: Tensor) -> Dims | None:
    """Where only dimensions of one element come or go."""
    if [n for n in x.shape if n > 1] != [n for n in to.shape if n > 1]:
        return None
    left = iter([label for label, n in zip(dims, x.shape, strict=True) if n > 1])
    return tuple(next(left) if n > 1 else None for n in to.shape)


class Dot(NamedTuple):
    """The roles of the dimensions of a product: of each operand those of the batch, contracted, and free."""

    batch: tuple[tuple[int, ...], tuple[int, ...]]
    contracted: tuple[tuple[int, ...], tuple[int, ...]]
    free: tuple[tuple[int, ...], tuple[int, ...]]

    @staticmethod
    def of(op: Op) -> Dot:
        contracted, batch = op.params["dimension_numbers"]
        used = [{*contracted[i], *batch[i]} for i in range(2)]
        free = tuple(tuple(d for d in range(t.rank) if d not in u) for t, u in zip(op.inputs, used, strict=True))
        return Dot(tuple(map(tuple, batch)), tuple(map(tuple, contracted)), free)  # type: ignore[arg-type]

    def made(self, side: int, dims: Dims, other: Dims) -> Dims | None:
        """The dimensions of the result, of those of the operand on this side and of the other one; None where those of
        the batch differ."""
        for d, e in zip(self.batch[side], self.batch[1 - side], strict=True):
            if dims[d] != other[e]:
                return None
        found = [dims[d] for d in self.batch[side]]
        for i in (0, 1):
            of = dims if i == side else other
            found += [of[d] for d in self.free[i]]
        return tuple(found)
