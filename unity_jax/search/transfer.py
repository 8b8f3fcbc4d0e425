"""The decisions of one program for another one of which every op has its like there, op by op: of a folded program for
the whole one, of one that computes again for one that keeps.

Nothing is left to choose then, so that no problem has to be built, such as of a program that is as deep as it was
written.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping

from unity_jax.pcg.graph import Graph, Op, Tensor
from unity_jax.pcg.layout import Layout
from unity_jax.pcg.loops import Scan
from unity_jax.program import Program
from unity_jax.search.assemble import Decisions, is_free, lift, passes_layouts, unlift
from unity_jax.search.candidate import Candidate, Pins
from unity_jax.search.decompose import Place
from unity_jax.search.rule_cache import RuleCache


def transferred(
    plan: Candidate, program: Program, like: Mapping[Tensor, Tensor], pins: Pins, rules: RuleCache
) -> Decisions | None:
    """What a plan decides, for a program that computes the same by the same ops, or by fewer; None where something has
    no like, or cannot do the same.

    **Arguments:** `like`: what the program of the plan has in place of tensors of this one; `pins`: of this one.
    """
    try:
        return _transferred(plan, program, like, pins, rules)
    except LookupError:
        return None


def _transferred(
    plan: Candidate, program: Program, like: Mapping[Tensor, Tensor], pins: Pins, rules: RuleCache
) -> Decisions:
    """The same; raises `LookupError` in place of None."""
    graph, before = program.graph, plan.decisions
    made_by = {t: op for op in before.strategies for t in op.outputs}
    reads, read_before = _reads(graph), _reads(plan.program.graph)
    results = dict(zip(plan.program.graph.outputs, before.outputs, strict=True))
    strategies, layouts = dict[Op, tuple[int, ...]](), dict[Tensor, Layout]()

    def layout(t: Tensor) -> Layout:
        source = like.get(t, t)
        if source.shape != t.shape:
            raise LookupError
        return before.layouts[source]

    def alike(t: Tensor) -> bool:
        """Whether as many read a partial sum as read its like, each for itself, as elementwise ops do."""
        return reads[t] == read_before[like.get(t, t)]

    def held(t: Tensor) -> tuple[Tensor, Layout]:
        """A partial sum whose one reduction serves all that read it; what leaves a layer of the folded program is read
        by the next one as it leaves."""
        source = like.get(t, t)
        return t, results[source] if source in results and source not in before.layouts else layout(t)

    def known(t: Tensor) -> bool:
        source = like.get(t, t)
        return source in before.layouts and source.shape == t.shape

    def new_parts(scan: Op, body: Graph) -> Iterator[tuple[Tensor, Layout]]:
        """What a loop reads parts of that there was not: as the stack lies."""
        roles = Scan.of(scan.params)
        for t, stack in zip(body.inputs, scan.inputs, strict=True):
            if t not in layouts:
                if t not in body.inputs[roles.sliced]:
                    raise LookupError
                yield t, unlift(layouts[stack])

    def new_stacks(scan: Op) -> Iterator[tuple[Tensor, Layout]]:
        """What a loop stacks that there was not: as its parts are made."""
        roles, (body,) = Scan.of(scan.params), scan.bodies
        for stack, t in zip(scan.outputs[roles.stacked], body.outputs[roles.stacked], strict=True):
            if stack not in layouts:
                made = layouts.get(t)
                if made is None:
                    op = body.producer[t]
                    made = rules.shard(op, plan.mesh, strategies[op]).result_layouts[op.outputs.index(t)]
                if made is None or made.partial:
                    raise LookupError
                yield stack, lift(made)

    def decide(inner: Graph) -> None:
        for op in inner.ops:
            if is_free(op) or passes_layouts(op):
                continue
            for body in op.bodies:
                layouts.update((t, layout(t)) for t in body.inputs if known(t) or op.name != "scan")
                if op.name == "scan":
                    layouts.update(new_parts(op, body))
                decide(body)
            if op.bodies:
                layouts.update((t, layout(t)) for t in op.outputs if known(t))
                if op.name == "scan":
                    layouts.update(new_stacks(op))
                continue
            source = made_by[like.get(op.outputs[0], op.outputs[0])]
            strategy = strategies[op] = before.strategies[source]
            if op.signature is not source.signature and strategy not in rules.strategies(op, plan.mesh):
                raise LookupError
            shared = [t for t in op.outputs if reads[t] > 1]
            if shared and any(lay.partial for lay in rules.shard(op, plan.mesh, strategy).result_layouts):
                layouts.update(held(t) for t in shared if like.get(t, t) in before.layouts or not alike(t))

    layouts.update((t, pins.tensors.get(t) or layout(t)) for t in graph.inputs)
    decide(graph)

    def result(i: int, t: Tensor) -> Layout:
        if i in program.ties:
            return layouts[graph.inputs[program.ties[i]]]
        return pins.outputs.get(i) or results[like.get(t, t)]

    outputs = tuple([result(i, t) for i, t in enumerate(graph.outputs)])
    return dataclasses.replace(before, strategies=strategies, layouts=layouts, outputs=outputs, rings=frozenset())


def _reads(graph: Graph) -> Counter[Tensor]:
    """How often each tensor is read, results of loops' bodies and of the graph included."""
    found = Counter(t for op in graph.walk() for t in op.inputs)
    found.update(t for op in graph.walk() for body in op.bodies for t in body.outputs)
    found.update(graph.outputs)
    return found


def rings_of(plan: Candidate, graph: Graph, like: Mapping[Tensor, Tensor]) -> frozenset[Place]:
    """The places of another graph that are like those of a plan whose collectives are rings."""
    at = {t: (op, side) for op, side in plan.decisions.rings for t in op.outputs}
    return frozenset((op, at[t][1]) for op in graph.walk() for o in op.outputs if (t := like.get(o, o)) in at)
