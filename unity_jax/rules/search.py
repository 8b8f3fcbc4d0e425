"""Rules of one alphabet: pairs of graphs of one value, without those that follow from others."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields

from unity_jax.rewrite.language import Dim, Term
from unity_jax.rewrite.ops.parts import SLICE
from unity_jax.rewrite.ops.stacks import UNSTACK
from unity_jax.rewrite.rule import Rule
from unity_jax.rewrite.table import apply
from unity_jax.rules.alphabet import Alphabet
from unity_jax.rules.generalize import generalized
from unity_jax.rules.prune import Known, follows, inputs, unfolds
from unity_jax.rules.values import Node, Values, node


@dataclass
class Counts:
    """What is left after each step.

    `graphs`: of the alphabet, as trees. `pairs`: a graph and the smallest of its value. `subgraphs`: pairs whose graphs
    differ outermost, with operands that are smallest themselves. `renamed`: those that differ in more than the names of
    inputs. `bound`: those with a side that mentions every input of the other. `independent`: those that do not follow
    from the rules before. `linear`: those with a side that mentions each input once. `true`: those that hold at other
    sizes. `proved`.
    """

    graphs: int = 0
    values: int = 0
    pairs: int = 0
    subgraphs: int = 0
    renamed: int = 0
    bound: int = 0
    independent: int = 0
    linear: int = 0
    true: int = 0
    proved: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Counts)))


Proof = Callable[[Rule], Rule | None]
"""The rule with its proof, if there is one."""


def search(
    alphabet: Alphabet, known: Known, counts: Counts, true: Callable[[Rule], bool], prove: Proof
) -> Iterator[Rule]:
    """The rules of an alphabet that do not follow from `known` ones, which they join."""
    graph = Values(alphabet)
    settled: set[Node] = set()

    def accepted(rule: Rule) -> Rule | None:
        counts.independent += 1
        if all(any(map(_repeats, side)) for side in (rule.source, rule.target)):
            return None
        counts.linear += 1
        if not true(rule):
            return None
        counts.true += 1
        proved = prove(rule)
        if proved is not None:
            counts.proved += 1
            known.add(proved)
        return proved

    for size in range(1, (alphabet.size if alphabet.direct else alphabet.largest) + 1):
        first = len(graph.types)
        equal = graph.grow(size, (alphabet.ops if size <= alphabet.size else alphabet.outer).split())
        settled.update(n for v in range(first, len(graph.types)) for n in graph.nodes[v])
        for nodes, rule in _ranked(graph, equal, counts):
            folds = _leads(nodes[0], known, graph, settled)
            if folds is None:
                found = accepted(rule)
                if found is None:
                    continue
                folds = unfolds(found.target, found.source)
                yield found
            settled.update(nodes)
            for n in () if folds else nodes:
                graph.nodes[graph.of[n]].append(n)
    several = [*_direct(graph), *_siblings(graph)]
    renamed = {_numbered([*r.source, *r.target]): r for r in reversed(several)}
    counts.subgraphs += len(several)
    counts.renamed += len(renamed)
    counts.bound += len(renamed)
    like = Known()  # of these, larger sides fold into smaller ones as well
    for rule in sorted(renamed.values(), key=rank):
        if not follows(rule, known, one_way=True) and not follows(rule, like) and (found := accepted(rule)):
            like.add(found)
            yield found
    counts.graphs += sum(sum(c.values()) for c in graph.graphs)
    counts.values += len(graph.types)
    counts.pairs += sum(sum(c.values()) - 1 for c in graph.graphs)


def _ranked(graph: Values, equal: Sequence[tuple[Node, int]], counts: Counts) -> Iterator[tuple[list[Node], Rule]]:
    """The rules that make a node the smallest graph of its value, each with all nodes that differ in the names of
    inputs: the smaller and the more general first."""
    pending: dict[str, list[Node]] = {}
    for n, value in equal:
        pending.setdefault(_numbered([graph.term_of(n), graph.term(value)]), []).append(n)
    ranked = []
    for nodes in pending.values():
        sides = [graph.term_of(nodes[0])], [graph.term(graph.of[nodes[0]])]
        for source, target in (sides, sides[::-1]):
            if inputs(target) <= inputs(source):
                rule = generalized("", source, target)
                ranked.append((rank(rule), nodes, rule))
                break
    counts.subgraphs += len(equal)
    counts.renamed += len(pending)
    counts.bound += len(ranked)
    yield from ((nodes, rule) for _, nodes, rule in sorted(ranked, key=lambda r: r[0]))


def rank(rule: Rule) -> tuple[int, bool, int, int, int, int, str]:
    """Small rules first; among those of a size the ones that work both ways, the shallow and the more general."""
    sizes = [sum(map(_ops, side)) for side in (rule.source, rule.target)]
    terms = {t for r in (*rule.source, *rule.target) for t in r.walk()}
    batch = set.intersection(*(set(v.type.dims) for v in rule.given)) - {a for t in terms for a in t.attrs}
    dims = {d for v in rule.given for d in (*v.type.dims, *v.type.devices)} - batch
    lossy = inputs(rule.source) != inputs(rule.target)
    depth = sum(map(_depth, (*rule.source, *rule.target)))
    return max(sizes), lossy, sum(sizes), depth, -len(rule.given), -len(dims), str(rule)


def _depth(t: Term) -> int:
    return 1 + max(map(_depth, t.args)) if t.args else 0


def _ops(t: Term) -> int:
    return bool(t.op) + sum(map(_ops, t.args))


def _repeats(t: Term) -> bool:
    """Whether an input occurs in it twice."""
    found = list(_leaves(t))
    return len(found) > len(set(found))


def _leaves(t: Term) -> Iterator[Term]:
    if not t.op:
        yield t
    for a in t.args:
        yield from _leaves(a)


def _leads(at: Node, known: Known, graph: Values, settled: set[Node]) -> bool | None:
    """Whether known rules make of a node one that is settled: None if they do not, and if they do, whether only by
    folding several ops into one. Such a node is settled but no way to make its value: else all rules of an op would
    follow from its definition, as when a single op is unfolded."""
    seen, queue = {at: False}, [at]
    reached = None
    for n in queue:
        for (made,), folds in known.applied([n], graph):
            value = graph.of.get(made) if isinstance(made, Node) else made
            if value == graph.of[at]:
                if isinstance(made, int) or made in settled:
                    reached = seen[n] or folds
                    if not reached:
                        return False
                elif made not in seen:
                    seen[made] = seen[n] or folds
                    queue.append(made)
    return reached


def _direct(graph: Values) -> list[Rule]:
    """Values as the outermost ops of a direct alphabet make them of graphs that are not the smallest, too."""
    if not graph.alphabet.direct:
        return []
    found = {}
    for size in range(1, graph.alphabet.largest + 1):
        for n, value in graph.grow(size, graph.alphabet.outer.split()):
            small = graph.term(value)
            for args in itertools.product(*([*map(graph.term_of, graph.nodes[a])] or [graph.term(a)] for a in n.args)):
                large = apply(n.op, *args, attrs=n.attrs)
                inside = {t for t in large.walk() if t.op}
                if small.op and small not in inside and len(inside) <= graph.alphabet.largest and not _repeats(small):
                    rule = generalized("", [small], [large])
                    found[rule] = None
    return list(found)


def _siblings(graph: Values) -> Iterator[Rule]:
    """Two values of one op each that are the parts of one value of that op: graphs with two results.

    The frontier is restricted to the results of a cut: their sources are single ops, since merges of larger siblings
    are merges of op after op.
    """
    ops = graph.alphabet.ops.split()
    for value in range(len(graph.types)):
        for cut, dim in _cuts(graph, value, ops):
            parts = [graph.value_of(node(cut, (dim, i), (value,))) for i in (0, 1)]
            if None in parts or parts[0] == parts[1] or any(graph.size(p) != 1 for p in parts):  # type: ignore[arg-type]
                continue
            source = [graph.term(p) for p in parts]  # type: ignore[arg-type]
            merged = next((n for n in graph.nodes[value] if n.op == source[0].op == source[1].op), None)
            if merged is not None and inputs([t := graph.term_of(merged)]) <= inputs(source):
                yield generalized("", source, [apply(cut, t, attrs=(dim, i)) for i in (0, 1)])


def _cuts(graph: Values, value: int, ops: Sequence[str]) -> Iterator[tuple[str, Dim]]:
    for d in graph.types[value].dims:
        if d.name == "+" and SLICE in ops:
            yield SLICE, d
        elif d.name == "e" and UNSTACK in ops:
            yield UNSTACK, d


def _numbered(terms: Sequence[Term]) -> str:
    """Text in which inputs of one type are numbered as they occur."""
    types = {t.name: str(t.type) for s in terms for t in s.walk() if not t.op}
    order: dict[str, str] = {}

    def name(m: re.Match[str]) -> str:
        word = m.group(0)
        if word in types and word not in order:
            order[word] = f"{types[word]}{sum(types[w] == types[word] for w in order)}"
        return order.get(word, word)

    return re.sub(r"[a-z]+(?=[,);]| =|$)", name, " = ".join(map(str, terms)))
