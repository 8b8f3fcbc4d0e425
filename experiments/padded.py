"""A model whose weights are stored padded, so that all devices share each of them: how FSDP stores weights of 1,024
rows on 96 devices (PyTorch's `fully_shard` pads the dimension that it shards; Megatron pads vocabularies).

The largest dimension of a weight is padded, if no dimension divides by the number of devices. The step cuts the padding
off where it uses a weight; gradients of the padding are zero, and its optimizer state is padded alike. Tables of rows
are not cut: they have a few rows more, which no example reads. Three dimensions are layers that are stacked for a scan,
which are left as they are: padding would have to be cut off inside of the loop.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import models
from models import Batch, Metrics, Model, TrainState


@dataclasses.dataclass(frozen=True, eq=False)
class Padded(Model):
    """A `Model` on padded parameters.

    **Fields:** `whole`: the shapes of its parameters as they are; `ways`: what the padded dimensions divide by.
    """

    whole: Any = None
    ways: int = 1

    def make_state(self, key: Any) -> TrainState:
        state = super().make_state(key)
        params = jax.tree.map(lambda x: jnp.pad(x, [(0, n) for n in padding(x.shape, self.ways)]), state.params)
        return state._replace(params=params, opt_state=self.optimizer.init(params))

    def _apply(self, params: Any, variables: Any, batch: Batch, key: Any) -> tuple[Any, tuple[Metrics, Any]]:
        cut = jax.tree.map(lambda x, w: lax.slice(x, [0] * x.ndim, w.shape), params, self.whole)
        return super()._apply(cut, variables, batch, key)


def padding(shape: tuple[int, ...], ways: int) -> list[int]:
    """How much longer each dimension of a weight is stored; of a vector, a matrix or the kernel of a convolution
    over two dimensions one dimension at most."""
    more = [0] * len(shape)
    if math.prod(shape) >= ways and len(shape) in (1, 2, 4) and not any(n % ways == 0 for n in shape):
        widest = max(range(len(shape)), key=lambda d: shape[d])
        more[widest] = -shape[widest] % ways
    return more


def padded(model: Model, ways: int) -> Model | None:
    """The model as it is stored on so many devices, None if nothing has to be padded or its step is its own."""
    if rows := getattr(model.config, "rows", None):
        even = tuple(n + -n % ways for n in rows)
        model = models.get(model.name, model.size, **{**vars(model.config), "rows": even})
        found = model if even != rows else None
    else:
        found = None
    whole = model.abstract_state().params
    if type(model) is not Model or not any(any(padding(w.shape, ways)) for w in jax.tree.leaves(whole)):
        return found
    fields = {f.name: getattr(model, f.name) for f in dataclasses.fields(model)}
    return Padded(**fields, whole=whole, ways=ways)
