"""Equal layers in a row: stacked along a leading axis and scanned, or unrolled; each may be rematerialized.

    self.blocks = stack(lambda rngs: Block(config, rngs), config.layers, rngs, scan=True)   # leaves f[L, ...]
    x = through(self.blocks, x, mask, key=key, remat=True)                                  # x = block(x, mask, key)

A scanned model compiles in a time that does not depend on its depth; an unrolled one may treat its layers differently.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from models._common import Array, fold

Carry = TypeVar("Carry", Array, tuple[Array, ...])


def stack(make: Callable[[nnx.Rngs], nnx.Module], count: int, rngs: nnx.Rngs, *, scan: bool) -> nnx.Module | nnx.List:
    """`count` layers: one module whose leaves are f[count, ...] if they are to be scanned, else a list."""
    if not scan:
        return nnx.List([make(rngs) for _ in range(count)])
    keys = jax.random.split(rngs.params(), count)
    return nnx.vmap(lambda key: make(nnx.Rngs(key)))(keys)


def through(layers: nnx.Module | nnx.List, x: Carry, *context: Any, key: Array | None, remat: bool) -> Carry:
    """x, an array or several, after every layer, each called as `layer(x, *context, key)`: the i-th, from 1, with the
    i-th child of the key.

    `remat` recomputes each layer in the backward pass.
    """

    def make_body(graphdef: nnx.GraphDef, **options: Any) -> Callable[..., tuple[Carry, None]]:
        def body(x: Carry, layer: tuple[Any, Array]) -> tuple[Carry, None]:
            params, index = layer
            return nnx.merge(graphdef, params)(x, *context, fold(key, index)), None

        return jax.checkpoint(body, **options) if remat else body

    if isinstance(layers, nnx.List):
        for index, layer in enumerate(layers, 1):
            graphdef, params = nnx.split(layer)
            x, _ = make_body(graphdef)(x, (nnx.to_pure_dict(params), jnp.int32(index)))
        return x
    graphdef, params = nnx.split(layers)
    stacked = nnx.to_pure_dict(params)
    count = jax.tree.leaves(stacked)[0].shape[0]
    indices = jnp.arange(1, count + 1, dtype=jnp.int32)
    x, _ = jax.lax.scan(make_body(graphdef, prevent_cse=False), x, (stacked, indices))
    return x
