"""What ops of rules mean: arrays in, an array out, over either of two arithmetics.

`FIELD` is exact: integers modulo the prime 2^31 - 1, in which every law of rings holds and two polynomials that differ
agree at a random point with probability at most degree/2^31 (Schwartz and Zippel); unknown functions are fixed
pseudo-random functions. `NUMBERS` is the arithmetic of gradients: complex numbers x + i h x' with a tiny h carry a
value and its derivative along x' to full precision (the complex step of Squire and Trapp, SIAM Review 1998).

Arrays have one axis for each device axis of a type, then one for each dimension, in the order of the type. Axes have
labels: a dimension, or (device axis,).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from unity_jax.rewrite.language import Dim, Term, Type

Array = np.ndarray[Any, Any]
Sizes = Mapping[str, int]
Label = Any

PRIME = 2**31 - 1  # products of two residues, and sums of 2^32 of them, fit 64 bits
STEP = 1e-30


@dataclass(frozen=True)
class Arithmetic:
    """`settle` brings a sum or product back among the numbers; the rest are the functions nothing is known of: two
    `unary` ones, one that `keeps_zero`, a `binary` one, and a `fold` over axes."""

    settle: Callable[[Array], Array]
    unary: tuple[Callable[[Array], Array], Callable[[Array], Array]]
    keeps_zero: Callable[[Array], Array]
    binary: Callable[[Array, Array], Array]
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
    unary=(_unknown(1), _unknown(2)),
    keeps_zero=_keeps_zero(3),
    binary=lambda x, y: _mix(x * 2**32 + y, 4),
    fold=lambda x, axes: _mix(_mix(x, 5).sum(axes) % PRIME, 6),
    draw=lambda rng, shape: rng.integers(PRIME, size=shape),
)

NUMBERS = Arithmetic(
    settle=lambda x: x,
    unary=(np.tanh, lambda x: np.sin(x) + 0.3 * x),
    keeps_zero=lambda x: x - np.sin(8 * x) / 16,
    binary=lambda x, y: np.sin(x + 0.7 * y) * y + x,
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


@dataclass(frozen=True)
class Operand:
    """A value with its type."""

    type: Type
    value: Array

    @property
    def labels(self) -> tuple[Label, ...]:
        return labels_of(self.type)

    def along(self, labels: Sequence[Label]) -> Array:
        """The axes in the order of these labels, of size one for those it lacks."""
        mine = self.labels
        moved = self.value.transpose([mine.index(n) for n in labels if n in mine])
        return moved.reshape(
            [moved.shape[sum(m in mine for m in labels[:i])] if n in mine else 1 for i, n in enumerate(labels)]
        )


@dataclass(frozen=True)
class Applied:
    """A term to be computed: sizes of its dimensions, and the arithmetic."""

    term: Term
    sizes: Sizes
    numbers: Arithmetic

    @property
    def labels(self) -> tuple[Label, ...]:
        return labels_of(self.term.type)

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

    def contract(self, x: Operand, y: Operand, over: Sequence[Label]) -> Array:
        every = (*self.labels, *over)
        product = self.numbers.settle(x.along(every) * y.along(every))
        return self.numbers.settle(product.sum(tuple(range(len(self.labels), len(every)))))

    def one_hot(self, i: Operand) -> Operand:
        """A new last axis of the rows, one at the number and zero elsewhere."""
        rows = i.type.ids
        assert rows is not None
        hot = (i.value[..., None] == np.arange(self.size(rows))).astype(np.int64)
        return Operand(Type((*i.type.dims, rows), i.type.devices), hot)


def labels_of(type: Type) -> tuple[Label, ...]:
    return (*((p,) for p in type.devices), *type.dims)


def pointwise(function: Callable[[Arithmetic], Callable[..., Array]]) -> Callable[..., Array]:
    def run(op: Applied, *operands: Operand) -> Array:
        return function(op.numbers)(*np.broadcast_arrays(*(x.along(op.labels) for x in operands)))

    return run


def reduction(
    function: Callable[[Arithmetic], Callable[..., Array]], over: Callable[[Dim], Label]
) -> Callable[..., Array]:
    """**Arguments:** `over`: the label of an axis that an attribute names."""

    def run(op: Applied, x: Operand) -> Array:
        every = (*op.labels, *map(over, op.attrs))
        return function(op.numbers)(x.along(every), tuple(range(len(op.labels), len(x.labels))))

    return run


def cut(block: Callable[[Dim], Label]) -> Callable[..., Array]:
    """A dimension `p*n` as an axis of blocks and one of the places in them."""

    def run(op: Applied, x: Operand) -> Array:
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


def joined(block: Callable[[Dim], Label]) -> Callable[..., Array]:
    def run(op: Applied, x: Operand) -> Array:
        whole = op.attrs[0]
        p, n = whole.parts
        rest = [m for m in op.labels if m != whole]
        joined = x.along((block(p), n, *rest))
        joined = joined.reshape((op.size(whole), *joined.shape[2:]))
        return joined.transpose([(whole, *rest).index(m) for m in op.labels])

    return run


def dimension(d: Dim) -> Label:
    return d


def device(d: Dim) -> Label:
    return (d,)
