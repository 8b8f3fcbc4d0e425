"""Variants of a program, explored best first, each judged by its own best plan (Unity, OSDI 22, section 5; MetaFlow's
relaxed search).

A step rewrites all places of one kind (`rewrite.sites`), and then what the new ops make profitable by themselves, such
as a selection that goes down a chain of ops. What a variant can become does not depend on who judges it: searches for
one device and for all share it (`Moves`).
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from unity_jax import progress
from unity_jax.machine.network import slowest
from unity_jax.pcg.graph import Graph, Op, Path, Tensor, nested
from unity_jax.pcg.mesh import WHOLE, MeshAxes
from unity_jax.program import Program
from unity_jax.rewrite.directions import inverse
from unity_jax.rewrite.estimate import Seconds, by_kernels, one_by_one, saved
from unity_jax.rewrite.record import Rewrite, graph_at, with_graph
from unity_jax.rewrite.rule import Rule
from unity_jax.rewrite.sites import Finder, Place, Step, Vain, counterparts, fingerprint, rewrite, still
from unity_jax.rewrite.towers import Towers, exchanged, stacked, towers
from unity_jax.search.candidate import Candidate
from unity_jax.search.identity import Alone
from unity_jax.search.limits import LIMITS
from unity_jax.search.planner import Planner
from unity_jax.search.searched import Searched


def is_better(a: Candidate, b: Candidate, limit: float) -> bool:
    """Whether the plan of a variant is worth its rewrites."""
    if a.fits(limit) != b.fits(limit):
        return a.fits(limit)
    return a.seconds < (1 - LIMITS.saves) * b.seconds


class Move(NamedTuple):
    """A place in one of the graphs of a program, which runs `repeat` times a step, or the towers of that graph.

    **Fields:** `seen`: the place was found in the variant that this one was made of, and is found again when its turn
    comes.
    """

    path: Path
    repeat: int
    finder: Finder
    place: Place | Towers
    seen: bool = False


class Made(NamedTuple):
    """A move made: the whole graph, its fingerprint, and the steps with what followed from the first."""

    graph: Graph
    fingerprint: tuple[int, ...]
    steps: tuple[tuple[Path, Step], ...]


class First(NamedTuple):
    """The first step of a move: the graph that it rewrites, the ops to look at next, the step, and the fingerprint of
    the whole."""

    graph: Graph
    near: frozenset[Op]
    step: Step
    fingerprint: tuple[int, ...]


class Outcome(NamedTuple):
    """Where a move ends: the fingerprint of the whole graph, and the graph that it rewrites."""

    fingerprint: tuple[int, ...]
    graph: Graph


class Moves:
    """From every variant of a program to the next.

    **Arguments:** `rules`: for single places; `stacking`: for towers; `lost`: seconds of one device that no first step
    may cost.
    """

    def __init__(self, planner: Planner, rules: Sequence[Rule], stacking: Sequence[Rule], lost: float) -> None:
        device, of, known = planner.machine.device, planner.rules, dict[object, int]()
        self.rules, self.stacking, self.lost = rules, stacking, lost
        self.by_name = {r.name: r for r in (*rules, *stacking)}
        self.seconds = by_kernels(device, lambda op: of.shard(op, WHOLE, ()))
        self.saves = functools.cache(functools.partial(saved, seconds=self.seconds))
        self.number = functools.cache(lambda graph: fingerprint(graph, known))
        self.apart = one_by_one(device, lambda op: of(op).flops)
        self.emitted: dict[object, Graph | str] = {}
        self.vain: Vain = {}  # of steps that follow
        self.followed = 0  # how many those were
        self._found: dict[Graph, list[Move]] = {}
        self._made: dict[Place | Towers, Made | None] = {}
        self._firsts: dict[Place, First | None] = {}
        self._outcomes: dict[object, Outcome] = {}
        self._origins: dict[Graph, tuple[Graph, Path]] = {}

    def __call__(self, whole: Graph) -> list[Move]:
        """Every move that does not cost too much."""
        if whole not in self._found:
            before, at = self._origins.get(whole, (None, ()))
            known = {} if before is None else self._by_graph(before)
            found = self._found[whole] = []
            for path, graph, repeat in nested(whole):
                finder = Finder(graph, self.seconds, emitted=self.emitted)
                old = graph_at(before, path) if before is not None and path == at else graph
                seen = known.get(old)
                least = -self.lost / repeat
                near = None if seen is None else finder.above({*graph.ops}.difference(old.ops))
                every: list[Place | Towers] = [*finder.places(self.rules, near, least)]
                if self.stacking:
                    every += (Towers(tuple(pairs)) for pairs in (towers(graph), exchanged(graph)) if pairs)
                found += [Move(path, repeat, finder, place) for place in every]
                spots = {place.spots for place in every if isinstance(place, Place)}
                left = [p for p in seen or () if p.spots not in spots and p.root in graph.producer]
                found += [Move(path, repeat, finder, dataclasses.replace(p), True) for p in left]
        return self._found[whole]

    def _by_graph(self, whole: Graph) -> dict[Graph, list[Place]]:
        """The places of a program by the graph that they are in."""
        found: dict[Graph, list[Place]] = {graph: [] for _, graph, _ in nested(whole)}
        for move in self(whole):
            if isinstance(move.place, Place):
                found[move.finder.graph].append(move.place)
        return found

    def made(self, whole: Graph, move: Move) -> Made | None:
        """What a move of a graph leads to, if it can be made."""
        if move.place not in self._made:
            self._made[move.place] = self._make(whole, move)
        return self._made[move.place]

    def outcome(self, whole: Graph, move: Move) -> Outcome | None:
        """Where a move of a graph ends, if it can be made.

        Rules that say the same of the same ops, and steps in another order, are the same program after the first step:
        what follows from that is found once.
        """
        key = self._key(whole, move)
        if key is None:
            return None
        if key not in self._outcomes:
            made = self.made(whole, move)
            if made is None and isinstance(move.place, Towers):
                return None
            graph = whole if made is None else made.graph  # None: undone
            number = self.number(whole) if made is None else made.fingerprint
            self._outcomes[key] = Outcome(number, graph_at(graph, move.path))
        return self._outcomes[key]

    def _key(self, whole: Graph, move: Move) -> object | None:
        """What decides where a move ends, None if it cannot be made."""
        if isinstance(move.place, Towers):
            return move.place
        first = self._first(whole, move)
        return None if first is None else (move.path, first.fingerprint)

    def gain(self, whole: Graph, move: Move) -> Seconds | None:
        """What a move of a graph saves together with what follows from it, each time it runs, if it can be made."""
        outcome = self.outcome(whole, move)
        return None if outcome is None else self.saves(graph_at(whole, move.path), outcome.graph)

    def _make(self, whole: Graph, move: Move) -> Made | None:
        if isinstance(move.place, Towers):
            made = stacked(move.finder.graph, move.place.pairs, self.stacking, self.emitted)
        else:
            first = self._first(whole, move)
            made = None if first is None else self._followed(first, move.finder.graph)
        if made is None:
            return None
        graph, steps = made
        found = with_graph(whole, move.path, graph)
        self._origins[found] = whole, move.path
        return Made(found, self.number(found), tuple((move.path, step) for step in steps))

    def _first(self, whole: Graph, move: Move) -> First | None:
        finder, place = move.finder, move.place
        assert isinstance(place, Place)
        if place not in self._firsts:
            again = finder.again(place) if move.seen else place
            made = None if again is None else rewrite(finder, again)
            if again is None or made is None:
                self._firsts[place] = None
            else:
                graph, near, step = made
                near |= counterparts(again, finder.view, graph)
                self._firsts[place] = First(graph, near, step, self.number(with_graph(whole, move.path, graph)))
        return self._firsts[place]

    def _followed(self, first: First, before: Graph) -> tuple[Graph, list[Step]] | None:
        """The graph after a first step and all that follows from it, and the steps; None if a rule that says the same
        as the first one undoes it.

        **Arguments:** `before`: the graph before.
        """
        graph, near, steps = first.graph, first.near, [first.step]
        total, work, touched, left = self.apart(graph).work, self.apart(before).work, near, list[Place]()
        while True:
            finder, undoing = Finder(graph, self.apart, emitted=self.emitted), {inverse(step.rule) for step in steps}
            rules = [rule for rule in self.rules if rule.name not in undoing]
            changed = near & finder.above(touched)
            found = {p.spots: p for p in finder.places(rules, near, 0.0, self.vain, changed)}
            for place in left:  # of what is not near the last step, little has changed
                if place.rule.name not in undoing and place.root in graph.producer and place.spots not in found:
                    again = finder.again(place)
                    if again is not None and again.gain.work > 0:
                        found[place.spots] = again
            following = self._following(finder, found.values(), total)
            if following is None:
                return graph, steps
            self.followed += 1
            old, (graph, new, step, total, left) = graph, following
            if math.isclose(total, work) and self.number(graph) == self.number(before):
                return None
            near = still(near | new, graph)
            read = {t for op in {*old.ops}.difference(graph.ops) for t in op.inputs}  # and maybe no more
            touched = still(new, graph).union(graph.producer[t] for t in read if t in graph.producer)
            steps.append(step)

    def _following(
        self, finder: Finder, places: Iterable[Place], total: float
    ) -> tuple[Graph, frozenset[Op], Step, float, list[Place]] | None:
        """The best step at some places that saves time op by op, the total after it, and the places that are left."""
        waiting = sorted(places, key=lambda p: -p.gain.work)
        for place in waiting:
            made = rewrite(finder, place)
            if made is not None and (now := self.apart(made[0]).work) < (1 - LIMITS.saves**2) * total:
                return *made, now, [p for p in waiting if p is not place]
        return None


@dataclass(frozen=True, eq=False)
class Variant:
    """A program with what its best plan for a mesh takes: simulated, or estimated where that plan is not made (`plan`).

    **Fields:** `added`: what its planning problem adds up to, None where that says nothing: communication overlaps with
    arithmetic, or memory is short.
    """

    program: Program
    planner: Planner | Alone
    mesh: MeshAxes
    seconds: float
    added: float | None
    plan: Candidate | None


class Search:
    """A best-first search among the variants of a program.

    Where nothing overlaps, what their planning problems add up to differs between two variants by as much as their
    plans do: only a variant that is better by this difference is planned in full.
    """

    def __init__(self, planner: Planner | Alone, moves: Moves) -> None:
        self.planner, self.moves = planner, moves
        network, memory = slowest(planner.machine.network), planner.machine.device.memory_bandwidth
        self.bandwidth = min(network, memory)
        self.seen: set[tuple[int, ...]] = set()
        self.tried: dict[object, bool] = {}
        self.saved: dict[object, float] = {}
        self.makes = self.followed = 0
        self.searched = Searched()
        self.done: dict[Graph, tuple[Rewrite, ...]] = {}
        self.best: Candidate

    def run(self, first: Candidate) -> Candidate:
        """The fastest variant that fits, within the budget."""
        allowed = left = min(LIMITS.variants, LIMITS.variant_ops // (1 + sum(1 for _ in first.program.graph.walk())))
        self.makes, self.followed = LIMITS.made * left, self.moves.followed + LIMITS.followed
        self.seen.add(self.moves.number(first.program.graph))
        of, is_held = first.program, first.mesh in self.planner.held
        planner = self.planner if of is self.planner.program else self.planner.like(of, follows=is_held)
        added = None if _overlaps(first) else planner.added(first.mesh)
        start = Variant(of, planner, first.mesh, first.seconds, added, first)
        self.best, order, vain = first, itertools.count(), 0
        waiting = [(start.seconds, next(order), start)]
        while waiting and left > 0 and vain < LIMITS.patience:
            seconds, _, variant = heapq.heappop(waiting)
            if seconds > LIMITS.worse * self.best.seconds:
                break
            for move in self._worth_a_plan(variant):
                progress.stage(f"rewritten programs on {self.planner.machine.name}", allowed - left, allowed)
                if variant.plan is not self.best and move.place.key in self.tried:
                    continue  # of slower variants only what is new is rewritten further
                made = self._planned(variant, move)
                if made is None:
                    continue
                left -= 1
                heapq.heappush(waiting, (made.seconds, next(order), made))
                better = made.plan is not None and is_better(made.plan, self.best, self.planner.limit)
                if better and made.plan is not None:
                    self.best = made.plan
                self.tried[move.place.key] = better
                vain = 0 if better else vain + 1
                if better or not left or vain >= LIMITS.patience:
                    break  # what else there is, is found again in the better variant
        made = not self.makes or self.moves.followed >= self.followed
        ended = not left or made or vain >= LIMITS.patience
        self.searched = Searched(variants=allowed - left, allowed=allowed, out_of_budget=ended)
        if self.best is first:
            return first
        graph = self.best.program.graph
        return self.best.noting(program=self.best.program.rewritten(graph, self.done[graph]))

    def _worth_a_plan(self, variant: Variant) -> Iterator[Move]:
        """The moves of a variant that are worth a plan, most promising first; what has been tried elsewhere comes after
        what is as good, and last if it was in vain.

        Not worth one is what costs too much work, and what is too small to matter even on the slowest link, and as the
        start of kernels. A move promises what is to be hoped for; when its turn comes it is made, with what follows
        from it, and promises what that saves, here and in other variants. First come those that save time, then those
        that cost some, then those that only move things about.
        """
        devices, graph = self.planner.machine.num_devices, variant.program.graph
        cost, least = (LIMITS.worse - 1) * variant.seconds * devices, LIMITS.saves * variant.seconds
        waiting: list[tuple[bool, int, bool, float, int, bool, Move]] = []

        def wait(number: int, move: Move) -> None:
            place = move.place
            saved = None if isinstance(place, Towers) else self.saved.get(place.spots)  # what towers save, layouts tell
            late = 0 if saved is None or saved > 0 else 1 if saved < 0 else 2
            promise = move.repeat * place.hope.on(devices) if saved is None else saved
            if promise >= -cost:
                is_known = isinstance(place, Towers) or saved is not None
                tried = place.key in self.tried
                failed = tried and not self.tried[place.key]
                heapq.heappush(waiting, (failed, late, tried, -promise, number, is_known, move))

        for number, move in enumerate(self.moves(graph)):
            place = move.place
            if move.repeat * max(place.bytes / self.bandwidth, place.gain.starts) >= least:
                wait(number, move)
        vain = 0
        while waiting:
            *_, number, is_known, move = heapq.heappop(waiting)
            if is_known:
                yield move
            elif self.makes > 0 and self.moves.followed < self.followed and vain < LIMITS.vain:
                gain = self.moves.gain(graph, move)
                self.makes -= gain is not None
                saved = -math.inf if gain is None else move.repeat * gain.on(devices)
                assert not isinstance(move.place, Towers)
                self.saved[move.place.spots] = saved if abs(saved) > LIMITS.saves**2 * variant.seconds else 0.0
                vain = 0 if self.saved[move.place.spots] > 0 else vain + 1
                wait(number, move)

    def _planned(self, variant: Variant, move: Move) -> Variant | None:
        """The variant after a move, planned if it may be better than the best; None if it cannot be, or is known."""
        before = variant.program
        outcome = self.moves.outcome(before.graph, move)
        if outcome is None or outcome.fingerprint in self.seen:
            return None
        made = self.moves.made(before.graph, move)
        if made is None or made.fingerprint in self.seen:
            return None
        self.seen.add(made.fingerprint)
        is_known = variant.added is not None or variant.mesh in self.planner.held
        follows = is_known and isinstance(move.place, Place)  # stacked towers change all layouts
        found = self._judged(variant, before.rewritten(made.graph, ()), follows)
        _, first = made.steps[0]
        where = _source(before.graph, move.path, move.place.root)
        saved, proof = variant.seconds - found.seconds, self.moves.by_name[first.rule].proof
        did = Rewrite(first.rule, where, len(first.spots), saved, proof, made.steps)
        self.done[made.graph] = *self.done.get(before.graph, before.rewrites), did
        return found

    def _judged(self, before: Variant, program: Program, follows: bool) -> Variant:
        planner, mesh, added = before.planner.like(program, follows=follows), before.mesh, None
        if before.added is not None and (added := planner.added(mesh)) is not None:
            seconds = before.seconds + added - before.added
            if seconds >= (1 - LIMITS.saves) * self.best.seconds:
                return Variant(program, planner, mesh, seconds, added, None)
        plan = planner.promising(mesh, self.best.seconds)
        return Variant(program, planner, mesh, plan.seconds, added if plan.fits(planner.limit) else None, plan)


def _overlaps(plan: Candidate) -> bool:
    """Whether arithmetic hides communication, so that times do not add up."""
    found = plan.timeline
    hidden = found.compute_seconds + found.communication_seconds - found.step_seconds
    return hidden > LIMITS.saves * found.step_seconds


def _source(graph: Graph, path: Path, root: Tensor) -> str:
    """The user's line of what makes a tensor of a graph within a program."""
    return next((op.source for op in graph_at(graph, path).ops if root in op.outputs), "")
