"""Rewriting and parallelization together: the program is rewritten where its best plan becomes faster for it.

Variants of the program are explored best first, each judged by its own best plan (Unity, OSDI 22, section 5; MetaFlow's
relaxed search): a rewrite that costs time on one device stays if the plan gains, and one that saves arithmetic goes if
the plan loses. A step rewrites all places of one kind (`rewrite.sites`), and then what the new ops make profitable by
themselves, such as a selection that goes down a chain of ops. Of a deep program the shallow `twin` is searched, and
what wins there is done again on the whole, which keeps it if its own plan becomes faster.

How many variants are planned depends on the size of the program, never on the clock: plans are deterministic.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Collection, Sequence

from unity_jax.machine.machine import Machine
from unity_jax.machine.network import slowest
from unity_jax.pcg.graph import Graph, Op, Path, Tensor, nested
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.program import Program
from unity_jax.rewrite.estimate import on_devices, one_by_one
from unity_jax.rewrite.find import inverse
from unity_jax.rewrite.record import Rewrite, graph_at, with_graph
from unity_jax.rewrite.rule import Rule
from unity_jax.rewrite.sites import Finder, Place, Step, fingerprint, rewrite
from unity_jax.search.planner import Candidate, Pins, Planner, best
from unity_jax.search.twin import replayed, shallow

WORSE = 1.05
"""How much slower than the best a variant may be that is rewritten further (MetaFlow, section 4)."""

PLANNED_OPS = 8_000
"""Ops of all variants together that are planned, those of twins for deep programs."""

MOST_VARIANTS = 32

NEGLIGIBLE = 1e-3
"""The part of a step that a rewrite must save."""

DEEP = 1e-2
"""The part of its shallow twin's step that rewrites must save to be tried on a deep program: planning that takes
seconds."""

WHOLE = MeshAxes((), ())
"""The mesh on which nothing is split."""


def plan(
    program: Program,
    machine: Machine,
    limit: float | None,
    pins: Pins,
    meshes: Sequence[MeshAxes],
    rules: Sequence[Rule],
) -> Candidate:
    """The best plan over meshes and rewrites. Never worse than that of the program as it is.

    A program that does not fit as it is is not rewritten: what it needs is memory, which is not what rewriting saves.
    """
    planner = Planner(program, machine, limit, pins)
    sketches = planner.sketch(meshes)
    first = best(sketches, planner.limit)
    if not first.fits(planner.limit):
        first, sketches = planner.plan(meshes), []
    found, deep = _rewritten(planner, first, rules) if first.fits(planner.limit) else (first, False)
    if found is first:
        return planner.plan(meshes) if sketches else first
    chosen = planner.plan([c.mesh for c in sketches], [found])
    if chosen.program is program or deep:
        return chosen
    others = [m for m in meshes if m != chosen.mesh] or meshes
    return planner.like(chosen.program).plan(others, [chosen])


def _rewritten(planner: Planner, first: Candidate, rules: Sequence[Rule]) -> tuple[Candidate, bool]:
    """A faster variant for the same mesh, if one is found, and whether the program is deep: then it is made of what its
    shallow twin finds.

    A twin needs less memory than the program: its plans have no limit.
    """
    program, pins, mesh = first.program, planner.pins, first.mesh
    twin = shallow(program)
    if len(twin.program.graph.ops) > len(program.graph.ops) // 2:
        return _Search(planner, rules).run(first), False
    outputs = {new: pins.outputs[old] for new, old in enumerate(twin.outputs) if old in pins.outputs}
    scout = planner.like(twin.program, math.inf, dataclasses.replace(pins, outputs=outputs))
    search = _Search(scout, rules)
    start = scout.promising(mesh)
    found = search.run(start)
    if found.seconds > (1 - DEEP) * start.seconds:
        return first, True
    graph, done = replayed(program.graph, twin.program.graph, found.program.rewrites, rules, search.seconds)
    if not done:
        return first, True
    made = planner.like(program.rewritten(graph, done)).promising(mesh)
    return (made if is_better(made, first, planner.limit) else first), True


def is_better(a: Candidate, b: Candidate, limit: float) -> bool:
    """Whether the plan of a variant is worth its rewrites."""
    if a.fits(limit) != b.fits(limit):
        return a.fits(limit)
    return a.seconds < (1 - NEGLIGIBLE) * b.seconds


class _Search:
    def __init__(self, planner: Planner, rules: Sequence[Rule]) -> None:
        self.planner, self.rules = planner, rules
        self.seconds = on_devices(planner.machine, lambda op: planner.rules.shard(op, WHOLE, ()))
        self.apart = one_by_one(planner.machine.device, lambda op: planner.rules(op).flops)
        self.known: dict[object, int] = {}
        self.seen: set[tuple[int, ...]] = set()
        self.tried: set[object] = set()
        self.done: dict[Graph, tuple[Rewrite, ...]] = {}
        self.emitted: dict[object, Graph | str] = {}

    def run(self, first: Candidate) -> Candidate:
        """The fastest variant that fits, within the budget."""
        left = min(MOST_VARIANTS, PLANNED_OPS // (1 + sum(1 for _ in first.program.graph.walk())))
        self._is_new(first.program.graph)
        chosen, order = first, itertools.count()
        waiting = [(first.seconds, next(order), first)]
        while waiting and left > 0:
            seconds, _, variant = heapq.heappop(waiting)
            if seconds > WORSE * chosen.seconds:
                break
            for path, finder, place in self._proposals(variant):
                if variant is not chosen and place.key in self.tried:
                    continue  # of slower variants only what is new is rewritten further
                made = self._stepped(variant, path, finder, place) if left > 0 else None
                if made is None:
                    continue
                left -= 1
                self.tried.add(place.key)
                heapq.heappush(waiting, (made.seconds, next(order), made))
                if is_better(made, chosen, self.planner.limit):
                    chosen = made
                    break  # what else there is, is found again in the better variant
        if chosen is first:
            return first
        graph = chosen.program.graph
        return dataclasses.replace(chosen, program=chosen.program.rewritten(graph, self.done[graph]))

    def _is_new(self, graph: Graph) -> bool:
        found = fingerprint(graph, self.known)
        new = found not in self.seen
        self.seen.add(found)
        return new

    def _proposals(self, variant: Candidate) -> list[tuple[Path, Finder, Place]]:
        """Places of all graphs of a program that are worth a plan, most promising first; what has been tried elsewhere
        comes last.

        Not worth one is what costs too much work, and what is too small to matter even on the network, if there is one.
        """
        found = []
        worst = (WORSE - 1) * variant.seconds * self.planner.machine.num_devices
        machine = self.planner.machine
        small = NEGLIGIBLE * variant.seconds * slowest(machine.network) if machine.num_devices > 1 else 0.0
        for path, graph, repeat in nested(variant.program.graph):
            finder = Finder(graph, self.seconds, emitted=self.emitted)
            least = small / repeat
            places = (p for p in finder.places(self.rules, None, -worst / repeat, least) if p.bytes >= least)
            found += [
                ((p.key in self.tried, -p.gain * repeat), path, finder, p) for p in places if -p.gain * repeat <= worst
            ]
        return [(path, finder, place) for _, path, finder, place in sorted(found, key=lambda f: f[0])]

    def _following(
        self, graph: Graph, near: Collection[Op], total: float, undoing: Collection[str]
    ) -> tuple[Graph, frozenset[Op], Step, float] | None:
        """The best of the steps near some ops that save time op by op and undo nothing, and the total after it."""
        finder = Finder(graph, self.apart, emitted=self.emitted)
        rules = [rule for rule in self.rules if rule.name not in undoing]
        gains = [p for p in finder.places(rules, near) if p.gain > 0]
        for place in sorted(gains, key=lambda p: -p.gain):
            made = rewrite(finder, place)
            if made is not None and (now := self.apart(made[0])) < (1 - NEGLIGIBLE**2) * total:
                return *made, now
        return None

    def _stepped(self, variant: Candidate, path: Path, finder: Finder, place: Place) -> Candidate | None:
        """The variant after one step and what follows from it, planned; None if it cannot be made or is known."""
        made = rewrite(finder, place)
        if made is None:
            return None
        graph, near, first = made
        steps, total = [(path, first)], self.apart(graph)
        while following := self._following(graph, near, total, [inverse(step.rule) for _, step in steps]):
            graph, new, step, total = following
            near = (near | new) & frozenset(graph.ops)
            steps.append((path, step))
        whole = with_graph(variant.program.graph, path, graph)
        if not self._is_new(whole):
            return None
        before = variant.program
        candidate = self.planner.like(before.rewritten(whole, ())).promising(variant.mesh)
        where = _source(before.graph, path, place.found[0].roots[0].tensor)
        saved = variant.seconds - candidate.seconds
        did = Rewrite(place.rule.name, where, len(first.spots), saved, place.rule.proof, tuple(steps))
        self.done[whole] = *self.done.get(before.graph, before.rewrites), did
        return candidate


def _source(graph: Graph, path: Path, root: Tensor) -> str:
    """The user's line of what makes a tensor of a graph within a program."""
    return next((op.source for op in graph_at(graph, path).ops if root in op.outputs), "")
