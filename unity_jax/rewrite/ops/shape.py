"""What only relabels dimensions, and is looked through in programs: `broadcast`, `transpose`, `split` and `merge`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from unity_jax.rewrite.language import Attrs, Dim, Term, Type, Types, blocks_of, need, place, replaced
from unity_jax.rewrite.meaning import cut, dimension, joined
from unity_jax.rewrite.table import Code, Letters, RuleOp, Shapes, register, traits

TRANSPOSE, SPLIT = "transpose", "split"


def _broadcast_type(types: Types, attrs: Attrs) -> Type:
    return types[0]._replace(dims=(*types[0].dims, *attrs))  # type: ignore[arg-type]


def _transpose_type(types: Types, attrs: Attrs) -> Type:
    (x,) = types
    need(set(attrs) == set(x.dims), f"not an order of the dimensions of {x}")
    return x._replace(dims=attrs)  # type: ignore[arg-type]


def _split_type(types: Types, attrs: Attrs) -> Type:
    return replaced(types[0], attrs[0], blocks_of(attrs[0]))


def _merge_type(types: Types, attrs: Attrs) -> Type:
    p, n = blocks_of(attrs[0])
    place(types[0], p)
    return replaced(replaced(types[0], n, [attrs[0]]), p, [])


def new(letters: Letters, types: Sequence[Type]) -> Iterator[Attrs]:
    """A dimension that the operands do not have."""
    yield from ((d,) for d in letters.dims("new"))


def blocks(letters: Letters, types: Sequence[Type]) -> Iterator[Attrs]:
    yield from ((d,) for d in letters.dims("multiples"))


def _reversed(letters: Letters, types: Sequence[Type]) -> Iterator[Attrs]:
    if len(types[0].dims) > 1:
        yield types[0].dims[::-1]


def _transpose_core(term: Term, x: Term) -> Term:
    """Dimensions have names, whatever their order."""
    return x


def _broadcast_code(term: Term, args: Sequence[Code], shapes: Shapes) -> Code:
    """A value does not depend on a dimension that it is broadcast over."""
    return args[0]


def _blocks_code(term: Term, args: Sequence[Code], shapes: Shapes) -> Code:
    return (term.op.capitalize(), *args, *(shapes.dim(d) for d in term.attrs if isinstance(d, Dim)))


register(
    "broadcast",
    RuleOp(
        arity=1,
        naming="dims",
        traits=traits(),
        type=_broadcast_type,
        meaning=lambda op, x: np.broadcast_to(x.along(op.labels), op.shape),
        choices=new,
        core=None,
        code=_broadcast_code,
        seen={},
        emit=None,
    ),
)
register(
    TRANSPOSE,
    RuleOp(
        arity=1,
        naming="dims",
        traits=traits(),
        type=_transpose_type,
        meaning=lambda op, x: x.along(op.labels),
        choices=_reversed,
        core=_transpose_core,
        code=None,
        seen={},
        emit=None,
    ),
)
register(
    SPLIT,
    RuleOp(
        arity=1,
        naming="blocks",
        traits=traits(),
        type=_split_type,
        meaning=cut(dimension),
        choices=blocks,
        core=None,
        code=_blocks_code,
        seen={},
        emit=None,
    ),
)
register(
    "merge",
    RuleOp(
        arity=1,
        naming="blocks",
        traits=traits(),
        type=_merge_type,
        meaning=joined(dimension),
        choices=blocks,
        core=None,
        code=_blocks_code,
        seen={},
        emit=None,
    ),
)
