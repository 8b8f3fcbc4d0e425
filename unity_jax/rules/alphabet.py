"""What graphs are made of: an alphabet of inputs, dimensions and ops.

All graphs of up to three ops over all ops at once are too many, and nearly all of them mix ops that have nothing to
say to each other. So there is an alphabet for each set of ops that may interact, with inputs whose types let every op
apply in every way that matters: operands of equal and of different types (`x` and `y`, `v` and `w`), dimensions that
only one operand has, that two share and that all share, sums and multiples where something is concatenated or cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from unity_jax.rewrite.language import Attrs, Dim, Term, Type
from unity_jax.rewrite.rule import parse_dim, parse_variable
from unity_jax.rewrite.table import OPS


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
        choices = OPS[op].choices
        if choices is None:
            raise ValueError(f"{op} is an op of the axioms alone")
        return choices(self, types)

    def summed(self, x: Type) -> list[Dim]:
        """Dimensions of an operand that may be summed over."""
        return [d for d in x.dims if not self.over or str(d) in self.over.split()]

    def dims(self, which: Literal["sums", "multiples", "new", "devices"]) -> list[Dim]:
        return [parse_dim(d) for d in getattr(self, which).split()]
