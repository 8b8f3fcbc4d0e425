"""Equal layers in a row: stacked along a leading axis and scanned, or unrolled; each may be rematerialized.

    self.blocks = stack(lambda rngs: Block(config, rngs), config.layers, rngs, scan=True)   # leaves f[L, ...]
    x = through(self.blocks, x, mask, key=key, remat=True)                                  # x = block(x, mask, key)

A scanned model compiles in a time that does not depend on its depth; an unrolled one may treat its layers differently.
What a layer names (`jax.ad_checkpoint.checkpoint_name`) a policy may keep.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from models._common import Array, fold

Carry = TypeVar("Carry", Array, tuple[Array, ...])

_QKV = ("query_proj", "key_proj", "value_proj", "qkv_proj")
_MLP = ("mlpwi_0", "mlpwi_1", "mlpwi", "mlpwo")
POLICIES: Mapping[str, tuple[str, ...]] = {
    "save_out_proj": ("out_proj",),
    "save_qkv_proj": _QKV,
    "save_dot_except_mlp": (*_QKV, "out_proj"),
    "save_dot_except_mlpwi": (*_QKV, "out_proj", "mlpwo"),
    "save_dot_with_context_except_mlp": (*_QKV, "context", "out_proj"),
    "minimal": (*_QKV, "out_proj", *_MLP),
    "minimal_with_context": (*_QKV, "context", "out_proj", *_MLP),
}
"""What is kept of each layer for the backward pass by the policies that MaxText has under these names
(https://github.com/AI-Hypercomputer/maxtext, `get_remat_policy`): projections, gates, and what attention gives."""

Remat = bool | int | str
"""Which layers are computed again in the backward pass: all of them (True; what a policy of this name keeps is kept),
the first so many, or none."""


def stack(make: Callable[[nnx.Rngs], nnx.Module], count: int, rngs: nnx.Rngs, *, scan: bool) -> nnx.Module | nnx.List:
    """`count` layers: one module whose leaves are f[count, ...] if they are to be scanned, else a list."""
    if not scan:
        return nnx.List([make(rngs) for _ in range(count)])
    keys = jax.random.split(rngs.params(), count)
    return nnx.vmap(lambda key: make(nnx.Rngs(key)))(keys)


def through(layers: nnx.Module | nnx.List, x: Carry, *context: Any, key: Array | None, remat: Remat) -> Carry:
    """x, an array or several, after every layer, each called as `layer(x, *context, key)`: the i-th, from 1, with the
    i-th child of the key."""
    policy = POLICIES[remat] if isinstance(remat, str) else ()
    named = jax.checkpoint_policies.save_only_these_names(*policy)

    def make_body(graphdef: nnx.GraphDef, again: bool, **options: Any) -> Callable[..., tuple[Carry, None]]:
        def body(x: Carry, layer: tuple[Any, Array]) -> tuple[Carry, None]:
            params, index = layer
            return nnx.merge(graphdef, params)(x, *context, fold(key, index)), None

        return jax.checkpoint(body, policy=named if policy else None, **options) if again else body

    if isinstance(layers, nnx.List):
        few = _rematerialized(remat, len(layers))
        for index, layer in enumerate(layers, 1):
            graphdef, params = nnx.split(layer)
            x, _ = make_body(graphdef, index <= few)(x, (nnx.to_pure_dict(params), jnp.int32(index)))
        return x
    graphdef, params = nnx.split(layers)
    stacked = nnx.to_pure_dict(params)
    count = jax.tree.leaves(stacked)[0].shape[0]
    every = stacked, jnp.arange(1, count + 1, dtype=jnp.int32)
    few = _rematerialized(remat, count)
    for start, stop in ((0, few), (few, count)):
        if start < stop:
            part = every if stop - start == count else jax.tree.map(lambda a, i=start, j=stop: a[i:j], every)
            x, _ = jax.lax.scan(make_body(graphdef, start < few, prevent_cse=False), x, part)
    return x


def _rematerialized(remat: Remat, count: int) -> int:
    """How many of so many layers are computed again."""
    if isinstance(remat, int) and not isinstance(remat, bool):
        return min(remat, count)
    return count if remat else 0
