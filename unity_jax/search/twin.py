"""A deep program made shallow: of each run of equal layers the first and the last are left.

    BERT-Large, 24 layers, forward, backward and update: 18,719 ops    its twin: 2,263

A train step repeats itself in every pass, so its ops in program order are periodic where layers follow each other. What
is left reads, instead of what has been cut out, its like in the first layer: the types are the same, so that the twin
is a program, with the costs of one with fewer layers, though no function of interest. What is found on the twin is done
again on the whole (`replayed`), to all places that are like those in the twin: every kind of place there is has one
there. Whether it is worth it is for a plan of the whole to say.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from unity_jax.pcg.graph import Graph, Op, Path, Tensor, nested
from unity_jax.program import Program
from unity_jax.rewrite.estimate import Seconds
from unity_jax.rewrite.record import Rewrite, graph_at, with_graph
from unity_jax.rewrite.rule import Rule
from unity_jax.rewrite.sites import Finder, Kinds, Step, counterparts, fingerprint, rewrite, still
from unity_jax.search.limits import LIMITS
from unity_jax.trace import without_dead_code

LEFT = 2
"""Layers of a run that are left."""

LIKE = 1
"""How many ops before a place must be equal for the whole to be rewritten there as the twin is: few, since layers of
few ops are near the ends of a twin."""


class Twin(NamedTuple):
    """`program`: with the trees of the whole; `outputs`: which of the whole's results it has, in order; `like`: what it
    has in place of the tensors that have been cut out, arguments included."""

    program: Program
    outputs: tuple[int, ...]
    like: Mapping[Tensor, Tensor]


def shallow(program: Program) -> Twin:
    """The program with all layers but the first and the last of each run cut out."""
    graph = program.graph
    like: dict[Tensor, Tensor] = {}
    read_alike: dict[Tensor, Tensor] = {}
    gone: set[Op] = set()
    for run in _runs(graph.ops):
        for i in run.cut():
            op, first = graph.ops[i], graph.ops[run.start + (i - run.start) % run.period]
            gone.add(op)
            like.update(zip(op.outputs, first.outputs, strict=True))
            read_alike.update(zip(op.inputs, first.inputs, strict=True))
    ops = [_reading(op, like) for op in graph.ops if op not in gone]
    outputs = tuple(i for i, t in enumerate(graph.outputs) if t not in like)
    left = without_dead_code(Graph(graph.inputs, tuple(graph.outputs[i] for i in outputs), ops))
    read = {t for op in left.ops for t in op.inputs} | set(left.outputs)
    read |= {graph.inputs[program.ties[i]] for i in outputs if i in program.ties}
    inputs = [i for i, t in enumerate(graph.inputs) if t in read]
    inner = Graph(tuple(graph.inputs[i] for i in inputs), left.outputs, left.ops)
    cut = {t: read_alike[t] for t in {*graph.inputs}.difference(inner.inputs) if t in read_alike}
    return Twin(_of(program, inner, inputs, outputs), outputs, like | cut)


def _of(program: Program, graph: Graph, inputs: Sequence[int], outputs: Sequence[int]) -> Program:
    place, n = {old: new for new, old in enumerate(inputs)}, len(program.constants)
    leaves = [i - n for i in inputs if i >= n]
    return dataclasses.replace(
        program,
        graph=graph,
        constants=tuple(program.constants[i] for i in inputs if i < n),
        in_paths=tuple(program.in_paths[i] for i in leaves),
        in_suffixes=tuple(program.in_suffixes[i] for i in leaves),
        out_paths=tuple(program.out_paths[i] for i in outputs),
        donated=tuple(place[i] for i in program.donated if i in place),
        ties={new: place[program.ties[old]] for new, old in enumerate(outputs) if old in program.ties},
    )


def _reading(op: Op, like: dict[Tensor, Tensor]) -> Op:
    if not any(t in like for t in op.inputs):
        return op
    return dataclasses.replace(op, inputs=tuple(like.get(t, t) for t in op.inputs))


# Runs


class _Run(NamedTuple):
    """Ops from `start` to `stop` that are each like the one a period later."""

    start: int
    stop: int
    period: int

    def cut(self) -> range:
        """All periods between the first and the last."""
        first = self.start + self.period
        return range(first, first + ((self.stop - self.start) // self.period - LEFT) * self.period)


def _runs(ops: Sequence[Op]) -> list[_Run]:
    """Runs that do not overlap, those first that let go of most."""
    numbers: dict[object, int] = {}
    kinds = np.array([numbers.setdefault(_kind(op, numbers), len(numbers)) for op in ops])
    found = [run for period in _periods(kinds) for run in _periodic(kinds, period)]
    taken, chosen = np.zeros(len(ops), bool), []
    for run in sorted(found, key=lambda r: (-len(r.cut()), r)):
        if len(run.cut()) >= LIMITS.cut * len(ops) and not taken[run.start : run.stop].any():
            taken[run.start : run.stop] = True
            chosen.append(run)
    return chosen


def _kind(op: Op, numbers: dict[object, int]) -> object:
    """Equal for ops that differ at most in the numbers that they are given: layers have their own."""
    name, ins, outs, params, *_ = op.signature
    bodies = tuple(fingerprint(b, numbers) for b in op.bodies)
    return name, tuple((shape, dtype) for shape, dtype, _ in ins), outs, "" if bodies else params, bodies, op.backward


def _periods(kinds: np.ndarray) -> list[int]:
    order = np.argsort(kinds, kind="stable")
    same = kinds[order][1:] == kinds[order][:-1]
    gaps = Counter(np.diff(order)[same].tolist())
    return [gap for gap, _ in sorted(gaps.items(), key=lambda g: (-g[0] * g[1], g[0]))[:LIMITS.periods]]


def _periodic(kinds: np.ndarray, period: int) -> Iterator[_Run]:
    """Maximal runs of one period with more layers than are left."""
    same = np.concatenate([[False], kinds[period:] == kinds[:-period], [False]])
    edges = np.flatnonzero(same[1:] != same[:-1])
    for start, stop in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        if stop - start >= LEFT * period:
            yield _Run(start, stop + period, period)


# The whole again


def replayed(
    whole: Graph, twin: Graph, rewrites: Sequence[Rewrite], rules: Sequence[Rule], seconds: Callable[[Graph], Seconds]
) -> tuple[Graph, tuple[Rewrite, ...]]:
    """The whole program after the rewrites of its twin, those that can be done there as well; what each saves grows
    with the number of its places.

    **Arguments:** `seconds`: see `Finder`.
    """
    by_name, numbers, found = {r.name: r for r in rules}, dict[object, int](), []
    for done in rewrites:
        graph = whole
        near: dict[Path, frozenset[Op]] = {}
        steps: list[tuple[Path, Step]] = []
        for path, step in done.steps:
            inner, rule = graph_at(twin, path), by_name[step.rule]
            twin = with_graph(twin, path, step.applied(inner, rule))
            op, result, *_ = step.spots[0]
            kind = Kinds(inner, numbers, LIKE)[inner.ops[op].outputs[result]]
            begun = steps or step is done.steps[0][1]  # what the first step cannot do there, the others do not continue
            for at in _alike(graph, inner, path) if begun else ():
                there = graph_at(graph, at)
                finder = Finder(there, seconds, Kinds(there, numbers, LIKE))
                place = finder.place(rule, kind, near.get(at))
                made = rewrite(finder, place) if place is not None else None
                if place is None or made is None:
                    continue  # done with an earlier one: fewer kinds are told apart
                after, new, did = made
                graph = with_graph(graph, at, after)
                new |= near[at] if at in near else counterparts(place, finder.view, after)
                near[at] = still(new, after)
                steps.append((at, did))
        if steps:
            whole, count = graph, len(steps[0][1].spots)
            saved = done.saved * count / done.count
            found.append(dataclasses.replace(done, count=count, saved=saved, steps=tuple(steps)))
    return whole, tuple(found)


def _alike(whole: Graph, inner: Graph, path: Path) -> list[Path]:
    """The graphs within the whole program that are like one of the twin."""
    if not path:
        return [()]
    numbers: dict[object, int] = {}
    wanted = fingerprint(inner, numbers)
    return [at for at, graph, _ in nested(whole) if at and fingerprint(graph, numbers) == wanted]
