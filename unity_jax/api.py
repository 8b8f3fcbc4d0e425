"""`auto_shard` and `plan`: the stages of `jax.jit`, with one more."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.extend import source_info_util
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from unity_jax import objects, pins, planning, processes, progress
from unity_jax.call import Call, JitSettings, abstract
from unity_jax.correction import corrected
from unity_jax.derivative import Derivative
from unity_jax.errors import PlanError
from unity_jax.lower.compile import lower
from unity_jax.machine.machine import Machine
from unity_jax.options import NO_OPTIONS, Options
from unity_jax.pcg.layout import Layout
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.plan import Leaf, Plan, cache
from unity_jax.plan.devices import attach_devices
from unity_jax.runner import Runner, move
from unity_jax.text import size_of


def auto_shard(
    fun: Callable[..., Any] | None = None,
    /,
    *,
    mesh: Mesh | AbstractMesh | Sequence[Any] | None = None,
    machine: Machine | str | None = None,
    memory_limit: float | str | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    plan: Plan | None = None,
    like: AutoSharded | None = None,
    options: Options = NO_OPTIONS,
) -> Any:
    """Run a function written for one device on many, well. Use it like `jax.jit`.

        @unity.auto_shard(donate_argnums=0)
        def train_step(state, batch): ...

        state, metrics = train_step(state, batch)   # plans on the first call of a signature

    Objects of `flax.nnx` among the arguments are updated in place, as by `nnx.jit`.

    **Arguments:**

    - `mesh`: a `Mesh`, whose axes are used as given, or a sequence of devices, whose axes the planner chooses (default:
      the mesh of `jax.set_mesh`, or `jax.devices()`); devices of an ahead-of-time topology are fine for
      `.lower(...).compile()`.
    - `machine`: a `Machine` or preset name that prices plans (default: detected from the devices).
    - `memory_limit`: bytes per device, as a number or as `"40GiB"` (default: the machine's). Where no plan fits,
      attention and the loss are computed by chunks, values again, the batch by microbatches, or state and activations
      are on the host, as `print(plan)` says.
    - `donate_argnums`, `donate_argnames`, `static_argnums`, `static_argnames`: as in `jax.jit`.
    - `in_shardings`, `out_shardings`: pins, a tree prefix of `NamedSharding`, `PartitionSpec` or None (free).
    - `plan`: a plan to run instead of searching for one.
    - `like`: another decorated function, whose mesh and state layouts this one takes over (an eval step).
    - `options`: what few users need (`Options`).

    A function that is decorated already keeps the settings that are not given here.

    **Returns:** a callable with `.plan`, `.trace`, `.lower`, `.init` and `.shard`.
    **Raises:** `TypeError` or `ValueError` for an argument of another kind, which it names. Planning, not decorating,
    raises `PinError` for pins that cannot be, `UnsupportedError` for what cannot be sharded, and `PlanError` for a
    `plan=` of another function or machine; running raises `MemoryLimitError` where the plan does not fit.
    """
    __tracebackhide__ = True
    given = {k: v for k, v in locals().items() if k not in ("fun", "__tracebackhide__")}
    if fun is None:
        return lambda f: auto_shard(f, **given)
    if isinstance(fun, AutoSharded):
        return auto_shard(fun._fun, **fun._given | {k: v for k, v in given.items() if v != _DEFAULTS[k]})
    if not callable(fun):
        raise TypeError(f"auto_shard needs a function, not {fun!r} of type {type(fun).__name__}")
    if like is not None and not isinstance(like, AutoSharded):
        raise TypeError(f"like= takes a function decorated with auto_shard, not {type(like).__name__}")
    if plan is not None and not isinstance(plan, Plan):
        raise TypeError(f"plan= takes a Plan (unity.Plan.load reads one from a file), not {type(plan).__name__}")
    if not isinstance(options, Options):
        raise TypeError(f"options= takes unity.Options(...), not {options!r}")
    jit = JitSettings(donate_argnums, donate_argnames, static_argnums, static_argnames)
    jax.jit(fun, **jit.keywords())  # checks the numbers and names
    settings = planning.Settings(
        jit,
        _mesh(mesh),
        Machine.preset(machine) if isinstance(machine, str) else machine,
        _memory_limit(memory_limit),
        in_shardings,
        out_shardings,
        plan,
        cache.default_folder() if options.cache == "default" else Path(options.cache) if options.cache else None,
        options.ties,
        options.search,
    )
    decorated = AutoSharded(fun, settings, like)
    decorated._given = given
    return decorated


_DEFAULTS: Mapping[str, Any] = auto_shard.__kwdefaults__ or {}


def plan(fun: Callable[..., Any], *args: Any, machine: Machine | str | None = None, **kwargs: Any) -> Plan:
    """The plan of a function for arguments given as arrays or `jax.ShapeDtypeStruct`s; no accelerator is needed.

        unity.plan(train_step, state_shapes, batch_shapes, machine="v5e:4x4", donate_argnums=0)

    Keyword arguments that `auto_shard` knows go there, the others to the function. Raises what that raises.
    """
    __tracebackhide__ = True
    settings = {k: kwargs.pop(k) for k in list(kwargs) if k in _DEFAULTS}
    return auto_shard(fun, machine=machine, **settings).plan(*args, **kwargs)


class AutoSharded:
    """A function under `auto_shard`. Made by `auto_shard`, not directly."""

    def __init__(self, fun: Callable[..., Any], settings: planning.Settings, like: AutoSharded | None) -> None:
        functools.update_wrapper(self, fun)
        self._fun, self._settings, self._like = fun, settings, like
        self._pure = objects.pure(fun)
        self._given: dict[str, Any] = {}  # as `auto_shard` was called
        self._plans: dict[Any, Plan] = {}  # by key and pins of the call
        self._known: list[Plan] = []  # distinct plans, the first one first
        self._weak: dict[Any, tuple[bool, ...]] = {}  # by key of the call: which types of its results give way
        self._runners: dict[tuple[int, tuple[bool, ...]], Runner] = {}  # by identity of the plan, and these
        self._last: tuple[Any, Any, Any] = None, None, None  # how the last call looked, its runner, `plain` of the next
        self._derivative: Derivative | None = None
        _exclude_our_frames()

    # Stages

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """As `jax.jit(fun).trace`: the function as it is written, before it is planned."""
        __tracebackhide__ = True
        call = self._call(args, kwargs)
        args, kwargs = call.with_leaves(call.leaves)
        return jax.jit(self._pure, **self._settings.jit.keywords()).trace(*args, **kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for arguments of these shapes (arrays or `jax.ShapeDtypeStruct`s); the same every time.

        A plan that does not fit the memory is returned, too (`plan.fits`). Shardings of `ShapeDtypeStruct`s are pins,
        those of arrays are not. **Raises:** `PinError`, `UnsupportedError` or `PlanError`, as `auto_shard` says.
        """
        __tracebackhide__ = True
        return self._plan(self._call(args, kwargs))

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered | objects.Stage:
        """As `jax.jit(fun).lower`, of the planned program; `.compile()` gives a `jax.stages.Compiled`.

        The compiled function takes arguments in their planned layouts; if the function captures arrays, a tuple of them
        (`plan.program.constants`) comes first. What the plan holds packed from step to step is packed within it.
        """
        __tracebackhide__ = True
        call = self._call(args, kwargs)
        runner = self._runner(self._plan(call), call)
        lowered = lower(runner.stored, runner.plan.pcg, runner.mesh, unpacked=True, weak=runner.weak)
        return lowered if call.objects is None else objects.Stage(lowered)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step; plans first if these shapes are new. Arguments may lie anywhere, and are moved where they have
        to be; results lie as planned, so that those of one step are moved no more in the next.

        **Raises:** `MemoryLimitError` where the plan does not fit or the device ran out of memory, `ValueError` for an
        array that was donated to an earlier call, or is donated and given again; and what planning raises.
        """
        __tracebackhide__ = True
        look, runner, plain = self._last
        call = Call.of(self._fun, self._settings.jit, args, kwargs, plain)
        if call.is_traced:
            with planning.alone():
                self._derivative = self._derivative or Derivative(self._pure, self._settings.jit, self._related)
            found = self._derivative(call, lambda inner: self._runner(self._plan(inner), inner)(inner))
            return objects.merge(found, call.objects)
        del args, kwargs
        if call.look == look:
            found = runner(call)
        else:
            with planning.uncollected():
                runner = self._fitting(call)
                found = runner(call)
        self._last = (call.look, runner, call.tree if call.objects is None else None)
        return objects.merge(found, call.objects)

    def init(self, make_state: Callable[..., Any], *args: Any) -> Any:
        """Build the state already sharded, never whole on one device: `make_state(*args)` runs in the planned layouts.

        Call `.plan(...)` (or the function) for some shapes first, so that there is a plan whose state this is: every
        leaf has the path, shape and dtype of one of an argument. **Raises:** `PlanError` for a leaf that has not, or
        without a plan.
        """
        __tracebackhide__ = True
        first = self._first("init")
        lie = first.named({i: first.sharding(leaf) for i, leaf in enumerate(first.inputs)})
        make_state = objects.pure(make_state)
        (args, _), found = objects.split((args, {}))
        leaves, tree = jax.tree_util.tree_flatten_with_path(jax.eval_shape(make_state, *args))
        mesh = Runner(first).mesh
        shardings = []
        for path, leaf in leaves:
            name, dtype = jax.tree_util.keystr(path), str(leaf.dtype)
            sharding = pins.find(lie, name, name, leaf.shape, dtype)
            if path[:1] == (objects.RESULT,) and sharding is None:  # objects in another order than the arguments
                sharding = pins.find(lie, name, jax.tree_util.keystr(path[2:]), leaf.shape, dtype)
            if sharding is None and path[:1] in ((objects.ARGS,), (objects.KWARGS,)):
                sharding = NamedSharding(mesh, jax.P())
            if sharding is None:
                raise PlanError(
                    f"init: no argument of {first.function} has a leaf {name} of type {dtype}{list(leaf.shape)}"
                )
            shardings.append(sharding)
        given, args_tree = jax.tree_util.tree_flatten(args)
        placed = move(given, [NamedSharding(mesh, jax.P())] * len(given), ["an argument of init"] * len(given))
        build = jax.jit(make_state, out_shardings=jax.tree_util.tree_unflatten(tree, shardings))
        return objects.merge(build(*jax.tree_util.tree_unflatten(args_tree, placed)), found)

    def shard(self, batch: Any, argument: int = -1) -> Any:
        """A host batch as arrays in the planned layout of an argument, by default the last positional one.

        With several processes each passes its own part, and the batch is made of them in the order of the processes;
        leaves that have the planned shape already are the same in all. A dimension that the mesh does not divide (of a
        short last batch) stays whole. **Raises:** `PlanError` without a plan, or for a batch of another structure.
        """
        __tracebackhide__ = True
        plan = self._first("shard")
        program = plan.bound()
        args, _ = jax.tree_util.tree_unflatten(program.in_tree, plan.inputs[len(program.constants) :])
        if not -len(args) <= argument < len(args):
            raise PlanError(
                f"shard: {plan.function} has {len(args)} positional arguments, there is no argument {argument}"
            )
        mesh = Runner(plan).mesh
        if objects.split(((batch,), {}))[1] is not None:
            raise PlanError(
                f"shard: argument {argument} of {plan.function} is an nnx object: .init builds it sharded, and the "
                "first call moves it to its planned layouts"
            )
        given: Any = jax.tree.structure(batch)
        wanted: Any = jax.tree.structure(args[argument])
        if given != wanted:
            raise PlanError(
                f"shard: the batch has structure {given}, argument {argument} of {plan.function} has {wanted}"
            )
        return jax.tree.map(lambda leaf, x: _from_host(x, leaf, mesh), args[argument], batch)

    # Planning

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        __tracebackhide__ = True
        return Call.of(self._fun, self._settings.jit, args, kwargs)

    def _plan(self, call: Call) -> Plan:
        __tracebackhide__ = True
        concrete = not any(isinstance(x, jax.ShapeDtypeStruct) for x in call.leaves)
        key = call.key, None if concrete else call.pins
        found = self._plans.get(key)
        if found is not None and (call.is_traced or not isinstance(found.mesh, AbstractMesh)):
            return found
        with planning.alone():
            return self._planned(call, key)

    def _planned(self, call: Call, key: Any) -> Plan:
        """The plan of a call, made if no thread has made it before."""
        __tracebackhide__ = True
        found = self._plans.get(key)
        if found is None:
            found = self._made(call, self._known)
            if not any(found is p for p in self._known):
                self._known.append(found)
            self._plans[key] = found
            self._plans.setdefault((call.key, None), found)  # arrays run by what was planned for their shapes first
        if isinstance(found.mesh, AbstractMesh) and not call.is_traced:
            found = self._replaced(found, attach_devices(found))
        return found

    def _made(self, call: Call, known: Sequence[Plan], margin: int = 0) -> Plan:
        """The plan of a call, given those that are known, which leaves a margin of the memory limit."""
        __tracebackhide__ = True
        why = f" again: {call.changed(next(reversed(self._plans))[0])}" if known else ""
        name = getattr(self._fun, "__name__", type(self._fun).__name__)
        with progress.shown(f"planning {name}{why}"):
            program = planning.trace_call(self._pure, call, self._settings)
            self._weak[call.key] = program.weak
            base = known[0] if known else self._like._first("like=") if self._like is not None else None
            return planning.make(program, call, self._settings, base, known, margin)

    def _replaced(self, plan: Plan, other: Plan) -> Plan:
        """Another plan, in place of one that was made before."""
        self._known = [other if p is plan else p for p in self._known]
        self._plans = {k: other if p is plan else p for k, p in self._plans.items()}
        return other

    def _fitting(self, call: Call) -> Runner:
        """What runs a call. A plan that fits, but as compiled does not, is made again; one that was given is not."""
        __tracebackhide__ = True
        plan = self._plan(call)
        runner = self._runner(plan, call)
        if not plan.fits or self._settings.saved is not None or runner.peak <= plan.memory_limit:
            return runner
        with planning.alone():
            found, margin = corrected(
                plan.function,
                plan,
                plan.memory_limit,
                needs=lambda p: self._runner(p, call).peak,
                predicted=lambda p: p.predicted.peak_bytes,
                again=lambda margin: self._made(call, [p for p in self._known if p is not plan], margin),
            )
            same = found if found.margin == margin else replace(found, margin=margin)
            return self._runner(self._replaced(plan, same), call)

    def _first(self, what: str) -> Plan:
        __tracebackhide__ = True
        if not self._known:
            raise PlanError(f"{what}: there is no plan yet; call .plan(...) with the shapes of the arguments first")
        return self._known[0]

    def _runner(self, found: Plan, call: Call) -> Runner:
        __tracebackhide__ = True
        weak = self._weak[call.key]
        return self._runners.get((id(found), weak)) or self._runners.setdefault((id(found), weak), Runner(found, weak))

    def _related(self, fun: Callable[..., Any], in_shardings: Any) -> AutoSharded:
        """Another function on the same mesh: the forward (static arguments as here) or the backward pass of this
        one."""
        jit = self._settings.jit if in_shardings is None else JitSettings()
        settings = replace(
            self._settings,
            jit=replace(jit, donate_argnums=None, donate_argnames=None),
            in_shardings=self._settings.in_shardings if in_shardings is None else in_shardings,
            out_shardings=None,
            saved=None,
            ties=None,
        )
        return AutoSharded(fun, settings, self if self._known and in_shardings is None else None)


@functools.cache
def _exclude_our_frames() -> None:
    """Lines in plans and errors are the user's; called once, and not at import, which touches nothing global."""
    source_info_util.register_exclusion(str(Path(__file__).parent))


def _from_host(x: Any, leaf: Leaf, mesh: Mesh) -> jax.Array:
    """A host array in the layout of a leaf; dimensions that the mesh does not divide (a short last batch) stay
    whole."""
    sizes = MeshAxes.of(mesh)

    def layout(shape: tuple[int, ...]) -> NamedSharding:
        dims = zip(shape, leaf.layout.dims, strict=True)
        return NamedSharding(mesh, Layout(tuple(axes if n % sizes.size(axes) == 0 else () for n, axes in dims)).spec())

    x = np.asarray(x, abstract(x).dtype) if not isinstance(x, jax.Array) else x
    if layout(x.shape).is_fully_addressable or not processes.is_local(x):
        return jax.device_put(x, layout(x.shape))
    return processes.from_parts(x, leaf.shape, layout)


def _mesh(mesh: Any) -> Mesh | AbstractMesh | tuple[Any, ...] | None:
    __tracebackhide__ = True
    if mesh is None or isinstance(mesh, (Mesh, AbstractMesh)):
        if mesh is not None and mesh.empty:
            raise ValueError("mesh= has no devices")
        return mesh
    if not isinstance(mesh, (Sequence, np.ndarray)) or isinstance(mesh, str):
        raise TypeError(
            f"mesh= takes a jax.sharding.Mesh or a sequence of devices, not {mesh!r} of type {type(mesh).__name__}"
        )
    devices = tuple(np.asarray(mesh, object).flat)
    if not devices or not all(hasattr(d, "device_kind") for d in devices):
        raise ValueError(f"mesh= needs at least one device, and devices only; got {mesh!r}")
    if len(set(devices)) != len(devices):
        raise ValueError("mesh= names a device twice")
    return devices


def _memory_limit(limit: Any) -> float | None:
    __tracebackhide__ = True
    if limit is None:
        return None
    try:
        return size_of(limit)
    except ValueError as error:
        raise ValueError(f"memory_limit= of a device: {error}") from None
