"""`auto_shard` and `plan`: the stages of `jax.jit`, with one more."""

from __future__ import annotations

import functools
import hashlib
import os
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from unity_jax import _compat, pins
from unity_jax.cost.fusion import materialized
from unity_jax.cost.reshard import Resharder
from unity_jax.errors import MemoryLimitError, PlanError
from unity_jax.lower.compile import spmd
from unity_jax.machine.machine import Machine
from unity_jax.pcg.layout import Layout
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.plan import Plan, from_record, make_plan, mesh_axes
from unity_jax.program import Program, abstract
from unity_jax.program import trace as trace_program
from unity_jax.search.assemble import RuleCache
from unity_jax.search.planner import Planner, finish, mesh_candidates


@dataclass(frozen=True)
class Options:
    """What few users need.

    **Fields:** `cache`: folder of plans found earlier (None: no cache; the default is `$UNITY_JAX_CACHE`, or `unity_jax` in the
    user's cache folder); `ties`: path of a result to the path of the argument that it replaces, where neither donation nor
    equal paths say so.
    """

    cache: str | Path | None = "default"
    ties: Mapping[str, str] | None = None

    def folder(self) -> Path | None:
        """Where plans are kept."""
        if self.cache != "default":
            return Path(self.cache) if self.cache else None
        named = os.environ.get("UNITY_JAX_CACHE")
        if named is not None:
            return Path(named) if named else None
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unity_jax"


def auto_shard(
    fun: Callable[..., Any] | None = None,
    /,
    *,
    mesh: Mesh | Sequence[Any] | None = None,
    machine: Machine | str | None = None,
    memory_limit: float | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    plan: Plan | None = None,
    like: AutoSharded | None = None,
    options: Options = Options(),  # noqa: B008
) -> Any:
    """Run a function written for one device on many, well. Use it like `jax.jit`.

        @unity.auto_shard(donate_argnums=0)
        def train_step(state, batch): ...

        state, metrics = train_step(state, batch)   # plans on the first call of a signature

    **Arguments:**

    - `mesh`: a `Mesh`, whose axes are used as given, or a sequence of devices, whose axes the planner chooses (default:
      `jax.devices()`); devices of an ahead-of-time topology are fine for `.lower(...).compile()`.
    - `machine`: a `Machine` or preset name that prices plans (default: detected from the devices).
    - `memory_limit`: bytes per device (default: the machine's).
    - `donate_argnums`, `donate_argnames`, `static_argnums`, `static_argnames`: as in `jax.jit`.
    - `in_shardings`, `out_shardings`: pins, a tree prefix of `NamedSharding`, `PartitionSpec` or None (free).
    - `plan`: a plan to run instead of searching for one.
    - `like`: another decorated function, whose state layouts this one takes over (an eval step).

    **Returns:** a callable with `.plan`, `.trace`, `.lower`, `.init` and `.shard`.
    """
    given = {k: v for k, v in locals().items() if k != "fun"}
    if fun is None:
        return lambda f: auto_shard(f, **given)
    if not callable(fun):
        raise TypeError(f"auto_shard needs a function, not {type(fun).__name__}")
    return AutoSharded(fun, **given)


def plan(fun: Callable[..., Any], *args: Any, machine: Machine | str | None = None, **kwargs: Any) -> Plan:
    """The plan of a function for arguments given as arrays or `jax.ShapeDtypeStruct`s; no accelerator is needed.

        unity.plan(train_step, state_shapes, batch_shapes, machine="v5e:4x4", donate_argnums=0)

    Keyword arguments that `auto_shard` knows go there, the others to the function.
    """
    known = set(auto_shard.__kwdefaults__ or ())
    settings = {k: kwargs.pop(k) for k in list(kwargs) if k in known}
    return auto_shard(fun, machine=machine, **settings).plan(*args, **kwargs)


@dataclass(frozen=True, eq=False)
class _Runner:
    """A planned signature ready to run: `call(constants, *args, **kwargs)` is the jitted function."""

    plan: Plan
    call: Any
    constants: tuple[Any, ...]
    shardings: tuple[NamedSharding, ...]  # of the argument leaves


class AutoSharded:
    """A function under `auto_shard`. Made by `auto_shard`, not directly."""

    def __init__(self, fun: Callable[..., Any], **settings: Any) -> None:
        functools.update_wrapper(self, fun)
        self._fun = fun
        self._s = types.SimpleNamespace(**settings)
        self._plans: dict[Any, Plan] = {}
        self._runners: dict[Any, _Runner] = {}
        self._first: Plan | None = None

    # Stages

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """As `jax.jit(fun).trace`."""
        return jax.jit(self._fun, **self._jit_settings()).trace(*args, **kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for arguments of these shapes (arrays or `jax.ShapeDtypeStruct`s); the same every time."""
        return self._plan(args, kwargs)[1]

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """As `jax.jit(fun).lower`, of the planned program; `.compile()` gives a `jax.stages.Compiled`."""
        key, found = self._plan(args, kwargs)
        runner = self._runner(key, found)
        structs = self._structs(runner, args, kwargs)
        return runner.call.lower(runner.constants, *structs[0], **structs[1])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step; plans first if these shapes are new."""
        key, found = self._plan(args, kwargs)
        runner = self._runners.get(key)
        if runner is None:
            if not found.fits:
                raise memory_error(found)
            runner = self._runner(key, found)
        placed, (a, k) = self._place(runner, args, kwargs)
        del args, kwargs, placed
        return runner.call(runner.constants, *a, **k)

    def init(self, make_state: Callable[..., Any], *args: Any) -> Any:
        """Build the state already sharded, never whole on one device: `make_state(*args)` runs under the planned layouts.

        Call `.plan(...)` (or the function) for some shapes first, so that there is a plan whose state this is.
        """
        found = self._need_first("init")
        shapes = jax.eval_shape(make_state, *args)
        known = self._state_shardings(found)
        leaves, tree = jax.tree_util.tree_flatten_with_path(shapes)
        shardings = []
        for path, leaf in leaves:
            key = (jax.tree_util.keystr(path), leaf.shape, str(leaf.dtype))
            if key not in known:
                raise PlanError(f"init: the planned function has no argument leaf {key[0]} of {leaf.dtype}{list(leaf.shape)}")
            shardings.append(known[key])
        return jax.jit(make_state, out_shardings=jax.tree_util.tree_unflatten(tree, shardings))(*args)

    def shard(self, batch: Any, argument: int = -1) -> Any:
        """A host batch as arrays in the planned layout of an argument (the last one, unless `argument` says otherwise).

        With several processes each passes its own part of the batch.
        """
        found = self._need_first("shard")
        args = found.in_shardings
        args = args[0] if isinstance(args, tuple) and len(args) == 2 and isinstance(args[1], dict) and found.program and found.program.in_paths[-1].startswith("['") else args
        return jax.tree.map(_from_host, batch, args[argument])

    # Planning

    def _jit_settings(self) -> dict[str, Any]:
        names = ("donate_argnums", "donate_argnames", "static_argnums", "static_argnames")
        return {n: getattr(self._s, n) for n in names}

    def _need_first(self, what: str) -> Plan:
        if self._first is None:
            raise PlanError(f"{what}: there is no plan yet; call .plan(...) with the shapes of the arguments first")
        return self._first

    def _plan(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Plan]:
        key, dynamic = self._key(args, kwargs)
        found = self._plans.get(key)
        if found is None:
            found = self._plans[key] = self._make_plan(args, kwargs, dynamic)
            self._first = self._first or found
        return key, found

    def _key(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, list[Any]]:
        """What decides whether to plan anew: the tree, shapes, dtypes and static values; and the dynamic leaves."""
        static = _static_positions(self._fun, self._s.static_argnums, self._s.static_argnames, len(args))
        names = _as_tuple(self._s.static_argnames)
        fixed = tuple((i, args[i]) for i in static if i < len(args)) + tuple((n, kwargs[n]) for n in names if n in kwargs)
        moving = tuple(None if i in static else a for i, a in enumerate(args))
        leaves, tree = jax.tree_util.tree_flatten((moving, {k: v for k, v in kwargs.items() if k not in names}))
        structs = tuple((x.shape, str(x.dtype), _pin_key(leaf)) for leaf in leaves for x in [abstract(leaf)])
        return (tree, structs, fixed, _ambient_mesh()), leaves

    def _make_plan(self, args: Sequence[Any], kwargs: Mapping[str, Any], leaves: Sequence[Any]) -> Plan:
        program = self._trace(args, kwargs)
        given = self._s.plan
        if given is not None:
            return self._rebuild(program, given, self._mesh_like(given))
        base = self._s.like._need_first("like") if self._s.like is not None else self._first
        inherited = _state_layouts(base) if base is not None else None
        mesh = base.mesh if base is not None else self._s.mesh
        if mesh is None:
            mesh = pins.constraint_mesh(program.graph)
        machine = self._machine(mesh)
        limit = machine.memory_bytes if self._s.memory_limit is None else float(self._s.memory_limit)
        if limit <= 0:
            raise ValueError(f"memory_limit must be positive, got {limit}")
        if isinstance(mesh, (Mesh, jax.sharding.AbstractMesh)):
            meshes = [mesh_axes(mesh)]
        else:
            meshes = mesh_candidates(len(mesh) if mesh is not None else self._device_count(machine), machine)
        found_pins = pins.resolve(
            program, meshes[0], self._s.in_shardings, self._s.out_shardings, leaves, inherited
        )
        cached = self._cache_file(program, machine, limit, meshes, found_pins)
        if cached is not None and cached.exists():
            try:
                saved = Plan.load(cached)
                if saved.program_hash == program.hash:
                    return self._rebuild(program, saved, self._devices_mesh(mesh, mesh_axes(saved.mesh), machine))
            except PlanError:
                pass  # a damaged or old cache entry is replaced below
        best = Planner(program, machine, limit, found_pins).plan(meshes)
        made = make_plan(
            program, self._devices_mesh(mesh, best.mesh, machine), machine, limit, best.decisions, best.graph, best.cost, best.memory,
            best.label, best.lower_bound,
        )  # fmt: skip
        if cached is not None:
            _write_atomically(made, cached)
        return made

    def _trace(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Program:
        static = _static_positions(self._fun, self._s.static_argnums, self._s.static_argnames, len(args))
        names = _as_tuple(self._s.static_argnames)
        shaped = [a if i in static else jax.tree.map(abstract, a) for i, a in enumerate(args)]
        keywords = {k: v if k in names else jax.tree.map(abstract, v) for k, v in kwargs.items()}
        return trace_program(self._fun, shaped, keywords, ties=self._s.options.ties, **self._jit_settings())

    def _machine(self, mesh: Any) -> Machine:
        machine = self._s.machine
        if isinstance(machine, str):
            machine = Machine.preset(machine)
        if machine is None:
            devices = list(mesh.devices.flat) if isinstance(mesh, Mesh) else list(mesh) if isinstance(mesh, Sequence) else jax.devices()
            machine = Machine.detect(devices)
        return machine

    def _device_count(self, machine: Machine) -> int:
        return machine.num_devices if self._s.machine is not None else len(jax.devices())

    def _devices_mesh(self, mesh: Any, axes: MeshAxes, machine: Machine) -> Any:
        """The mesh of a plan: the caller's, or one over the caller's devices, or an abstract one if they do not suffice."""
        if isinstance(mesh, (Mesh, jax.sharding.AbstractMesh)):
            return mesh
        if mesh is None:
            mesh = jax.devices()
            if len(mesh) != axes.num_devices:
                return _compat.abstract_mesh(axes.names, axes.sizes)
        return Mesh(np.array(mesh).reshape(axes.sizes), axes.names)

    def _mesh_like(self, given: Plan) -> Any:
        if isinstance(given.mesh, Mesh):
            return given.mesh
        axes = mesh_axes(given.mesh)
        mesh = self._s.mesh
        if isinstance(mesh, Mesh) and mesh_axes(mesh) != axes:
            raise PlanError(f"the plan is for a mesh ({axes}), mesh= is ({mesh_axes(mesh)})")
        if isinstance(mesh, Sequence) and len(mesh) != axes.num_devices:
            raise PlanError(f"the plan is for {axes.num_devices} devices ({axes}), mesh= has {len(mesh)}")
        return self._devices_mesh(mesh, axes, None)  # type: ignore[arg-type]

    def _rebuild(self, program: Program, given: Plan, mesh: Any) -> Plan:
        """A saved plan, with the program it is for."""
        _check_same_program(program, given)
        axes = mesh_axes(mesh)
        machine = self._saved_machine(given)
        rules = RuleCache()
        decisions = from_record(program.graph, given.record)
        made = finish(program, decisions, Resharder(machine, axes), rules, materialized(program.graph), given.label)
        return make_plan(
            program, mesh, machine, given.memory_limit, decisions, made.graph, made.cost, made.memory, given.label,
            given.predicted.lower_bound_seconds,
        )  # fmt: skip

    def _saved_machine(self, given: Plan) -> Machine:
        machine = self._s.machine if self._s.machine is not None else given.machine
        return Machine.preset(machine) if isinstance(machine, str) else machine

    def _cache_file(self, program: Program, machine: Machine, limit: float, meshes: Sequence[MeshAxes], found: Any) -> Path | None:
        folder = self._s.options.folder()
        if folder is None:
            return None
        inputs = [(i, str(found.tensors[t])) for i, t in enumerate(program.graph.inputs) if t in found.tensors]
        text = repr((program.hash, repr(machine), limit, meshes, inputs, sorted((i, str(x)) for i, x in found.outputs.items())))
        return folder / "plans" / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"

    # Running

    def _runner(self, key: Any, found: Plan) -> _Runner:
        if key in self._runners:
            return self._runners[key]
        program = found.program
        assert program is not None
        if not isinstance(found.mesh, Mesh):
            axes = mesh_axes(found.mesh)
            raise PlanError(
                f"the plan is for {axes.num_devices} devices ({axes}) and there are {len(jax.devices())}: it can be read, "
                "saved and compared, not run here"
            )
        run = spmd(found.pcg, found.mesh)
        n = len(program.constants)
        static = set(_as_tuple(self._s.static_argnames))
        positions = _static_positions(self._fun, self._s.static_argnums, self._s.static_argnames, 10**6)

        @functools.wraps(self._fun)
        def planned(constants: Any, *args: Any, **kwargs: Any) -> Any:
            moving = [a for i, a in enumerate(args) if i not in positions]
            flat = jax.tree.leaves((moving, {k: v for k, v in kwargs.items() if k not in static}))
            return jax.tree_util.tree_unflatten(program.out_tree, run([*constants, *flat]))

        planned.__dict__.pop("__wrapped__", None)
        call = jax.jit(
            planned,
            donate_argnums=tuple(1 + i for i in _as_tuple(self._s.donate_argnums)),
            donate_argnames=self._s.donate_argnames,
            static_argnums=tuple(1 + i for i in positions if i < 1000),
            static_argnames=self._s.static_argnames,
            out_shardings=found.out_shardings,
        )
        shardings = tuple(NamedSharding(found.mesh, leaf.layout.spec()) for leaf in found.inputs)
        constants = tuple(jax.device_put(c, s) for c, s in zip(program.constants, shardings, strict=False))
        self._runners[key] = _Runner(found, call, constants, shardings[n:])
        return self._runners[key]

    def _split(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[set[int], set[str]]:
        positions = _static_positions(self._fun, self._s.static_argnums, self._s.static_argnames, len(args))
        return set(positions), set(_as_tuple(self._s.static_argnames))

    def _map_leaves(self, runner: _Runner, args: Sequence[Any], kwargs: Mapping[str, Any], fn: Callable[[Any, Any, bool], Any]) -> Any:
        """Apply `fn(leaf, sharding, donated)` to the dynamic leaves, and put static arguments back where they were."""
        positions, names = self._split(args, kwargs)
        moving = ([a for i, a in enumerate(args) if i not in positions], {k: v for k, v in kwargs.items() if k not in names})
        leaves, tree = jax.tree_util.tree_flatten(moving)
        program = runner.plan.program
        assert program is not None
        donated = {i - len(program.constants) for i in program.donated}
        done = [fn(x, s, i in donated) for i, (x, s) in enumerate(zip(leaves, runner.shardings, strict=True))]
        positional, keywords = jax.tree_util.tree_unflatten(tree, done)
        dynamic = iter(positional)
        full = tuple(a if i in positions else next(dynamic) for i, a in enumerate(args))
        return full, {**keywords, **{k: kwargs[k] for k in names if k in kwargs}}

    def _structs(self, runner: _Runner, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        def struct(leaf: Any, sharding: Any, donated: bool) -> Any:
            shaped = abstract(leaf)
            return jax.ShapeDtypeStruct(shaped.shape, shaped.dtype, sharding=sharding)

        return self._map_leaves(runner, args, kwargs, struct)

    def _place(self, runner: _Runner, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
        """Move every leaf to its planned layout; nothing moves once outputs of one step come back as inputs of the next."""

        def put(leaf: Any, sharding: NamedSharding, donated: bool) -> Any:
            if isinstance(leaf, jax.core.Tracer) or getattr(leaf, "sharding", None) == sharding:
                return leaf
            shaped = abstract(leaf)
            if not hasattr(leaf, "dtype") or (not _compat.is_key(shaped.dtype) and leaf.dtype != shaped.dtype):
                leaf = np.asarray(leaf, shaped.dtype)
            return jax.device_put(leaf, sharding, donate=donated and isinstance(leaf, jax.Array))

        return True, self._map_leaves(runner, args, kwargs, put)

    def _state_shardings(self, found: Plan) -> dict[Any, NamedSharding]:
        return {k: NamedSharding(found.mesh, lay.spec()) for k, lay in _state_layouts(found, every=True).items()}


def _state_layouts(found: Plan, every: bool = False) -> dict[Any, Layout]:
    """Layouts of the state leaves of a plan (of `every` argument leaf), by (path below the argument, shape, dtype)."""
    program = found.program
    if program is None:
        return {}
    n = len(program.constants)
    state = set(program.ties.values())
    return {
        (suffix, leaf.shape, leaf.dtype): leaf.layout
        for i, (suffix, leaf) in enumerate(zip(program.in_suffixes, found.inputs[n:], strict=True))
        if every or n + i in state
    }


def _check_same_program(program: Program, given: Plan) -> None:
    if program.hash == given.program_hash:
        return
    theirs = {leaf.path: (leaf.shape, leaf.dtype) for leaf in given.inputs}
    ours = {p: (t.shape, str(t.dtype)) for p, t in zip(program.input_names, program.graph.inputs, strict=True)}
    for path in [*theirs, *ours]:
        if theirs.get(path) != ours.get(path):
            raise PlanError(
                f"the plan is for another signature of {given.function}: {path} is {ours.get(path, 'missing')} here and "
                f"{theirs.get(path, 'missing')} in the plan; plan again"
            )
    raise PlanError(f"the plan was made for another version of {given.function}: its program differs; plan again")


def memory_error(found: Plan) -> MemoryLimitError:
    """Why a plan that does not fit will not run: the largest tensors at the peak, and what helps."""
    top = "\n".join(f"  {size / 2**20:10.1f} MiB  {name}" for name, size in found.largest[:5])
    return MemoryLimitError(
        f"{found.function} needs {found.predicted.peak_bytes / 2**20:.1f} MiB on each device, the limit is "
        f"{found.memory_limit / 2**20:.1f} MiB (memory_limit=). The largest tensors at the peak are\n{top}\nUse more devices, "
        "a smaller batch, jax.checkpoint around the layers, or raise memory_limit."
    )


def _from_host(x: Any, sharding: NamedSharding) -> Any:
    if jax.process_count() == 1:
        return jax.device_put(x, sharding)
    return jax.make_array_from_process_local_data(sharding, np.asarray(x))


def _pin_key(leaf: Any) -> Any:
    return leaf.sharding if isinstance(leaf, jax.ShapeDtypeStruct) else None


def _ambient_mesh() -> Any:
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh


def _as_tuple(x: Any) -> tuple[Any, ...]:
    return () if x is None else (x,) if isinstance(x, (int, str)) else tuple(x)


def _static_positions(fun: Callable[..., Any], argnums: Any, argnames: Any, count: int) -> tuple[int, ...]:
    """Positions of static arguments, also of those named in `static_argnames`, as `jax.jit` resolves them."""
    import inspect

    positions = {i % count if i < 0 else i for i in _as_tuple(argnums)}
    try:
        parameters = list(inspect.signature(fun).parameters)
    except (TypeError, ValueError):
        parameters = []
    positions |= {parameters.index(n) for n in _as_tuple(argnames) if n in parameters}
    return tuple(sorted(positions))


def _write_atomically(made: Plan, path: Path) -> None:
    """Other processes plan the same program at the same time: they must never read half a file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        made.save(part)
        part.replace(path)
    except OSError:
        pass  # a cache that cannot be written costs time, not correctness


