"""Rewriting and parallelization together: the program is rewritten where its best plan becomes faster for it.

Variants of the program are explored best first, each judged by its own best plan (Unity, OSDI 22, section 5; MetaFlow's
relaxed search): a rewrite that costs time on one device stays if the plan gains, and one that saves arithmetic goes if
the plan loses. A step rewrites all places of one kind (`rewrite.sites`), and then what the new ops make profitable by
themselves, such as a selection that goes down a chain of ops.

How many variants are planned depends on the size of the program, never on the clock: plans are deterministic.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from unity_jax.machine.machine import Machine
from unity_jax.machine.network import slowest
from unity_jax.pcg.graph import Graph, Op, Path, Tensor, nested
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.program import Program
from unity_jax.rewrite.find import inverse
from unity_jax.rewrite.record import Rewrite, graph_at, with_graph
from unity_jax.rewrite.rule import Rule
from unity_jax.rewrite.sites import Finder, Place, Step, fingerprint, rewrite, roofline
from unity_jax.search.planner import Candidate, Pins, Planner, best

WORSE = 1.05
"""How much slower than the best a variant may be that is rewritten further (MetaFlow, section 4)."""

PLANNED_OPS = 8_000
"""Ops of all variants together that are planned; a larger program is not rewritten."""

MOST_VARIANTS = 32

NEGLIGIBLE = 1e-3
"""The part of a step that a rewrite must save."""


@dataclass(frozen=True, eq=False)
class Variant:
    """A program, rewritten or not, with its best plan."""

    program: Program
    candidate: Candidate

    @property
    def seconds(self) -> float:
        return self.candidate.seconds


def plan(
    program: Program,
    machine: Machine,
    limit: float | None,
    pins: Pins,
    meshes: Sequence[MeshAxes],
    rules: Sequence[Rule],
) -> Variant:
    """The best plan over meshes and rewrites. Never worse than that of the program as it is.

    A program that does not fit as it is is not rewritten: what it needs is memory, which is not what rewriting saves.
    """
    planner = Planner(program, machine, limit, pins)
    first = Variant(program, planner.plan(meshes))
    found = _Search(planner, rules).run(first) if first.candidate.fits(planner.limit) else first
    if found is first:
        return first
    again = planner.like(found.program).plan([m for m in meshes if m != found.candidate.mesh] or meshes)
    chosen = best([found.candidate, again], planner.limit)
    return dataclasses.replace(found, candidate=chosen)


class _Search:
    def __init__(self, planner: Planner, rules: Sequence[Rule]) -> None:
        self.planner, self.rules = planner, rules
        self.seconds = roofline(planner.machine.device, lambda op: planner.rules(op).flops)
        self.known: dict[object, int] = {}
        self.seen: set[tuple[int, ...]] = set()
        self.tried: set[object] = set()

    def run(self, first: Variant) -> Variant:
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
                made = self._stepped(variant, path, finder, place) if left > 0 else None
                if made is None:
                    continue
                left -= 1
                self.tried.add(place.key)
                heapq.heappush(waiting, (made.seconds, next(order), made))
                if self._is_better(made, chosen):
                    chosen = made
                    break  # what else there is, is found again in the better variant
        return chosen

    def _is_new(self, graph: Graph) -> bool:
        found = fingerprint(graph, self.known)
        new = found not in self.seen
        self.seen.add(found)
        return new

    def _is_better(self, a: Variant, b: Variant) -> bool:
        limit = self.planner.limit
        if a.candidate.fits(limit) != b.candidate.fits(limit):
            return a.candidate.fits(limit)
        return a.seconds < (1 - NEGLIGIBLE) * b.seconds

    def _proposals(self, variant: Variant) -> list[tuple[Path, Finder, Place]]:
        """Places of all graphs of a program that are worth a plan, most promising first; what has been tried elsewhere
        comes last.

        Not worth one is what costs too much on one device, and what is too small to matter even on the network, if
        there is one.
        """
        found = []
        worst = (WORSE - 1) * variant.seconds * self.planner.machine.num_devices
        machine = self.planner.machine
        small = NEGLIGIBLE * variant.seconds * slowest(machine.network) if machine.num_devices > 1 else 0.0
        for path, graph, repeat in nested(variant.program.graph):
            finder = Finder(graph, self.seconds)
            places = (p for p in finder.places(self.rules, least=-worst / repeat) if p.bytes * repeat >= small)
            found += [
                ((p.key in self.tried, -p.gain * repeat), path, finder, p) for p in places if -p.gain * repeat <= worst
            ]
        return [(path, finder, place) for _, path, finder, place in sorted(found, key=lambda f: f[0])]

    def _total(self, graph: Graph) -> float:
        """Seconds of all ops on one device, one by one."""
        return sum(map(self.seconds, graph.ops))

    def _following(
        self, graph: Graph, fresh: Collection[Op], total: float, undoing: Collection[str]
    ) -> tuple[Graph, frozenset[Op], Step, float] | None:
        """The best of the steps near new ops that save time on one device and undo nothing, and the total after it."""
        finder = Finder(graph, self.seconds)
        rules = [rule for rule in self.rules if rule.name not in undoing]
        gains = [p for p in finder.places(rules, near=fresh) if p.gain > 0]
        for place in sorted(gains, key=lambda p: -p.gain):
            made = rewrite(finder, place)
            if made is not None and (now := self._total(made[0])) < (1 - NEGLIGIBLE**2) * total:
                return *made, now
        return None

    def _stepped(self, variant: Variant, path: Path, finder: Finder, place: Place) -> Variant | None:
        """The variant after one step and what follows from it, planned; None if it cannot be made or is known."""
        made = rewrite(finder, place)
        if made is None:
            return None
        graph, fresh, first = made
        steps, total = [(path, first)], self._total(graph)
        while following := self._following(graph, fresh, total, [inverse(step.rule) for _, step in steps]):
            graph, new, step, total = following
            fresh = (fresh | new) & frozenset(graph.ops)
            steps.append((path, step))
        whole = with_graph(variant.program.graph, path, graph)
        if not self._is_new(whole):
            return None
        before = variant.program
        candidate = self.planner.like(before.rewritten(whole, ())).promising(variant.candidate.mesh)
        where = _source(before.graph, path, place.found[0].roots[0].tensor)
        saved = variant.seconds - candidate.seconds
        did = Rewrite(place.rule.name, where, len(first.spots), saved, place.rule.proof, tuple(steps))
        return Variant(before.rewritten(whole, (*before.rewrites, did)), candidate)


def _source(graph: Graph, path: Path, root: Tensor) -> str:
    """The user's line of what makes a tensor of a graph within a program."""
    return next((op.source for op in graph_at(graph, path).ops if root in op.outputs), "")
