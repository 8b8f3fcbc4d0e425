"""The JAX code of one `Move`, inside `shard_map`: at most one collective, padding added and dropped around it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from unity_jax import _compat
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.pcg.parallel import Move, Shift


def apply_move(x: Any, move: Move, shape: tuple[int, ...], mesh: MeshAxes) -> Any:
    """This device's shard after `move`, from its shard `x` before it. `shape` is the tensor's global shape.

    Booleans are reduced as bytes: a partial sum of booleans means "or" (of at most 255 true terms where it is
    scattered), as does max; min means "and". Typed keys move as their words.
    """
    if _compat.is_key(x.dtype):
        words = apply_move(jax.random.key_data(x), move, shape, mesh)
        return jax.random.wrap_key_data(words, impl=str(jax.random.key_impl(x)))
    return _APPLY[move.kind](x, move, move.after.local_shape(shape, mesh), mesh)


def _partition(x: Any, move: Move, local: tuple[int, ...], mesh: MeshAxes) -> Any:
    assert move.dim is not None
    size = local[move.dim]
    x = _resize(x, move.dim, size * mesh.size(move.axes))
    return lax.dynamic_slice_in_dim(x, lax.axis_index(move.axes) * size, size, move.dim)


def _combine(x: Any, move: Move, local: tuple[int, ...], mesh: MeshAxes) -> Any:
    assert move.dim is not None
    return _resize(lax.all_gather(x, move.axes, axis=move.dim, tiled=True), move.dim, local[move.dim])


def _reduce(x: Any, move: Move, local: tuple[int, ...], mesh: MeshAxes) -> Any:
    return _as_bytes(lambda y: _REDUCE[_reduction(move, x)](y, move.axes), x)


def _reduce_scatter(x: Any, move: Move, local: tuple[int, ...], mesh: MeshAxes) -> Any:
    assert move.dim is not None
    x = _resize(x, move.dim, local[move.dim] * mesh.size(move.axes))
    return _as_bytes(lambda y: lax.psum_scatter(y, move.axes, scatter_dimension=move.dim, tiled=True), x)


def _exchange(x: Any, move: Move, local: tuple[int, ...], mesh: MeshAxes) -> Any:
    assert move.dim is not None and move.target_dim is not None
    x = _resize(x, move.target_dim, local[move.target_dim] * mesh.size(move.axes))
    x = lax.all_to_all(x, move.axes, split_axis=move.target_dim, concat_axis=move.dim, tiled=True)
    return _resize(x, move.dim, local[move.dim])


def _replicate(x: Any, move: Move, local: tuple[int, ...], mesh: MeshAxes) -> Any:
    identity = _identity(dict(move.after.partial)[move.axes[0]], x.dtype)
    return jnp.where(lax.axis_index(move.axes) == 0, x, jnp.full_like(x, identity))


def _shift(x: Any, move: Move, local: tuple[int, ...], mesh: MeshAxes) -> Any:
    assert isinstance(move, Shift)
    return lax.ppermute(x, move.axes, move.pairs)


_APPLY = {
    "partition": _partition,
    "combine": _combine,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "exchange": _exchange,
    "replicate": _replicate,
    "shift": _shift,
    "from_host": lambda x, *_: jax.device_put(x, jax.memory.Space.Device),
    "to_host": lambda x, *_: jax.device_put(x, jax.memory.Space.Host),
}

_REDUCE = {"sum": lax.psum, "max": lax.pmax, "min": lax.pmin}


def _reduction(move: Move, x: Any) -> str:
    reduction = dict(move.before.partial)[move.axes[0]]
    return "max" if reduction == "sum" and x.dtype == jnp.bool_ else reduction


def _identity(reduction: str, dtype: Any) -> Any:
    """The value that leaves a reduction unchanged."""
    if reduction == "sum":
        return 0
    if dtype == jnp.bool_:
        return reduction == "min"
    if jnp.issubdtype(dtype, jnp.floating):
        return -jnp.inf if reduction == "max" else jnp.inf
    return jnp.iinfo(dtype).min if reduction == "max" else jnp.iinfo(dtype).max


def _as_bytes(collective: Any, x: Any) -> Any:
    """Collectives do arithmetic on numbers only; a boolean takes one byte either way."""
    return collective(x.astype(jnp.uint8)) != 0 if x.dtype == jnp.bool_ else collective(x)


def _resize(x: Any, dim: int, size: int) -> Any:
    """`x` with `size` elements along `dim`: padded with zeros at the end, or cut there."""
    extra = size - x.shape[dim]
    if extra > 0:
        return jnp.pad(x, [(0, extra if d == dim else 0) for d in range(x.ndim)])
    return lax.slice_in_dim(x, 0, size, axis=dim) if extra < 0 else x
