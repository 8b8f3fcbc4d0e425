"""The arrays of an attention in the order of its kernels, and back.

    q f[B, T, K, G, F]  ->  [batch, heads, queries, features] = f[B, K G, T, F]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from unity_jax.implement.dims import Dims, Labelled
from unity_jax.implement.group import Group
from unity_jax.kernels.bits import product

Labels = tuple[Any, ...]


@dataclass(frozen=True)
class Arrangement:
    """Which labels are what kernels call batch, groups of heads, heads that share keys, queries and keys.

    **Fields:** `size`: elements along each label.
    """

    size: dict[Any, int]
    batch: Labels
    groups: Labels
    shared: Labels
    query: Labels
    key: Labels

    @staticmethod
    def of(group: Group) -> Arrangement:
        """Of labels that queries and keys have, the last one is of groups of heads, unless heads share all keys; of
        those that only queries have, one is of their positions: that which a mask depends on, or has as many as there
        are keys, or is the last."""
        scores = group.scores
        assert scores.q is not None and scores.k is not None
        size = dict(zip(scores.dims, scores.exp.outputs[0].shape, strict=True))
        labels = [label for label in scores.dims if label is not None and label in scores.q.dims]
        both = [label for label in labels if label in scores.k.dims]
        own = [label for label in labels if label not in both]
        told = {label for of in (*scores.biases, *(mask.which for mask in scores.masks)) for label in of.dims}

        def rank(label: Any) -> tuple[bool, bool, int]:
            return label in told, size[label] == size[scores.key], own.index(label)

        query = max(own, key=rank, default=None)
        shared = tuple(label for label in own if label != query)
        first = len(both) if len(both) == 1 else max(0, len(both) - 1)
        positions = () if query is None else (query,)
        return Arrangement(size, tuple(both[:first]), tuple(both[first:]), shared, positions, (scores.key,))

    @property
    def heads(self) -> Labels:
        return (*self.groups, *self.shared)

    def axes(self, name: str) -> tuple[Labels, ...]:
        """The labels of the four dimensions of `q`, `k`, `v` or `out`."""
        along = {"q": (self.heads, self.query, "f"), "out": (self.heads, self.query, "fv")}
        heads, positions, features = along.get(name, (self.groups, self.key, "f" if name == "k" else "fv"))
        return self.batch, heads, positions, (features,)

    def turned(self, name: str, dims: Dims, x: Any) -> Any:
        """An array as a kernel has it."""
        return _grouped(dims, x, self.axes(name))

    def back(self, name: str, x: Any, to: Labelled) -> Any:
        """What a kernel made, as it is in the program."""
        size = {**dict(zip(to.dims, to.tensor.shape, strict=True)), **self.size}
        flat = [label for part in self.axes(name) for label in part]
        order = [flat.index(label) for label in to.dims if label is not None]
        return lax.transpose(x.reshape([size[label] for label in flat]), order).reshape(to.tensor.shape)

    def small(self, dims: Dims, x: Any) -> Any:
        """A bias or a mask: with one element where it is the same for all of a batch, all heads, queries or keys."""
        shape, whole, labels = list[int](), list[int](), list[Labels]()
        for of in (self.batch, self.heads, self.query, self.key):
            varies = any(label in dims for label in of)
            whole += [self.size[label] if varies else 1 for label in of]
            shape.append(math.prod(self.size[label] for label in of) if varies else 1)
            labels += [(label,) for label in of]
        return jnp.broadcast_to(_grouped(dims, x, labels), whole).reshape(shape)

    def first_bits(self, dims: Dims) -> tuple[Any, Any]:
        """The index that the first probability of each head has in an array of random bits with these dimensions, which
        ends with queries and keys: two words, of [batch, heads] or of one element where they share bits."""
        own = [label for label in dims if label in (*self.batch, *self.heads)]
        shape = [self.size[label] for label in own]
        each = math.prod(self.size[label] for label in (*self.query, *self.key))
        index, many = lax.iota(jnp.uint32, math.prod(shape)), math.prod(shape) * each >= 2**32
        words = product(index, each) if many else (jnp.zeros_like(index), index * jnp.uint32(each))
        high, low = (self.small(tuple(own), t.reshape(shape))[:, :, 0, 0] for t in words)
        return high, low

    @property
    def counts(self) -> tuple[int, int]:
        """How many there are of the batch, and of heads."""
        batch, heads = (math.prod(self.size[label] for label in of) for of in (self.batch, self.heads))
        return batch, heads


def _grouped(dims: Dims, x: Any, axes: Sequence[Labels]) -> Any:
    """An array with its dimensions in this order, those of a tuple as one; those without a label have one element."""
    there = [[label for label in of if label in dims] for of in axes]
    order = [dims.index(label) for of in there for label in of]
    shape = [math.prod(x.shape[dims.index(label)] for label in of) for of in there]
    return lax.transpose(x, (*(d for d in range(len(dims)) if d not in order), *order)).reshape(shape)
