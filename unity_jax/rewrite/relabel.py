"""Ops that only relabel dimensions: identities of the operand's dimensions from those of the result's.

`transpose` permutes them, `squeeze` and `broadcast_in_dim` drop and add some (a value does not depend on a dimension
that it was broadcast over), `reshape` splits and merges them, `copy` leaves them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from unity_jax.ops.shape import reshape_factors
from unity_jax.pcg.graph import Op
from unity_jax.rewrite.dims import Dims, Ids


def relabels(op: Op) -> bool:
    if op.name == "reshape":
        plain = op.params.get("dimensions") is None and len(op.inputs) == 1
        return plain and _factors(op.inputs[0].shape, op.outputs[0].shape) is not None
    return op.name in _RELABELLED and len(op.inputs) == 1


def relabelled(op: Op, ids: Ids, dims: Dims) -> Ids | None:
    """The identities of the operand's dimensions; None where those of the result are products that do not fit."""
    return _RELABELLED[op.name](op, ids, dims)


def _transposed(op: Op, ids: Ids, dims: Dims) -> Ids:
    where = op.params["permutation"]
    return tuple(ids[where.index(d)] for d in range(len(ids)))


def _broadcast(op: Op, ids: Ids, dims: Dims) -> Ids:
    """Dimensions of size one that were widened have an identity of their own."""
    found = []
    for size, d in zip(op.inputs[0].shape, op.params["broadcast_dimensions"], strict=True):
        found.append(ids[d] if op.outputs[0].shape[d] == size else dims.fresh(1))
    return tuple(found)


def _squeezed(op: Op, ids: Ids, dims: Dims) -> Ids:
    left = iter(ids)
    gone = {d % op.inputs[0].rank for d in op.params["dimensions"]}
    return tuple(dims.fresh(1) if d in gone else next(left) for d in range(op.inputs[0].rank))


def _reshaped(op: Op, ids: Ids, dims: Dims) -> Ids | None:
    factors = _factors(op.inputs[0].shape, op.outputs[0].shape)
    assert factors is not None
    source, target, sizes = factors
    found: dict[int, int] = {}
    for i, dim in zip(ids, target, strict=True):
        parts = dims.split(i, [sizes[f] for f in dim]) if dim else ()
        if parts is None:
            return None
        found.update(zip(dim, parts, strict=True))
    return tuple(dims.product([found[f] for f in dim]) if dim else dims.fresh(1) for dim in source)


_Factors = tuple[list[tuple[int, ...]], list[tuple[int, ...]], dict[int, int]]


@functools.cache
def _factors(source: tuple[int, ...], target: tuple[int, ...]) -> _Factors | None:
    """The factors that operand and result are made of; None where their sizes do not nest, as in (4, 6) to (6, 4)."""
    if 0 in source:
        return None
    found = reshape_factors(source, target)
    both = [{f for dim in side for f in dim} for side in found[:2]]
    return found if both[0] == both[1] else None


_RELABELLED: dict[str, Callable[[Op, Ids, Dims], Ids | None]] = {
    "copy": lambda op, ids, dims: ids,
    "transpose": _transposed,
    "broadcast_in_dim": _broadcast,
    "squeeze": _squeezed,
    "reshape": _reshaped,
}
