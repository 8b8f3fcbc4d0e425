"""Parallel ops, which look across the devices of an axis: `partition(x; p*n)`, `combine`, `replicate(x; p)`, `reduce`.

A view shows none of them: layouts are chosen by the search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from unity_jax.rewrite.language import Attrs, Dim, Term, Type, Types, are_values, blocks_of, need, replaced
from unity_jax.rewrite.meaning import Array, cut, device, joined, reduction
from unity_jax.rewrite.ops.contraction import wide
from unity_jax.rewrite.ops.shape import blocks
from unity_jax.rewrite.table import Letters, Naming, RuleOp, apply, register, traits


def _partition_type(types: Types, attrs: Attrs) -> Type:
    """`p*n` cut into blocks, one per device of `p`; a plain `p` gives each device one element."""
    (whole,) = attrs
    if whole in types[0].dims and not whole.parts:
        return _on(replaced(types[0], whole, []), whole)
    p, n = blocks_of(whole)
    return _on(replaced(types[0], whole, [n]), p)


def _combine_type(types: Types, attrs: Attrs) -> Type:
    """The inverse of partition: an all-gather."""
    p, n = blocks_of(attrs[0])
    return replaced(_off(types[0], p), n, [attrs[0]])


def _replicate_type(types: Types, attrs: Attrs) -> Type:
    return _on(types[0], attrs[0])


def _reduce_type(types: Types, attrs: Attrs) -> Type:
    """The sum over the devices of `p`."""
    are_values(types[0])
    return _off(types[0], attrs[0])


def _on(x: Type, p: Dim | int) -> Type:
    need(isinstance(p, Dim), f"{p} is not a device axis")
    return x._replace(devices=(*x.devices, p))  # type: ignore[arg-type]


def _off(x: Type, p: Dim | int) -> Type:
    need(p in x.devices, f"{x} does not lie on {p}")
    return x._replace(devices=tuple(d for d in x.devices if d != p))


def _axes(letters: Letters, types: Sequence[Type]) -> Iterator[Attrs]:
    yield from ((p,) for p in letters.dims("devices"))


# In core ops a device axis is one more dimension


def _partition_core(term: Term, x: Term) -> Term:
    (whole,) = term.attrs
    return apply("split", x, attrs=term.attrs) if isinstance(whole, Dim) and whole.parts else x


def _combine_core(term: Term, x: Term) -> Term:
    return apply("merge", x, attrs=term.attrs)


def _replicate_core(term: Term, x: Term) -> Term:
    return wide(x, [d for d in term.attrs if isinstance(d, Dim)])


def _reduce_core(term: Term, x: Term) -> Term:
    return apply("sum", x, attrs=term.attrs)


def _parallel(
    naming: Naming,
    type: Callable[[Types, Attrs], Type],
    meaning: Callable[..., Array],
    choices: Callable[[Letters, Sequence[Type]], Iterator[Attrs]],
    core: Callable[[Term, Term], Term],
) -> RuleOp:
    return RuleOp(
        arity=1,
        naming=naming,
        traits=traits("parallel"),
        type=type,
        meaning=meaning,
        choices=choices,
        core=core,
        code=None,
        seen={},
        emit=None,
    )


register("partition", _parallel("blocks", _partition_type, cut(device), blocks, _partition_core))
register("combine", _parallel("blocks", _combine_type, joined(device), blocks, _combine_core))
register(
    "replicate",
    _parallel(
        "axis",
        _replicate_type,
        lambda op, x: np.broadcast_to(x.along(op.labels), op.shape),
        _axes,
        _replicate_core,
    ),
)
register(
    "reduce",
    _parallel(
        "axis",
        _reduce_type,
        reduction(lambda n: lambda x, axes: n.settle(x.sum(axes)), device),
        _axes,
        _reduce_core,
    ),
)
