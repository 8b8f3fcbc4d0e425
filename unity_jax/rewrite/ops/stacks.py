"""Values of one type along a new dimension that counts them, `stack(x, y; e)`, and one of them, `unstack(x; e, 0)`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from unity_jax.pcg.graph import Op
from unity_jax.rewrite.dims import CannotEmit, Dims, Named, Seen, Value, put_at, values
from unity_jax.rewrite.emitter import Emitter
from unity_jax.rewrite.language import Attrs, Dim, Term, Type, Types, need, replaced
from unity_jax.rewrite.meaning import Applied, Array, Operand
from unity_jax.rewrite.ops.parts import cut_by, joined_code, part_code
from unity_jax.rewrite.ops.shape import new
from unity_jax.rewrite.table import Letters, RuleOp, register, traits
from unity_jax.rewrite.view import View

UNSTACK = "unstack"


def _stack_type(types: Types, attrs: Attrs) -> Type:
    """Operands of one type along a new first dimension, whose size is their number."""
    need(not attrs[0].parts, f"{attrs[0]} is not a name")  # type: ignore[union-attr]
    need(len({(frozenset(t.dims), t.ids) for t in types}) == 1, "operands differ in their types")
    return types[0]._replace(dims=(attrs[0], *types[0].dims))  # type: ignore[arg-type]


def _unstack_type(types: Types, attrs: Attrs) -> Type:
    need(isinstance(attrs[1], int) and not attrs[0].parts, "takes a name and a number")  # type: ignore[union-attr]
    return replaced(types[0], attrs[0], [])


def _stack(op: Applied, *operands: Operand) -> Array:
    axis, rest = op.labels.index(op.attrs[0]), [n for n in op.labels if n != op.attrs[0]]
    return np.stack([x.along(rest) for x in operands], axis)


def _unstack(op: Applied, x: Operand) -> Array:
    return x.along((op.attrs[0], *op.labels))[op.attrs[1]]


def _each_of_two(letters: Letters, types: Sequence[Type]) -> Iterator[Attrs]:
    yield from ((d, i) for d in letters.dims("new") for i in (0, 1))


def _see_stack(view: View, op: Op, value: Value, dims: Dims) -> Iterator[Seen]:
    at = op.params.get("axis", 0)
    rest = (*value.ids[:at], *value.ids[at + 1 :])
    yield Seen(values(op, [rest] * len(op.inputs)), ((value.ids[at],),), op)


def _see_unstack(view: View, op: Op, value: Value, dims: Dims) -> Iterator[Seen]:
    at = op.params.get("axis", 0)
    ids = (*value.ids[:at], dims.fresh(len(op.outputs)), *value.ids[at:])
    yield Seen(values(op, [ids]), ((ids[at],), op.outputs.index(value.tensor)), op)


def _see_one_of_two(view: View, op: Op, value: Value, dims: Dims) -> Iterator[Seen]:
    """A slice of size one of a dimension of size two: what is left of a stack."""
    cut = cut_by(op, value.tensor)
    if cut is not None and op.inputs[0].shape[cut.dim] == 2:
        whole = dims.fresh(2)
        yield Seen(values(op, [put_at(value.ids, cut.dim, whole)]), ((whole,), int(cut.start)), op)


def _emit_stack(e: Emitter, term: Term) -> Named:
    name = term.attrs[0]
    assert isinstance(name, Dim)
    arrays, ids = e.together(*e.arguments(term))
    if len({a.dtype for a in arrays}) > 1:
        raise CannotEmit("a stack of different dtypes")
    if name not in e.match.names:
        e.fresh.setdefault(name, e.dims.fresh(len(arrays)))
    at = e.one(name)
    if e.dims.size[at] != len(arrays):
        raise CannotEmit(f"{name} has another size")
    return Named(e.call(_stacked, *arrays), (at, *ids))


def _stacked(*arrays: Any) -> Any:
    return jnp.stack(arrays)


def _emit_unstack(e: Emitter, term: Term) -> Named:
    name, which = term.attrs
    assert isinstance(name, Dim) and isinstance(which, int)
    x = e.term(term.args[0])
    at = e.one(name)
    if at not in x.ids:
        return x
    d = x.ids.index(at)
    return Named(e.at(x.array, which, d), (*x.ids[:d], *x.ids[d + 1 :]))


register(
    "stack",
    RuleOp(
        arity=None,
        naming="count",
        traits=traits(),
        type=_stack_type,
        meaning=_stack,
        choices=new,
        core=None,
        code=joined_code,  # of parts of size one
        seen={"stack": _see_stack},
        emit=_emit_stack,
    ),
)
register(
    UNSTACK,
    RuleOp(
        arity=1,
        naming="counted",
        traits=traits(),
        type=_unstack_type,
        meaning=_unstack,
        choices=_each_of_two,
        core=None,
        code=part_code,
        seen={"unstack": _see_unstack, "slice": _see_one_of_two, "split": _see_one_of_two},
        emit=_emit_unstack,
    ),
)
