"""Ops that do the same at each place: arithmetic, constants, and functions of which nothing is known."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jax import lax

from unity_jax.pcg.graph import Op
from unity_jax.rewrite.dims import Dims, Named, Seen, Value
from unity_jax.rewrite.emitter import Emitter
from unity_jax.rewrite.language import Attrs, Term, Type, Types, are_values
from unity_jax.rewrite.meaning import Applied, Array, pointwise
from unity_jax.rewrite.table import POINTWISE, Code, Letters, RuleOp, Shapes, apply, register, traits
from unity_jax.rewrite.view import SUMS, View, pointwise_values

ADD, CONVERT = "add", "convert"

See = Callable[[View, Op, Value, Dims], Iterator[Seen]]


def pointwise_type(types: Types, attrs: Attrs) -> Type:
    """The dimensions of all operands; each is repeated along those that it lacks."""
    are_values(*types)
    return Type(tuple(dict.fromkeys(d for x in types for d in x.dims)), types[0].devices)


def _choices(letters: Letters, types: Sequence[Type]) -> Iterator[Attrs]:
    """One operand has all dimensions of the other, unless the alphabet is wide."""
    if letters.wide or len(types) < 2 or _nested(types):
        yield ()


def _nested(types: Sequence[Type]) -> bool:
    a, b = (set(t.dims) for t in types)
    return a <= b or b <= a


def _see(view: View, op: Op, value: Value, dims: Dims) -> Iterator[Seen]:
    yield Seen(pointwise_values(op, value, dims), (), op)


def _together(function: Callable[..., Any]) -> Callable[[Emitter, Term], Named]:
    def emit(e: Emitter, term: Term) -> Named:
        arrays, ids = e.together(*e.arguments(term))
        return Named(e.call(function, *arrays), ids)

    return emit


def _code(term: Term, args: Sequence[Code], shapes: Shapes) -> Code:
    return (term.op.capitalize(), *args)


def _arithmetic(
    arity: int,
    traits: frozenset[str],
    meaning: Callable[..., Array],
    primitives: Sequence[str],
    emit: Callable[..., Any],
    core: Callable[..., Term] | None = None,
) -> RuleOp:
    return RuleOp(
        arity=arity,
        naming="nothing",
        traits=traits,
        type=pointwise_type,
        meaning=meaning,
        choices=_choices,
        core=core,
        code=None if core else _code,
        seen=dict.fromkeys(primitives, _see),
        emit=_together(emit),
    )


def _sub(term: Term, x: Term, y: Term) -> Term:
    return apply("add", x, apply("neg", y))


register(
    ADD,
    _arithmetic(2, traits("pointwise commutes"), pointwise(lambda n: lambda x, y: n.settle(x + y)), SUMS, lax.add),
)
register(
    "sub",
    _arithmetic(2, traits("pointwise"), pointwise(lambda n: lambda x, y: n.settle(x - y)), ["sub"], lax.sub, _sub),
)
register(
    "mul",
    _arithmetic(
        2,
        traits("pointwise commutes multiplies"),
        pointwise(lambda n: lambda x, y: n.settle(x * y)),
        ["mul"],
        lax.mul,
    ),
)
register("neg", _arithmetic(1, traits("pointwise"), pointwise(lambda n: lambda x: n.settle(-x)), ["neg"], lax.neg))


# Constants, of the axioms alone


def _constant(fill: Callable[[tuple[int, ...], Any], Array]) -> RuleOp:
    def meaning(op: Applied) -> Array:
        return fill(op.shape, np.int64)

    return RuleOp(
        arity=0,
        naming="dims",
        traits=traits(),
        type=lambda types, attrs: Type(attrs),  # type: ignore[arg-type]
        meaning=meaning,
        choices=None,
        core=None,
        code=_code,
        seen={},
        emit=None,
    )


register("zeros", _constant(np.zeros))
register("ones", _constant(np.ones))


# Functions


def _see_function(operands: int) -> See:
    """A pointwise op as an unknown function of the operands that are no constants."""

    def see(view: View, op: Op, value: Value, dims: Dims) -> Iterator[Seen]:
        found = [v for v in pointwise_values(op, value, dims) if view.source(v.tensor).literal is None]
        if len(found) == 2 and found[0].tensor is found[1].tensor:
            found.pop()
        if len(found) == operands:
            yield Seen(tuple(found), (), op)

    return see


def _see_quotient(view: View, op: Op, value: Value, dims: Dims) -> Iterator[Seen]:
    """Division by a constant keeps zero, unless that is zero or not a number."""
    x, divisor = pointwise_values(op, value, dims)
    constant = view.source(divisor.tensor).literal
    if constant is None or view.source(x.tensor).literal is not None:
        return
    if np.all(constant) and not np.any(np.isnan(constant)):
        yield Seen((x,), (), op)


def _emit_function(e: Emitter, term: Term) -> Named:
    """The op that the function stands for, on other operands; its constants stay."""
    op = e.matched(term.op)
    arrays, ids = e.together(*e.arguments(term))
    shape, left = tuple(e.dims.size[i] for i in ids), iter(arrays)
    operands = []
    for t in op.inputs:
        constant = e.view.source(t)
        if constant.literal is None:
            operands.append(next(left) if len(arrays) > 1 else arrays[0])
        elif t.rank and shape:
            operands.append(e.call(lax.broadcast_in_dim, constant, shape=shape, broadcast_dimensions=()))
        else:
            operands.append(constant)
    return Named(e.like(op, operands, shape), ids)


def _code_function(term: Term, args: Sequence[Code], shapes: Shapes) -> Code:
    return ("Apply" if len(args) == 1 else "Apply2", shapes.function(term.op), *args)


def _function(arity: int, meaning: Callable[..., Array], seen: dict[str, See]) -> RuleOp:
    return RuleOp(
        arity=arity,
        naming="nothing",
        traits=traits("pointwise unknown"),
        type=pointwise_type,
        meaning=meaning,
        choices=_choices,
        core=None,
        code=_code_function,
        seen=seen,
        emit=_emit_function if seen else None,
    )


register("f", _function(1, pointwise(lambda n: n.unary[0]), {POINTWISE: _see_function(1)}))
register("g", _function(1, pointwise(lambda n: n.unary[1]), {}))  # where one function is not enough: in proofs
register("h", _function(2, pointwise(lambda n: n.binary), {POINTWISE: _see_function(2)}))
register(  # keeps zero, as a change of precision does
    CONVERT,
    _function(1, pointwise(lambda n: n.keeps_zero), {"convert_element_type": _see, "div": _see_quotient}),
)
