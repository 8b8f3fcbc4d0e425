"""Planning: the best mesh, strategies and layouts for a program on a machine, within a memory limit.

For every candidate mesh the planner builds the problem (`build`), solves it (`solver`) and turns the answer into a
planned graph (`assemble`). The problem adds times up and so only proposes; the simulated time of the planned graph
(`cost.timeline`) and its true peak memory decide, of expert plans too, unless their `floors` show that they cannot win.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

import numpy as np

from unity_jax import progress
from unity_jax.machine.machine import Machine
from unity_jax.pcg.graph import Tensor
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.program import Program
from unity_jax.search.build import Builder
from unity_jax.search.built import Built, Solved
from unity_jax.search.candidate import NO_PINS, Candidate, Pins, best
from unity_jax.search.common import Common
from unity_jax.search.experts import experts
from unity_jax.search.floors import Floors, arithmetic_seconds, by_arithmetic, wasted_seconds
from unity_jax.search.limited import Held, argument_bytes, followed, tightened, with_rivals
from unity_jax.search.limits import LIMITS
from unity_jax.search.memory_model import divided, least_peak, priced_by_memory, usage
from unity_jax.search.problem import Problem
from unity_jax.search.refine import by_axis, by_one_axis_at_a_time, carried, coarser, decided, lifted
from unity_jax.search.rings import with_rings
from unity_jax.search.searched import Searched
from unity_jax.search.seeds import Seeds
from unity_jax.search.solver import solve
from unity_jax.search.transfer import rings_of, transferred
from unity_jax.xla.traffic import Traffic


class Planner:
    """Plans one program on one machine; caches what meshes share.

    **Arguments:** `base`: plans the program that this one is a variant of; what it found is where this one starts;
    `follows`: it goes no further: of a mesh it takes that, with what is best for what differs.

    **Fields:** `held`: where memory is short, the best plan within the limit of each mesh.
    """

    def __init__(
        self,
        program: Program,
        machine: Machine,
        limit: float | None = None,
        pins: Pins = NO_PINS,
        rivals: int = 0,
        base: Planner | None = None,
        follows: bool = False,
    ) -> None:
        self.program, self.machine, self.pins, self.rivals = program, machine, pins, rivals
        self.limit = machine.device.memory_bytes if limit is None else limit
        self.common: Common = Common(machine) if base is None else base.common
        self.rules = self.common.rules
        self.seeds: Seeds = Seeds(program, self.rules, None if base is None else base.seeds)
        self._base, self._follows = base, follows
        self._builders: dict[MeshAxes, Builder] = {}
        self._problems: dict[MeshAxes, Built] = {}
        self._solutions: dict[MeshAxes, Solved] = {}
        self._proposals: dict[MeshAxes, Candidate] = {}
        self._competed, self._limited, self._seeded, self._sketched = (set[MeshAxes]() for _ in range(4))
        self.held: dict[MeshAxes, Held] = {}
        self._origins: WeakKeyDictionary[Candidate, Held] = WeakKeyDictionary()
        self._floors = functools.cache(lambda built: Floors(built, program.graph, self.common.resharder))
        self._live = functools.cache(lambda built: Problem([], usage=usage(program, built, self.traffic.written)))
        self._least: dict[tuple[MeshAxes, str], float] = {}
        self.near = LIMITS.alike if any(t.times > 1 for t in program.graph.inputs) else 0.0  # plans are estimates

    def like(self, program: Program, follows: bool = False) -> Planner:
        """A planner for a variant of the program, with the same limit and pins."""
        return Planner(program, self.machine, self.limit, self.pins, self.rivals, self, follows)

    @functools.cached_property
    def traffic(self) -> Traffic:
        """What the program moves through memory on one device."""
        return Traffic.of(self.program.graph, self.machine.device.compiler)

    def sketch(self, meshes: Sequence[MeshAxes]) -> list[Candidate]:
        """The planner's own answers without a memory limit; meshes are tried as in `plan`."""
        found: list[Candidate] = []
        for mesh in meshes:
            progress.stage(f"mesh ({mesh})")
            if self._may_win(found, mesh):
                found.append(self._proposed(mesh))
                if self._is_enough(found, mesh):
                    break
        return found

    def plan(self, meshes: Sequence[MeshAxes], rivals: Sequence[Candidate] = (), seeded: bool = False) -> Candidate:
        """The best candidate over the meshes: the fastest that fits, or else the one that needs the least memory.

        Meshes are tried in order, until a plan fits whose arithmetic waits little for communication, and which the mesh
        splits almost evenly, arguments and arithmetic.

        **Arguments:** `rivals`: plans made before, of this program or a variant, which take part; `seeded`: plans of
        these meshes are made of seeds, and searched for if one of them is near.
        """
        found = list(rivals)
        self._sketched.update(meshes if seeded else ())
        for mesh in meshes:
            if self._may_win(found, mesh):
                self._compete(found, mesh)
                if self._is_enough(found, mesh):
                    break
        now = best(found, self.limit)
        near = [m for m in (meshes if seeded else [now.mesh]) if m in self._seeded and now.fits(self.limit)]
        for mesh in near:
            own = (self._proposals[mesh], *(c for c in found if c.mesh == mesh))
            if min(c.seconds for c in own) <= LIMITS.behind * now.seconds:
                found.append(self._searched(mesh))
        chosen = self.ringed(found)
        return with_rivals(chosen, found, self.limit, self.rivals, LIMITS.behind * chosen.seconds if self.near else 0.0)

    def _may_win(self, found: Sequence[Candidate], mesh: MeshAxes) -> bool:
        """Whether a mesh may be better than what the search found for another one: by what communication takes there,
        and what the arithmetic of that plan takes longer than it has to on this mesh."""
        now = best(found, self.limit) if found else None
        if now is None or self.rivals or not now.fits(self.limit) or now is not self._proposals.get(now.mesh):
            return True
        there = self._solved(now.mesh)
        longer = arithmetic_seconds(there.built, there.assignment) - self.problem(mesh).least_seconds
        return now.timeline.exposed_communication_seconds + longer >= LIMITS.mesh_saves * now.seconds

    def _is_enough(self, found: Sequence[Candidate], mesh: MeshAxes) -> bool:
        """Whether no more meshes are tried after this one."""
        now = best(found, self.limit)
        if now.fits(self.limit):
            return now.timeline.exposed_communication_seconds + self.wasted(mesh) < LIMITS.waiting * now.seconds
        uses = self._live(self._solved(mesh).built).usage  # what it does not split, a finer mesh may
        return len(mesh.names) == 1 and least_peak(divided(uses, mesh.num_devices)) > self.limit

    def wasted(self, mesh: MeshAxes) -> float:
        """Seconds that a finer mesh may save of the plan of one without a memory limit, besides communication."""
        solved = self._solved(mesh)
        return wasted_seconds(solved.built, solved.assignment, self.machine.device)

    def tried(self, meshes: Sequence[MeshAxes]) -> list[MeshAxes]:
        """Which of these meshes have been planned for so far."""
        return [m for m in meshes if m in self._proposals]

    def searched(self, meshes: Sequence[MeshAxes]) -> Searched:
        """Which of these meshes have been planned for, and how."""
        tried, skipped = self.tried(meshes), (str(m) for m in meshes if m not in self._proposals)
        inexact = (str(m) for m in tried if not self.is_proved(m))
        return Searched(tuple(map(str, tried)), tuple(skipped), tuple(inexact))

    def is_proved(self, mesh: MeshAxes) -> bool:
        """Whether the solution for a mesh that has been planned for is proved to be the best."""
        return mesh not in self._limited and self._solved(mesh).exact

    def promising(self, mesh: MeshAxes, most: float = math.inf) -> Candidate:
        """The planner's own answer for one mesh, within the limit if it can be, and takes less than so many seconds
        without one."""
        if (held := self._holding(mesh)) is not None:
            return held
        found = [self._proposed(mesh)]
        if not found[0].fits(self.limit) and found[0].seconds < most:
            self._within_limit(found, mesh, found[0])
        return best(found, self.limit)

    def added(self, mesh: MeshAxes) -> float | None:
        """What the times of the best plan for a mesh add up to, nothing overlapping; None where memory was short."""
        return None if mesh in self._limited else self._solved(mesh).cost

    def candidates(self, mesh: MeshAxes) -> list[Candidate]:
        """The planner's answer for one mesh, then the seeds that were worth a simulation."""
        found: list[Candidate] = []
        self._compete(found, mesh)
        return found

    def experts(self, meshes: Sequence[MeshAxes], most: float, every: bool = True) -> list[Candidate]:
        """What experts would do on some meshes without a memory limit, as far as it takes less than so many seconds,
        and was not far behind before: on the coarsest that expresses it. Unless `every` such plan is wanted, less than
        those before that fit, too."""
        found = list[Candidate]()
        for mesh in meshes:
            built = self.problem(mesh)
            for name, seed in by_arithmetic(built, self.seeds.completed(built, self.seeds.near(mesh, meshes))):
                if self._least.get((mesh, name), 0.0) < most and self.floor(built, seed, most) < most:
                    made = self._finish(built, seed, True, name)
                    found += [made] if made.seconds < most else []
                    most = min(most, made.seconds) if not every and made.fits(self.limit) else most
        return found

    def _compete(self, found: list[Candidate], mesh: MeshAxes) -> None:
        """Add the planner's answer for one mesh, and the seeds that could be better than all that is there."""
        progress.stage(f"mesh ({mesh}), and what experts would do on it")
        solved, own = self._solved(mesh), self._proposed(mesh)
        found.append(own)
        took_part = {m for m, plan in self._proposals.items() if any(c is plan for c in found)}
        lifted = {m: x for m, x in solved.lifted.items() if m not in took_part}
        others = {f"search on ({m})": x for m, x in lifted.items() if not np.array_equal(x, solved.assignment)}
        self._contend(found, solved.built, True, others)
        if self.rivals or best(found, self.limit).seconds > solved.built.least_seconds:
            near = best(found, self.limit).fits(self.limit) and not self.rivals
            self._contend(found, solved.built, True, self._expert_seeds(mesh, near))
            self._competed.add(mesh)
        if not own.fits(self.limit):
            self._within_limit(found, mesh, own)

    def _proposed(self, mesh: MeshAxes) -> Candidate:
        """What the problem of a mesh without a memory limit proposes, that of a coarser mesh where it is the same; of a
        variant what was best before it was rewritten, where that is faster: times that nothing overlaps add up less."""
        if mesh not in self._proposals:
            solved = self._solved(mesh)
            same = (m for m, x in solved.lifted.items() if np.array_equal(x, solved.assignment))
            known = next((self._proposals[m] for m in same if m in self._proposals), None)
            own = known or self._finish(solved.built, solved.assignment, True, "search")
            differs = solved.before is not None and not np.array_equal(solved.before, solved.assignment)
            if differs and self.floor(solved.built, solved.before, own.seconds) < own.seconds:
                other = self._finish(solved.built, solved.before, True, "search")
                if best([own, other], self.limit) is other:
                    own, self._solutions[mesh] = other, solved._replace(assignment=solved.before, exact=False)
            self._proposals[mesh] = own
        return self._proposals[mesh]

    def _searched(self, mesh: MeshAxes) -> Candidate:
        """What the problem of a mesh proposes that has only been made of seeds."""
        solved = self._solved(mesh)
        built, seeds = solved.built, [solved.assignment, *self._expert_seeds(mesh).values()]
        self._seeded.remove(mesh)
        if by_one_axis_at_a_time(built):
            found = by_axis(built, seeds)
        else:
            found = solve(built.problem, seeds=seeds, store=self.common.stores[mesh]).assignment
        self._solutions[mesh] = solved._replace(assignment=found)
        self._proposals[mesh] = self._finish(built, found, True, "search")
        return self._proposals[mesh]

    def ringed(self, found: Sequence[Candidate]) -> Candidate:
        """The best of some candidates, its collectives as rings where that is faster."""
        now = best(found, self.limit)
        return with_rings(found, now, self.limit, self.common.ringed) if now.fits(self.limit) else now

    def _contend(self, found: list[Candidate], built: Built, keep: bool, seeds: Mapping[str, np.ndarray]) -> None:
        """Add every seed that could be faster than the fastest of `found` that fits; every one if rivals are wanted.
        None whose arguments alone, or all that it has in memory, are more than fits, and than what is there takes. Of a
        variant none could be that was far behind for the program that it is made of. What gathers weights again is not
        faster than the same without (`keep`)."""
        for name, seed in by_arithmetic(built, seeds):
            now, key = best(found, self.limit), (built.mesh, name, keep)
            taken = now.memory.peak_bytes
            if argument_bytes(built, seed, self.program.on_host) > max(self.limit, taken):
                continue
            if not now.fits(self.limit) and self._live(built).peak(seed) > max(LIMITS.needs * self.limit, taken):
                continue
            far = self.seeds.was_far(*key)
            least, most = self._least.get((built.mesh, name), 0.0), (1 + self.near) * now.seconds
            if not far and least < most:
                least = max(least, self._likely(built, seed, most))
            may_win = not now.fits(self.limit) or not (far or least >= most)
            if may_win or self.rivals:
                made = self._finish(built, seed, keep, name)
                found.append(made)
                least = made.seconds
            self.seeds.behind[key] = least / now.seconds if now.seconds else 1.0  # nothing is faster than no time
            if keep:
                self._least[built.mesh, name] = least

    def floor(self, built: Built, assignment: np.ndarray, enough: float = math.inf) -> float:
        """Seconds below which the step of a plan is not; of several bounds the first that is `enough`."""
        return self._floors(built).seconds(assignment, enough)

    def _likely(self, built: Built, seed: np.ndarray, enough: float) -> float:
        """Seconds below which the step of an expert's plan is not, or where plans are only to tell how fast one could
        be, most likely not."""
        least = built.problem.cost(seed) / LIMITS.hides if built.mesh in self._sketched else 0.0
        return least if least >= enough else max(least, self.floor(built, seed, enough))

    def _builder(self, mesh: MeshAxes) -> Builder:
        if mesh not in self._builders:
            program, pins, shared = self.program, self.pins, (self.common.resharder(mesh), self.machine, self.rules)
            known = program.on_host.keys() | program.spilled, self.common.interned[mesh]
            self._builders[mesh] = Builder(
                program.graph, program.ties, *shared, self.traffic, pins.tensors, pins.outputs, *known
            )
        return self._builders[mesh]

    def problem(self, mesh: MeshAxes) -> Built:
        """The problem of a mesh without a memory limit."""
        if mesh not in self._problems:
            self._problems[mesh] = self._builder(mesh).build(keep=True)
        return self._problems[mesh]

    def _solved(self, mesh: MeshAxes) -> Solved:
        """The problem of a mesh without a memory limit and its solution."""
        if mesh not in self._solutions:
            built = self.problem(mesh)
            store = self.common.store(built)
            of = self._base
            base = None if of is None else of._solved(mesh) if self._follows else of._solutions.get(mesh)
            known = [] if base is None else [carried(base.built, base.assignment, built, store)]
            if known and self._follows:
                return self._solutions.setdefault(mesh, Solved(built, known[0], {}, None, False))
            pinned = self.pins.tensors or self.pins.outputs  # they name the axes of one mesh
            coarse = {} if pinned else lifted(built, self._solutions.get if mesh in self._sketched else self._solved)

            def seeds() -> list[np.ndarray]:
                new = mesh in self._sketched or len(coarse) == len(mesh.names) - 1
                experts = self.seeds.of(built, new) if len(mesh.names) > 1 else {}
                return [*known, *experts.values(), *coarse.values()]  # of coarser meshes: stand for their experts

            if mesh in self._sketched or (not by_one_axis_at_a_time(built) and self._is_short(mesh)):
                assignment, exact = min(seeds(), key=built.problem.rank), False
                self._seeded.add(mesh)
            elif by_one_axis_at_a_time(built):
                assignment, exact = by_axis(built, seeds()), False
            else:
                solution = solve(built.problem, seeds=seeds, store=store, most=self._most())
                assignment, exact = solution.assignment, solution.gap < LIMITS.proved
            self._solutions[mesh] = Solved(built, assignment, coarse, known[0] if known else None, exact)
        return self._solutions[mesh]

    def _most(self) -> float:
        """What the times of a plan for another mesh may add up to: little more than those of the best that fits."""
        fit = (m for m, plan in self._proposals.items() if plan.fits(self.limit))
        return LIMITS.worse * min((self._solutions[m].cost for m in fit), default=math.inf)

    def _is_short(self, mesh: MeshAxes) -> bool:
        """Whether memory is so short on a coarser mesh that no plan for this one fits that is made without a limit."""
        coarse = (self._proposals.get(m) for m, _ in coarser(mesh))
        return any(plan is not None and plan.memory.peak_bytes > LIMITS.short * self.limit for plan in coarse)

    def _expert_seeds(self, mesh: MeshAxes, near: bool = False) -> dict[str, np.ndarray]:
        """The expert plans of a mesh, but those that took part on coarser meshes; `near`: only what is not far."""
        solved, coarse = self._solved(mesh), [m for m, _ in coarser(mesh)]
        took_part = bool(coarse) and len(solved.lifted) == len(coarse) and self._competed.issuperset(coarse)
        return self.seeds.of(solved.built, took_part or mesh in self._sketched, near)

    def _within_limit(self, found: list[Candidate], mesh: MeshAxes, free: Candidate) -> None:
        """Add plans under the memory limit for a mesh; they gather weights again for the backward pass. Unless one now
        fits that is nearly as fast as the one without a limit (`free`), the problem is solved under the limit."""
        if (held := self._holding(mesh)) is not None:
            found.append(held)
            return
        built = self._builder(mesh).build(keep=False)
        self._limited.add(mesh)
        built.problem.usage = self._live(built).usage
        if least_peak(built.problem.usage) > self.limit:
            found.append(self._finish(built, solve(priced_by_memory(built.problem)).assignment, False, "search"))
            return
        seeds = self.seeds.completed(built, experts(mesh))
        self._contend(found, built, False, seeds)
        now = best(found, self.limit)
        if not now.fits(self.limit) or now.seconds > LIMITS.near_free * free.seconds:
            make = functools.partial(self._finish, built, keep=False, label="search")
            found += tightened(built, list(seeds.values()), self.limit, make, self.common.store(built))
        if own := [c for c in found if c in self._origins and c.mesh == mesh and c.fits(self.limit)]:
            self.held[mesh] = self._origins[best(own, self.limit)]

    def _holding(self, mesh: MeshAxes) -> Candidate | None:
        """The plan that does what is held for the program that this one follows, if it is within the limit, too."""
        held = self._base.held.get(mesh) if self._base is not None and self._follows else None
        if held is None:
            return None
        self._limited.add(mesh)
        held = followed(held, self._builder(mesh).build, self.common.store)
        plan = self._finish(*held, "search")
        if plan.fits(self.limit):
            self.held[mesh] = held
        return plan if mesh in self.held else None

    def following(
        self, plan: Candidate, program: Program, like: Mapping[Tensor, Tensor], settled: bool = False
    ) -> Candidate:
        """The plan of a variant of a program that does what a plan of that does, see `as_decided`."""
        return self.like(program).as_decided(plan, like, settled)

    def as_decided(self, plan: Candidate, like: Mapping[Tensor, Tensor], settled: bool = False) -> Candidate:
        """What a plan of another program does, for this one; `like`: what that one has in place of its tensors;
        `settled`: what is left to choose is best for this one, even where nothing has to be chosen."""
        decisions, mesh = plan.decisions, plan.mesh
        same = None if settled else transferred(plan, self.program, like, self.pins, self.rules)
        if same is not None:
            made = self.common.finished(self.program, same, mesh, plan.label, plan.lower_bound)
        else:
            built = self._builder(mesh).build(decisions.keep)
            store = self.common.store(built)
            made = self._finish(built, decided(decisions, built, store, like), decisions.keep, plan.label)
        return self.common.ringed(made, rings_of(plan, self.program.graph, like)) if decisions.rings else made

    def _finish(self, built: Built, assignment: np.ndarray, keep: bool, label: str) -> Candidate:
        decisions, bound = built.decisions(assignment, keep), built.least_seconds
        made = self.common.finished(self.program, decisions, built.mesh, label, bound)
        self._origins[made] = Held(built, assignment, keep)
        return made
