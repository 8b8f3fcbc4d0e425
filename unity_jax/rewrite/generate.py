"""Finding rules."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from unity_jax.rewrite.alphabet import Alphabet
from unity_jax.rewrite.generalize import generalized
from unity_jax.rewrite.language import RuleError, Term
from unity_jax.rewrite.prune import Known, follows, inputs
from unity_jax.rewrite.rule import Rule
from unity_jax.rewrite.semantics import tested
from unity_jax.rewrite.values import Node, Values


@dataclass
class Counts:
    graphs: int = 0
    values: int = 0
    pairs: int = 0
    operands: int = 0
    renamed: int = 0
    derived: int = 0
    unbound: int = 0
    repeated: int = 0
    false: int = 0
    unproved: int = 0
    rules: int = 0


def derivable(at: Node, known: Known, graph: Values, settled: set[Node]) -> bool:
    """Whether known rules make of a node one that is settled."""
    seen, queue = {at}, [at]
    for n in queue:
        for (made,) in known.applied([n], graph):
            if isinstance(made, int) or made in settled:
                if (made if isinstance(made, int) else graph.of[made]) == graph.of[at]:
                    return True
            elif made not in seen and graph.of.get(made) == graph.of[at]:
                seen.add(made)
                queue.append(made)
    return False


def search(alphabet: Alphabet, known: Known, counts: Counts) -> Iterator[Rule]:
    graph = Values(alphabet)
    settled: set[Node] = set()
    levels = [(s, alphabet.ops.split()) for s in range(1, alphabet.size + 1)]
    if alphabet.outer:
        levels.append((alphabet.size + 1, alphabet.outer.split()))
    for size, ops in levels:
        before = len(graph.types)
        equal = graph.grow(size, ops)
        settled.update(n for v in range(before, len(graph.types)) for n in graph.nodes[v])
        pending = {}
        for n, value in equal:
            source, target = graph.term_of(n), graph.term(value)
            key = renamed(source, target)
            if key not in pending:
                pending[key] = (n, value, source, target)
        counts.operands += len(equal)
        counts.renamed += len(pending)
        ranked = []
        for n, value, source, target in pending.values():
            if inputs([target]) <= inputs([source]):
                rule = generalized("", [source], [target])
            elif inputs([source]) <= inputs([target]):
                rule = generalized("", [target], [source])
            else:
                counts.unbound += 1
                continue
            ranked.append((rank(rule), n, value, rule))
        ranked.sort(key=lambda r: r[0])
        for _, n, value, rule in ranked:
            if derivable(n, known, graph, settled):
                counts.derived += 1
            elif all(map(repeats, (*rule.source, *rule.target))):
                counts.repeated += 1
                continue
            elif not tested(rule):
                counts.false += 1
                continue
            else:
                known.add(rule)
                counts.rules += 1
                yield rule
            settled.add(n)
            graph.nodes[value].append(n)
        asked = {n for _, n, _, _ in ranked}
        for n, value in equal:  # the renamed
            if n not in asked:
                graph.nodes[value].append(n)
                settled.add(n)
    counts.graphs += sum(sum(c.values()) for c in graph.graphs)
    counts.values += len(graph.types)


def rank(rule: Rule) -> tuple[int, int, int, int, str]:
    """Small rules first; among those of a size the more general."""
    sizes = [sum(map(tree, side)) for side in (rule.source, rule.target)]
    dims = {d for v in rule.given for d in (*v.type.dims, *v.type.devices)}
    return sum(sizes), max(sizes), -len(rule.given), -len(dims), str(rule)


def repeats(t: Term) -> bool:
    """Whether an input occurs in it twice."""
    return len(list(leaves(t))) > len(set(leaves(t)))


def leaves(t: Term) -> Iterator[Term]:
    if not t.op:
        yield t
    for a in t.args:
        yield from leaves(a)


def tree(t: Term) -> int:
    return bool(t.op) + sum(map(tree, t.args))


def minimized(rules: Sequence[Rule]) -> list[Rule]:
    """Without those that follow from others that are no larger, the largest and least general first."""
    left = sorted(rules, key=rank)
    for rule in reversed(list(left)):
        others = Known()
        for other in left:
            if other is not rule and rank(other)[0] <= rank(rule)[0]:
                others.add(other)
        if follows(rule, others):
            left.remove(rule)
    return left


def renamed(source: Term, target: Term) -> str:
    """Text in which variables of one type are numbered as they occur."""
    types = {t.name: str(t.type) for s in (source, target) for t in s.walk() if not t.op}
    order: dict[str, str] = {}
    used: dict[str, int] = {}

    def name(m: re.Match[str]) -> str:
        word = m.group(0)
        if word not in types:
            return word
        if word not in order:
            used[types[word]] = used.get(types[word], 0) + 1
            order[word] = f"{types[word]}{used[types[word]]}"
        return order[word]

    return re.sub(r"\b[a-z]+\b(?=[,)])", name, f"{source} = {target}")
