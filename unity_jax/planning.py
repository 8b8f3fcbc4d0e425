"""From one call to its plan: which mesh and machine, which pins, and whether a plan is known already."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from unity_jax import _compat, pins, processes, progress
from unity_jax.aot.cycles import CLOCKS
from unity_jax.aot.finalists import Trial, best_compiled
from unity_jax.aot.topologies import topology
from unity_jax.call import Call, JitSettings
from unity_jax.correction import corrected, reserving
from unity_jax.errors import PlanError
from unity_jax.lower.compile import lower
from unity_jax.machine.machine import Machine
from unity_jax.network.reshard import Resharder
from unity_jax.ops.constraint import code_mesh
from unity_jax.pcg.layout import Layout
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.plan import Plan, cache, make_plan
from unity_jax.plan.devices import arranged, placed, with_devices
from unity_jax.plan.record import from_record
from unity_jax.program import Program, trace
from unity_jax.rewrite.dims import CannotEmit
from unity_jax.rewrite.library import searched
from unity_jax.rewrite.pack import pack
from unity_jax.rewrite.packing import Group
from unity_jax.rewrite.record import Rewrite, replay
from unity_jax.search import joint, packing
from unity_jax.search.candidate import Candidate, Pins, finish
from unity_jax.search.hosting import hosting
from unity_jax.search.implementing import implemented
from unity_jax.search.limits import LIMITS
from unity_jax.search.options import DEFAULTS, SearchOptions
from unity_jax.search.placement import mesh_candidates
from unity_jax.search.planner import Planner
from unity_jax.search.rule_cache import RuleCache
from unity_jax.search.searched import UNKNOWN


@dataclass(frozen=True)
class Settings:
    """What a function was decorated with. `folder` keeps plans on disk; `ties` as in `program.trace`; `search`: what a
    search may do."""

    jit: JitSettings
    mesh: Mesh | AbstractMesh | tuple[Any, ...] | None = None
    machine: Machine | None = None
    memory_limit: float | None = None
    in_shardings: Any = None
    out_shardings: Any = None
    saved: Plan | None = None
    folder: Path | None = None
    ties: Mapping[str, str] | None = None
    search: SearchOptions = DEFAULTS


_ONE = threading.RLock()


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Without garbage collection: the objects of a program, its plans and its trace live, and are millions for the
    collector to visit each time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """As the only thread that plans.

    Threads that ask for one plan wait for the first of them, which makes it. There is one lock for all functions, since
    they call each other; planning is Python, of which one thread runs at a time anyway.
    """
    with _ONE, uncollected():
        yield


def trace_call(fun: Callable[..., Any], call: Call, settings: Settings) -> Program:
    """The program of a call, traced under the mesh that the user set or gave."""
    __tracebackhide__ = True
    progress.stage("tracing")
    args, kwargs = call.abstract()
    context: Any = contextlib.nullcontext()
    if isinstance(settings.mesh, (Mesh, AbstractMesh)) and _compat.ambient_mesh() is None:
        context = jax.sharding.use_abstract_mesh(_compat.abstract_twin(settings.mesh))
    with context:
        return trace(fun, args, kwargs, ties=settings.ties, **settings.jit.keywords())


def make(
    program: Program, call: Call, settings: Settings, base: Plan | None, known: Sequence[Plan], margin: int = 0
) -> Plan:
    """The plan of a traced call.

    **Arguments:** `base`: the plan whose mesh and state layouts to take over; `known`: plans made for this function
    before; `margin`: bytes of the limit that the compiler was seen to need beyond the prediction.
    """
    __tracebackhide__ = True
    mesh = _mesh(program, call, settings, base)
    machine = _machine(mesh, settings, base)
    limit = machine.device.memory_bytes if settings.memory_limit is None else float(settings.memory_limit)
    if isinstance(mesh, (Mesh, AbstractMesh)):
        meshes = [placed(mesh, machine, base.order if base is not None and mesh is base.mesh else ())]
    else:
        meshes = mesh_candidates(machine.num_devices, machine)
    asked = pins.resolve(program, meshes[0], settings.in_shardings, settings.out_shardings, call.pins)
    for plan in known:
        if program.hash == plan.program_hash and _text(program, asked) == _text(plan.bound(), plan.pins):
            if _is_same(program, plan):
                return plan
            return rebuild(program, plan, plan.mesh, machine, asked)  # static parts or captured arrays are others
    if settings.saved is not None and not known:
        return rebuild(
            program,
            settings.saved,
            with_devices(mesh, settings.saved.axes, machine),
            machine,
            asked,
            settings.memory_limit,
        )
    wanted, handed, hosted = asked, None, list[int]()
    if base is not None and [MeshAxes.of(base.mesh)] == [MeshAxes(m.names, m.sizes) for m in meshes]:
        wanted, handed = pins.inherit(asked, program, base.layouts()), _held(program, base, asked)
        hosted = _on_host(program, base)
    may_rewrite, rewrites = joint.may_rewrite(machine, settings.search), None
    if may_rewrite and known and base is not None and _has_same_ops(program, base):
        rewrites = base.rewrites
    path = None
    if settings.folder is not None and (may_rewrite or machine.num_devices > 1):
        steps = None if rewrites is None else [r.steps for r in rewrites]
        searched_by = settings.search, LIMITS
        key = repr((program.hash, machine, limit, meshes, _text(program, wanted), handed, hosted, searched_by, steps))
        path = cache.file_of(settings.folder, key)
        known_plan = cache.load(path, program.hash) if not margin else None
        if known_plan is not None and known_plan.axes in meshes and (known_plan.fits or not known_plan.margin):
            with contextlib.suppress(PlanError):  # a damaged entry is replaced
                return rebuild(program, known_plan, with_devices(mesh, known_plan.axes, machine), machine, asked, limit)
    followed = None if rewrites is None else _followed(implemented(program, machine, settings.search), rewrites)
    rules = searched() if may_rewrite else ()

    def search(margin: int, spare: int = 0) -> Candidate:
        within = max(limit - margin, 1.0)
        return joint.plan(program, machine, within, wanted, meshes, rules, settings.search, followed, spare)

    best = search(margin) if margin else reserving(limit, search)
    if settings.search.compile_candidates:
        best, margin = _as_compiled(program.name, best, mesh, machine, limit, search)
    how, mesh = best.searched, with_devices(mesh, best.mesh, machine)
    if not processes.are_several(mesh):
        within = limit - margin
        best = packing.held(best, within, wanted) if handed is None else packing.inherited(best, within, wanted, handed)
    plan = make_plan(mesh, machine, limit, hosting(best, hosted).noting(searched=how), asked, margin)
    if path is not None:
        cache.store(plan, path)
    return plan


def _as_compiled(
    name: str, best: Candidate, mesh: Any, machine: Machine, limit: float, again: Callable[[int], Candidate]
) -> tuple[Candidate, int]:
    """The candidate, or that of its rivals, whose program the compiler thinks best of, and bytes by which this one goes
    beyond the prediction, where none was within the limit at first (`correction`).

    **Raises:** `PlanError` where there is neither a device nor a compiler for the machine.
    """
    __tracebackhide__ = True

    def devices(axes: MeshAxes) -> Mesh:
        given = with_devices(mesh, axes, machine)
        if isinstance(given, Mesh) and given.devices.flat[0].platform == machine.device.compiler:
            return given
        return Mesh(arranged(topology(machine.name), axes, machine), axes.names)

    try:
        platform = devices(best.mesh).devices.flat[0].platform
    except (ImportError, ValueError) as error:
        raise PlanError(f"compile_candidates={1 + len(best.rivals)}: {error}") from None
    clock = CLOCKS.get(machine.name.partition(":")[0])

    def compiled(best: Candidate) -> tuple[Trial, Candidate]:
        every = [best, *best.rivals]
        progress.stage(f"compiling {len(every)} plan{'s' * (len(every) > 1)}")
        trial, chosen = best_compiled(
            every, lambda c: lower(c.program, c.graph, devices(c.mesh)), platform, clock, limit
        )
        how = replace(best.searched, compiled=len(every))
        return trial, chosen.noting(rivals=tuple(c for c in every if c is not chosen), searched=how)

    (_, chosen), margin = corrected(
        name,
        compiled(best),
        limit,
        needs=lambda found: found[0].peak,
        predicted=lambda found: found[1].memory.peak_bytes,
        again=lambda margin: compiled(again(margin)),
    )
    return chosen, margin


def rebuild(
    program: Program, saved: Plan, mesh: Any, machine: Machine, asked: Pins, limit: float | None = None
) -> Plan:
    """A saved plan, with the program it is for, priced on a machine.

    **Arguments:** `limit`: bytes per device (default: as it was saved; another machine's own).
    **Raises:** `PlanError` if it is for another program, or does not fit it.
    """
    __tracebackhide__ = True
    _check_same(program, saved)
    axes = placed(mesh, machine, saved.order)
    if MeshAxes.of(mesh) != MeshAxes.of(saved.mesh):
        raise PlanError(f"the plan is for the mesh ({saved.axes}), mesh= is ({axes}): plan again, or drop mesh=")
    if axes.num_devices != machine.num_devices:
        have = f"{machine.name} has {machine.num_devices}"
        raise PlanError(f"the plan is for {axes.num_devices} devices ({axes}), {have}")
    is_same = saved.is_for(machine)
    if limit is None:
        limit = saved.memory_limit if is_same else machine.device.memory_bytes
    try:
        program, rules = _as_saved(program, saved), RuleCache()
        decisions = from_record(program.graph, saved.record, axes, rules)
        if is_same:
            bound = saved.predicted.lower_bound_seconds
        else:
            pinned = packing.pinned(asked, program, [None] * len(saved.packed)) if saved.packed else asked
            bound = Planner(program, machine, limit, pinned).problem(axes).least_seconds
        label = saved.label if is_same or " for " in saved.label else f"{saved.label} for {saved.machine}"
        made = finish(program, decisions, Resharder(machine, axes), rules, label, bound)
        margin = saved.margin if is_same and limit == saved.memory_limit else 0
        return make_plan(
            mesh, machine, limit, made.noting(searched=saved.searched if is_same else UNKNOWN), asked, margin
        )
    except (AssertionError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, PlanError):
            raise
        said = f"the plan does not fit {saved.function} ({type(error).__name__}: {error})"
        raise PlanError(f"{said}: plan again") from error


def _as_saved(program: Program, saved: Plan) -> Program:
    """A traced program, with other implementations, rewritten, changed to need less memory, and packed as a plan
    says."""
    for done in saved.implementations:
        program = program.implemented(done.applied(program.graph), (done,))
    if saved.rewrites:
        try:
            program = program.rewritten(replay(program.graph, saved.rewrites, searched()), saved.rewrites)
        except (LookupError, CannotEmit):
            raise PlanError("the plan rewrites the program by rules that are not there any more: plan again") from None
    for how in saved.saving:
        program = program.saving(how.applied(program.graph), how)
    return pack(program, [(p.packing, p.inputs) for p in saved.packed]) if saved.packed else program


def _has_same_ops(program: Program, first: Plan) -> bool:
    """Whether a program is that of another plan of its function, for other shapes."""
    assert first.program is not None
    traced = first.program.traced or first.program
    return [op.name for op in program.graph.walk()] == [op.name for op in traced.graph.walk()]


def _followed(program: Program, rewrites: tuple[Rewrite, ...]) -> Program | None:
    """A program rewritten as it is for other shapes; None if it cannot be."""
    try:
        return program.rewritten(replay(program.graph, rewrites, searched()), rewrites)
    except (LookupError, CannotEmit):
        return None


def _on_host(program: Program, base: Plan) -> list[int]:
    """What an earlier plan has on the host of this program's arguments."""
    known = base.named({i: True for i, leaf in enumerate(base.inputs) if leaf.on_host})
    names = enumerate(zip(program.leaves, program.in_paths, program.in_suffixes, strict=True), len(program.constants))
    return [i for i, (t, path, suffix) in names if pins.find(known, path, suffix, t.shape, str(t.dtype))]


def _held(program: Program, base: Plan, asked: Pins) -> list[tuple[Group, Layout]]:
    """What an earlier plan holds packed of this program's arguments, and how it lies; not what is pinned here."""
    known = base.named({i: (n, k) for n, ((_, places), _) in enumerate(base.wholes) for k, i in enumerate(places)})
    at: dict[tuple[int, int] | None, int] = {}
    names = enumerate(zip(program.leaves, program.in_paths, program.in_suffixes, strict=True), len(program.constants))
    for i, (t, path, suffix) in names:
        if t not in asked.tensors:
            at.setdefault(pins.find(known, path, suffix, t.shape, str(t.dtype)), i)
    return [
        ((how, tuple(at[n, k] for k in range(len(places)))), layout)
        for n, ((how, places), layout) in enumerate(base.wholes)
        if all((n, k) in at for k in range(len(places)))
    ]


def _mesh(program: Program, call: Call, settings: Settings, base: Plan | None) -> Any:
    """Who decides the mesh: `mesh=`, the plan that this one follows, the pins, the code, `jax.set_mesh`; None: all
    devices."""
    saved = settings.saved
    ambient = _compat.ambient_mesh()
    if settings.mesh is not None:
        mesh = settings.mesh
    elif base is not None:
        mesh = base.mesh
    elif saved is not None:
        mesh = saved.mesh if isinstance(saved.mesh, Mesh) else None
    else:
        given = pins.meshes_of((settings.in_shardings, settings.out_shardings, call.pins))
        mesh = next(given, None) or ambient or code_mesh(program.graph)
    if call.is_traced and ambient is not None:
        if mesh is not None and not isinstance(mesh, tuple) and MeshAxes.of(mesh) != MeshAxes.of(ambient):
            raise PlanError(
                f"{program.name} is planned for the mesh ({MeshAxes.of(mesh)}) and called inside jit under "
                f"jax.set_mesh of "
                f"({MeshAxes.of(ambient)}): pass that mesh as mesh="
            )
        return ambient
    return mesh


def _machine(mesh: Any, settings: Settings, base: Plan | None) -> Machine:
    """The machine that prices plans."""
    machine = settings.machine
    if machine is None:
        known = base or settings.saved
        devices = mesh if isinstance(mesh, tuple) else mesh.devices.flat if isinstance(mesh, Mesh) else None
        if known is not None and known.program is not None:
            machine = known.priced_on
        elif known is not None:
            try:
                machine = Machine.preset(known.machine)
            except ValueError:
                raise PlanError(
                    f"the plan was made for the machine {known.machine!r}, which is no preset: pass machine="
                ) from None
        elif isinstance(mesh, AbstractMesh) and mesh.size != len(jax.devices()):
            raise ValueError(f"the mesh ({MeshAxes.of(mesh)}) has no devices: pass machine= to plan for it")
        else:
            machine = Machine.detect(list(devices) if devices is not None else jax.devices())
    assert machine is not None
    count = len(mesh) if isinstance(mesh, tuple) else None if mesh is None else MeshAxes.of(mesh).num_devices
    if count is not None and count != machine.num_devices:
        raise ValueError(
            f"mesh= has {count} devices, machine {machine.name} has {machine.num_devices}: they must agree"
        )
    return machine


def _text(program: Program, found: Pins) -> str:
    """Pins as text, by position."""
    inputs = [(i, str(found.tensors[t])) for i, t in enumerate(program.graph.inputs) if t in found.tensors]
    code = [str(op.params["layout"]) for op in program.graph.walk() if op.name == "sharding_constraint"]
    return repr((inputs, sorted((i, str(x)) for i, x in found.outputs.items()), code))


def _is_same(program: Program, plan: Plan) -> bool:
    """Whether a plan is about this program, so that it can run for it as it is."""
    other = plan.program
    return (
        other is not None
        and (program.hash, program.in_tree, program.out_tree) == (other.hash, other.in_tree, other.out_tree)
        and all(a is b for a, b in zip(program.constants, other.constants, strict=True))
    )


def _check_same(program: Program, saved: Plan) -> None:
    if program.hash == saved.program_hash:
        return
    theirs = {leaf.path: (leaf.shape, leaf.dtype) for leaf in saved.inputs}
    ours = {p: (t.shape, str(t.dtype)) for p, t in zip(program.input_names, program.graph.inputs, strict=True)}

    def typed(leaf: tuple[tuple[int, ...], str] | None) -> str:
        return f"{leaf[1]}{list(leaf[0])}" if leaf else "missing"

    for path in [*theirs, *ours]:
        if theirs.get(path) != ours.get(path):
            raise PlanError(
                f"the plan is for another signature of {saved.function}: argument {path} is {typed(ours.get(path))} "
                f"here and "
                f"{typed(theirs.get(path))} in the plan; plan again"
            )
    raise PlanError(f"the plan was made for another version of {saved.function}: its program differs; plan again")
