"""Sides of rules as JAX programs: each op of the language as a user would write it.

    run = function(rule.source, rule.given, sizes)      # of the variables, in the order of `rule.given`
    run(*arrays)                                        # the results, each with its dimensions in the order of its type

Meanings are written once more in `rewrite/ops`, in exact arithmetic and by sums of products, which no user
writes and in which no matmul can be found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from unity_jax.rewrite.language import Dim, Term
from unity_jax.rewrite.meaning import size

Dims = Sequence[Dim]


@dataclass(frozen=True)
class Named:
    """An array with its dimensions, and of row numbers the dimension that they count in."""

    array: Any
    dims: tuple[Dim, ...]
    ids: Dim | None = None

    def moved(self, dims: Dims) -> Any:
        """The array with its dimensions in this order."""
        return jnp.transpose(self.array, [self.dims.index(d) for d in dims])

    def along(self, dims: Dims) -> Any:
        """In this order, and of size one where it lacks one."""
        moved = self.moved([d for d in dims if d in self.dims])
        return jnp.expand_dims(moved, [i for i, d in enumerate(dims) if d not in self.dims])


@dataclass(frozen=True)
class Applied:
    """A term whose operands are known; of its result these dimensions are `first`."""

    term: Term
    sizes: Mapping[str, int]
    first: frozenset[Dim]

    @property
    def attrs(self) -> tuple[Any, ...]:
        return self.term.attrs

    @property
    def dims(self) -> tuple[Dim, ...]:
        return in_order(self.term, self.first)

    def size(self, dim: Dim) -> int:
        return size(dim, self.sizes)

    def shape(self, dims: Dims) -> tuple[int, ...]:
        return tuple(map(self.size, dims))

    def ordered(self, array: Any, dims: Dims) -> Any:
        """A result whose dimensions are in another order than that of its type."""
        return Named(array, tuple(dims)).moved(self.dims)


def in_order(term: Term, first: frozenset[Dim]) -> tuple[Dim, ...]:
    """The dimensions of an array."""
    return tuple(sorted(term.type.dims, key=lambda d: d not in first))


def function(
    terms: Sequence[Term], given: Sequence[Term], sizes: Mapping[str, int], first: frozenset[Dim] = frozenset()
) -> Callable[..., list[Any]]:
    """A function of the variables that returns the terms; `first`: dimensions that all arrays have first."""

    def run(*arrays: Any) -> list[Any]:
        known = dict(zip(given, arrays, strict=True))
        for t in terms:
            for s in t.walk():
                if s not in known:
                    operands = (Named(known[a], in_order(a, first), a.type.ids) for a in s.args)
                    known[s] = _WRITTEN[s.op](Applied(s, sizes, first), *operands)
        return [known[t] for t in terms]

    return run


def _pointwise(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda op, *operands: function(*(x.along(op.dims) for x in operands))


def _reduction(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda op, x: op.ordered(
        function(x.array, axis=tuple(x.dims.index(d) for d in op.attrs)), [d for d in x.dims if d not in op.attrs]
    )


def _dot(op: Applied, x: Named, y: Named) -> Any:
    letter = {d: "abcdefghijklmnopqrstuvwxyz"[i] for i, d in enumerate(dict.fromkeys((*x.dims, *y.dims)))}
    spell = ["".join(letter[d] for d in dims) for dims in (x.dims, y.dims, op.dims)]
    return jnp.einsum(f"{spell[0]},{spell[1]}->{spell[2]}", x.array, y.array)


def _conv(op: Applied, x: Named, w: Named) -> Any:
    """What both operands have are groups of features; what one alone has, batch or channels."""
    c, h, r = op.attrs
    groups = [d for d in x.dims if d in w.dims and d != c]
    batch = [d for d in x.dims if d not in (*groups, c, h)]
    channels = [d for d in w.dims if d not in (*groups, c, r)]
    image = x.moved((*batch, h, *groups, c)).reshape(
        (-1, op.size(h), int(np.prod(op.shape((*groups, c)))))
    )
    window = w.moved((r, c, *groups, *channels)).reshape((op.size(r), op.size(c), -1))
    made = lax.conv_general_dilated(
        image, window, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC"),
        feature_group_count=int(np.prod(op.shape(groups))),
    )
    dims = (*batch, h, *groups, *channels)
    return op.ordered(made.reshape(op.shape(dims)), dims)


def _concat(op: Applied, *operands: Named) -> Any:
    (whole,) = op.attrs
    dims = [[part if d == whole else d for d in op.dims] for part in whole.parts]
    return jnp.concatenate([x.moved(ds) for x, ds in zip(operands, dims, strict=True)], op.dims.index(whole))


def _span(op: Applied) -> tuple[int, int, int]:
    """Start and end of a part of a sum, and the size of the sum."""
    whole, which = op.attrs
    ends = np.cumsum([0, *op.shape(whole.parts)]).tolist()
    return ends[which], ends[which + 1], ends[-1]


def _slice(op: Applied, x: Named) -> Any:
    whole, which = op.attrs
    start, end, _ = _span(op)
    cut = lax.slice_in_dim(x.array, start, end, axis=x.dims.index(whole))
    return op.ordered(cut, [whole.parts[which] if d == whole else d for d in x.dims])


def _pad(op: Applied, x: Named) -> Any:
    whole, which = op.attrs
    start, end, total = _span(op)
    around = [(start, total - end) if d == whole.parts[which] else (0, 0) for d in x.dims]
    return op.ordered(jnp.pad(x.array, around), [whole if d == whole.parts[which] else d for d in x.dims])


def _stack(op: Applied, *operands: Named) -> Any:
    (name,) = op.attrs
    return jnp.stack([x.moved([d for d in op.dims if d != name]) for x in operands], op.dims.index(name))


def _unstack(op: Applied, x: Named) -> Any:
    """Of two, one by its number: each by itself, as of a longer stack at once."""
    name, which = op.attrs
    at = x.dims.index(name)
    few = op.size(name) == 2
    one = lax.index_in_dim(x.array, which, at, keepdims=False) if few else jnp.unstack(x.array, axis=at)[which]
    return op.ordered(one, [d for d in x.dims if d != name])


_MODE = "promise_in_bounds"  # that of `x[i]` and of its gradient; rules join rows of one mode


def _in_batches(function: Callable[..., Any], batch: int) -> Callable[..., Any]:
    for _ in range(batch):
        function = jax.vmap(function)
    return function


def _take(op: Applied, x: Named, i: Named) -> Any:
    batch = [d for d in i.dims if d in x.dims]
    rows, numbers = [d for d in x.dims if d not in batch and d != i.ids], [d for d in i.dims if d not in batch]
    taken = _in_batches(lambda x, i: x.at[i].get(mode=_MODE), len(batch))(
        x.moved((*batch, i.ids, *rows)), i.moved((*batch, *numbers))
    )
    return op.ordered(taken, (*batch, *numbers, *rows))


def _put(op: Applied, u: Named, i: Named) -> Any:
    dims = [d for d in u.dims if d not in op.attrs]
    zeros = jnp.zeros((op.size(i.ids), *op.shape(dims)), u.array.dtype)
    return _scatter(op, Named(zeros, (i.ids, *dims)), u, i)


def _scatter(op: Applied, t: Named, u: Named, i: Named) -> Any:
    batch = [d for d in i.dims if d not in op.attrs]
    rows = [d for d in t.dims if d not in batch and d != i.ids]
    added = _in_batches(lambda t, i, u: t.at[i].add(u, mode=_MODE), len(batch))(
        t.moved((*batch, i.ids, *rows)), i.moved((*batch, *op.attrs)), u.moved((*batch, *op.attrs, *rows))
    )
    return op.ordered(added, (*batch, i.ids, *rows))


_WRITTEN: dict[str, Callable[..., Any]] = {
    "dot": _dot,
    "conv": _conv,
    "add": _pointwise(jnp.add),
    "sub": _pointwise(jnp.subtract),
    "mul": _pointwise(jnp.multiply),
    "neg": _pointwise(jnp.negative),
    "f": _pointwise(jnp.tanh),
    "g": _pointwise(jnp.sin),
    "h": _pointwise(jnp.arctan2),
    "convert": _pointwise(lambda x: x.astype(jnp.float32)),
    "sum": _reduction(jnp.sum),
    "fold": _reduction(jnp.max),
    "concat": _concat,
    "slice": _slice,
    "pad": _pad,
    "stack": _stack,
    "unstack": _unstack,
    "take": _take,
    "put": _put,
    "scatter": _scatter,
}
