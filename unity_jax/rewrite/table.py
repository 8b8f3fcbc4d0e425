"""The ops of rewrite rules, one entry for each: all that is known of an op, from its type to how a program computes it.

    register("neg", RuleOp(arity=1, naming="nothing", type=..., meaning=..., ...))
    apply("neg", x)                  # a term, with its type

Every field is to be given, and entries are checked as they are made, so that nothing of an op is forgotten. The entries
are in `rewrite/ops`, a file for each family; importing `rewrite` fills the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

from unity_jax.rewrite.dims import Named, Seen
from unity_jax.rewrite.language import Attrs, Dim, RuleError, Term, Type, Types, checked

Naming = Literal["nothing", "dims", "whole", "part", "count", "counted", "blocks", "axis", "windows"]
"""What the attributes of an op name: nothing, a set of dimensions (`sum(x; k, l)`), a sum (`n+o`), a sum and which part
(`n+o, 0`), a dimension that counts operands (`stack(x, y; e)`), such a one and which (`e, 0`), a multiple (`p*n`), a
device axis (`p`), or what is slid along what (`c, h, r`)."""

TRAITS = {
    "pointwise": "the same at each place, and fused by compilers",
    "unknown": "a function of which nothing is known; it stands for what is matched first",
    "commutes": "operands may trade places",
    "parallel": "looks across devices",
    "rows": "its last operand is numbers of rows",
    "multiplies": "a polynomial whose degree is the sum of those of its operands",
    "reduces": "sums or folds over dimensions that it names: all, or the first of windows",
    "settings": "is made with the settings of such an op of the source, as its precision",
}

POINTWISE = "a pointwise primitive"
"""In place of a primitive in `RuleOp.seen`: any that computes element by element."""

Code = str | tuple["Code", ...]
"""An expression of the e-graph in which rules are proved."""


class Shapes(Protocol):
    """How dimensions and functions are written in the e-graph, see `rules.prove`."""

    def dim(self, d: Dim) -> Code: ...
    def parts(self, d: Dim) -> int: ...
    def function(self, op: str) -> Code: ...


class Letters(Protocol):
    """What attributes may name in an alphabet of graphs, see `rules.alphabet`."""

    @property
    def wide(self) -> bool: ...
    def summed(self, x: Type) -> Sequence[Dim]: ...
    def dims(self, which: Literal["sums", "multiples", "new", "devices"]) -> Sequence[Dim]: ...


@dataclass(frozen=True, kw_only=True)
class RuleOp:
    """**Fields:**

    `arity`: how many operands it takes; None: as many as it joins. `naming`, `traits`: see `Naming` and `TRAITS`.

    `type(types, attrs)`: that of the result; raises `RuleError`.

    `meaning(applied, *operands)`: the array that it makes, see `rewrite.meaning`.

    `choices(letters, types)`: the attributes that it may have in an alphabet; None for ops of the axioms alone.

    `core(term, *args)`: the term in ops of the axioms, of operands that are; None for ops of the axioms. Then
    `code(term, args, shapes)` is the term in the e-graph, and None for the others.

    `seen`: by primitive, how an op of a program is seen as this one: `(view, op, value, dims)` makes the operands and
    attributes of what makes a value. Empty for ops that no view shows: what relabels is looked through.

    `emit(emitter, term)`: the array that a program makes; None for ops that no view shows.
    """

    arity: int | None
    naming: Naming
    traits: frozenset[str]
    type: Callable[[Types, Attrs], Type]
    meaning: Callable[..., Any]
    choices: Callable[[Letters, Sequence[Type]], Iterator[Attrs]] | None
    core: Callable[..., Term] | None
    code: Callable[[Term, Sequence[Code], Shapes], Code] | None
    seen: Mapping[str, Callable[..., Iterator[Seen]]]
    emit: Callable[..., Named] | None


OPS: dict[str, RuleOp] = {}
SEEN_AS: dict[str, tuple[str, ...]] = {}
"""By primitive: the ops that it may be seen as."""


def register(name: str, op: RuleOp) -> None:
    """Put an op into the table. Raises `ValueError` where fields contradict each other."""
    if name in OPS:
        raise ValueError(f"{name} is in the table already")
    if op.naming not in get_args(Naming) or not op.traits <= TRAITS.keys():
        raise ValueError(f"{name}: unknown naming {op.naming!r} or traits {', '.join(op.traits - TRAITS.keys())}")
    if (op.core is None) == (op.code is None):
        raise ValueError(f"{name} is either made of ops of the axioms, or one of them")
    if bool(op.seen) != (op.emit is not None):
        raise ValueError(f"{name} is both seen in programs and made in them, or neither")
    OPS[name] = op
    for primitive in op.seen:
        SEEN_AS[primitive] = (*SEEN_AS.get(primitive, ()), name)


def traits(text: str = "") -> frozenset[str]:
    return frozenset(text.split())


def naming(t: Term) -> Naming:
    """What the attributes of a term name."""
    return OPS[t.op].naming if t.op else "nothing"


def has(t: Term, trait: str) -> bool:
    """Whether a term is of an op with this trait."""
    return bool(t.op) and trait in OPS[t.op].traits


def apply(op: str, *args: Term, attrs: Sequence[Dim | int] = ()) -> Term:
    """An op applied to terms, with its type.

    **Raises:** `RuleError` where the op is unknown or does not fit the types.
    """
    if op not in OPS:
        raise RuleError(f"unknown op {op!r}: one of {', '.join(OPS)}")
    entry = OPS[op]

    def shown() -> str:
        return f"{op}({', '.join(str(a.type) for a in args)}; {', '.join(map(str, attrs))})"

    if entry.arity is not None and len(args) != entry.arity:
        raise RuleError(f"{shown()}: takes {entry.arity} operands")
    if "parallel" not in entry.traits and len({frozenset(a.type.devices) for a in args}) > 1:
        raise RuleError(f"{shown()}: operands lie on different device axes")
    try:
        found = checked(entry.type(tuple([a.type for a in args]), tuple(attrs)), shown)
    except RuleError:
        raise
    except (IndexError, TypeError, AttributeError, ValueError) as error:
        raise RuleError(f"{shown()}: wrong attributes") from error
    return Term(op, args, tuple(attrs), found)
