"""What was planned for a folded program, done on the whole one: its rewrites, what it does to need less memory, and the
layouts of every layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from unity_jax.pcg.graph import Graph, Op, Path, Tensor, nested
from unity_jax.program import Program
from unity_jax.rewrite.estimate import Seconds
from unity_jax.rewrite.record import Rewrite, graph_at, with_graph
from unity_jax.rewrite.rule import Rule
from unity_jax.rewrite.sites import Finder, Kinds, Step, counterparts, fingerprint, rewrite, still
from unity_jax.search.candidate import Candidate, Pins, best
from unity_jax.search.fold import Folded, folded
from unity_jax.search.following import saving
from unity_jax.search.limits import LIMITS
from unity_jax.search.planner import Planner

LIKE = 1
"""How many ops before a place must be equal for the whole to be rewritten there as the folded program is: few, since
layers of few ops are near the ends of the three."""


def unfolded(
    wholes: Sequence[tuple[Program, Folded]],
    plan: Candidate,
    limit: float | None,
    pins: Pins,
    rules: Sequence[Rule],
    every: bool = False,
) -> Candidate:
    """The plan of a whole program that does in each layer what a plan of the folded one does; the best one of that and
    its rivals (`Candidate.rivals`): those that are nearly as fast there, and where the whole is slower than told, those
    that are told to be faster than that. They become its rivals.

    **Arguments:** `wholes`: the program, and others that compute the same, each with itself folded: plans are of one of
    these, or of the first one rewritten; `rules`: those with which that may have been; `every`: rivals are all wanted.
    """
    found, planners = list[Candidate](), dict[Program, tuple[Planner, Mapping[Tensor, Tensor]]]()
    most = plan.machine.device.memory_bytes if limit is None else limit
    for small in (plan, *plan.rivals):
        if found and not every:
            if small.seconds > max(best(found, most).seconds, (1 + LIMITS.alike) * plan.seconds):
                break
            if not small.fits(most):
                continue
        if small.program not in planners:
            before = small.program.keeping or small.program
            whole, deep = next((w for w in wholes if w[1].program.graph is before.graph), wholes[0])
            if before.graph is deep.program.graph and before.rewrites:
                whole = whole.rewritten(whole.graph, before.rewrites)  # what each saves may be told anew
            program, like = rewritten(whole, deep, small.program, pins, rules)
            planners[small.program] = Planner(program, plan.machine, most, pins), like
        planner, like = planners[small.program]
        found.append(planner.as_decided(small, like))
    chosen = best(found, most)
    return chosen.noting(searched=plan.searched, rivals=tuple(c for c in found if c is not chosen))


def rewritten(
    whole: Program, deep: Folded, small: Program, pins: Pins, rules: Sequence[Rule]
) -> tuple[Program, Mapping[Tensor, Tensor]]:
    """The whole program rewritten and saving memory as the folded one (`small`), and what that has in place of its
    tensors."""
    if small.keeping is not None:
        program, like = rewritten(whole, deep, small.keeping, pins, rules)
        return saving(program, like, small)
    if small.graph is deep.program.graph:
        return whole, deep.like
    before = len(whole.rewrites)
    graph, done = replayed(whole.graph, deep.program.graph, small.rewrites[before:], rules)
    program = whole.rewritten(graph, (*whole.rewrites, *done))
    again = folded(program, pins)
    if again is None:
        return program, deep.like
    known: dict[object, int] = {}
    numbers = {n: t for t, n in numbered(small.graph, known).items()}
    same = {t: numbers[n] for t, n in numbered(again.program.graph, known).items() if n in numbers}
    return program, {t: same.get(s) or deep.like.get(t, t) for t, s in again.like.items()}


def numbered(graph: Graph, known: dict[object, int]) -> dict[Tensor, int]:
    """A number for each tensor of a graph, equal for those that are computed alike from the same arguments."""
    number = {t: known.setdefault(("input", i), len(known)) for i, t in enumerate(graph.inputs)}
    for op in graph.ops:
        operands = tuple(number.get(t, -1) if t.literal is None else str(t.literal) for t in op.inputs)
        own = (op.name, len(op.outputs), *map(id, op.bodies)) if op.bodies else op.signature
        for i, t in enumerate(op.outputs):
            number[t] = known.setdefault((own, operands, i), len(known))
    return number


def replayed(
    whole: Graph, small: Graph, rewrites: Sequence[Rewrite], rules: Sequence[Rule]
) -> tuple[Graph, tuple[Rewrite, ...]]:
    """The whole program after the rewrites of the folded one (`small`), those that can be done there as well."""
    by_name, numbers, found = {r.name: r for r in rules}, dict[object, int](), []
    for done in rewrites:
        graph = whole
        near: dict[Path, frozenset[Op]] = {}
        steps: list[tuple[Path, Step]] = []
        for path, step in done.steps:
            inner, rule = graph_at(small, path), by_name[step.rule]
            small = with_graph(small, path, step.applied(inner, rule))
            op, result, *_ = step.spots[0]
            kind = Kinds(inner, numbers, LIKE)[inner.ops[op].outputs[result]]
            begun = steps or step is done.steps[0][1]  # what the first step cannot do there, the others do not continue
            for at in _alike(graph, inner, path) if begun else ():
                there = graph_at(graph, at)
                finder = Finder(there, lambda _: Seconds(0.0), Kinds(there, numbers, LIKE))
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
            found.append(dataclasses.replace(done, count=count, steps=tuple(steps)))
    return whole, tuple(found)


def _alike(whole: Graph, inner: Graph, path: Path) -> list[Path]:
    """The graphs within the whole program that are like one of the folded program."""
    if not path:
        return [()]
    numbers: dict[object, int] = {}
    wanted = fingerprint(inner, numbers)
    return [at for at, graph, _ in nested(whole) if at and fingerprint(graph, numbers) == wanted]
