"""Running a plan: arrays are moved to their planned layouts once, then steps feed each other without copies."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from unity_jax import _compat, processes
from unity_jax.aot.compiled import peak_of
from unity_jax.call import Call, abstract, is_concrete
from unity_jax.errors import MemoryLimitError, PlanError
from unity_jax.lower.compile import arguments, jitted, planned
from unity_jax.lower.host import sharding
from unity_jax.lower.parts import Form, Part, as_array
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.plan import Plan
from unity_jax.rewrite.packing import gathered, spread
from unity_jax.text import size


class Runner:
    """A plan as jitted functions of the arguments that are not static (captured arrays first, if there are any).

    **Arguments:** `weak`: whether the type of each result gives way to others; programs of one plan may differ in it.
    """

    def __init__(self, plan: Plan, weak: Sequence[bool] = ()) -> None:
        self.plan, self.weak = plan, weak
        self.program = plan.bound()
        assert plan.stored is not None
        self.stored = plan.stored
        self.donated = [i in self.program.donated for i in range(len(plan.inputs))]
        self._lie: list[Any] = []  # the shardings of the leaves of the last call, if they were the planned ones

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The mesh with its devices."""
        if isinstance(self.plan.mesh, Mesh):
            return self.plan.mesh
        axes = MeshAxes.of(self.plan.mesh)
        raise PlanError(
            f"the plan is for {axes.num_devices} devices ({axes}) and there are {len(jax.devices())}: it can be "
            f"read, saved "
            "and compared, not run here"
        )

    @functools.cached_property
    def shardings(self) -> list[NamedSharding]:
        """One per input of the planned graph."""
        return [sharding(self.mesh, leaf.layout, leaf.on_host) for leaf in self.plan.inputs]

    @functools.cached_property
    def jitted(self) -> Any:
        """The planned function over arrays. Processes with different plans would wait for each other forever."""
        __tracebackhide__ = True
        mine = repr((self.program.hash, self.plan.axes, self.plan.packed, self.plan.record))
        if processes.disagreements([mine], self.mesh):
            raise PlanError(
                f"the processes have different plans of {self.plan.function}: they must run the same code and "
                "versions, with the same machine= and pins"
            )
        return jitted(self.stored, self.plan.pcg, self.mesh, unpacked=not self.forms, weak=self.weak)

    @functools.cached_property
    def peak(self) -> float:
        """Bytes per device that the program needs, as the compiler has it (`aot.compiled.peak_of`). It is compiled for
        arrays in their planned layouts, and not again when they come. Zero on CPUs, which stand for other devices where
        memory is limited: XLA:CPU has other schedules, and merges what is computed again with what was before."""
        __tracebackhide__ = True
        if self.mesh.devices.flat[0].platform == "cpu":
            return 0.0
        args, kwargs = arguments(self.stored, self.plan.pcg, self.mesh, unpacked=not self.forms)
        with jax.sharding.use_abstract_mesh(self._abstract_mesh):
            return peak_of(self.jitted.lower(*args, **kwargs).compile)

    @functools.cached_property
    def _inner(self) -> Any:
        """The planned function as a part of an outer program, whose mesh may have no devices yet."""
        return jax.jit(planned(self.stored, self.plan.pcg, self.plan.mesh, unpacked=True, weak=self.weak))

    @functools.cached_property
    def forms(self) -> list[Form]:
        """How packed state is held; nothing is, over several processes (`lower.parts`)."""
        found: list[Form] = []
        for (packing, places), layout in [] if processes.are_several(self.mesh) else self.plan.wholes:
            shapes = tuple(self.plan.inputs[i].shape for i in places)
            shardings = tuple(self.shardings[i] for i in places)
            found.append(Form(packing, shapes, shardings, NamedSharding(self.mesh, layout.spec())))
        return found

    @functools.cached_property
    def constants(self) -> tuple[Any, ...]:
        """The captured arrays in their planned layouts."""
        n = len(self.program.constants)
        return tuple(self._place(self.program.constants, self.shardings[:n], [False] * n, self.program.input_names[:n]))

    def __call__(self, call: Call) -> Any:
        """Run on arrays."""
        __tracebackhide__ = True
        if not self.plan.fits:
            raise memory_error(self.plan)
        if call.is_traced:
            return self._inside(call)
        self._check_deleted(call)
        self._check_donated(call.leaves)
        n, leaves = len(self.constants), call.leaves
        if call.shardings != self._lie:  # the same objects, mostly
            leaves = self._place(leaves, self.shardings[n:], self.donated[n:], self.program.in_paths)
        self._lie = call.shardings if leaves is call.leaves else []
        if self.forms:
            args, kwargs = self._packed(leaves)
        elif not call.is_plain and Part in call.types:
            args, kwargs = call.dynamic(map(as_array, leaves))
        elif leaves is call.leaves and call.objects is None and not call.static:
            args, kwargs = call.args, call.kwargs
        else:
            args, kwargs = call.dynamic(leaves)
        if n:
            args = (self.constants, *args)
        try:
            with jax.sharding.use_abstract_mesh(self._abstract_mesh):
                found = self.jitted(*args, **kwargs)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise memory_error(self.plan, str(error).splitlines()[0]) from None
        return self._unpacked(found) if self.forms else found

    @functools.cached_property
    def _abstract_mesh(self) -> Any:
        return _compat.auto_mesh(self.mesh).abstract_mesh

    def _check_deleted(self, call: Call) -> None:
        """JAX itself does not always survive that (0.10.2 ends with a segmentation fault)."""
        __tracebackhide__ = True
        if call.is_plain or (call.is_concrete and True not in [x.is_deleted() for x in call.leaves]):
            return
        for leaf, path in zip(call.leaves, self.program.in_paths, strict=True):
            if is_concrete(leaf) and leaf.is_deleted():
                raise ValueError(
                    f"argument {path} has been deleted: it was donated to an earlier call. Pass what that call "
                    f"returned in its place."
                )

    def _check_donated(self, leaves: Sequence[Any]) -> None:
        """As under `jax.jit`, an array whose memory the results may take is no other argument as well."""
        __tracebackhide__ = True
        known = sorted(map(id, leaves))  # in half the time of a set
        if True not in map(operator.eq, known, known[1:]):
            return
        first = len(self.program.constants)
        for i, x in enumerate(leaves):
            same = [j for j, y in enumerate(leaves) if y is x]
            if is_concrete(x) and len(same) > 1 and self.donated[first + i]:
                other = same[0] if same[0] != i else same[1]
                raise ValueError(
                    f"argument {self.program.in_paths[i]} is donated, and argument {self.program.in_paths[other]} is "
                    "the same array: donate neither, or pass a copy (jnp.copy)"
                )

    def _packed(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as they are held. What is not held yet is joined, once, one array after the other."""

        def joined(n: int, parts: list[Any]) -> Any:
            whole = self.forms[n].whole(parts)
            if whole is None:
                whole = self.forms[n].joined([as_array(x) for x in parts])
                if all(self.donated[i] for i in self.stored.entering[n][1]):
                    for x in parts:
                        x.delete()
            return whole

        n = len(self.constants)
        flat = gathered([*self.constants, *leaves], self.stored.entering, joined)
        return tuple(map(as_array, flat[n:])), {}

    def _unpacked(self, found: list[Any]) -> Any:
        """The results as the caller sees them."""
        held = [form for form, p in zip(self.forms, self.stored.packed, strict=True) if p.outputs]
        flat = spread(found, self.stored.leaving, lambda n, k, whole: held[n].part(whole, k))
        return jax.tree_util.tree_unflatten(self.program.out_tree, flat)

    def _inside(self, call: Call) -> Any:
        """Run under a transformation: inside `jit` the outer program decides where arrays live."""
        args, kwargs = call.dynamic(_typed(x) for x in call.leaves)
        if self.program.constants:
            args = (self.program.constants, *args)
        ambient = jax.sharding.get_abstract_mesh()
        if ambient.empty or not _compat.has_explicit_axes(ambient):
            return self._inner(*args, **kwargs)
        specs = [leaf.layout.spec() for leaf in self.plan.outputs]
        auto = jax.sharding.auto_axes(
            self._inner, out_sharding=jax.tree_util.tree_unflatten(self.program.out_tree, specs)
        )
        return auto(*args, **kwargs)

    def _place(
        self, leaves: Sequence[Any], shardings: list[NamedSharding], donated: list[bool], paths: Sequence[str]
    ) -> Sequence[Any]:
        """Every leaf in its planned layout, the same sequence where all lie so: nothing moves once the results of one
        step come back as arguments of the next."""
        away = [i for i, x in enumerate(leaves) if getattr(x, "sharding", None) != shardings[i]]
        if not away:
            return leaves
        placed = list(leaves)
        moved = move([placed[i] for i in away], [shardings[i] for i in away], [paths[i] for i in away])
        for i, new in zip(away, moved, strict=True):
            if donated[i] and is_concrete(placed[i]):
                _free(placed[i], new)
            placed[i] = new
        return placed


def move(leaves: Sequence[Any], shardings: Sequence[NamedSharding], paths: Sequence[str]) -> list[jax.Array]:
    """Leaves as arrays in these layouts. What lies in this process alone must be the same in all the others.

    **Arguments:** `paths`: what to call the leaves. **Raises:** `ValueError` that names one that differs.
    """
    __tracebackhide__ = True
    leaves = [_typed(x) for x in leaves]
    local = [i for i, x in enumerate(leaves) if not shardings[i].is_fully_addressable and processes.is_local(x)]
    if local:
        for i in processes.disagreements([leaves[i] for i in local], shardings[local[0]].mesh):
            raise ValueError(
                f"{paths[local[i]]} is not the same in all processes. If each holds its own part of a batch, pass "
                "what .shard(batch) makes of it"
            )
    others = sorted(set(range(len(leaves))) - set(local))
    moved: list[Any] = [None] * len(leaves)
    for i, new in zip(others, jax.device_put([leaves[i] for i in others], [shardings[i] for i in others]), strict=True):
        moved[i] = new
    for i in local:
        moved[i] = processes.place(leaves[i], shardings[i])
    return moved


def _typed(leaf: Any) -> Any:
    """A leaf as an array of exactly the dtype it was traced with."""
    if isinstance(leaf, (jax.Array, jax.core.Tracer)):
        return as_array(leaf)
    return np.asarray(leaf, abstract(leaf).dtype)


def _free(old: jax.Array, new: jax.Array) -> None:
    """Give up a donated array that has been moved, unless the new one uses its memory (typed keys do not say)."""
    if not _compat.is_key(old.dtype) and not old.is_deleted() and not _buffers(old) & _buffers(new):
        old.delete()


def _buffers(x: jax.Array) -> set[tuple[int, int]]:
    return {(s.device.id, s.data.unsafe_buffer_pointer()) for s in x.addressable_shards}


def memory_error(plan: Plan, said: str = "") -> MemoryLimitError:
    """Why a plan will not run that does not fit, or that ran out of memory: the largest tensors at the peak, and what
    helps.

    **Arguments:** `said`: the device's words, where it ran out of memory.
    """
    top = "\n".join(f"  {size(n):>10}  {name}" for name, n in plan.largest[:5])
    given = sum(leaf.bytes for leaf in plan.inputs if not leaf.on_host)
    alone = f" The arguments alone take {size(given)}." if given > plan.memory_limit else ""
    adds = f" and {size(plan.margin)} more as compiled" if plan.margin > 0 else ""
    needs = f"{plan.function} needs {size(plan.predicted.peak_bytes)} on each device{adds}"
    limit = f"the limit is {size(plan.memory_limit)} (memory_limit=)"
    first = f"{plan.function} ran out of memory: {said}\n{needs} by its plan" if said else needs
    helps = (
        "more devices, a smaller batch, jax.checkpoint around the layers, donating the state (donate_argnums=), or a"
    )
    knob = "smaller memory_limit=, which leaves more for what else is on the device" if said else "larger memory_limit="
    entire = next((line for line in plan.searched.entire if line), "")
    whole = f" {entire} needs the whole batch at once, so that there are no microbatches." if entire else ""
    return MemoryLimitError(
        f"{first}, {limit}.{alone}{whole} The largest tensors at the peak are\n{top}\nWhat helps: {helps} {knob}."
    )
