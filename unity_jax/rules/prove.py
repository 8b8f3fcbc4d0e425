"""Equality saturation: whether two terms are equal for all sizes, by the axioms.

A term stands for a function of an assignment of places to dimension names, so `broadcast` and `transpose` are the
identity; `free` keeps, for each class of equal terms, the dimensions its value may depend on. Sums of dimensions are
binary (`n+o+q` is `n+(o+q)`), and `stack` is a concatenation of parts of size one. How an op is written here is said
by its entry in the table (`RuleOp.code`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from unity_jax.rewrite.language import Dim, RuleError, Term
from unity_jax.rewrite.ops.elementwise import CONVERT
from unity_jax.rewrite.table import OPS, Code, Shapes
from unity_jax.rules.axioms import Axiom, axioms

if TYPE_CHECKING:
    from egglog.bindings import EGraph

_ONE: Code = ("One",)


def _text(code: Code) -> str:
    return code if isinstance(code, str) else f"({' '.join(map(_text, code))})"


ROUNDS = 14
NODES = 6000
"""Saturation ends when nothing changes, or after so many rounds, or once there are so many nodes."""

_LANGUAGE = """
(datatype Dim (Name String) (One) (Plus String Dim Dim) (Times Dim Dim))
(sort Dims (Set Dim))
(datatype T (Variable String) (Zeros) (Ones) (Add T T) (Mul T T) (Neg T) (Sum T Dim)
  (Apply String T) (Apply2 String T T)
  (Slice T Dim i64) (Concat Dim T T) (Split T Dim) (Merge T Dim) (Take T T Dim) (OneHot T Dim) (Window T Dim Dim))
(function free (T) Dims :merge (set-intersect old new))
(ruleset dependence)
(ruleset axioms)
"""

_DEPENDENCE = {
    "(Zeros)": "(set-empty)",
    "(Ones)": "(set-empty)",
    "(Add x y)": "(set-union a b)",
    "(Mul x y)": "(set-union a b)",
    "(Neg x)": "a",
    "(Apply f x)": "a",
    "(Apply2 f x y)": "(set-union a b)",
    "(Sum x k)": "(set-remove a k)",
    "(Slice x (Plus t n o) 0)": "(set-remove (set-insert (set-remove a (Plus t n o)) n) (One))",
    "(Slice x (Plus t n o) 1)": "(set-remove (set-insert (set-remove a (Plus t n o)) o) (One))",
    "(Concat (Plus t n o) x y)": "(set-insert (set-union (set-remove a n) (set-remove b o)) (Plus t n o))",
    "(Split x (Times p n))": "(set-remove (set-insert (set-insert (set-remove a (Times p n)) p) n) (One))",
    "(Merge x (Times p n))": "(set-insert (set-remove (set-remove a p) n) (Times p n))",
    "(Take x y v)": "(set-union (set-remove a v) b)",
    "(OneHot x v)": "(set-insert a v)",
    "(Window x h r)": "(set-remove (set-insert (set-insert a h) r) (One))",
}
"""What a value may depend on, from what its operands may (`a`, `b`)."""

_IF_PRESENT: dict[str, tuple[Code, ...]] = {"take-put": (("=", "row", ("OneHot", "i", "dim-v")),)}
"""What must be there for an axiom to be worth using."""


@dataclass(frozen=True)
class Sizes:
    """What is known of sizes: names with a number, names that are another name, and dimensions of at least some size
    that are also taken apart."""

    number: Mapping[str, int] = field(default_factory=dict)
    same: Mapping[str, str] = field(default_factory=dict)
    least: Mapping[str, int] = field(default_factory=dict)

    def dim(self, d: Dim) -> Code:
        """A dimension for egglog."""
        name = self.same.get(d.name, d.name)
        if d.name == "+":
            return _plus("", [self.dim(p) for p in d.parts])
        if d.name == "*":
            return ("Times", *map(self.dim, d.parts))
        rest: list[Code] = [("Name", f'"{name}"')] if name not in self.number else []
        return _plus(name, [_ONE] * self.number.get(name, self.least.get(name, 0)) + rest)

    def parts(self, d: Dim) -> int:
        """How many parts it is made of."""
        return len(d.parts) or self.number.get(d.name, self.least.get(d.name, 0) + 1)

    def function(self, op: str) -> Code:
        return f'"{op}"'


def _plus(tag: str, parts: Sequence[Code]) -> Code:
    return functools.reduce(lambda rest, first: ("Plus", f'"{tag}"', first, rest), reversed(parts))


@dataclass(frozen=True)
class Proof:
    """`axioms`: those that matched on the way, in alphabetical order: the proof needs no others."""

    found: bool
    axioms: tuple[str, ...]
    rounds: int
    nodes: int


def prove(pairs: Iterable[tuple[Term, Term]], sizes: Sizes = Sizes()) -> Proof:
    """Whether the terms of each pair are equal, terms of core ops.

    **Raises:** `ImportError` without egglog; `RuleError` where sizes make two dimensions of a tensor one.
    """
    graph = _prepared()
    encode = _Encoder(sizes)
    goals = [(encode(a), encode(b)) for a, b in pairs]
    _run(graph, "(push)")
    try:
        _run(graph, "\n".join(encode.lines))
        return _saturated(graph, goals)
    finally:
        _run(graph, "(pop)")


def _saturated(graph: EGraph, goals: Sequence[tuple[str, str]]) -> Proof:
    used: set[str] = set()
    for done in range(ROUNDS + 1):
        goals = [g for g in goals if not _equal(graph, *g)]
        nodes = sum(n for _, n in _run(graph, "(print-size)")[0].sizes)
        if not goals:
            return Proof(True, tuple(sorted(used)), done, nodes)
        if done == ROUNDS or nodes > NODES:
            break
        (out,) = _run(graph, "(run-schedule (saturate (run dependence)) (run axioms) (saturate (run dependence)))")
        fired = {name for name, n in out.report.num_matches_per_rule.items() if n and name in _names()}
        used |= fired
        if not out.report.updated:
            break
    return Proof(False, tuple(sorted(used)), done, nodes)


def _equal(graph: EGraph, a: str, b: str) -> bool:
    from egglog.bindings import EggSmolError

    try:
        _run(graph, f"(check (= {a} {b}))")
    except EggSmolError:
        return False
    return True


@functools.cache
def _names() -> frozenset[str]:
    return frozenset(a.name for a in axioms())


def _run(graph: EGraph, program: str) -> list:
    return graph.run_program(*graph.parse_program(program))


@functools.cache
def _prepared() -> EGraph:
    from egglog.bindings import EGraph

    graph = EGraph()
    _run(graph, "\n".join([_LANGUAGE, *map(_dependence, _DEPENDENCE), *map(_rewrite, axioms())]))
    return graph


def _dependence(node: str) -> str:
    operands = [v for v in ("x", "y") if f" {v}" in node]
    known = " ".join(f"(= {a} (free {v}))" for a, v in zip("ab", operands, strict=False))
    return f"(rule ((= e {node}) {known}) ((set (free e) {_DEPENDENCE[node]})) :ruleset dependence)"


def _code(t: Term, args: Sequence[Code], shapes: Shapes) -> Code:
    """An op of the axioms applied to expressions."""
    made = OPS[t.op].code
    if made is None:
        raise ValueError(f"{t.op} is no op of the axioms")
    return made(t, args, shapes)


class _Encoder:
    """Terms as egglog expressions, shared ones by name."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.lines: list[str] = []
        self.known: dict[Term, str] = {}

    def __call__(self, t: Term) -> str:
        if t not in self.known:
            code = _code(t, [self(a) for a in t.args], self.sizes) if t.op else ("Variable", f'"{t.name}"')
            dims = [d for d in map(self.sizes.dim, t.type.dims) if d != _ONE]
            if len(set(dims)) < len(dims):
                raise RuleError(f"dimensions of {t.type} coincide under the conditions")
            name = f"$t{len(self.known)}"  # numbered once its operands are
            self.lines.append(f"(let {name} {_text(code)})")
            if not t.op:
                self.lines.append(f"(set (free {name}) {_text(('set-of', *dims) if dims else ('set-empty',))})")
            self.known[t] = name
        return self.known[t]


@dataclass(frozen=True)
class _Pattern:
    """Names of dimensions as variables of egglog, but those of size one."""

    ones: frozenset[str]

    def dim(self, d: Dim) -> Code:
        if d.parts:
            kind = ("Plus", "tag-" + "-".join(d.names())) if d.name == "+" else ("Times",)
            return (*kind, *map(self.dim, d.parts))
        return _ONE if d.name in self.ones else f"dim-{d.name}"

    def parts(self, d: Dim) -> int:
        return len(d.parts)

    def function(self, op: str) -> Code:
        """An unknown function stands for any, but one that keeps zero."""
        return f'"{op}"' if op == CONVERT else "any"


def _rewrite(axiom: Axiom) -> str:
    """An axiom as an egglog rule: names of variables and dimensions become its variables."""
    shapes = _Pattern(frozenset(c.split(" == ")[0] for c in axiom.rule.when))

    def pattern(t: Term) -> Code:
        return _code(t, [pattern(a) for a in t.args], shapes) if t.op else t.name

    needs: list[Code] = [("!=", shapes.dim(a), shapes.dim(b)) for a, b in axiom.distinct]
    for v, d in axiom.free:
        needs += [("=", f"free-{v}", ("free", v)), ("set-not-contains", f"free-{v}", shapes.dim(d))]
    needs += _IF_PRESENT.get(axiom.name, ())
    (left,), (right,) = axiom.rule.source, axiom.rule.target
    end = (":when", tuple(dict.fromkeys(needs)), ":ruleset", "axioms", ":name", f'"{axiom.name}"')
    return _text(("rewrite", pattern(left), pattern(right), *end))
