"""The decisions of one program for another one of which every op has its like there, op by op: of a folded program for
the whole one, of one that computes again for one that keeps, of one whose layers are all alike for one that has them in
two ranges.

Nothing is left to choose then, so that no problem has to be built, such as of a program that is as deep as it was
written.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from unity_jax.ops.rule import Strategy
from unity_jax.ops.strategies import making
from unity_jax.pcg.graph import Graph, Op, Tensor
from unity_jax.pcg.layout import Layout
from unity_jax.pcg.loops import START, Scan
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
        return _Transfer(plan, program, like, pins, rules).run()
    except LookupError:
        return None


class _Transfer:
    """What a plan decides, on its way to another program. It raises `LookupError` where something has no like."""

    def __init__(
        self, plan: Candidate, program: Program, like: Mapping[Tensor, Tensor], pins: Pins, rules: RuleCache
    ) -> None:
        self.program, self.like, self.pins, self.rules = program, like, pins, rules
        self.before, self.mesh = plan.decisions, plan.mesh
        self.made_by = {t: op for op in self.before.strategies for t in op.outputs}
        self.reads, self.read_before = _reads(program.graph), _reads(plan.program.graph)
        self.in_ranges = {t for op in program.graph.walk() if START in op.params for t in op.outputs}
        self.results = dict(zip(plan.program.graph.outputs, self.before.outputs, strict=True))
        self.strategies, self.layouts = dict[Op, Strategy](), dict[Tensor, Layout]()

    def run(self) -> Decisions:
        """The decisions for the other program."""
        graph = self.program.graph
        self.layouts.update((t, self.pins.tensors.get(t) or self.layout(t)) for t in graph.inputs)
        self.decide(graph)
        outputs = tuple([self.result(i, t) for i, t in enumerate(graph.outputs)])
        decided = {"strategies": self.strategies, "layouts": self.layouts, "outputs": outputs}
        return dataclasses.replace(self.before, **decided, rings=frozenset())

    def decide(self, inner: Graph) -> None:
        """Decide for all ops of a graph, bodies included."""
        for op in inner.ops:
            if is_free(op) or passes_layouts(op):
                continue
            if op.bodies:
                self._decide_within(op)
                continue
            source = self.made_by.get(self.like.get(op.outputs[0], op.outputs[0]))
            if source is None:
                self.strategies[op] = self._joining(op)
                continue
            strategy = self.strategies[op] = self.before.strategies[source]
            if op.signature is not source.signature and strategy not in self.rules.strategies(op, self.mesh):
                raise LookupError
            shared = [t for t in op.outputs if self.reads[t] > 1]
            if shared and any(lay.partial for lay in self.rules.shard(op, self.mesh, strategy).result_layouts):
                self.layouts.update(self._reduced_once(shared))

    def _decide_within(self, op: Op) -> None:
        for body in op.bodies:
            self.layouts.update((t, self.layout(t)) for t in body.inputs if op.name != "scan" or self.is_known(t))
            if op.name == "scan":
                self.layouts.update(self._new_parts(op, body))
            self.decide(body)
        self.layouts.update((t, self.layout(t)) for t in op.outputs if self.is_known(t))
        if op.name == "scan":
            self.layouts.update(self._new_stacks(op))

    def layout(self, t: Tensor) -> Layout:
        """That of the like of a tensor."""
        if not self.is_known(t):
            raise LookupError
        return self.before.layouts[self.like.get(t, t)]

    def is_known(self, t: Tensor) -> bool:
        """Whether a tensor has a like with a layout: of its shape, or the stack of all layers for that of a range."""
        source = self.like.get(t, t)
        is_like = source.shape == t.shape or (t in self.in_ranges and source.shape[1:] == t.shape[1:])
        return is_like and source in self.before.layouts

    def _joining(self, op: Op) -> Strategy:
        """Puts together what loops over two ranges stack, as it lies."""
        if not self.in_ranges.issuperset(op.inputs):
            raise LookupError
        strategy = making(self.rules(op), self.mesh, self.layout(op.outputs[0]))
        if strategy not in self.rules.strategies(op, self.mesh):
            raise LookupError
        return strategy

    def result(self, i: int, t: Tensor) -> Layout:
        """The layout of an output."""
        if i in self.program.ties:
            return self.layouts[self.program.graph.inputs[self.program.ties[i]]]
        return self.pins.outputs.get(i) or self.results[self.like.get(t, t)]

    def _reduced_once(self, shared: Sequence[Tensor]) -> Iterator[tuple[Tensor, Layout]]:
        """Of tensors that several ops read, those partial sums whose one reduction serves all of them, not each for
        itself, as elementwise ops do: where as many read the like, it was so there. What leaves a layer of the folded
        program is read by the next one as it leaves."""
        for t in shared:
            source = self.like.get(t, t)
            if source in self.before.layouts or self.reads[t] != self.read_before[source]:
                leaves = source in self.results and source not in self.before.layouts
                yield t, self.results[source] if leaves else self.layout(t)

    def _new_parts(self, scan: Op, body: Graph) -> Iterator[tuple[Tensor, Layout]]:
        """What a loop reads parts of that there was not: as the stack lies."""
        roles = Scan.of(scan.params)
        for t, stack in zip(body.inputs, scan.inputs, strict=True):
            if t not in self.layouts:
                if t not in body.inputs[roles.sliced]:
                    raise LookupError
                yield t, unlift(self.layouts[stack])

    def _new_stacks(self, scan: Op) -> Iterator[tuple[Tensor, Layout]]:
        """What a loop stacks that there was not: as its parts are made."""
        roles, (body,) = Scan.of(scan.params), scan.bodies
        for stack, t in zip(scan.outputs[roles.stacked], body.outputs[roles.stacked], strict=True):
            if stack not in self.layouts:
                made = self.layouts.get(t)
                if made is None:
                    op = body.producer[t]
                    made = self.rules.shard(op, self.mesh, self.strategies[op]).result_layouts[op.outputs.index(t)]
                if made is None or made.partial:
                    raise LookupError
                yield stack, lift(made)


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
