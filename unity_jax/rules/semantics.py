"""What a term means: arrays in, an array out, over either of two arithmetics.

`FIELD` is exact: integers modulo the prime 2^31 - 1, in which every law of rings holds and two polynomials that differ
agree at a random point with probability at most degree/2^31 (Schwartz and Zippel); unknown functions are fixed
pseudo-random functions. `NUMBERS` is the arithmetic of gradients: complex numbers x + i h x' with a tiny h carry a
value and its derivative along x' to full precision (the complex step of Squire and Trapp, SIAM Review 1998).

Arrays have one axis for each device axis of a type, then one for each dimension, in the order of the type.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from unity_jax.rewrite.language import Dim, Term, Type
from unity_jax.rewrite.rule import Rule, parse_dim

Array = np.ndarray[Any, Any]
Sizes = Mapping[str, int]
Values = Mapping[str, Array]

PRIME = 2**31 - 1  # products of two residues, and sums of 2^32 of them, fit 64 bits
STEP = 1e-30


@dataclass(frozen=True)
class Arithmetic:
    """`settle` brings a sum or product back among the numbers; the rest are the functions nothing is known of."""

    settle: Callable[[Array], Array]
    unary: Mapping[str, Callable[[Array], Array]]
    binary: Mapping[str, Callable[[Array, Array], Array]]
    fold: Callable[[Array, tuple[int, ...]], Array]
    draw: Callable[[np.random.Generator, tuple[int, ...]], Array]


def _mix(x: Array, salt: int) -> Array:
    """The finalizer of splitmix64 (Steele, Lea and Flood, OOPSLA 2014), modulo the prime."""
    with np.errstate(over="ignore"):  # modulo 2^64 is meant
        z = x.astype(np.uint64) + np.uint64(salt * 0x9E3779B97F4A7C15 % 2**64)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return ((z ^ (z >> np.uint64(31))) % np.uint64(PRIME)).astype(np.int64)


def _unknown(salt: int) -> Callable[[Array], Array]:
    return lambda x: _mix(x, salt)


def _keeps_zero(salt: int) -> Callable[[Array], Array]:
    at_zero = _mix(np.zeros((), np.int64), salt)
    return lambda x: (_mix(x, salt) - at_zero) % PRIME


FIELD = Arithmetic(
    settle=lambda x: x % PRIME,
    unary={"f": _unknown(1), "g": _unknown(2), "convert": _keeps_zero(3)},
    binary={"h": lambda x, y: _mix(x * 2**32 + y, 4)},
    fold=lambda x, axes: _mix(_mix(x, 5).sum(axes) % PRIME, 6),
    draw=lambda rng, shape: rng.integers(PRIME, size=shape),
)

NUMBERS = Arithmetic(
    settle=lambda x: x,
    unary={"f": np.tanh, "g": lambda x: np.sin(x) + 0.3 * x, "convert": lambda x: x - np.sin(8 * x) / 16},
    binary={"h": lambda x, y: np.sin(x + 0.7 * y) * y + x},
    fold=lambda x, axes: np.log(np.exp(x).sum(axes)),
    draw=lambda rng, shape: rng.normal(size=shape) + 1j * STEP * rng.normal(size=shape),
)


def size(dim: Dim, sizes: Sizes) -> int:
    """How large a dimension is."""
    if not dim.parts:
        return sizes[dim.name]
    parts = [size(d, sizes) for d in dim.parts]
    return sum(parts) if dim.name == "+" else math.prod(parts)


def shape(type: Type, sizes: Sizes) -> tuple[int, ...]:
    return tuple(size(d, sizes) for d in (*type.devices, *type.dims))


def evaluate(
    terms: Sequence[Term],
    sizes: Sizes,
    values: Values,
    numbers: Arithmetic = FIELD,
    known: dict[Term, Array] | None = None,
) -> list[Array]:
    """The value of each term for given sizes of the names and values of the variables. `known` remembers values of
    terms from call to call."""
    known = {} if known is None else known
    for t in terms:
        for s in t.walk() if t not in known else ():
            if s not in known:
                known[s] = values[s.name] if not s.op else apply_op(s, [known[a] for a in s.args], sizes, numbers)
    return [known[t] for t in terms]


def apply_op(t: Term, args: Sequence[Array], sizes: Sizes, numbers: Arithmetic = FIELD) -> Array:
    """The value of an op, given those of its operands."""
    operands = [_Operand(a.type, v) for a, v in zip(t.args, args, strict=True)]
    return _MEANING[t.op](_Op(t, sizes, numbers), *operands)


def draw(variables: Sequence[Term], sizes: Sizes, rng: np.random.Generator, numbers: Arithmetic = FIELD) -> Values:
    """A random value of each variable; row numbers below the size they count in."""
    made = {}
    for v in variables:
        where = shape(v.type, sizes)
        ids = v.type.ids
        made[v.name] = numbers.draw(rng, where) if ids is None else rng.integers(size(ids, sizes), size=where)
    return made


# Rules


def random_sizes(rule: Rule, rng: np.random.Generator, most: int = 4) -> dict[str, int]:
    """Sizes from 1 to `most` that satisfy the rule: its conditions, and the sizes of stacked dimensions."""
    terms = {t: None for r in (*rule.source, *rule.target) for t in r.walk()}
    names = sorted({n for t in terms for d in _dims_of(t) for n in d.names()})
    fixed = {t.attrs[0].name: len(t.args) for t in terms if t.op == "stack"}  # type: ignore[union-attr]
    least: Counter[str] = Counter()
    for t in terms:
        if t.op == "unstack":
            least |= Counter({t.attrs[0].name: t.attrs[1]})  # type: ignore[union-attr,dict-item]
    for _ in range(10_000):
        sizes = {n: int(rng.integers(1 + least[n], 1 + max(most, 1 + least[n]))) for n in names} | fixed
        if all(_holds(c, sizes) for c in rule.when):
            return sizes
    raise ValueError(f"{rule.name}: no small sizes satisfy {', '.join(rule.when)}")


def _dims_of(t: Term) -> Iterator[Dim]:
    yield from (*t.type.dims, *t.type.devices, *(a for a in t.attrs if isinstance(a, Dim)))
    if t.type.ids:
        yield t.type.ids


def _holds(condition: str, sizes: Sizes) -> bool:
    """`n == o`, `n == 2`."""
    left, right = (side.strip() for side in condition.split("=="))
    value = {s: int(s) if s.isdigit() else size(parse_dim(s), sizes) for s in (left, right)}
    return value[left] == value[right]


def agrees(rule: Rule, sizes: Sizes, rng: np.random.Generator, numbers: Arithmetic = FIELD) -> bool:
    """Whether both sides have the same results, at random values of the variables; with `NUMBERS`, the same values
    and derivatives along a random direction."""
    known: dict[Term, Array] = {}
    values = draw(rule.given, sizes, rng, numbers)
    before, after = (evaluate(side, sizes, values, numbers, known) for side in (rule.source, rule.target))
    pairs = zip(rule.source, rule.target, before, after, strict=True)
    return all(_same(canonical(a.type, x), canonical(b.type, y)) for a, b, x, y in pairs)


def passes(rule: Rule, times: int = 20, seed: int = 0) -> bool:
    """Whether both sides agree at random sizes, exactly and in values and gradients."""
    rng = np.random.default_rng(seed)
    return all(agrees(rule, random_sizes(rule, rng), rng, n) for _ in range(times) for n in (FIELD, NUMBERS))


def canonical(type: Type, value: Array) -> Array:
    """Axes in the order of their names: results are compared up to the order of dimensions."""
    order = sorted(range(value.ndim), key=lambda i: (i >= len(type.devices), str((*type.devices, *type.dims)[i])))
    return value.transpose(order)


def _same(x: Array, y: Array) -> bool:
    if x.dtype.kind != "c":
        return bool(np.array_equal(x, y))
    return _close(x.real, y.real, 1) and _close(x.imag, y.imag, STEP)


def _close(x: Array, y: Array, least: float) -> bool:
    """Up to rounding, relative to the largest element."""
    return bool(np.abs(x - y).max(initial=0) <= 1e-9 * max(np.abs(x).max(initial=0), least))


# Ops. Axes have labels: a dimension, or (device axis,).

Label = Any


@dataclass(frozen=True)
class _Operand:
    type: Type
    value: Array

    @property
    def labels(self) -> tuple[Label, ...]:
        return _labels(self.type)

    def along(self, labels: Sequence[Label]) -> Array:
        """The axes in the order of these labels, of size one for those it lacks."""
        mine = self.labels
        moved = self.value.transpose([mine.index(n) for n in labels if n in mine])
        return moved.reshape(
            [moved.shape[sum(m in mine for m in labels[:i])] if n in mine else 1 for i, n in enumerate(labels)]
        )


@dataclass(frozen=True)
class _Op:
    term: Term
    sizes: Sizes
    numbers: Arithmetic

    @property
    def labels(self) -> tuple[Label, ...]:
        return _labels(self.term.type)

    @property
    def attrs(self) -> tuple[Any, ...]:
        return self.term.attrs

    @property
    def shape(self) -> tuple[int, ...]:
        return shape(self.term.type, self.sizes)

    def size(self, dim: Dim) -> int:
        return size(dim, self.sizes)

    def like(self, replaced: Mapping[Label, Label]) -> list[Label]:
        """The labels of the result, some replaced."""
        return [replaced.get(n, n) for n in self.labels]

    def contract(self, x: _Operand, y: _Operand, over: Sequence[Label]) -> Array:
        every = (*self.labels, *over)
        product = self.numbers.settle(x.along(every) * y.along(every))
        return self.numbers.settle(product.sum(tuple(range(len(self.labels), len(every)))))

    def one_hot(self, i: _Operand) -> _Operand:
        """A new last axis of the rows, one at the number and zero elsewhere."""
        rows = i.type.ids
        assert rows is not None
        hot = (i.value[..., None] == np.arange(self.size(rows))).astype(np.int64)
        return _Operand(Type((*i.type.dims, rows), i.type.devices), hot)


def _labels(type: Type) -> tuple[Label, ...]:
    return (*((p,) for p in type.devices), *type.dims)


def _pointwise(function: Callable[[Arithmetic], Callable[..., Array]]) -> Callable[..., Array]:
    def run(op: _Op, *operands: _Operand) -> Array:
        return function(op.numbers)(*np.broadcast_arrays(*(x.along(op.labels) for x in operands)))

    return run


def _reducing(function: Callable[[Arithmetic], Callable[..., Array]]) -> Callable[..., Array]:
    def run(op: _Op, x: _Operand) -> Array:
        over = op.attrs if op.term.op != "reduce" else ((op.attrs[0],),)
        return function(op.numbers)(x.along((*op.labels, *over)), tuple(range(len(op.labels), len(x.labels))))

    return run


def _windows(op: _Op, x: _Operand, h: Dim, r: Dim) -> _Operand:
    """Windows that start (r - 1) // 2 places before theirs, as XLA pads for stride one."""
    axis, at, window, length = x.labels.index(h), x.type.dims.index(h) + 1, op.size(r), op.size(h)
    around = [(0, 0)] * len(x.labels)
    around[axis] = ((window - 1) // 2, window // 2)
    places = np.arange(length)[:, None] + np.arange(window)
    windows = np.take(np.pad(x.value, around), places.ravel(), axis)
    windows = windows.reshape((*x.value.shape[:axis], length, window, *x.value.shape[axis + 1 :]))
    return _Operand(Type((*x.type.dims[:at], r, *x.type.dims[at:]), x.type.devices), windows)


def _conv(op: _Op, x: _Operand, w: _Operand) -> Array:
    c, h, r = op.attrs
    return op.contract(_windows(op, x, h, r), w, (c, r))


def _concat(op: _Op, *operands: _Operand) -> Array:
    whole, axis = op.attrs[0], op.labels.index(op.attrs[0])
    aligned = [x.along(op.like({whole: part})) for x, part in zip(operands, whole.parts, strict=True)]
    return np.concatenate(aligned, axis)


def _span(op: _Op) -> slice:
    """Where a part of a sum lies."""
    whole, at = op.attrs
    ends = np.cumsum([0, *(op.size(d) for d in whole.parts)])
    return slice(int(ends[at]), int(ends[at + 1]))


def _slice(op: _Op, x: _Operand) -> Array:
    whole, at = op.attrs
    moved = x.along(op.like({whole.parts[at]: whole}))
    return moved[(slice(None),) * op.labels.index(whole.parts[at]) + (_span(op),)]


def _pad(op: _Op, x: _Operand) -> Array:
    whole, at = op.attrs
    made = np.zeros(op.shape, x.value.dtype)
    made[(slice(None),) * op.labels.index(whole) + (_span(op),)] = x.along(op.like({whole: whole.parts[at]}))
    return made


def _stack(op: _Op, *operands: _Operand) -> Array:
    axis, rest = op.labels.index(op.attrs[0]), [n for n in op.labels if n != op.attrs[0]]
    return np.stack([x.along(rest) for x in operands], axis)


def _unstack(op: _Op, x: _Operand) -> Array:
    return x.along((op.attrs[0], *op.labels))[op.attrs[1]]


def _put(op: _Op, u: _Operand, i: _Operand) -> Array:
    return op.contract(u, op.one_hot(i), op.attrs)


def _scatter(op: _Op, t: _Operand, u: _Operand, i: _Operand) -> Array:
    return op.numbers.settle(t.value + _put(op, u, i))


def _cut(block: Callable[[Dim], Label]) -> Callable[..., Array]:
    """A dimension `p*n` as an axis of blocks and one of the places in them."""

    def run(op: _Op, x: _Operand) -> Array:
        whole = op.attrs[0]
        if not whole.parts:  # one element each
            return x.along([whole if m == block(whole) else m for m in op.labels])
        p, n = whole.parts
        rest = [m for m in op.labels if m not in (block(p), n)]
        cut = x.along((whole, *rest)).reshape(
            (op.size(p), op.size(n), *(x.value.shape[x.labels.index(m)] for m in rest))
        )
        return cut.transpose([(block(p), n, *rest).index(m) for m in op.labels])

    return run


def _joined(block: Callable[[Dim], Label]) -> Callable[..., Array]:
    def run(op: _Op, x: _Operand) -> Array:
        whole = op.attrs[0]
        p, n = whole.parts
        rest = [m for m in op.labels if m != whole]
        joined = x.along((block(p), n, *rest))
        joined = joined.reshape((op.size(whole), *joined.shape[2:]))
        return joined.transpose([(whole, *rest).index(m) for m in op.labels])

    return run


def _identity(d: Dim) -> Label:
    return d


def _device(d: Dim) -> Label:
    return (d,)


_MEANING: dict[str, Callable[..., Array]] = {
    "dot": lambda op, x, y: op.contract(x, y, op.attrs),
    "conv": _conv,
    "window": lambda op, x: _windows(op, x, *op.attrs).along(op.labels),
    "zeros": lambda op: np.zeros(op.shape, np.int64),
    "ones": lambda op: np.ones(op.shape, np.int64),
    "add": _pointwise(lambda n: lambda x, y: n.settle(x + y)),
    "sub": _pointwise(lambda n: lambda x, y: n.settle(x - y)),
    "mul": _pointwise(lambda n: lambda x, y: n.settle(x * y)),
    "neg": _pointwise(lambda n: lambda x: n.settle(-x)),
    "f": _pointwise(lambda n: n.unary["f"]),
    "g": _pointwise(lambda n: n.unary["g"]),
    "h": _pointwise(lambda n: n.binary["h"]),
    "convert": _pointwise(lambda n: n.unary["convert"]),
    "sum": _reducing(lambda n: lambda x, axes: n.settle(x.sum(axes))),
    "fold": _reducing(lambda n: n.fold),
    "broadcast": lambda op, x: np.broadcast_to(x.along(op.labels), op.shape),
    "transpose": lambda op, x: x.along(op.labels),
    "concat": _concat,
    "slice": _slice,
    "pad": _pad,
    "stack": _stack,
    "unstack": _unstack,
    "split": _cut(_identity),
    "merge": _joined(_identity),
    "take": lambda op, x, i: op.contract(x, op.one_hot(i), [i.type.ids]),
    "onehot": lambda op, i: op.one_hot(i).along(op.labels),
    "put": _put,
    "scatter": _scatter,
    "partition": _cut(_device),
    "combine": _joined(_device),
    "replicate": lambda op, x: np.broadcast_to(x.along(op.labels), op.shape),
    "reduce": _reducing(lambda n: lambda x, axes: n.settle(x.sum(axes))),
}
