"""All small graphs of an alphabet, by their values.

Two graphs are taken for equal when their fingerprints are: a digest of the result over the prime field, at random
inputs. A larger graph need only be built on one graph of each value, since a rule that replaces an operand by another
of the same value is already a rule; the number of all graphs is counted alongside.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from unity_jax.rewrite.language import Attrs, Dim, RuleError, Term, Type, variable
from unity_jax.rewrite.meaning import Array
from unity_jax.rewrite.table import OPS, apply
from unity_jax.rules.alphabet import Alphabet
from unity_jax.rules.semantics import apply_op, draw

STACKED, ROWS, NUMBERS, DEVICES = 2, 6, 7, 5


@dataclass(frozen=True, slots=True)
class Node:
    """An op applied to values, by their numbers."""

    op: str
    attrs: Attrs
    args: tuple[int, ...]


def node(op: str, attrs: Sequence[Dim | int], args: Sequence[int]) -> Node:
    """Operands of symmetric ops and sets of dimensions in order."""
    attrs = tuple(sorted(attrs, key=str)) if OPS[op].naming == "dims" else tuple(attrs)
    return Node(op, attrs, tuple(sorted(args)) if _commutes(op) else tuple(args))


def _commutes(op: str) -> bool:
    return "commutes" in OPS[op].traits


class Values:
    """The values of an alphabet: `types`, `nodes` that are known to make each (the first is the smallest), and the
    values `inside` that first graph."""

    def __init__(self, alphabet: Alphabet, seed: int = 0) -> None:
        self.alphabet = alphabet
        self.types: list[Type] = []
        self.arrays: list[Array] = []
        self.nodes: list[list[Node]] = []
        self.inside: list[frozenset[int]] = []
        self.graphs: list[Counter[int]] = []  # of each value, by their number of ops
        self.of: dict[Node, int] = {}
        self._found: dict[bytes, int] = {}
        self._by: dict[tuple[Type, int], list[int]] = defaultdict(list)  # by type and size
        self._using: dict[int, list[int]] = defaultdict(list)
        self.variables = alphabet.variables
        self.sizes = _sizes(self.variables, alphabet)
        values = draw(self.variables, self.sizes, np.random.default_rng(seed))
        for v in self.variables:
            number = self._add(ordered(v.type), _in_order(v.type, values[v.name]))
            self.graphs[number][0] = 1

    def find(self, made: Node) -> int | None:
        return self.of.get(made)

    def size(self, value: int) -> int:
        return len(self.inside[value])

    def term(self, value: int) -> Term:
        """The smallest graph of a value."""
        return self.variables[value] if value < len(self.variables) else self.term_of(self.nodes[value][0])

    def term_of(self, n: Node) -> Term:
        return apply(n.op, *(self.term(a) for a in n.args), attrs=n.attrs)

    def value_of(self, n: Node) -> int | None:
        """The value of a node that need not be in here, if it is one of these."""
        if n in self.of:
            return self.of[n]
        ways = dict(_instructions(self.alphabet, n.op, tuple(self.types[a] for a in n.args)))
        if n.attrs not in ways:
            return None
        array = apply_op(ways[n.attrs], [self.arrays[a] for a in n.args], self.sizes)
        template = ways[n.attrs].type
        return self._found.get(_digest(ordered(template), _in_order(template, array)))

    def grow(self, size: int, ops: Sequence[str]) -> list[tuple[Node, int]]:
        """All graphs with `size` ops whose outermost is one of `ops` and whose operands are smallest graphs. Those of
        a new value are added; returned are the others, with the value they have."""
        equal = []
        for op in ops:
            for args in self._operands(op, size):
                for attrs, template in _instructions(self.alphabet, op, tuple(self.types[a] for a in args)):
                    made = node(op, attrs, args)
                    if made in self.of:
                        continue
                    value, new = self._value(made, template)
                    if value is None:
                        continue
                    self.of[made] = value
                    self._count(made, value, size)
                    if new:
                        self.nodes[value].append(made)
                    else:
                        equal.append((made, value))
        return equal

    def _value(self, made: Node, template: Term) -> tuple[int | None, bool]:
        array = apply_op(template, [self.arrays[a] for a in made.args], self.sizes)
        array = _in_order(template.type, array)
        if not array.any():
            return None, False  # zero whatever the inputs: the language has no constant to replace it by
        kind = ordered(template.type)
        known = self._found.get(_digest(kind, array))
        if known is not None:
            return known, False
        return self._add(kind, array, frozenset().union(*(self.inside[a] for a in made.args))), True

    def _add(self, kind: Type, array: Array, inside: frozenset[int] | None = None) -> int:
        number = len(self.types)
        self.types.append(kind)
        self.arrays.append(array)
        self.nodes.append([])
        self.graphs.append(Counter())
        self.inside.append(frozenset() if inside is None else inside | {number})
        self._by[kind, len(self.inside[number])].append(number)
        self._found[_digest(kind, array)] = number
        for v in self.inside[number]:
            self._using[v].append(number)
        return number

    def _count(self, made: Node, value: int, size: int) -> None:
        """Graphs as trees, with operands of any graph of their values; one that shares its parts is no tree."""
        orders = 2 if _commutes(made.op) and len(set(made.args)) > 1 else 1
        counts = Counter({1: orders})
        for a in made.args:
            counts = _product(counts, self.graphs[a])
        trees = {n: times for n, times in counts.items() if n <= self.alphabet.largest}
        self.graphs[value].update(trees or {size: 1})

    def _operands(self, op: str, size: int) -> Iterator[tuple[int, ...]]:
        """Operands that make a graph of `size` ops together, of types that the op takes."""
        arity = OPS[op].arity or 2
        by = defaultdict(list)
        for (kind, n), values in self._by.items():
            if n < size and values:
                by[kind].append((n, tuple(values)))
        for kinds in itertools.product(list(by), repeat=arity):
            if not any(True for _ in _instructions(self.alphabet, op, kinds)):
                continue
            for sized in itertools.product(*(by[k] for k in kinds)):
                total = sum(n for n, _ in sized)
                if total < size - 1:
                    continue
                if total == size - 1:
                    chosen = itertools.product(*(v for _, v in sized))
                elif arity == 2:
                    chosen = self._sharing(sized[0][1], set(sized[1][1]))
                else:
                    continue
                for args in chosen:
                    if _commutes(op) and args[0] > args[1]:
                        continue
                    if len(frozenset().union(*(self.inside[a] for a in args))) == size - 1:
                        yield args

    def _sharing(self, left: Sequence[int], right: set[int]) -> Iterator[tuple[int, int]]:
        for a in left:
            near = dict.fromkeys(b for v in self.inside[a] for b in self._using[v] if b in right)
            yield from ((a, b) for b in near)


def _digest(kind: Type, array: Array) -> bytes:
    return hashlib.blake2b(str(kind).encode() + array.tobytes(), digest_size=16).digest()


def _product(x: Counter[int], y: Counter[int]) -> Counter[int]:
    made: Counter[int] = Counter()
    for (a, m), (b, n) in itertools.product(x.items(), y.items()):
        made[a + b] += m * n
    return made


@functools.cache
def _instructions(alphabet: Alphabet, op: str, types: tuple[Type, ...]) -> tuple[tuple[Attrs, Term], ...]:
    """The ways to apply an op to operands of these types, each as a term over them."""
    made = {}
    operands = [variable(f"a{i}", t) for i, t in enumerate(types)]
    for attrs in alphabet.attributes(op, types):
        try:
            term = apply(op, *operands, attrs=attrs)
        except RuleError:
            continue
        if len(term.type.dims) <= alphabet.rank and not _has_part(term.type):
            made[attrs] = term
    return tuple(made.items())


def _has_part(t: Type) -> bool:
    """Whether a dimension is part of another: such values come of unlike things multiplied."""
    return any(part in t.dims for d in t.dims for part in d.parts)


@functools.cache
def ordered(t: Type) -> Type:
    """Types that differ in the order of dimensions are one: dimensions are known by name."""
    return Type(tuple(sorted(t.dims, key=str)), tuple(sorted(t.devices, key=str)), t.ids)


@functools.cache
def _axes(t: Type) -> tuple[int, ...]:
    labels = [*((0, str(p)) for p in t.devices), *((1, str(d)) for d in t.dims)]
    return tuple(sorted(range(len(labels)), key=labels.__getitem__))


def _in_order(t: Type, array: Array) -> Array:
    return np.array(np.transpose(array, _axes(t)), order="C")


def _sizes(variables: Sequence[Term], alphabet: Alphabet) -> dict[str, int]:
    """Twos and threes, but more devices than a short sum has terms, and more row numbers than rows, so that some rows
    have several."""
    extra = re.findall("[a-z]", " ".join((alphabet.sums, alphabet.multiples, alphabet.new, alphabet.devices)))
    dims = [d for v in variables for d in (*v.type.dims, *v.type.devices)]
    names = sorted({n for d in dims for n in d.names()} | set(extra))
    sizes = {n: 2 + i % 2 for i, n in enumerate(names)}
    sizes |= dict.fromkeys(alphabet.devices.split(), DEVICES) | {"e": STACKED, "q": 7}
    numbered = [v.type for v in variables if v.type.ids]
    sizes |= {d.name: NUMBERS if len(t.dims) == 1 else 3 for t in numbered for d in t.dims if not d.parts}
    sizes |= {t.ids.name: ROWS for t in numbered if t.ids and not t.ids.parts}
    return sizes
