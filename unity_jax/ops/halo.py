"""Splitting the spatial dimensions of convolutions and poolings: each device borrows its neighbours' borders.

A sliding window reads, for output `j` and window position `t`, the (dilated) input position
`j*stride + t*dilation - low`. Split the input and the output together, and every device needs the same few elements
from the devices next to it, whatever the number of devices. Beyond the ends of the array there is padding, which is
what the devices at the ends get. The same holds when the input and the window positions are split together, as in the
gradient of a kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from unity_jax.ops.rule import InnerCollective, Shard


@dataclass(frozen=True)
class Span:
    """How one windowed dimension splits.

    **Fields:** `size` of the factor; the input dimension has `size * input_minor` elements, the dimension that is split
    with it `size * other_minor`; `left` and `right`: the elements that a shard needs from each neighbour.
    """

    size: int
    input_minor: int
    other_minor: int
    left: int
    right: int

    @property
    def halo(self) -> int:
        """In units of the factor."""
        return -(-max(self.left, self.right) // self.input_minor)


def span(n: int, count: int, step: int, others: int, other_step: int, low: int, dilation: int = 1) -> Span | None:
    """How `n` inputs (`dilation` apart, `low` padding before them) split together with a loop of `count` steps.

    `(count, step)` is the loop over outputs (or over window positions, for a kernel gradient) that is split and
    `(others, other_step)` the other loop, which every device runs in full. None where shards of the two do not line up,
    or there is but one.
    """
    size = math.gcd(n, count)
    if n * dilation != count * step or size == 1:
        return None
    left = max(0, low // dilation)
    right = max(0, ((others - 1) * other_step - low - step + dilation) // dilation)
    return Span(size, n // size, count // size, left, right)


def split_axes(shard: Shard, operand: int, dim: int) -> tuple[str, ...]:
    return shard.operand_layouts[operand].dims[dim]


def borrow(shard: Shard, operand: int, x: Any, spans: Sequence[Span | None], fill: Any = None) -> Any:
    """Extend the local operand `x`, along every dimension that is split and has a span, by its neighbours' borders.

    The devices at the ends get `fill` (zeros if None).
    """
    for dim, s in enumerate(spans):
        axes = split_axes(shard, operand, dim)
        if s is None or not axes:
            continue
        n, ways = x.shape[dim], shard.mesh.size(axes)
        parts = [x]
        if s.left:
            border = jax.lax.slice_in_dim(x, n - s.left, n, axis=dim)
            parts.insert(0, _shift(border, axes, ways, 1, fill))
        if s.right:
            parts.append(_shift(jax.lax.slice_in_dim(x, 0, s.right, axis=dim), axes, ways, -1, fill))
        x = jnp.concatenate(parts, dim) if len(parts) > 1 else x
    return x


def _shift(x: Any, axes: tuple[str, ...], ways: int, by: int, fill: Any) -> Any:
    perm = [(i, i + by) for i in range(ways) if 0 <= i + by < ways]
    moved = jax.lax.ppermute(x, axes, perm)
    if fill is None:
        return moved  # a device without a source receives zeros
    end = 0 if by > 0 else ways - 1
    return jnp.where(jax.lax.axis_index(axes) == end, jnp.asarray(fill, x.dtype), moved)


def borrowed(shard: Shard, operand: int, spans: Sequence[Span | None]) -> list[InnerCollective]:
    """The collectives that `borrow` issues."""
    shape = list(shard.operand_shape(operand))
    found = []
    for dim, s in enumerate(spans):
        axes = split_axes(shard, operand, dim)
        if s is None or not axes:
            continue
        row = shard.op.inputs[operand].itemsize * math.prod(shape) // shape[dim]
        found += [InnerCollective("permute", axes, k * row) for k in (s.left, s.right) if k]
        shape[dim] += s.left + s.right
    return found
