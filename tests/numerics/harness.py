"""Oracle for whole programs: run a function under any plan on CPU devices and compare with the unsharded run.

    case = Case.of(fn, (x, y))
    plan = case.sample((2, 4), seed=0)                 # or case.planned(axes, decisions)
    assert case.differences(case.run(plan)) == []

The numerics contract: in float64 every result agrees within 1e-9 of its largest magnitude; keys and integers bit by
bit.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from unity_jax import _compat
from unity_jax.lower.compile import spmd
from unity_jax.lower.fills import filled_late
from unity_jax.lower.host import sharding
from unity_jax.machine.machine import Machine
from unity_jax.network.reshard import Resharder
from unity_jax.pcg.graph import Graph, nested
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.program import Program, trace
from unity_jax.rewrite.estimate import Seconds
from unity_jax.rewrite.library import applicable
from unity_jax.rewrite.record import with_graph
from unity_jax.rewrite.sites import Finder, rewrite
from unity_jax.search.assemble import Decisions, assemble
from unity_jax.search.implementing import implemented
from unity_jax.search.options import SearchOptions
from unity_jax.search.rule_cache import RuleCache
from unity_jax.search.sample import sample

TOLERANCE = 1e-9


@dataclasses.dataclass(frozen=True)
class Difference:
    """One result that differs: its path, and the largest error relative to its largest magnitude."""

    path: str
    error: float

    def __str__(self) -> str:
        return f"{self.path}: {self.error:.2e}"


@dataclasses.dataclass(frozen=True, eq=False)
class Planned:
    """A planned graph on a mesh, with what it was made from, and the rules that rewrote the program before."""

    axes: MeshAxes
    decisions: Decisions
    graph: Graph
    rewrites: tuple[str, ...] = ()

    @property
    def mesh(self) -> Mesh:
        devices = np.array(jax.devices()[: self.axes.num_devices]).reshape(self.axes.sizes)
        return Mesh(devices, self.axes.names)


@dataclasses.dataclass(eq=False)
class Case:
    """A function with arguments, traced, and its unsharded results."""

    program: Program
    flat: list[Any]  # the program's inputs
    want: list[Any]
    rules: RuleCache = dataclasses.field(default_factory=RuleCache)

    @staticmethod
    def of(fn: Callable[..., Any], args: Sequence[Any], donate: Sequence[int] = ()) -> Case:
        """Trace and run `fn`; donated arguments are tied to results, nothing is really donated."""
        case = Case.traced(fn, args, donate)
        case.want = jax.tree.leaves(jax.jit(fn)(*args))
        return case

    @staticmethod
    def traced(fn: Callable[..., Any], args: Sequence[Any], donate: Sequence[int] = ()) -> Case:
        """Trace `fn` and do not run it."""
        program = trace(fn, args, {}, donate_argnums=tuple(donate))
        return Case(program, [*program.constants, *jax.tree.leaves(tuple(args))], [])

    def sample(self, sizes: tuple[int, ...], seed: int, machine: str = "cpu") -> Planned:
        """A random plan."""
        axes = MeshAxes(tuple("xyz"[: len(sizes)]), sizes)
        decisions = sample(self.program.graph, self.program.ties, axes, self.rules, random.Random(seed))
        return self.planned(axes, decisions, machine)

    def rewritten(self, rng: random.Random, steps: int) -> tuple[Case, list[str]]:
        """The same function with some places of its graph rewritten by rules of the library, and the rules' names."""
        program, done = self.program, []
        for _ in range(steps):
            path, graph, _ = rng.choice(list(nested(program.graph)))
            finder = Finder(graph, lambda graph: Seconds(1.0))
            places = list(finder.places(applicable()))
            made = rewrite(finder, rng.choice(places)) if places else None
            if made is not None:
                program = program.rewritten(with_graph(program.graph, path, made[0]), ())
                done.append(made[2].rule)
        return Case(program, self.flat, self.want), done

    def implemented(self) -> Case:
        """The same function with all that has another implementation by that."""
        options = SearchOptions(attention="kernel", loops="kernel", bags="rows")
        return Case(implemented(self.program, Machine.preset("cpu:2"), options), self.flat, self.want)

    def planned(self, axes: MeshAxes, decisions: Decisions, machine: str = "cpu") -> Planned:
        """The plan of these decisions; `machine` decides which path each change of layout takes, and whether loops fill
        what they write into as on GPUs."""
        resharder = Resharder(Machine.preset(f"{machine}:{axes.num_devices}"), axes)
        program = self.program
        graph = assemble(program.graph, decisions, resharder, self.rules, program.on_host, program.spilled)
        return Planned(axes, decisions, graph if machine == "cpu" else filled_late(graph))

    def run(self, plan: Planned) -> list[Any]:
        """The results of the program under a plan, on the first CPU devices."""
        mesh = plan.mesh
        inputs = [
            jax.device_put(x, sharding(mesh, t.layout, t.on_host))
            for x, t in zip(self.flat, plan.graph.inputs, strict=True)
        ]
        results = [sharding(mesh, t.layout, True) if t.on_host else None for t in plan.graph.outputs]
        return jax.jit(spmd(plan.graph, mesh), out_shardings=results if any(results) else None)(inputs)

    def differences(self, got: Sequence[Any], floor: float = 0.0, tolerance: float = TOLERANCE) -> list[Difference]:
        """The results that disagree."""
        return [d for d in self.errors(got, floor) if not d.error <= tolerance]

    def errors(self, got: Sequence[Any], floor: float = 0.0) -> list[Difference]:
        """The error of every result; `floor`: the least magnitude that errors are measured against."""
        return errors(self.program.out_paths, self.want, got, floor)


def errors(paths: Sequence[str], want: Sequence[Any], got: Sequence[Any], floor: float = 0.0) -> list[Difference]:
    """The error of every leaf."""
    return [Difference(p, error(w, g, floor)) for p, w, g in zip(paths, want, got, strict=True)]


def error(want: Any, got: Any, floor: float = 0.0) -> float:
    """The largest error of a floating-point leaf relative to its largest magnitude; of any other, 0 if equal else inf.

    Not-a-number and infinities must stand in the same places.
    """
    if want.shape != got.shape or want.dtype != got.dtype:
        return np.inf
    if _compat.is_key(want.dtype):
        want, got = jax.random.key_data(want), jax.random.key_data(got)
    want, got = np.asarray(want), np.asarray(got)
    if want.dtype.kind not in "fc":
        return 0.0 if np.array_equal(want, got) else np.inf
    finite = np.isfinite(want)
    if not np.array_equal(want[~finite], got[~finite], equal_nan=True):
        return np.inf
    wide = np.complex128 if want.dtype.kind == "c" else np.float64
    want, got = want[finite].astype(wide), got[finite].astype(wide)
    if not want.size:
        return 0.0
    scale = max(floor, float(np.abs(want).max()))
    worst = float(np.abs(want - got).max())
    return 0.0 if worst == 0 else worst / scale if scale else np.inf
