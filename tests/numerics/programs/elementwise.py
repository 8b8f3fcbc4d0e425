"""Elementwise ops, and casts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from tests.numerics.programs.drawer import (
    BOOL,
    ENTRIES,
    FLOAT,
    INT,
    Drawer,
    Entry,
    distinct,
    entry,
    ignore,
    positive,
    small,
)

UNARY: dict[str, Callable[[Any], Any]] = {
    "abs": lax.abs,
    "acos": lambda x: lax.acos(small(x) * 0.9),
    "acosh": lambda x: lax.acosh(positive(x) + 1.0),
    "asin": lambda x: lax.asin(small(x) * 0.9),
    "asinh": lax.asinh,
    "atan": lax.atan,
    "atanh": lambda x: lax.atanh(small(x) * 0.9),
    "bessel_i0e": lax.bessel_i0e,
    "bessel_i1e": lax.bessel_i1e,
    "cbrt": lambda x: lax.cbrt(positive(x)),
    "ceil": lambda x: lax.ceil(distinct(x)),
    "convert_element_type": lambda x: x.astype(np.float32).astype(np.float64),
    "copy": jnp.copy,
    "cos": lax.cos,
    "cosh": lambda x: lax.cosh(small(x)),
    "digamma": lambda x: lax.digamma(positive(x)),
    "erf": lax.erf,
    "erf_inv": lambda x: lax.erf_inv(small(x) * 0.9),
    "erfc": lax.erfc,
    "exp": lambda x: lax.exp(small(x)),
    "exp2": lambda x: lax.exp2(small(x)),
    "expm1": lambda x: lax.expm1(small(x)),
    "floor": lambda x: lax.floor(distinct(x)),
    "integer_pow": lambda x: lax.integer_pow(small(x), 3),
    "lgamma": lambda x: lax.lgamma(positive(x)),
    "log": lambda x: lax.log(positive(x)),
    "log2": lambda x: lax.log2(positive(x)) if hasattr(lax, "log2") else jnp.log2(positive(x)),
    "log1p": lambda x: lax.log1p(positive(x)),
    "logistic": lax.logistic,
    "name": lambda x: checkpoint_name(lax.sin(x), "kept"),
    "neg": lax.neg,
    "reduce_precision": lambda x: lax.reduce_precision(distinct(x), 8, 10),
    "round": lambda x: lax.round(distinct(x)),
    "rsqrt": lambda x: lax.rsqrt(positive(x)),
    "sign": lambda x: lax.sign(distinct(x)),
    "sin": lax.sin,
    "sinh": lambda x: lax.sinh(small(x)),
    "sqrt": lambda x: lax.sqrt(positive(x)),
    "square": lambda x: lax.square(small(x)),
    "stop_gradient": lambda x: lax.stop_gradient(x) * 0.5,
    "tan": lambda x: lax.tan(small(x)),
    "tanh": lax.tanh,
    "complex": lambda x: lax.real(lax.complex(x, lax.cos(x))),
    "conj": lambda x: lax.imag(lax.conj(lax.complex(lax.sin(x), x)) * lax.complex(x, x * 0.5)),
    "polygamma": lambda x: lax.polygamma(jnp.full_like(x, 1.0), positive(x)),
    "zeta": lambda x: lax.zeta(positive(x) + 1.5, positive(x)),
}
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, y: (x + y) * 0.6,
    "sub": lambda x, y: (x - y) * 0.6,
    "mul": lambda x, y: x * y if x.shape == () else small(x) * y,
    "div": lambda x, y: x / positive(y),
    "max": lax.max,
    "min": lax.min,
    "atan2": lambda x, y: lax.atan2(x, positive(y)),
    "pow": lambda x, y: lax.pow(positive(x), small(y)),
    "rem": lambda x, y: lax.rem(distinct(x), positive(y)),
    "nextafter": lax.nextafter,
    "igamma": lambda x, y: lax.igamma(positive(x), positive(y)),
    "igammac": lambda x, y: lax.igammac(positive(x), positive(y)),
    "igamma_grad_a": lambda x, y: lax.igamma_grad_a(positive(x), positive(y)),
    "random_gamma_grad": lambda x, y: lax.random_gamma_grad(positive(x), positive(y)),
    "regularized_incomplete_beta": lambda x, y: lax.betainc(positive(x), positive(y), jax.nn.sigmoid(x)),
}
COMPARE = {"eq": lax.eq, "ne": lax.ne, "lt": lax.lt, "le": lax.le, "gt": lax.gt, "ge": lax.ge}
COMPARE |= {"lt_to": lax.lt_to_p.bind, "le_to": lax.le_to_p.bind}
LOGICAL = {"and": lax.bitwise_and, "or": lax.bitwise_or, "xor": lax.bitwise_xor}
SHIFTS = {
    "shift_left": lax.shift_left,
    "shift_right_logical": lax.shift_right_logical,
    "shift_right_arithmetic": lax.shift_right_arithmetic,
}


def _unary(name: str) -> Entry:
    return lambda d: ignore(d.apply(name, UNARY[name], d.value(FLOAT)))


def _binary(name: str) -> Entry:
    def draw_(d: Drawer) -> None:
        x = d.value(FLOAT)
        how = d.choice(("same", "same", "scalar", "rank 1"))
        if how == "same" or x.rank == 0:
            y = d.value(FLOAT, shape=x.shape)
        elif how == "scalar":
            y = d.value(FLOAT, 0, 0)
        else:
            shape = tuple(1 if d.flip() else n for n in x.shape)
            y = d.value(FLOAT, shape=shape)
        d.apply(name, lambda a, b: BINARY[name](*jnp.broadcast_arrays(a, b)) if name not in ("add", "sub", "mul", "div")
                else BINARY[name](a, b), *((x, y) if d.flip(0.8) else (y, x)))  # fmt: skip

    return draw_


def _compare(name: str) -> Entry:
    def draw_(d: Drawer) -> None:
        x = d.value(FLOAT)
        y = d.value(FLOAT, shape=x.shape)
        d.apply(name, lambda a, b: COMPARE[name](distinct(a), b), x, y)

    return draw_


def _logical(name: str) -> Entry:
    def draw_(d: Drawer) -> None:
        x = d.value(d.choice((BOOL, BOOL, INT)))
        d.apply(name, LOGICAL[name], x, d.value(x.kind, shape=x.shape))

    return draw_


def _shift(name: str) -> Entry:
    return lambda d: ignore(d.apply(name, lambda x: SHIFTS[name](x, jnp.full_like(x, 2)), d.value(INT)))


ENTRIES |= {name: _unary(name) for name in UNARY} | {name: _binary(name) for name in BINARY}
ENTRIES |= {name: _compare(name) for name in COMPARE} | {name: _logical(name) for name in LOGICAL}
ENTRIES |= {name: _shift(name) for name in SHIFTS}


@entry("not")
def not_(d: Drawer) -> None:
    d.apply("not", lax.bitwise_not, d.value(d.choice((BOOL, INT))))


@entry("population_count", "clz")
def bit_counts(d: Drawer) -> None:
    d.apply("bits", lambda x: lax.population_count(x) + lax.clz(x), d.value(INT))


@entry("is_finite")
def is_finite(d: Drawer) -> None:
    d.apply("is_finite", lambda x: lax.is_finite(x / x), d.value(FLOAT))


@entry("select_n")
def select(d: Drawer) -> None:
    x = d.value(FLOAT)
    d.apply(
        "select_n", lambda c, a, b: lax.select(c, a, b), d.value(BOOL, shape=x.shape), x, d.value(FLOAT, shape=x.shape)
    )


@entry("clamp")
def clamp(d: Drawer) -> None:
    d.apply("clamp", lambda x: lax.clamp(-0.5, x, 0.8), d.value(FLOAT))


@entry("convert_element_type:int")
def convert(d: Drawer) -> None:
    if d.flip():
        d.apply("convert", lambda x: (distinct(x) * 3).astype(np.int32), d.value(FLOAT))
    else:
        d.apply("convert", lambda x: x.astype(np.float64) * 0.1, d.value(d.choice((INT, BOOL))))


@entry("convert_element_type:narrow")
def narrow(d: Drawer) -> None:
    dtype = d.choice((jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16))
    d.apply("narrow", lambda x: distinct(x).astype(dtype).astype(np.float64), d.value(FLOAT))


@entry("bitcast_convert_type")
def bitcast(d: Drawer) -> None:
    if d.flip():
        d.apply("bitcast", lambda x: lax.bitcast_convert_type(x, np.int16).astype(np.int32), d.value(INT, 0, 3))
    else:
        d.apply("bitcast", lambda x: lax.bitcast_convert_type(x, np.float32).astype(np.float64), d.value(INT))


@entry("int arithmetic")
def integers(d: Drawer) -> None:
    x = d.value(INT)
    op = d.choice((lax.add, lax.mul, lax.sub, lax.max, lax.min))
    d.apply("int", lambda a, b: op(a, b) % 11, x, d.value(INT, shape=x.shape))


@entry("optimization_barrier")
def barrier(d: Drawer) -> None:
    d.apply("barrier", lambda a, b: lax.optimization_barrier((a, b)), d.value(FLOAT), d.value(FLOAT))
