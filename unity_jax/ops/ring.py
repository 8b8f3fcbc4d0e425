"""What a device does between the passes of a ring: it takes and writes the chunks that belong to the shard at hand.

    w_1 = dynamic_slice(w)                       # the rows of w that the shard x_1 meets
    y = dynamic_update_slice(y, dot(x_1, w))     # the rows of y that it makes; y is empty at first
    y = add(y, dot(x_1, w_1))                    # or a term of all of y

Which chunk that is differs from device to device: it is looked up in a table over the members of the group. The arrays
are what devices hold: their layouts give local shapes, their values are not shards of one global array.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from unity_jax.ops.rule import Rule, Shard
from unity_jax.pcg.graph import Op, Tensor
from unity_jax.pcg.mesh import MeshAxes


@dataclass(frozen=True)
class Chunks:
    """A dimension in as many equal chunks as a group over `axes` has members; for each of these, which chunk is
    meant."""

    dim: int
    axes: tuple[str, ...]
    of: tuple[int, ...]

    def start(self, x: Any) -> Any:
        """Where this device's chunk of `x` begins."""
        chunk = lax.dynamic_index_in_dim(jnp.array(self.of, jnp.int32), lax.axis_index(self.axes), keepdims=False)
        return chunk * (x.shape[self.dim] // len(self.of))


def take(x: Tensor, chunk: Tensor, where: Chunks, product: Op, mesh: MeshAxes) -> Op:
    """`chunk` of `x`."""

    def local(x: Any) -> Any:
        return lax.dynamic_slice_in_dim(x, where.start(x), x.shape[where.dim] // len(where.of), where.dim)

    return _local("dynamic_slice", (x,), chunk, local, product, mesh, moved=2.0)


def empty(whole: Tensor, product: Op, mesh: MeshAxes) -> Op:
    """An array whose values do not matter: on TPU and GPU just memory (XLA's `AllocateBuffer`)."""
    assert whole.layout is not None
    shape = whole.layout.local_shape(whole.shape, mesh)
    return _local("empty", (), whole, lambda: lax.empty(shape, whole.dtype), product, mesh, moved=0.0)


def put(whole: Tensor, chunk: Tensor, result: Tensor, where: Chunks, product: Op, mesh: MeshAxes) -> Op:
    """`whole` with `chunk` in its place, in the same memory."""

    def local(x: Any, y: Any) -> Any:
        return lax.dynamic_update_slice_in_dim(x, y, where.start(x), where.dim)

    return _local("dynamic_update_slice", (whole, chunk), result, local, product, mesh, moved=2.0 / len(where.of))


def add(x: Tensor, y: Tensor, result: Tensor, product: Op, mesh: MeshAxes) -> Op:
    """`x + y`"""
    return _local("add", (x, y), result, lax.add, product, mesh)


def convert(x: Tensor, result: Tensor, product: Op, mesh: MeshAxes) -> Op:
    """`x` in the dtype of `result`."""
    return _local(
        "convert_element_type", (x,), result, lambda x: lax.convert_element_type(x, result.dtype), product, mesh
    )


def _local(
    name: str,
    operands: Sequence[Tensor],
    result: Tensor,
    local: Callable[..., Any],
    product: Op,
    mesh: MeshAxes,
    moved: float | None = None,
) -> Op:
    """An op on what a device holds, for a contraction. `moved`: how often its result goes through memory, where that is
    not all operands and results once."""
    layout, layouts = result.layout, tuple(x for t in operands if (x := t.layout) is not None)
    assert layout is not None
    op = Op(name, tuple(operands), (result,), eqn=product.eqn, callers=product.callers, backward=product.backward)
    rule = Rule(
        (),
        (),
        (),
        local=lambda shard, *xs: local(*xs),
        flops=float(math.prod(layout.local_shape(result.shape, mesh))) if name == "add" else 0.0,
        bytes=None if moved is None else lambda shard: moved * shard.result_bytes(),
        mask=False,
        fixed=(layouts, (layout,)),
    )
    op.shard = Shard(op, rule, mesh, (-1,) * len(mesh.names))
    return op
