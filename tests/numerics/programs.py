"""Random programs made of the rule table's primitives.

    program = draw(random.Random(0))         # or any object with the methods of `random.Random`
    program.fn(*program.args)

`ENTRIES` is the table: primitive -> how to draw one application of it to values that exist already, or to new inputs.
Dimensions are drawn from sizes that divide 2, 4 and 8 and sizes that do not. Values stay near 1 in magnitude, and what
is discontinuous (comparisons, sorts, roundings) sees numbers without ties, so that rounding noise changes no result.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.random import threefry2x32_p

SIZES = (2, 3, 4, 5, 6, 7, 8, 8, 12, 16)
LIMIT = 3000  # elements of a value
FLOAT, INT, BOOL, KEY = "float", "int", "bool", "key"


@dataclass(frozen=True)
class Value:
    """A value of the program under construction."""

    index: int
    shape: tuple[int, ...]
    dtype: Any

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def kind(self) -> str:
        return kind_of(self.dtype)


def kind_of(dtype: Any) -> str:
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return KEY
    return {"f": FLOAT, "i": INT, "u": "word", "b": BOOL, "c": "complex"}[np.dtype(dtype).kind]


class Skip(Exception):
    """No application here: wrong sizes, too large, no derivative."""


@dataclass(frozen=True)
class Step:
    name: str
    fn: Callable[..., Any]
    operands: tuple[int, ...]
    results: int


@dataclass(eq=False)
class Program:
    """A function and arguments for it."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    steps: tuple[str, ...]
    donate: tuple[int, ...] = ()

    def __str__(self) -> str:
        return " ".join(self.steps)


@dataclass(eq=False)
class Drawer:
    """A program under construction: values so far, the steps that made them, and choices yet to be made."""

    rng: random.Random
    values: list[Value] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    inputs: list[Any] = field(default_factory=list)  # concrete arrays; none in sub-programs
    order: list[tuple[str, int]] = field(default_factory=list)  # ("input" or "step", position), in order of values
    closed: bool = False
    fresh: float = 0.35
    turns: dict[tuple[str, ...], int] | None = None  # if given, variants of an entry take turns

    # Choices

    def choice(self, options: Sequence[Any]) -> Any:
        return options[self.rng.randint(0, len(options) - 1)]

    def variant(self, *options: str) -> str:
        """Which form of its primitives an entry applies."""
        if self.turns is None:
            return self.choice(options)
        self.turns[options] = self.turns.get(options, -1) + 1
        return options[self.turns[options] % len(options)]

    def flip(self, probability: float = 0.5) -> bool:
        return self.rng.randint(0, 99) < probability * 100

    def shape(self, low: int, high: int) -> tuple[int, ...]:
        rank = self.rng.randint(low, high)
        sizes = [1 if self.turns is None and self.flip(0.06) else self.choice(SIZES) for _ in range(rank)]
        while math.prod(sizes) > LIMIT // 2:
            sizes[sizes.index(max(sizes))] = 2
        return tuple(sizes)

    def permutation(self, n: int) -> list[int]:
        left, found = list(range(n)), []
        while left:
            found.append(left.pop(self.rng.randint(0, len(left) - 1)))
        return found

    # Values

    def value(self, kind: str, low: int = 0, high: int = 4, shape: tuple[int, ...] | None = None) -> Value:
        """A value of these ranks (of this `shape`), existing or a new input."""
        fits = [
            v for v in self.values
            if v.kind == kind and (v.shape == shape if shape is not None else low <= v.rank <= high)
        ]  # fmt: skip
        if fits and (self.closed or not self.flip(self.fresh)):
            return self.choice(fits[-6:])
        wanted = self.shape(low, high) if shape is None else shape
        if not self.closed:
            return self.new(kind, wanted)
        return self.made(kind, wanted)

    def new(self, kind: str, shape: tuple[int, ...], low: int = 0, high: int = 10) -> Value:
        """A new input."""
        rng = np.random.default_rng([len(self.inputs), *shape])
        if kind == FLOAT:
            x = rng.normal(size=shape)
        elif kind == INT:
            x = rng.integers(low, high, shape).astype(np.int32)
        elif kind == "word":
            x = rng.integers(0, 2**32, shape).astype(np.uint32)
        elif kind == BOOL:
            x = rng.random(shape) < 0.5
        else:
            x = jax.random.split(jax.random.key(len(self.inputs)), shape) if shape else jax.random.key(len(self.inputs))
        x = jnp.asarray(x)
        self.inputs.append(x)
        value = Value(len(self.values), x.shape, x.dtype)
        self.values.append(value)
        self.order.append(("input", len(self.inputs) - 1))
        return value

    def made(self, kind: str, shape: tuple[int, ...]) -> Value:
        """A value computed from nothing but constants (inside sub-programs)."""
        data = np.random.default_rng([len(self.values), *shape]).normal(size=shape)
        if kind == FLOAT:
            return self.apply("constant", lambda: jnp.sin(jnp.full(shape, 0.7)) + jnp.asarray(data))[0]
        if kind == INT:
            return self.apply("constant", lambda: lax.iota(np.int32, math.prod(shape)).reshape(shape) % 5)[0]
        if kind == BOOL:
            return self.apply("constant", lambda: jnp.asarray(data > 0))[0]
        raise Skip

    def ids(self, shape: tuple[int, ...], low: int, high: int) -> Value:
        """Indices in `[low, high)`."""
        if not self.closed:
            return self.new(INT, shape, low, high)
        n = math.prod(shape)
        return self.apply("constant", lambda: (lax.iota(np.int32, n).reshape(shape) * 7) % (high - low) + low)[0]

    def apply(self, name: str, fn: Callable[..., Any], *operands: Value) -> list[Value]:
        """Add a step, if JAX accepts it and its results are of bearable size."""
        structs = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in operands]
        try:
            results = jax.tree.leaves(jax.eval_shape(fn, *structs))
        except (TypeError, ValueError, NotImplementedError) as e:
            raise Skip(f"{name}: {e}") from e
        if not results or any(math.prod(r.shape) > LIMIT or 0 in r.shape or len(r.shape) > 5 for r in results):
            raise Skip(f"{name}: {results}")
        found = [Value(len(self.values) + i, r.shape, r.dtype) for i, r in enumerate(results)]
        self.values += found
        self.order += [("step", len(self.steps))] * len(found)
        self.steps.append(Step(name, fn, tuple(v.index for v in operands), len(found)))
        return found

    def function(self, outputs: Sequence[Value], arguments: int) -> Callable[..., Any]:
        """The program so far: from its first `arguments` values (inputs of a sub-program) or from its inputs."""
        steps, order, inputs_at = list(self.steps), list(self.order), {}
        for i, (what, position) in enumerate(order):
            if what == "input":
                inputs_at[i] = position
        wanted = [v.index for v in outputs]

        def run(*args: Any) -> tuple[Any, ...]:
            env: list[Any] = []
            done = 0
            while len(env) < len(order):
                at = len(env)
                if at < arguments or at in inputs_at:
                    env.append(args[at if at < arguments else inputs_at[at]])
                    continue
                step = steps[done]
                done += 1
                env += jax.tree.leaves(step.fn(*(env[i] for i in step.operands)))
            return tuple(env[i] for i in wanted)

        return run


Entry = Callable[[Drawer], None]
ENTRIES: dict[str, Entry] = {}


def entry(*names: str) -> Callable[[Entry], Entry]:
    """Make the decorated function draw applications of these primitives."""

    def add(fn: Entry) -> Entry:
        ENTRIES.update(dict.fromkeys(names, fn))
        return fn

    return add


def distinct(x: Any) -> Any:
    """`x` moved by small random offsets, so that no two elements tie unless they differ by noise alone."""
    return x + np.random.default_rng(x.shape).normal(size=x.shape) * 0.3


# Elementwise


def small(x: Any) -> Any:
    return lax.tanh(x)


def positive(x: Any) -> Any:
    return lax.abs(x) + 0.5


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
LOGICAL = {"and": lax.bitwise_and, "or": lax.bitwise_or, "xor": lax.bitwise_xor}
SHIFTS = {
    "shift_left": lax.shift_left,
    "shift_right_logical": lax.shift_right_logical,
    "shift_right_arithmetic": lax.shift_right_arithmetic,
}


def _unary(name: str) -> Entry:
    return lambda d: _ignore(d.apply(name, UNARY[name], d.value(FLOAT)))


def _ignore(_: Any) -> None:
    return None


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
    return lambda d: _ignore(d.apply(name, lambda x: SHIFTS[name](x, jnp.full_like(x, 2)), d.value(INT)))


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


# Contractions, convolutions, reductions, windows


@entry("dot_general")
def dot_general(d: Drawer) -> None:
    x = d.value(FLOAT, 1, 4)
    order = d.permutation(x.rank)
    batch = order[: d.rng.randint(0, min(2, x.rank))]
    contract = order[len(batch) :][: d.rng.randint(0, 2)]
    free = d.shape(0, 2)
    dims = [x.shape[i] for i in (*batch, *contract)] + list(free)
    place = d.permutation(len(dims))  # place[i]: the dimension of y that dims[i] becomes
    shape = [0] * len(dims)
    for n, at in zip(dims, place, strict=True):
        shape[at] = n
    y = d.value(FLOAT, shape=tuple(shape))
    nb, nk = len(batch), len(contract)
    numbers = ((tuple(contract), tuple(place[nb : nb + nk])), (tuple(batch), tuple(place[:nb])))
    scale = 1 / math.sqrt(max(1, math.prod(x.shape[i] for i in contract)))
    d.apply("dot_general", lambda a, b: lax.dot_general(a, b, numbers) * scale, x, y)


@entry("ragged_dot_general")
def ragged_dot(d: Drawer) -> None:
    m, k, n, groups = d.choice((8, 12, 16)), d.choice(SIZES), d.choice(SIZES), d.choice((2, 3, 4))
    x, y = d.value(FLOAT, shape=(m, k)), d.value(FLOAT, shape=(groups, k, n))
    sizes = np.full(groups, m // groups, np.int32)
    sizes[0] += m % groups
    sizes[0] -= 1
    sizes[-1] += 1
    if d.variant("forward", "gradient") == "forward":
        d.apply("ragged_dot", lambda a, b: lax.ragged_dot(a, b, jnp.asarray(sizes)) * k**-0.5, x, y)
    else:
        d.apply(
            "ragged_dot",
            lambda a, b: jax.grad(lambda c: jnp.sin(lax.ragged_dot(a, c, jnp.asarray(sizes))).sum())(b),
            x,
            y,
        )


def _image(d: Drawer) -> tuple[int, tuple[int, ...]]:
    spatial = d.choice((1, 1, 2))
    return spatial, tuple(d.choice((4, 6, 7, 8, 12, 16)) for _ in range(spatial))


@entry("conv_general_dilated")
def convolution(d: Drawer) -> None:
    spatial, image = _image(d)
    groups = d.choice((1, 1, 2, 4))
    batch, features, out = d.choice((2, 3, 4, 8)), groups * d.choice((1, 2, 3)), groups * d.choice((1, 2, 3, 4))
    window = tuple(d.choice((1, 2, 3, 5)) for _ in image)
    stride = tuple(d.choice((1, 1, 2, 3)) for _ in image)
    padding: Any = d.choice(("SAME", "VALID", ((1, 1),) * spatial, ((2, 1),) * spatial))
    dilations = d.choice(((1, 1), (1, 1), (2, 1), (1, 2)))
    spec = ("NHC", "HIO", "NHC") if spatial == 1 else d.choice((("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")))
    last = spec[0][-1] == "C"
    shape = (batch, *image, features) if last else (batch, features, *image)
    kernel = (*window, features // groups, out) if last else (out, features // groups, *window)
    if any((k - 1) * dilations[1] + 1 > n for k, n in zip(window, image, strict=True)):
        raise Skip  # an empty result
    x, w = d.value(FLOAT, shape=shape), d.value(FLOAT, shape=kernel)
    scale = 1 / math.sqrt(math.prod(window) * features / groups)

    def conv(a: Any, b: Any) -> Any:
        pads = padding if dilations[0] == 1 or not isinstance(padding, str) else ((1, 1),) * spatial
        return scale * lax.conv_general_dilated(
            a, b, stride, pads, lhs_dilation=(dilations[0],) * spatial, rhs_dilation=(dilations[1],) * spatial,
            dimension_numbers=spec, feature_group_count=groups,
        )  # fmt: skip

    how = d.variant("forward", "image", "kernel")
    if how == "forward":
        d.apply("conv", conv, x, w)
    else:
        d.apply(f"conv:{how}", jax.grad(lambda a, b: (conv(a, b) ** 2).mean(), how == "kernel"), x, w)


WINDOWS = {
    "reduce_window_max": (-np.inf, lax.max),
    "reduce_window_min": (np.inf, lax.min),
    "reduce_window_sum": (0.0, lax.add),
    "reduce_window": (1.0, lax.mul),
}


@entry(*WINDOWS, "select_and_scatter_add", "select_and_gather_add")
def pooling(d: Drawer) -> None:
    _, image = _image(d)
    name = d.variant(*WINDOWS, "select_and_scatter_add", "select_and_gather_add")
    window = tuple(d.choice((1, 2, 3)) for _ in image)
    stride = tuple(d.choice((1, 2, 3)) for _ in image)
    padding = d.choice(("SAME", "VALID"))
    x = d.value(FLOAT, shape=(d.choice((2, 3, 4, 8)), *image, d.choice(SIZES)))

    def pool(a: Any) -> Any:
        init, op = WINDOWS.get(name, WINDOWS["reduce_window_max"])
        y = lax.reduce_window(distinct(a), init, op, (1, *window, 1), (1, *stride, 1), padding)
        return y / math.prod(window) if op is lax.add else y

    if name == "select_and_scatter_add":
        d.apply(name, jax.grad(lambda a: jnp.sin(pool(a)).sum()), x)
    elif name == "select_and_gather_add":
        d.apply(name, lambda a: jax.jvp(pool, (a,), (lax.cos(a),))[1], x)
    else:
        d.apply(name, pool, x)


def _axes(d: Drawer, rank: int) -> tuple[int, ...]:
    axes = tuple(i for i in range(rank) if d.flip())
    return axes or (d.rng.randint(0, rank - 1),)


REDUCTIONS = {
    "reduce_sum": (FLOAT, lambda x, axes: x.sum(axes) / math.sqrt(math.prod(x.shape[a] for a in axes))),
    "reduce_max": (FLOAT, lambda x, axes: x.max(axes)),
    "reduce_min": (FLOAT, lambda x, axes: x.min(axes)),
    "reduce_prod": (FLOAT, lambda x, axes: lax.cos(x).prod(axes)),
    "reduce_and": (BOOL, lambda x, axes: x.all(axes)),
    "reduce_or": (BOOL, lambda x, axes: x.any(axes)),
    "reduce_xor": (INT, lambda x, axes: lax.reduce(x, np.int32(0), lax.bitwise_xor, axes)),
    "reduce": (FLOAT, lambda x, axes: lax.reduce(small(x), 0.0, lambda a, b: a + b - a * b, axes)),
    "argmax": (FLOAT, lambda x, axes: lax.argmax(distinct(x), axes[0], np.int32)),
    "argmin": (FLOAT, lambda x, axes: lax.argmin(distinct(x), axes[0], np.int32)),
    "int sum": (INT, lambda x, axes: x.sum(axes)),
    "int max": (INT, lambda x, axes: x.max(axes)),
}
CUMULATIVE = {
    "cumsum": lambda x, axis, back: lax.cumsum(x, axis, back) / math.sqrt(x.shape[axis]),
    "cumprod": lambda x, axis, back: lax.cumprod(lax.cos(x), axis, back),
    "cummax": lambda x, axis, back: lax.cummax(distinct(x), axis, back),
    "cummin": lambda x, axis, back: lax.cummin(distinct(x), axis, back),
    "cumlogsumexp": lambda x, axis, back: lax.cumlogsumexp(x, axis, back) * 0.5,
}


def _reduction(name: str) -> Entry:
    def draw_(d: Drawer) -> None:
        kind, fn = REDUCTIONS[name]
        x = d.value(kind, 1, 4)
        axes = _axes(d, x.rank)
        d.apply(name, lambda a: fn(a, axes), x)

    return draw_


def _cumulative(name: str) -> Entry:
    def draw_(d: Drawer) -> None:
        x = d.value(FLOAT, 1, 4)
        axis, back = d.rng.randint(0, x.rank - 1), d.flip()
        d.apply(name, lambda a: CUMULATIVE[name](a, axis, back), x)

    return draw_


ENTRIES |= {name: _reduction(name) for name in REDUCTIONS} | {name: _cumulative(name) for name in CUMULATIVE}


# Shapes


@entry("reshape")
def reshape(d: Drawer) -> None:
    x = d.value(d.choice((FLOAT, FLOAT, INT)), 1, 4)
    primes = [p for n in x.shape for p in _primes(n)]
    if d.flip(0.3):
        primes = [primes[i] for i in d.permutation(len(primes))]
    shape: list[int] = []
    for p in primes:
        if shape and len(shape) < 4 and d.flip(0.5):
            shape[-1] *= p
        elif len(shape) < 4:
            shape.append(p)
        else:
            shape[-1] *= p
    if d.flip(0.2):
        shape.insert(d.rng.randint(0, len(shape)), 1)
    d.apply("reshape", lambda a: a.reshape(shape), x)


def _primes(n: int) -> list[int]:
    return [n] if n < 4 or n in (5, 7) else [p := next(p for p in (2, 3, 5, 7, n) if n % p == 0), *_primes(n // p)]


@entry("transpose")
def transpose(d: Drawer) -> None:
    x = d.value(d.choice((FLOAT, INT, BOOL)), 2, 4)
    order = d.permutation(x.rank)
    d.apply("transpose", lambda a: lax.transpose(a, order), x)


@entry("broadcast_in_dim", "squeeze")
def broadcast(d: Drawer) -> None:
    x = d.value(d.choice((FLOAT, FLOAT, INT, BOOL)), 0, 3)
    lead = d.shape(0, 2)
    ones = d.rng.randint(0, x.rank)
    if d.variant("broadcast", "squeeze") == "broadcast":
        d.apply(
            "broadcast",
            lambda a: jnp.broadcast_to(jnp.expand_dims(a, ones), (*lead, *a.shape[:ones], 3, *a.shape[ones:])),
            x,
        )
    else:
        d.apply("squeeze", lambda a: lax.squeeze(jnp.expand_dims(a, ones), (ones,)), x)


@entry("pad")
def pad(d: Drawer) -> None:
    x = d.value(FLOAT, 1, 3)
    config = [d.choice(((0, 0, 0), (0, 0, 0), (1, 2, 0), (0, 1, 1), (-1, 2, 0), (2, 0, 2))) for _ in x.shape]
    if d.flip():
        d.apply("pad", lambda a: lax.pad(a, np.float64(0), config), x)
    else:
        d.apply("pad", lambda a, v: lax.pad(a, v, config), x, d.value(FLOAT, 0, 0))


@entry("slice")
def slice_(d: Drawer) -> None:
    x = d.value(d.choice((FLOAT, FLOAT, INT)), 1, 4)
    index = []
    for n in x.shape:
        start = d.rng.randint(0, n - 1) if d.flip(0.4) else 0
        stop = d.rng.randint(start + 1, n) if d.flip(0.4) else n
        index.append(slice(start, stop, d.choice((1, 1, 2))))
    d.apply("slice", lambda a: a[tuple(index)], x)


@entry("concatenate")
def concatenate(d: Drawer) -> None:
    x = d.value(FLOAT, 1, 3)
    axis, more = d.rng.randint(0, x.rank - 1), d.choice((1, 2, 4))
    y = d.value(FLOAT, shape=tuple(more if i == axis else n for i, n in enumerate(x.shape)))
    d.apply("concatenate", lambda *xs: lax.concatenate(xs, axis), *((x, y) if d.flip() else (x, y, x)))


@entry("split")
def split(d: Drawer) -> None:
    x = d.value(FLOAT, 1, 3)
    axis = d.rng.randint(0, x.rank - 1)
    if x.shape[axis] < 2:
        raise Skip
    at = d.rng.randint(1, x.shape[axis] - 1)
    d.apply("split", lambda a: lax.split(a, (at, a.shape[axis] - at), axis), x)


@entry("stack", "unstack", "tile")
def stack(d: Drawer) -> None:
    x = d.value(FLOAT, 1, 3)
    axis, reps = d.rng.randint(0, x.rank - 1), tuple(d.choice((1, 2, 3)) for _ in x.shape)
    how = d.variant("stack", "unstack", "tile")
    fns = {
        "stack": lambda a: jnp.stack([a, lax.sin(a)], axis),
        "unstack": lambda a: jnp.unstack(a, axis=axis)[:3],
        "tile": lambda a: jnp.tile(a, reps),
    }
    d.apply(how, fns[how], x)


@entry("rev")
def rev(d: Drawer) -> None:
    x = d.value(d.choice((FLOAT, INT)), 1, 4)
    axes = _axes(d, x.rank)
    d.apply("rev", lambda a: lax.rev(a, axes), x)


@entry("iota")
def iota(d: Drawer) -> None:
    shape = d.shape(1, 3)
    axis, dtype = d.rng.randint(0, len(shape) - 1), d.choice((np.int32, np.float64))
    d.apply("iota", lambda: lax.broadcasted_iota(dtype, shape, axis) % 3)


@entry("empty", "empty2")
def empty(d: Drawer) -> None:
    shape = d.shape(1, 3)
    d.apply("empty", lambda x: jnp.full(shape, x) * 0.3, d.value(FLOAT, 0, 0))


@entry("dynamic_slice", "dynamic_update_slice")
def dynamic(d: Drawer) -> None:
    x = d.value(FLOAT, 1, 3)
    sizes = tuple(d.rng.randint(1, n) if d.flip() else n for n in x.shape)
    starts = [d.ids((), -1, n + 1) for n in x.shape]
    if d.variant("slice", "update") == "slice":
        d.apply("dynamic_slice", lambda a, *s: lax.dynamic_slice(a, s, sizes), x, *starts)
    else:
        update = d.value(FLOAT, shape=sizes)
        d.apply("dynamic_update_slice", lambda a, u, *s: lax.dynamic_update_slice(a, u, s), x, update, *starts)


# Indexing

MODES = ("clip", "fill", "promise_in_bounds")


@entry("gather")
def gather(d: Drawer) -> None:
    x = d.value(d.choice((FLOAT, FLOAT, FLOAT, INT, BOOL)), 1, 3)
    how = d.variant("rows", "embedding gradient", "along", "slices", "two")
    axis, mode = d.rng.randint(0, x.rank - 1), d.choice(MODES)
    far = 0 if mode == "promise_in_bounds" else 2
    n = x.shape[axis]
    if how == "along":
        ids = d.ids(tuple(d.choice((2, 4, 5)) if i == axis else m for i, m in enumerate(x.shape)), 0, n)
        d.apply("gather:along", lambda a, i: jnp.take_along_axis(a, i, axis, mode=mode), x, ids)
    elif how == "slices":
        ids, width = d.ids((d.choice(SIZES), 1), -far, n + far), d.rng.randint(1, n)
        window = tuple(width if i == axis else m for i, m in enumerate(x.shape))
        numbers = lax.GatherDimensionNumbers(tuple(range(1, x.rank + 1)), (), (axis,))
        mode = "clip" if mode == "promise_in_bounds" else mode
        d.apply("gather:slices", lambda a, i: lax.gather(a, i, numbers, window, mode=mode), x, ids)
    elif how == "two" and x.rank >= 2:
        ids = [d.ids((d.choice(SIZES),), 0, m) for m in x.shape[:2]]
        d.apply("gather:two", lambda a, i, j: a.at[i, :][:, j].get(mode=mode), x, *ids)
    elif how == "embedding gradient" and x.kind == FLOAT:
        ids = d.ids(d.shape(1, 2), -far, n + far)
        d.apply("gather:gradient", jax.grad(lambda a, i: jnp.sin(jnp.take(a, i, axis, mode="clip")).mean()), x, ids)
    else:
        ids = d.ids(d.shape(0, 2), -far, n + far)
        d.apply("gather", lambda a, i: jnp.take(a, i, axis, mode=mode), x, ids)


SCATTERS = {
    "scatter-add": lambda a, i, u: a.at[i].add(u * 0.3),
    "scatter-sub": lambda a, i, u: a.at[i].subtract(u * 0.3),
    "scatter-mul": lambda a, i, u: a.at[i].mul(lax.cos(u)),
    "scatter-max": lambda a, i, u: a.at[i].max(u),
    "scatter-min": lambda a, i, u: a.at[i].min(u),
    "scatter": lambda a, i, u: a.at[i].set(u, unique_indices=True),
    "scatter:same": lambda a, i, u: a.at[i].set(u),
}


def _scatter(name: str) -> Entry:
    def draw_(d: Drawer) -> None:
        x = d.value(FLOAT, 1, 3)
        shape = d.shape(1, 2) if name != "scatter" else (d.rng.randint(1, x.shape[0]),)
        ids = d.ids(shape, -2, x.shape[0] + 2)
        u = d.value(FLOAT, shape=(*shape, *x.shape[1:]))
        if name == "scatter":  # every row at most once
            d.apply(name, lambda a, i, v: SCATTERS[name](a, (jnp.arange(i.shape[0]) + i[0]) % a.shape[0], v), x, ids, u)
        elif name == "scatter:same":  # which of several updates of a row comes last is not defined: all are equal
            d.apply(name, lambda a, i, v: SCATTERS[name](a, i, jnp.broadcast_to(v[(0,) * i.ndim], v.shape)), x, ids, u)
        else:
            d.apply(name, SCATTERS[name], x, ids, u)

    return draw_


ENTRIES |= {name: _scatter(name) for name in SCATTERS}


@entry("scatter-add:along")
def scatter_along(d: Drawer) -> None:
    x = d.value(FLOAT, 2, 3)
    ids = d.ids((*x.shape[:-1], d.choice((2, 3, 4))), 0, x.shape[-1])
    d.apply("scatter-add:along", jax.grad(lambda a, i: jnp.cos(jnp.take_along_axis(a, i, -1)).sum()), x, ids)


@entry("sort")
def sort(d: Drawer) -> None:
    x = d.value(FLOAT, 1, 3)
    axis = d.rng.randint(0, x.rank - 1)
    if d.flip():
        d.apply("sort", lambda a: lax.sort(distinct(a), axis), x)
    else:
        y = d.value(FLOAT, shape=x.shape)
        d.apply("sort", lambda a, b: lax.sort((distinct(a), b), axis, num_keys=1), x, y)


@entry("top_k", "approx_top_k")
def top_k(d: Drawer) -> None:
    x = d.value(FLOAT, 1, 3)
    k = min(d.choice((1, 2, 3)), x.shape[-1])
    if d.variant("exact", "approximate") == "exact":
        d.apply("top_k", lambda a: lax.top_k(distinct(a), k), x)
    else:
        d.apply("approx_top_k", lambda a: lax.approx_max_k(distinct(a), k), x)


# Random numbers


@entry("random_bits")
def dropout(d: Drawer) -> None:
    x, key = d.value(FLOAT, 1, 3), d.value(KEY, 0, 0)
    d.apply("dropout", lambda k, a: jnp.where(jax.random.bernoulli(k, 0.8, a.shape), a / 0.8, 0.0), key, x)


@entry("random_split", "random_fold_in", "random_clone")
def keys(d: Drawer) -> None:
    key, n = d.value(KEY, 0, 0), d.choice((2, 3, 4, 8))
    how = d.variant("split", "fold", "clone")
    fns = {
        "split": lambda k: jax.vmap(lambda s: jax.random.normal(s, (6,)))(jax.random.split(k, n)),
        "fold": lambda k: jax.vmap(lambda s: jax.random.uniform(jax.random.fold_in(s, n), (4,)))(
            jax.random.split(k, 6)
        ),
        "clone": lambda k: (jax.random.clone(jax.random.split(k, 6)), jax.random.bits(k, (n,), "uint32") >> 3),
    }
    d.apply(how, fns[how], key)


@entry("random_wrap", "random_unwrap", "random_seed", "threefry2x32")
def words(d: Drawer) -> None:
    how = d.variant("wrap", "seed", "threefry")
    if how == "wrap":
        d.apply(how, lambda k: jax.random.key_data(jax.random.split(k, 4)), d.value(KEY, 0, 0))
        d.apply(how, lambda w: jax.random.normal(jax.random.wrap_key_data(w), (5,)), d.new("word", (2,)) if not d.closed
                else d.value("word", shape=(2,)))  # fmt: skip
    elif how == "seed":
        d.apply(how, lambda s: jax.vmap(lambda i: jax.random.uniform(jax.random.key(i), (3,)))(s), d.value(INT, 1, 1))
    else:
        key = np.uint32(7), np.uint32(9)
        fn = lambda x: threefry2x32_p.bind(*key, x.astype(np.uint32), x.astype(np.uint32))  # noqa: E731
        d.apply(how, fn, d.value(INT, 1, 3))


@entry("random_gamma")
def gamma(d: Drawer) -> None:
    n = d.choice((2, 3, 4, 8))
    d.apply("gamma", lambda k, a: jax.vmap(jax.random.gamma)(jax.random.split(k, n), a), d.value(KEY, 0, 0),
            d.apply("positive", positive, d.value(FLOAT, shape=(n, 3)))[0])  # fmt: skip


# Control flow and transformations: sub-programs


def _weighted(names: Sequence[str]) -> list[str]:
    """What moves data three times as often as what is elementwise."""
    return [n for n in names for _ in range(1 if n in UNARY or n in BINARY or n in COMPARE else 3)]


def _sub(d: Drawer, structs: Sequence[Any], steps: int) -> Drawer:
    """A sub-program over inputs of these types, with some steps drawn."""
    inner = Drawer(d.rng, closed=True)
    for s in structs:
        inner.values.append(Value(len(inner.values), s.shape, s.dtype))
        inner.order.append(("input", len(inner.order)))
    grow(inner, steps, _weighted([n for n in ENTRIES if n not in NESTED]))
    return inner


def _same_type(inner: Drawer, like: Value) -> Value:
    """A value of the sub-program with the type of `like`: the latest one, brought near 1."""
    found = [v for v in inner.values if (v.shape, v.dtype) == (like.shape, like.dtype)][-1]
    return inner.apply("settle", lambda x: lax.sin(x) if kind_of(x.dtype) == FLOAT else x, found)[0]


def _leaves(inner: Drawer, arguments: int) -> list[Value]:
    """The values that nothing reads."""
    read = {i for step in inner.steps for i in step.operands}
    return [v for v in inner.values[arguments:] if v.index not in read]


@entry("scan")
def scan(d: Drawer) -> None:
    length = d.choice((2, 3, 4, 6))
    carry, const = d.value(FLOAT, 1, 3), d.value(FLOAT, 0, 2)
    xs = d.value(FLOAT, shape=(length, *d.choice(((), carry.shape, carry.shape[-1:]))))
    inner = _sub(d, [carry, const, jax.ShapeDtypeStruct(xs.shape[1:], xs.dtype)], d.rng.randint(1, 4))
    mix = inner.apply("mix", lambda c, x: c + lax.sin(x).sum() * 0.1, inner.values[0], inner.values[2])[0]
    after = _same_type(inner, mix)
    outs = [v for v in _leaves(inner, 3) if v.index != after.index][-2:]
    step, back = inner.function([after, *outs], 3), d.flip(0.3)

    def fn(c: Any, k: Any, x: Any) -> Any:
        def body(c: Any, x: Any) -> Any:
            after, *ys = step(c, k, x)
            return after, ys

        return lax.scan(body, c, x, reverse=back)

    if d.flip(0.35) and not d.closed:
        floats = lambda *a: sum(jnp.sin(o).sum() for o in jax.tree.leaves(fn(*a)) if kind_of(o.dtype) == FLOAT)  # noqa: E731
        d.apply(f"grad(scan({_text(inner)}))", jax.grad(floats, (0, 1, 2)), carry, const, xs)
    else:
        d.apply(f"scan({_text(inner)})", fn, carry, const, xs)


@entry("while")
def while_(d: Drawer) -> None:
    carry, const, n = d.value(FLOAT, 1, 3), d.value(FLOAT, 0, 2), d.choice((1, 2, 3))
    inner = _sub(d, [carry, const], d.rng.randint(1, 3))
    step = inner.function([_same_type(inner, carry)], 2)
    d.apply(
        f"while({_text(inner)})",
        lambda c, k: lax.while_loop(
            lambda s: (s[0] < n) & (s[1].sum() < 1e6), lambda s: (s[0] + 1, step(s[1], k)[0]), (0, c)
        ),
        carry,
        const,
    )


@entry("cond")
def cond(d: Drawer) -> None:
    x, y = d.value(FLOAT, 1, 3), d.value(FLOAT, 0, 2)
    which = d.ids((), -1, 4)
    branches = []
    for _ in range(d.choice((2, 2, 3))):
        inner = _sub(d, [x, y], d.rng.randint(1, 3))
        total = inner.apply(
            "total", lambda a: jnp.cos(a).mean(), d.choice([v for v in inner.values if v.kind == FLOAT])
        )[0]
        branches.append((inner, inner.function([_same_type(inner, x), total], 2)))
    fn = lambda i, a, b: lax.switch(i, [f for _, f in branches], a, b)  # noqa: E731
    name = f"cond({'|'.join(_text(i) for i, _ in branches)})"
    if d.flip(0.35):
        d.apply(
            f"grad({name})",
            jax.grad(lambda a, b, i: (lambda o: jnp.sin(o[0]).sum() + o[1])(fn(i, a, b)), (0, 1)),
            x,
            y,
            which,
        )
    else:
        d.apply(name, fn, which, x, y)


@entry("grad")
def grad(d: Drawer) -> None:
    x, y = d.value(FLOAT, 1, 3), d.value(FLOAT, 0, 3)
    inner = _sub(d, [x, y], d.rng.randint(2, 5))
    outs = [v for v in _leaves(inner, 0) if v.kind == FLOAT]
    if not outs:
        raise Skip
    fn, remat = inner.function(outs, 2), d.flip(0.3)
    fn = jax.checkpoint(fn) if remat else fn
    loss = lambda a, b: sum(jnp.sin(o).sum() for o in fn(a, b))  # noqa: E731
    d.apply(f"{'remat-' * remat}grad({_text(inner)})", jax.value_and_grad(loss, (0, 1)), x, y)


NESTED = ("scan", "while", "cond", "grad")


def _text(inner: Drawer) -> str:
    return " ".join(s.name for s in inner.steps)


# Programs


def grow(d: Drawer, steps: int, names: Sequence[str]) -> None:
    """Add about `steps` applications."""
    done = 0
    for _ in range(4 * steps):
        if done >= steps:
            return
        try:
            ENTRIES[d.choice(names)](d)
            done += 1
        except Skip:
            continue


def finish(d: Drawer, most: int = 8) -> Program:
    """The program with what nothing reads, and some of the rest, as results."""
    read = {i for step in d.steps for i in step.operands}
    made = [v for v, (what, _) in zip(d.values, d.order, strict=True) if what == "step"]
    unread = [v for v in made if v.index not in read]
    rest = [v for v in made if v.index in read]
    outputs = unread[-most:]
    if rest and d.flip(0.5):
        outputs.append(d.choice(rest))
    if d.inputs and d.flip(0.2):  # an input that is a result
        outputs.append(d.values[next(i for i, (what, _) in enumerate(d.order) if what == "input")])
    donate = tuple(i for i in range(len(d.inputs)) if d.flip(0.3))
    return Program(d.function(outputs, 0), tuple(d.inputs), tuple(s.name for s in d.steps), donate)


def draw(rng: random.Random, most: int = 8) -> Program:
    """A random program of up to `most` applications, control flow among them."""
    d = Drawer(rng)
    names = [*_weighted(list(ENTRIES)), *NESTED * 5]
    grow(d, d.rng.randint(1, most), names)
    return finish(d)


def one_of_each(names: Sequence[str], seed: int, times: int = 2) -> Program:
    """A program with `times` applications of each of these entries, on inputs of their own."""
    d = Drawer(random.Random(seed), fresh=1.0, turns={})
    for name in names:
        done = 0
        for _ in range(20):
            if done < times:
                try:
                    ENTRIES[name](d)
                    done += 1
                except Skip:
                    continue
    return finish(d, most=1000)
