"""What a plan says and decides: its leaves and their layouts, its predictions and its graph, as an immutable value.

`plan.plan.Plan` adds what is made of it: text, a page, a file, a verification.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax
from jax.sharding import NamedSharding

from unity_jax import objects
from unity_jax.cost.tasks import tasks
from unity_jax.cost.timeline import Timeline, simulate
from unity_jax.errors import PlanError
from unity_jax.implement.record import Implementation
from unity_jax.lower.host import sharding
from unity_jax.machine.machine import Machine
from unity_jax.network.collectives import Collective
from unity_jax.pcg.graph import Graph
from unity_jax.pcg.layout import Layout
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.pins import Key
from unity_jax.plan.record import Record
from unity_jax.program import Program
from unity_jax.residuals.record import Saving
from unity_jax.rewrite.packing import Group, Packed
from unity_jax.rewrite.record import Rewrite
from unity_jax.search.candidate import NO_PINS, Pins
from unity_jax.search.searched import UNKNOWN, Searched
from unity_jax.xla.traffic import Traffic

T = TypeVar("T")


@dataclass(frozen=True)
class Predicted:
    """What the machine model expects of one step, per device.

    **Fields:** `step_seconds`, by simulation (`cost.timeline`), is the sum of `compute_seconds`, what the arithmetic
    takes alone, and `exposed_communication_seconds`, by how much communication lengthens the step: arithmetic waits for
    it or is slowed beside it. `peak_bytes` of memory; `flops`; `collectives`, in order of total time;
    `lower_bound_seconds`: the arithmetic of every op, split as well as it can be; no plan of the program, as rewritten,
    takes less for this mesh on this machine (0 if unknown).
    """

    step_seconds: float
    compute_seconds: float
    exposed_communication_seconds: float
    peak_bytes: int
    flops: float
    collectives: tuple[Collective, ...]
    lower_bound_seconds: float


@dataclass(frozen=True)
class Leaf:
    """One argument or result: path, shape, dtype name, layout, and the bytes that one device holds, in its own memory
    or `on_host`."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    layout: Layout
    bytes: int
    on_host: bool = False

    def __str__(self) -> str:
        return self.layout.typeof(self.shape, self.dtype) + " on the host" * self.on_host


@dataclass(frozen=True, eq=False)
class PlanValue:
    """How one function runs on one mesh.

    **Fields:** `mesh`: a `Mesh`, or an `AbstractMesh` for a plan made without devices; `order`: the network position of
    each mesh position, row-major (empty: the network's own order); `machine`: the machine's name; `unequal`: where its
    devices differ, which of them pace the step;
    `memory_limit` in bytes per device; `predicted`; `inputs` and `outputs`: every leaf with its layout; `label`:
    `"search"`, or the expert whose plan won; `replicated`: large ops that every device computes in full, each with its
    line and the reason (`plan.whole`); `rewrites`: how the program was rewritten first, and what each rewrite saves;
    `implementations`: what runs by another implementation than it was written in, such as a kernel, before that;
    `packed`: arguments, by position, that are held as one array from step to step, though the caller sees each by
    itself; `searched`: what the plan was chosen from; `program_hash`; `machine_hash`, of all that is known of the
    machine; `saving`: what was done to need less memory, where it was short, or to use what is left; `margin`: bytes of
    the limit that the compiler needs beyond the prediction, where a plan was corrected by it (`correction`).
    """

    mesh: Any
    machine: str
    memory_limit: float
    predicted: Predicted
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    largest: tuple[tuple[str, int], ...]
    label: str
    replicated: tuple[str, ...]
    program_hash: str
    function: str
    record: Record
    order: tuple[int, ...] = ()
    unequal: str = ""
    rewrites: tuple[Rewrite, ...] = ()
    packed: tuple[Packed, ...] = ()
    searched: Searched = UNKNOWN
    machine_hash: str = ""
    saving: tuple[Saving, ...] = ()
    margin: int = 0
    implementations: tuple[Implementation, ...] = ()
    # What a plan knows once it has met its function; a file holds none of it. `graph` is that of `stored`: the program
    # over the state as it is held, which is `program` where nothing is packed.
    program: Program | None = field(default=None, repr=False)
    stored: Program | None = field(default=None, repr=False)
    graph: Graph | None = field(default=None, repr=False)
    priced_on: Machine | None = field(default=None, repr=False)
    pins: Pins = field(default=NO_PINS, repr=False)

    def is_for(self, machine: Machine) -> bool:
        """Whether the figures of this plan are those of a machine; older files do not say, and are priced again."""
        return self.machine_hash == machine.hash

    @property
    def axes(self) -> MeshAxes:
        """The mesh axes as they lie on the network."""
        return MeshAxes.of(self.mesh, self.order)

    @property
    def fits(self) -> bool:
        """Whether the predicted peak is within the memory limit, what the compiler needs beyond it included."""
        return self.predicted.peak_bytes <= self.within

    @property
    def within(self) -> float:
        """Bytes per device that the predicted peak may take."""
        return self.memory_limit - self.margin

    @property
    def pcg(self) -> Graph:
        """The planned Parallel Computation Graph: `print(plan.pcg)` shows every op and every collective with
        layouts."""
        if self.graph is None:
            raise PlanError(
                "a loaded plan has no graph until it meets its function: run auto_shard(step, plan=plan), or call "
                "auto_shard(step, plan=plan).plan(*args)"
            )
        return self.graph

    @property
    def wholes(self) -> list[tuple[Group, Layout]]:
        """What is packed of the arguments, and how the arrays that hold it lie: the last inputs of the graph."""
        assert self.stored is not None
        groups, inputs = self.stored.entering, self.pcg.inputs
        lie = [t.layout for t in inputs[len(inputs) - len(groups) :]]
        return [(group, layout) for group, layout in zip(groups, lie, strict=True) if layout is not None]

    @property
    def in_shardings(self) -> Any:
        """A `NamedSharding` per argument leaf: a tuple over positional arguments, as `jax.jit` takes it.

        An `nnx` object holds shardings for arrays: `nnx.state` of it is what `jax.jit` takes.
        For a loaded plan that has not met its function: a dict from path to sharding.
        """
        shardings = [self.sharding(leaf) for leaf in self.inputs]
        if self.program is None:
            return {leaf.path: s for leaf, s in zip(self.inputs, shardings, strict=True)}
        given = jax.tree_util.tree_unflatten(self.program.in_tree, shardings[len(self.program.constants) :])
        args, kwargs = objects.unsplit(given)
        return (args, kwargs) if kwargs else args

    @property
    def out_shardings(self) -> Any:
        """A `NamedSharding` per result leaf, in the structure of the result (a dict by path for a plan without its
        function); an `objects.Outcome` if there are `nnx` objects."""
        shardings = [self.sharding(leaf) for leaf in self.outputs]
        if self.program is None:
            return {leaf.path: s for leaf, s in zip(self.outputs, shardings, strict=True)}
        return objects.unsplit(jax.tree_util.tree_unflatten(self.program.out_tree, shardings))

    def sharding(self, leaf: Leaf) -> NamedSharding:
        """How the array of a leaf lies, and in which memory."""
        return sharding(self.mesh, leaf.layout, leaf.on_host)

    def abstract_state(self, argument: int = 0) -> Any:
        """The positional argument as `ShapeDtypeStruct`s with shardings: what `orbax` restores a checkpoint into, or
        the `nnx` object whose `nnx.state` that is. Raises `PlanError` for a loaded plan that has not met its
        function."""
        program = self.bound()
        inputs = program.graph.inputs
        leaves = [
            jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=self.sharding(leaf))
            for t, leaf in zip(inputs, self.inputs, strict=True)
        ]
        args, _ = objects.unsplit(jax.tree_util.tree_unflatten(program.in_tree, leaves[len(program.constants) :]))
        return args[argument]

    def bound(self) -> Program:
        """The program this plan is for. Raises `PlanError` for a loaded plan that has not met its function."""
        if self.program is None:
            raise PlanError(
                "a loaded plan does not know its function: call auto_shard(step, plan=plan).plan(*args) first"
            )
        return self.program

    def layouts(self) -> dict[Key, Layout]:
        """Layouts of the state, the argument leaves that results replace, as `named`."""
        program = self.bound()
        state = set(program.ties.values())
        return self.named({i: leaf.layout for i, leaf in enumerate(self.inputs) if i in state})

    def named(self, values: Mapping[int, T]) -> dict[Key, T]:
        """Values of argument leaves, given by position, by path, shape and dtype.

        The path is that of the leaf and also, where it is not ambiguous, that below its argument: what functions share.
        """
        program = self.bound()
        n = len(program.constants)
        found: dict[Key, T] = {}
        below: dict[Key, set[T]] = {}
        for i, value in values.items():
            if i >= n:
                leaf = self.inputs[i]
                found[leaf.path, leaf.shape, leaf.dtype] = value
                below.setdefault((program.in_suffixes[i - n], leaf.shape, leaf.dtype), set()).add(value)
        return {**{key: next(iter(which)) for key, which in below.items() if len(which) == 1}, **found}

    def timeline(self) -> Timeline:
        """When every op and every collective of one step runs, as the machine model expects: what `predicted` is from.

        Raises `PlanError` for a loaded plan that has not met its function.
        """
        self.bound()
        machine = self.priced_on
        assert machine is not None
        found = tasks(self.pcg, Traffic.of(self.pcg, machine.device.compiler), self.axes, machine)
        return simulate(found, machine)
