"""Which rules follow from others: a search among the programs that other rules make of one, as an e-graph.

The classic structure of equality saturation (Willsey et al., POPL 2021): a class holds the nodes known to be equal,
nodes have classes as operands, and classes merge until nodes with equal operands are in one class.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from unity_jax.rewrite.language import Attrs, RuleError, Term, Type, variable
from unity_jax.rewrite.rule import Rule
from unity_jax.rewrite.table import apply
from unity_jax.rules.match import Graph, build, matches
from unity_jax.rules.values import Node, node, ordered

NODES, ROUNDS, PAIRS = 150, 3, 32
"""How far a derivation is followed: the most nodes, steps, and ways to take nodes of all results together."""


class Programs:
    """An e-graph: classes by number, each with its type and nodes."""

    def __init__(self) -> None:
        self.types: list[Type] = []
        self.nodes: list[list[Node]] = []
        self._of: dict[Node, int] = {}
        self._up: list[int] = []
        self._inputs: dict[str, int] = {}

    def class_of(self, c: int) -> int:
        while self._up[c] != c:
            c = self._up[c]
        return c

    def add(self, t: Term) -> int:
        if t.op:
            found = self.find(node(t.op, t.attrs, [self.add(a) for a in t.args]))
            assert found is not None
            return found
        if t.name not in self._inputs:
            self._inputs[t.name] = self._new(ordered(t.type))
        return self.class_of(self._inputs[t.name])

    def seen(self, t: Term) -> int | None:
        """The class of a program, if it is in here."""
        if not t.op:
            return self.add(t)
        args = [self.seen(a) for a in t.args]
        known = None if None in args else self._of.get(node(t.op, t.attrs, args))  # type: ignore[arg-type]
        return None if known is None else self.class_of(known)

    def find(self, made: Node) -> int | None:
        """The class of a node, new where there is none; None where the op does not fit."""
        made = node(made.op, made.attrs, [self.class_of(a) for a in made.args])
        if made not in self._of:
            kind = _type(made.op, made.attrs, tuple(self.types[a] for a in made.args))
            if kind is None:
                return None
            self._of[made] = self._new(kind)
            self.nodes[-1].append(made)
        return self.class_of(self._of[made])

    def merge(self, a: int, b: int) -> None:
        """Merge two classes, and those that then have equal nodes."""
        waiting = [(a, b)]
        while waiting:
            a, b = (self.class_of(c) for c in waiting.pop())
            if a == b:
                continue
            a, b = min(a, b), max(a, b)
            self._up[b] = a
            self.nodes[a] += self.nodes[b]
            self.nodes[b] = []
            of: dict[Node, int] = {}
            for n, c in self._of.items():
                now = node(n.op, n.attrs, [self.class_of(x) for x in n.args])
                if of.setdefault(now, c) != c:
                    waiting.append((of[now], c))
            self._of = of
            for c, nodes in enumerate(self.nodes):
                self.nodes[c] = list(
                    dict.fromkeys(node(n.op, n.attrs, [self.class_of(x) for x in n.args]) for n in nodes)
                )

    def __len__(self) -> int:
        return len(self._of)

    def _new(self, kind: Type) -> int:
        self.types.append(kind)
        self.nodes.append([])
        self._up.append(len(self._up))
        return len(self._up) - 1


@functools.cache
def _type(op: str, attrs: Attrs, types: tuple[Type, ...]) -> Type | None:
    try:
        return ordered(apply(op, *(variable(f"a{i}", t) for i, t in enumerate(types)), attrs=attrs).type)
    except RuleError:
        return None


@dataclass
class Known:
    """Rules, and their applicable directions by the outermost op of the first result that is matched.

    Directions that unfold a single op into others are left out: `dot` is `sum` of `mul`, `concat` is `add` of `pad`,
    and by such definitions nearly all rules of an op follow from those of others, though no search would go that way.
    """

    rules: list[Rule] = field(default_factory=list)
    directions: dict[tuple[str, int], list[tuple[Sequence[Term], Sequence[Term], bool]]] = field(default_factory=dict)

    def add(self, rule: Rule) -> None:
        self.rules.append(rule)
        for a, b in ((rule.source, rule.target), (rule.target, rule.source)):
            if all(t.op for t in a) and inputs(b) <= inputs(a) and not unfolds(a, b):
                self.directions.setdefault((a[0].op, len(a)), []).append((a, b, unfolds(b, a)))

    def applied(self, at: Sequence[Node], graph: Graph) -> Iterator[tuple[list[Node | int], bool]]:
        """What the rules make of nodes, all at once, and whether the other way would unfold an op."""
        for side, other, folds in self.directions.get((at[0].op, len(at)), ()):
            for found in matches(side, at, graph):
                made = [build(t, found, graph) for t in other]
                if all(m is not None for m in made):
                    yield made, folds  # type: ignore[misc]


def unfolds(a: Sequence[Term], b: Sequence[Term]) -> bool:
    if len(a) > 1 or any(t.op for t in a[0].args) or not any(t.op for t in b[0].args):
        return False
    return any(t.op not in ("", a[0].op) for t in b[0].walk())


def inputs(terms: Sequence[Term]) -> frozenset[str]:
    return frozenset(t.name for r in terms for t in r.walk() if not t.op)


def follows(rule: Rule, known: Known, one_way: bool = False) -> bool:
    """Whether the known rules make equal programs of both sides of a rule or, one way, the target of the source alone.

    One way is what matters for rules of several results: the target of a merge of siblings always simplifies to its
    source.
    """
    graph = Programs()
    before = [graph.add(t) for t in rule.source]
    for t in () if one_way else rule.target:
        graph.add(t)
    for _ in range(ROUNDS):
        size = len(graph)
        for at, results in _places(graph, before):
            for made, _ in known.applied(at, graph):
                _merge(graph, zip(results, made, strict=True))
        if _met(graph, before, rule.target):
            return True
        singles = [(c, n) for c, nodes in enumerate(graph.nodes) for n in nodes]
        _merge(graph, [(c, made) for c, n in singles for (made,), _ in known.applied([n], graph)])
        if len(graph) == size or len(graph) > NODES:
            break
    return _met(graph, before, rule.target)


def is_own_inverse(rule: Rule) -> bool:
    """Whether a rule of one result, applied to its target, makes its source."""
    if len(rule.source) > 1:
        return False
    graph = Programs()
    before, after = graph.add(rule.source[0]), graph.add(rule.target[0])
    of_target = graph.nodes[graph.class_of(after)]
    for found in itertools.chain.from_iterable(matches(rule.source, [n], graph) for n in of_target):
        made = build(rule.target[0], found, graph)
        value = graph.find(made) if isinstance(made, Node) else made
        if value is not None and graph.class_of(value) == graph.class_of(before):
            return True
    return False


def _places(graph: Programs, results: Sequence[int]) -> Iterator[tuple[Sequence[Node], Sequence[int]]]:
    """Nodes of all results together, in any order."""
    if len(results) > 1:
        for order in itertools.permutations(results):
            every = itertools.product(*(list(graph.nodes[graph.class_of(c)]) for c in order))
            yield from ((at, order) for at in itertools.islice(every, PAIRS))


def _merge(graph: Programs, equal: Iterable[tuple[int, Node | int]]) -> None:
    for c, made in equal:
        value = graph.find(made) if isinstance(made, Node) else made
        if value is not None:
            graph.merge(c, value)
        if len(graph) > NODES:
            break


def _met(graph: Programs, before: Sequence[int], target: Sequence[Term]) -> bool:
    for c, t in zip(before, target, strict=True):
        made = graph.seen(t)
        if made is None or graph.class_of(made) != graph.class_of(c):
            return False
    return True
