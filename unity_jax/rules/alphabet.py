"""What graphs are made of: an alphabet of inputs, dimensions and ops.

All graphs of up to three ops over all ops at once are too many, and nearly all of them mix ops that have nothing to
say to each other. So there is an alphabet for each set of ops that may interact, with inputs whose types let every op
apply in every way that matters: operands of equal and of different types (`x` and `y`, `v` and `w`), dimensions that
only one operand has, that two share and that all share, sums and multiples where something is concatenated or cut.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from unity_jax.rewrite.language import Attrs, Dim, Term, Type
from unity_jax.rewrite.rule import parse_dim, parse_variable

POINTWISE = frozenset("add sub mul h".split())


@dataclass(frozen=True)
class Alphabet:
    """`inputs` with their types, `ops`, and what attributes may name: `sums` and `multiples` to cut and to join,
    `new` dimensions to broadcast to or to stack along, `devices`.

    All graphs of up to `size` ops; beyond, if `outer` is not empty, graphs of up to `most` ops (one more, if that is
    zero) whose outermost op is one of these. No value has more than `rank` dimensions, nor one that is part of another.
    One operand of a pointwise op has all dimensions of the other, unless the alphabet is `wide`. Sums, folds and dots
    are over dimensions of `over`, if it is not empty.

    Rules of a `direct` alphabet make the outermost op of graphs that need not be the smallest, and are kept unless
    others lead from the smaller side to the larger one step by step: a program that computes in parts has equals among
    shorter programs, by rules that introduce identities such as `combine(partition(x))`, but no search would go there.
    """

    name: str
    inputs: str
    ops: str
    sums: str = ""
    multiples: str = ""
    new: str = ""
    devices: str = ""
    size: int = 3
    outer: str = ""
    rank: int = 3
    wide: bool = False
    over: str = ""
    most: int = 0
    direct: bool = False

    @property
    def variables(self) -> tuple[Term, ...]:
        return tuple(parse_variable(v) for v in self.inputs.split())

    @property
    def largest(self) -> int:
        """The most ops of a graph."""
        return (self.most or self.size + 1) if self.outer else self.size

    def attributes(self, op: str, types: Sequence[Type]) -> Iterator[Attrs]:
        """The attributes that `op` may have with operands of these types; some do not fit."""
        x = types[0]
        if op == "dot":
            yield from _subsets([d for d in self._over(x) if d in types[1].dims], least=0)
        elif op == "conv":
            yield from ((c, Dim("h"), Dim("r")) for c in x.dims if c in types[1].dims)
        elif op in ("sum", "fold"):
            yield from _subsets(self._over(x), most=2)
        elif op in ("put", "scatter"):
            yield from _subsets(types[-1].dims)
        elif op == "transpose":
            yield from [x.dims[::-1]] if len(x.dims) > 1 else []
        elif op in ("broadcast", "stack"):
            yield from ((d,) for d in _dims(self.new))
        elif op == "unstack":
            yield from ((d, i) for d in _dims(self.new) for i in (0, 1))
        elif op in ("slice", "pad"):
            yield from ((d, i) for d in _dims(self.sums) for i in range(len(d.parts)))
        elif op in ("replicate", "reduce"):
            yield from ((p,) for p in _dims(self.devices))
        elif op == "concat":
            yield from ((d,) for d in _dims(self.sums))
        elif op in ("split", "merge", "partition", "combine"):
            yield from ((d,) for d in _dims(self.multiples))
        elif self.wide or len(types) < 2 or op not in POINTWISE or _nested(types):
            yield ()

    def _over(self, x: Type) -> list[Dim]:
        return [d for d in x.dims if not self.over or str(d) in self.over.split()]


def _nested(types: Sequence[Type]) -> bool:
    a, b = (set(t.dims) for t in types)
    return a <= b or b <= a


def _dims(text: str) -> list[Dim]:
    return [parse_dim(d) for d in text.split()]


def _subsets(dims: Sequence[Dim], least: int = 1, most: int | None = None) -> Iterator[Attrs]:
    for n in range(least, min(len(dims), len(dims) if most is None else most) + 1):
        yield from itertools.combinations(dims, n)
