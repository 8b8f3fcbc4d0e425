"""Rewriting and parallelization together: the program is rewritten where its best plan becomes faster for it.

A rewrite that costs time on one device stays if the plan gains, and one that saves arithmetic goes if the plan loses
(`variants`). What is best for one device is a variant too, and the search goes on from there if it is the better one:
no plan is slower than rewriting first and parallelizing then. Of a deep program the folded one is planned (`fold`),
and what wins there is done on the whole (`unfold`).

How many variants are planned depends on the size of the program, never on the clock: plans are deterministic.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence

from unity_jax.machine.machine import Machine
from unity_jax.machine.network import Level
from unity_jax.ops.constraint import code_mesh
from unity_jax.pcg.graph import Tensor
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.program import Program
from unity_jax.residuals.record import Keep
from unity_jax.rewrite.directions import is_applicable
from unity_jax.rewrite.library import stacking
from unity_jax.rewrite.record import Rewrite
from unity_jax.rewrite.rule import Rule
from unity_jax.rewrite.sites import fingerprint
from unity_jax.rewrite.towers import towers
from unity_jax.search.candidate import NO_PINS, Candidate, Pins, best, sparing
from unity_jax.search.fold import Folded, Folds, folded
from unity_jax.search.following import some_layers
from unity_jax.search.hosting import offloaded
from unity_jax.search.identity import Alone, identity
from unity_jax.search.implementing import implemented
from unity_jax.search.limits import LIMITS
from unity_jax.search.options import DEFAULTS, SearchOptions
from unity_jax.search.placement import mesh_candidates
from unity_jax.search.planner import Planner
from unity_jax.search.recomputing import Rivals, keeping
from unity_jax.search.saving import fitting, microbatches
from unity_jax.search.searched import Searched
from unity_jax.search.unfold import unfolded
from unity_jax.search.variants import Moves, Search, is_better


def may_rewrite(machine: Machine, options: SearchOptions) -> bool:
    """Whether programs may be rewritten for a machine: by default, if it has several devices."""
    return machine.num_devices > 1 if options.rewrite is None else options.rewrite


def plan(
    program: Program,
    machine: Machine,
    limit: float | None,
    pins: Pins,
    meshes: Sequence[MeshAxes],
    rules: Sequence[Rule],
    options: SearchOptions = DEFAULTS,
    followed: Program | None = None,
    spare: float = 0.0,
) -> Candidate:
    """The best plan over meshes and rewrites, if `options` allow those. Never worse than that of the program as it is,
    nor, unless one is `followed`, than that of the program rewritten for one device on the mesh that is best for the
    program as it is. Of a deep program the folded one is planned.

    Rewritten programs are planned for the meshes that came near the best, or for all where rewrites save much. A
    program that does not fit as it is is not rewritten: what it needs is memory, which is not what rewriting saves. It
    is made to keep less (`saving`).

    **Arguments:** `followed`: the program rewritten as for other shapes, maybe not at all: then nothing else is tried;
    `spare`: bytes of the limit that what is kept in place of computing it again rather leaves.
    """
    program = implemented(program, machine, options)
    if not may_rewrite(machine, options) and machine.num_devices == 1:
        return _alone(program, machine, limit, meshes[0], options, spare)
    folds = Folds(program, pins)
    if not folds.made:
        return _plan(program, machine, limit, pins, meshes, rules, options, followed, spare)
    layers, also, follows = folds.made[None], list[tuple[Program, Folded]](), None
    single = [rule for rule in rules if rule not in stacking()]  # of towers none may be missing
    if followed is not None:
        deep = folded(followed, pins) if followed.graph is not program.graph else None
        also, follows = ([(followed, deep)], deep.program) if deep is not None else ([], layers.program)
    most = within = machine.device.memory_bytes if limit is None else limit
    for _ in range(LIMITS.tightened):
        small = _plan(layers.program, machine, within, layers.pins, meshes, single, options, follows, spare)
        ways = [*((program, way) for way in folds.made.values()), *also]
        found = unfolded(ways, small, limit, pins, rules, every=options.compile_candidates > 0)
        if found.fits(most) or not small.fits(within):
            break
        if some_layers(small.program.savings) is not None:  # the folded program tells less well what they need
            layers = layers._replace(program=dataclasses.replace(layers.program, parts=None))
            continue
        within = small.memory.peak_bytes - (found.memory.peak_bytes - most)  # the folded program says it needs less
    return found if options.compile_candidates else found.noting(rivals=())


def _plan(
    program: Program,
    machine: Machine,
    limit: float | None,
    pins: Pins,
    meshes: Sequence[MeshAxes],
    rules: Sequence[Rule],
    options: SearchOptions,
    followed: Program | None,
    spare: float,
) -> Candidate:
    """The same, of a program that is not folded any further. At last finer meshes are tried, and what `jax.checkpoint`
    would not keep is kept where memory is left."""
    planner = Planner(program, machine, limit, pins, max(options.compile_candidates - 1, 0))
    few = [mesh for mesh in meshes if len(mesh.names) < 3] or meshes
    found = _on_meshes(planner, few, rules, options, followed)
    searched, more = found.searched, [mesh for mesh in meshes if mesh not in planner.tried(few)]

    def of(form: Program) -> Planner:
        return planner if form is program else planner.like(form)

    if found.fits(planner.limit) and not found.program.savings:
        for other in map(of, dict.fromkeys((found.program, program))):  # as it is, it may win only there
            found = _finer(other, found, more)
            searched += other.searched(more)
    if options.checkpoint != "keep":  # what rewrites have changed is not known for what the forward pass made
        as_it_is = [] if found.program is program else [best(planner.sketch(few), planner.limit)]

        def beside(plan: Candidate, most: float) -> Sequence[Candidate]:
            return of(plan.program).experts(planner.tried(few), min(most, LIMITS.behind * plan.seconds))

        def anew(plan: Candidate, most: float) -> Sequence[Candidate]:
            return of(plan.program).experts([plan.mesh], most, every=False)

        rivals = Rivals(beside, anew, functools.partial(planner.following, settled=True))
        found = keeping(found, planner.limit, planner.following, microbatches, rivals, spare)
        for form in as_it_is:
            there = rivals._replace(seconds=found.seconds) if found.fits(planner.limit) else rivals
            kept = keeping(form, planner.limit, planner.following, microbatches, there, spare)
            found = sparing([found, kept], planner.limit, spare)
        if any(isinstance(how, Keep) for how in found.program.savings):  # which leaves less arithmetic
            found = found if found.decisions.rings else planner.ringed([found])
            found = found.noting(lower_bound=of(found.program).problem(found.mesh).least_seconds)
    else:
        found = offloaded(found, planner.following)
    return found.noting(searched=searched)


def _finer(planner: Planner, found: Candidate, meshes: Sequence[MeshAxes]) -> Candidate:
    """The best plan over finer meshes, too, where a floor lets them save much: those of three axes, and those of two
    that a plan did not seem to need that waits little for communication. Of as many axes they are tried until one is
    in vain."""
    vain = set[int]()
    for mesh in meshes:
        axes = len(mesh.names)
        if axes not in vain and found.lower_bound < (1 - LIMITS.finer) * found.seconds:
            better = planner.plan([mesh], [found], seeded=True)
            vain |= {axes} if better is found else set()
            found = better
    return found


def _on_meshes(
    planner: Planner,
    meshes: Sequence[MeshAxes],
    rules: Sequence[Rule],
    options: SearchOptions,
    followed: Program | None,
) -> Candidate:
    """The best plan over meshes of one or two axes, or over those that are given, and rewrites."""
    if not may_rewrite(planner.machine, options):
        found = _fitting(planner, planner.plan(meshes), meshes, options)
        return found.noting(searched=planner.searched(meshes) + found.searched)
    if followed is not None:
        return _following(planner, meshes, followed, options)
    sketches = planner.sketch(meshes)
    first = best(sketches, planner.limit)
    if not first.fits(planner.limit):
        first, sketches = _fitting(planner, planner.plan(meshes), meshes, options), []
        if first.program.savings or not first.fits(planner.limit):
            return first.noting(searched=planner.searched(meshes) + first.searched)
    found, gain, searched = _rewritten(planner, first, rules)
    paired = [r for r in rules if r in stacking()]
    if found and paired and towers(first.program.graph):  # stacked, they suit the mesh that has an axis for them
        for other in sketches:
            if other.mesh != first.mesh and other.fits(planner.limit) and other.seconds <= LIMITS.worse * first.seconds:
                more, by, tried = _rewritten(planner, other, paired)
                found, gain, searched = found + more, max(gain, by), searched + tried
    if not found:
        chosen = planner.plan(meshes) if sketches else first
        return chosen.noting(searched=planner.searched(meshes) + searched)
    chosen = planner.plan(planner.tried(meshes) if sketches else [], found if sketches else [first, *found])
    if gain > LIMITS.behind:  # and elsewhere maybe more
        near = planner.tried(meshes)
    else:
        near = [c.mesh for c in sketches if c.seconds <= LIMITS.worse * first.seconds]
    likely = list(dict.fromkeys([first.mesh, chosen.mesh, *near]))
    searched += planner.searched(meshes)
    for program in _distinct(c.program for c in found):
        for part, follows in _divided(planner, likely, planner.tried(meshes), program):
            if part:
                other = planner.like(program, follows=follows)
                chosen = other.plan(part, [chosen])
                searched += other.searched(part)
    return chosen.noting(searched=searched)


def _distinct(programs: Iterable[Program]) -> list[Program]:
    """Programs without those that compute the same by the same ops as an earlier one."""
    known, found = dict[object, int](), dict[tuple[int, ...], Program]()
    for program in programs:
        found.setdefault(fingerprint(program.graph, known), program)
    return list(found.values())


def _divided(
    planner: Planner, likely: Sequence[MeshAxes], tried: Sequence[MeshAxes], program: Program
) -> list[tuple[list[MeshAxes], bool]]:
    """The meshes for which a variant is planned anew, and those for which its plan follows that of the program as it
    is: those for which that one is not proved to be the best, either. Stacked towers change all layouts, and which mesh
    is best: they are planned anew for all that were tried."""
    names = {rule.name for rule in stacking()}
    if any(step.rule in names for done in program.rewrites for _, step in done.steps):
        return [(list(dict.fromkeys([*likely, *tried])), False)]
    proved = [m for m in likely if planner.is_proved(m)]
    return [(proved, False), ([m for m in likely if m not in proved], True)]


def _following(planner: Planner, meshes: Sequence[MeshAxes], followed: Program, options: SearchOptions) -> Candidate:
    """The best plan of a program as it is, or as it is rewritten in `followed`."""
    chosen, searched = planner.plan(meshes), planner.searched(meshes)
    if followed.graph is not planner.program.graph:
        other = planner.like(followed)
        better = other.plan(meshes, [chosen])
        searched += other.searched(meshes) + Searched(variants=1, allowed=1)
        if better.program is followed:
            rewrites = shared_out(followed.rewrites, chosen.seconds - better.seconds)
            better = better.noting(program=followed.rewritten(followed.graph, rewrites))
        chosen = better
    found = _fitting(planner, chosen, meshes, options)
    return found.noting(searched=searched + found.searched)


def _alone(
    program: Program, machine: Machine, limit: float | None, mesh: MeshAxes, options: SearchOptions, spare: float
) -> Candidate:
    """The plan of one device, or where it does not fit that of the program so changed that it needs less memory."""
    most = machine.device.memory_bytes if limit is None else limit
    found = identity(program, machine, mesh)
    bound = found.lower_bound

    def follow(_: Candidate, other: Program, __: Mapping[Tensor, Tensor]) -> Candidate:
        return identity(other, machine, mesh).noting(lower_bound=bound)

    if options.checkpoint == "keep":
        found = offloaded(found, follow)
    if not found.fits(most):
        found = fitting([found], most, follow, lambda _: found, list, options.checkpoint == "keep")
    return keeping(found, most, follow, microbatches, spare=spare) if options.checkpoint != "keep" else found


def _fitting(planner: Planner, found: Candidate, meshes: Sequence[MeshAxes], options: SearchOptions) -> Candidate:
    """A plan, or where it does not fit one that needs less memory, for the meshes that were planned for."""
    keep = options.checkpoint == "keep"
    if keep:
        found = offloaded(found, planner.following)
    if found.fits(planner.limit):
        return found
    tried = planner.tried(meshes)
    free = min(planner.sketch(tried), key=lambda c: c.seconds)
    free = min([free, *planner.experts([free.mesh], free.seconds)], key=lambda c: c.seconds)  # what needs much, too
    free = offloaded(free, planner.following) if keep else free
    starts = [free] if free is found else [free, found]

    def plan(form: Program) -> Candidate:
        return planner.like(form).plan(tried)

    def beside() -> Sequence[Candidate]:
        return planner.experts([free.mesh], (1 + LIMITS.alike) * free.seconds)

    return fitting(starts, planner.limit, planner.following, plan, beside, keep)


def shared_out(rewrites: Sequence[Rewrite], seconds: float) -> tuple[Rewrite, ...]:
    """Rewrites that save as many seconds together, each as large a part of them as before."""
    before = sum(r.saved for r in rewrites)
    return tuple(dataclasses.replace(r, saved=r.saved * seconds / before if before else 0.0) for r in rewrites)


def alone(program: Program, machine: Machine, rules: Sequence[Rule]) -> Candidate:
    """The program rewritten for one device of a machine, whatever that holds."""
    single = one_device(machine)
    options = SearchOptions(rewrite=True)
    return plan(program, single, math.inf, NO_PINS, mesh_candidates(1, single), rules, options)


def one_device(machine: Machine) -> Machine:
    """A single device of the same kind."""
    return Machine(f"one {machine.device.kind}", (machine.device,), (Level("device", 1, math.inf, 0.0),))


def _rewritten(planner: Planner, first: Candidate, rules: Sequence[Rule]) -> tuple[list[Candidate], float, Searched]:
    """Variants for the same mesh that may be faster, the best first: what the search finds, and the program as it is
    best on one device, which another layout may suit better, if there is one: code that names mesh axes is for several.
    How many times as fast they are, there or on one device, which is what they may be elsewhere; and how many were
    tried."""
    paired = [r for r in rules if r in stacking()]
    single = [r for r in rules if is_applicable(r)]
    limit, several = planner.limit, planner.machine.num_devices > 1 and code_mesh(first.program.graph) is None
    moves = Moves(planner, single, paired, (LIMITS.worse - 1) * planner.machine.num_devices * first.seconds)
    search = Search(planner, moves)
    found, searched = search.run(first), search.searched
    seed, gain, alone = _seed(planner, first, moves) if several else (first, 1.0, Searched())
    searched += alone
    if is_better(seed, found, limit):
        search = Search(planner, moves)
        found = search.run(seed)
        searched += search.searched
    rivals = [seed] if seed is not found and seed.fits(limit) else []
    gain = max(gain, _times_as_fast(found, first))
    return [planner.common.known(c) for c in (found, *rivals) if c is not first], gain, searched


def _seed(planner: Planner, start: Candidate, moves: Moves) -> tuple[Candidate, float, Searched]:
    """The program rewritten for one device, planned; what its rewrites save together is divided as it is there. How
    many times as fast it is there, and how many variants were tried."""
    single = one_device(planner.machine)
    scout = Alone(start.program, single, planner.rules)
    before = scout.promising(*mesh_candidates(1, single))
    search = Search(scout, moves)
    after = search.run(before)
    if after is before:
        return start, 1.0, search.searched
    made = planner.like(after.program, follows=True).promising(start.mesh)
    rewrites = shared_out(after.program.rewrites, start.seconds - made.seconds)
    program = after.program.rewritten(after.program.graph, rewrites)
    return made.noting(program=program), _times_as_fast(after, before), search.searched


def _times_as_fast(after: Candidate, before: Candidate) -> float:
    """How many times as fast a plan is; one time where there is nothing to do in either."""
    if after.seconds == before.seconds:
        return 1.0
    return before.seconds / after.seconds if after.seconds else math.inf
