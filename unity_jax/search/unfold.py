"""What was planned for a folded program, done on the whole one: its rewrites, what it does to need less memory, and the
layouts of every layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unity_jax.pcg.graph import Graph, Tensor
from unity_jax.program import Program
from unity_jax.rewrite.rule import Rule
from unity_jax.search.candidate import Candidate, Pins, best
from unity_jax.search.fold import Folded, folded, replayed
from unity_jax.search.following import saving
from unity_jax.search.planner import Planner


def unfolded(
    wholes: Sequence[tuple[Program, Folded]],
    plan: Candidate,
    limit: float | None,
    pins: Pins,
    rules: Sequence[Rule],
) -> Candidate:
    """The plan of a whole program that does in each layer what a plan of the folded one does; the best one of that and
    what is nearly as fast there (`Candidate.rivals`), which become its rivals.

    **Arguments:** `wholes`: the program, and others that compute the same, each with itself folded: plans are of one of
    these, or of the first one rewritten; `rules`: those with which that may have been.
    """
    found, planners = list[Candidate](), dict[Program, tuple[Planner, Mapping[Tensor, Tensor]]]()
    for small in (plan, *plan.rivals):
        if small.program not in planners:
            before = small.program.keeping or small.program
            whole, deep = next((w for w in wholes if w[1].program.graph is before.graph), wholes[0])
            if before.graph is deep.program.graph and before.rewrites:
                whole = whole.rewritten(whole.graph, before.rewrites)  # what each saves may be told anew
            program, like = rewritten(whole, deep, small.program, pins, rules)
            planners[small.program] = Planner(program, plan.machine, limit, pins), like
        planner, like = planners[small.program]
        found.append(planner.as_decided(small, like))
    chosen = best(found, planner.limit)
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
