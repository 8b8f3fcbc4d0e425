"""The rule of any op: its own, that of elementwise ops, or full replication."""

from __future__ import annotations

import dataclasses
import math

from unity_jax import _compat
from unity_jax.ops.rule import RULES, Label, Rule, make_rule
from unity_jax.pcg.graph import Op


def rule_of(op: Op) -> Rule:
    """The rule of an op: its own, the pointwise rule, or full replication."""
    if op.name in RULES:
        rule = RULES[op.name](op)
        if rule is not None:
            return rule
    return pointwise(op) or replicated(op)


LINEAR: dict[str, tuple[frozenset[int], ...]] = {
    "add": (frozenset({0, 1}),),
    "add_any": (frozenset({0, 1}),),
    "sub": (frozenset({0, 1}),),
    "mul": (frozenset({0}), frozenset({1})),
    "div": (frozenset({0}),),
    "neg": (frozenset({0}),),
    "copy": (frozenset({0}),),
    "copy_p": (frozenset({0}),),
    "real": (frozenset({0}),),
    "imag": (frozenset({0}),),
    "conj": (frozenset({0}),),
}


def linear_sets(op: Op) -> tuple[frozenset[int], ...]:
    """The operand sets in which a pointwise op is linear over floating-point numbers."""
    if not all(_compat.is_float(t.dtype) for t in op.outputs):
        return ()
    if op.name == "convert_element_type":
        # Rounding to a narrower type is not linear: sums are finished first, in the type the user chose for them.
        source, target = op.inputs[0].dtype, op.outputs[0].dtype
        wider = _compat.is_float(source) and _compat.represents(target, source)
        return (frozenset({0}),) if wider else ()
    if op.name == "select_n":
        return (frozenset(range(1, len(op.inputs))),)
    return LINEAR.get(op.name, ())


def is_pointwise(op: Op) -> bool:
    """Whether every result element depends only on the same element of each operand (scalars are shared)."""
    known = (op.traced or op).__dict__  # as of a cached property: every pass asks, over every plan of the same op
    if "is_pointwise" not in known:
        known["is_pointwise"] = _is_pointwise(op)
    return bool(known["is_pointwise"])


def _is_pointwise(op: Op) -> bool:
    if op.name not in POINTWISE:
        return False
    shape = op.outputs[0].shape
    return all(t.shape == shape for t in op.outputs) and all(
        t.shape == shape or t.shape == () or _broadcasts(t.shape, shape) for t in op.inputs
    )


def _broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    return len(shape) == len(target) and all(n in (1, m) for n, m in zip(shape, target, strict=True))


def pointwise_labels(shape: tuple[int, ...], target: tuple[int, ...]) -> list[Label]:
    """The labels of an operand of an elementwise op over `target`: none for a scalar."""
    if shape == () and target != ():
        return []
    return [f"d{i}" if n == m else None for i, (n, m) in enumerate(zip(shape, target, strict=True))]


def pointwise(op: Op) -> Rule | None:
    """The generic rule: equal shapes pass through, dimension by dimension."""
    if not is_pointwise(op):
        return None
    shape = op.outputs[0].shape
    return make_rule(
        op,
        [pointwise_labels(t.shape, shape) for t in op.inputs],
        [pointwise_labels(shape, shape) for _ in op.outputs],
        linear=linear_sets(op),
        flops=math.prod(shape) * FLOPS.get(op.name, 1),
    )


def replicated(op: Op) -> Rule:
    """The fallback: every device computes everything. Plans name each op that uses it."""
    rule = make_rule(op, [[None] * t.rank for t in op.inputs], [[None] * t.rank for t in op.outputs])
    return dataclasses.replace(rule, fallback=bool(rule.factors))


TRANSCENDENTAL = frozenset(
    "exp exp2 expm1 log log1p log2 logistic tanh sin cos tan asin acos atan atan2 sinh cosh asinh acosh atanh erf erfc "
    "erf_inv pow rsqrt sqrt cbrt lgamma digamma igamma igammac".split()
)
FLOPS = dict.fromkeys(TRANSCENDENTAL, 8) | {"erf": 20, "erf_inv": 33, "erfc": 64}
"""Operations on each element, where it is not one. Error functions are polynomials; so many does XLA:TPU count (libtpu
0.0.42; `experiments/validation/cycles.py`)."""
POINTWISE = TRANSCENDENTAL | frozenset(
    "abs add add_any and bessel_i0 bessel_i0e bessel_i1 bessel_i1e bitcast_convert_type ceil clamp clz "
    "complex conj convert_element_type copy copy_p div eq floor ge gt igamma_grad_a imag integer_pow "
    "is_finite le le_to lt lt_to max min mul mulhi nan_to_num ne neg nextafter not one_minus_square or pcast "
    "polygamma polynomial population_count pvary random_gamma_grad real reduce_precision "
    "regularized_incomplete_beta rem round select_n shift_left shift_right_arithmetic shift_right_logical "
    "sign square stop_gradient sub xor zeta".split()
)
