"""What a device does in one step of a planned graph, as tasks with dependencies: arithmetic, collectives, loops.

    0 compute      dot_general
    1 collectives  all_reduce     after 0
    2 compute      tanh           after 1

Kernels compute, moves and the collectives inside rules go over the network, copies of what is on the host over its
link. What takes no time is no task: its consumers wait for what it would have waited for. Collectives that the compiler
combines are one (`combining`). A loop runs its first iteration in the open and the others as one task: XLA awaits in an
iteration what was started in it, so all later ones take the same time.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from unity_jax.cost.compute import copy_seconds, fill_seconds
from unity_jax.cost.program import host_seconds, kernel_seconds, local_bytes
from unity_jax.machine.machine import Machine
from unity_jax.machine.network import Matrix
from unity_jax.network.collectives import Collective, op_collectives, serves
from unity_jax.network.communication import collective_seconds, groups_of
from unity_jax.network.reshard import turning_seconds
from unity_jax.pcg.graph import Graph, Op, Tensor, trips
from unity_jax.pcg.loops import Scan, prefetched
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.pcg.parallel import HOST
from unity_jax.xla.aliases import base_tensors
from unity_jax.xla.collective_combiner import Sent, Waits, across_layers, in_one, kind, together
from unity_jax.xla.convert_mover import sent
from unity_jax.xla.kernel import Kernel
from unity_jax.xla.op_classes import PRODUCTS
from unity_jax.xla.targets import target_of
from unity_jax.xla.traffic import Traffic

COMPUTE, COLLECTIVES, HOST_TO_DEVICE, DEVICE_TO_HOST = range(4)
"""Streams, numbered as in `machine.contention.STREAMS`."""


@dataclass(frozen=True, eq=False, slots=True)
class Task:
    """One piece of work.

    **Fields:** `stream`: what it runs on; `seconds` that it takes alone; `after`: positions of the tasks that must end
    first; `levels`: bits of the network levels that it occupies; `blocking`: it occupies the compute stream as well (a
    collective that the compiler does not start and await apart); `op`: what it computes, or the op that it serves;
    `collective`: kind, axes and bytes; `parts`: the collectives that are combined in it. `body` and `runs`: a loop's
    tasks and how often they are run; `seconds` then means nothing. `times`: for how many it stands, one of each layer
    (`cost.layers`); `enters` and `leaves`: the numbers of what it reads that enters a layer of those, and of what it
    makes that leaves one for the next. A task of no seconds is a point in time that others wait for.
    """

    stream: int
    seconds: float
    after: tuple[int, ...]
    op: Op | None = None
    levels: int = 0
    blocking: bool = False
    collective: Collective | None = None
    parts: tuple[Task, ...] = ()
    body: tuple[Task, ...] = ()
    runs: int = 0
    times: int = 1
    enters: tuple[int, ...] = ()
    leaves: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """`all-gather over x`, `x 95 iterations` or the op's label."""
        if self.collective is not None:
            return f"{self.collective.kind.replace('_', '-')} over {','.join(self.collective.axes)}"
        label = self.op.label if self.op is not None else ""
        return f"{label} x {self.runs}" if self.body else label

    @property
    def source(self) -> str:
        """The user's line; of a collective that of the op it serves."""
        return self.op.source if self.op is not None else "output"


def tasks(graph: Graph, traffic: Traffic, mesh: MeshAxes, machine: Machine) -> tuple[Task, ...]:
    """The tasks of a planned graph, a task for each kernel and each collective, in an order in which they can run.

    **Arguments:** `traffic`: of this graph.
    """
    return _Writer(mesh, machine, traffic).run(graph)


class _Writer:
    def __init__(self, mesh: MeshAxes, machine: Machine, traffic: Traffic, loop: Op | None = None) -> None:
        self.mesh, self.machine, self.traffic = mesh, machine, traffic
        self.target = target_of(machine.device)
        self.loop = loop  # of which it writes a body
        self.sent: dict[Op, float] = {}
        self.times = 1  # of what is written now
        self.enters: defaultdict[int, set[int]] = defaultdict(set)  # of tasks the numbers of what they read that enters
        self.leaves: defaultdict[int, set[int]] = defaultdict(set)  # a layer, and of what they make that leaves it
        self.tasks: list[Task] = []
        self.alike: list[Sent] = []  # the collectives that may be combined
        self.ready: dict[Tensor, tuple[int, ...]] = {}  # the tasks to wait for; inputs and constants need none

    def run(self, graph: Graph) -> tuple[Task, ...]:
        served, copied = serves(graph), self._copied(graph)
        self.sent = sent(graph) if self.target.moves_casts else {}
        if self.loop is not None and self.loop.name == "scan" and self.target.fusing.updates_apart:
            self._slices(self.loop, graph)
        for kernel in self.traffic.kernels[graph]:
            root, after = kernel.root, self._wait((*kernel.reads, *kernel.waits))
            self.times, before = root.times, len(self.tasks)
            if root.bodies:
                done = self._loop(root, after)
            elif root.name in HOST and len(kernel.ops) == 1:
                done = self._copies(graph, root, after)
            elif root.move is not None and len(kernel.ops) == 1:
                done = self._collectives(root, served.get(root), self._join(after), root in copied)
            else:
                for op in kernel.ops:
                    if op.shard is not None and op.shard.rule.inner is not None:
                        after = self._collectives(op, op, after)
                after = self._reads([t for t in kernel.reads if t.on_host], kernel, after)
                done = self._compute(kernel_seconds(kernel, self.machine.device), after, root)
            if root in copied:
                seconds = copy_seconds(self.machine.device, self._local(root.outputs[0]), root.outputs[0].itemsize)
                done = self._compute(copied[root] * seconds, done, root)
            for t in kernel.writes:
                self.ready[t] = done
            self._crosses(kernel, range(before, len(self.tasks)), done)
        if self.loop is not None and self.loop.name == "scan":
            self._iterates(self.loop, graph)
        self._combine([i for t in graph.outputs for i in self.ready.get(t, ())])
        for i in {**self.enters, **self.leaves}:
            self.tasks[i] = replace(self.tasks[i], enters=tuple(self.enters[i]), leaves=tuple(self.leaves[i]))
        return tuple(self.tasks)

    def _crosses(self, kernel: Kernel, own: Iterable[int], done: Sequence[int]) -> None:
        """Note what a kernel, with these tasks, reads and makes that crosses layers of which one stands for several. A
        result that a kernel of another layer makes is there when it can be computed."""
        for op in (op for op in kernel.ops if op.times > 1):
            for i in own:
                self.enters[i].update(t.enters for t in (*op.inputs, *kernel.waits) if t.enters)
            for t in (t for t in op.outputs if t.leaves):
                for i in done if kernel.root.times > 1 and t in kernel.writes else self._behind(op, kernel):
                    self.leaves[i].add(t.leaves)

    def _behind(self, op: Op, kernel: Kernel) -> Iterator[int]:
        """The tasks that make what an op reads, other ops of its kernel left out."""
        made = {t: op for op in kernel.ops for t in op.outputs}
        reads = [*op.inputs]
        for t in reads:  # grows
            yield from self.ready.get(t, ())
            reads += made[t].inputs if t in made and t not in self.ready else ()

    def _combine(self, ends: Sequence[int]) -> None:
        """One collective in place of each group that the compiler makes one of, where the last of them was."""
        if not self.alike:
            return
        waits, threshold = Waits(self.alike, [t.after for t in self.tasks], ends), self.target.combined_bytes
        across = across_layers(self.alike, waits, self.enters, self.leaves)
        for group in together(self.alike, waits, threshold):
            parts = tuple(self.tasks[s.at] for s in group)
            last, first = max(s.at for s in group), group[0].of
            layers = in_one(group, threshold, parts[0].times) if any(s.at in across for s in group) else 1.0
            if len(parts) == 1 and layers == 1.0:
                continue
            nbytes = sum(s.of.bytes for s in group)
            seconds = collective_seconds(self.machine, self.mesh, first.kind, layers * nbytes, first.axes) / layers
            whole = replace(first, bytes=nbytes, seconds=seconds)
            awaited = tuple(dict.fromkeys(i for part in parts for i in part.after))
            for s in group:
                self.enters[last] |= self.enters[s.at]
                self.tasks[s.at] = Task(COMPUTE, 0.0, (last,), times=self.tasks[s.at].times)
            combined = parts if len(parts) > 1 else ()
            self.tasks[last] = replace(parts[-1], seconds=seconds, after=awaited, collective=whole, parts=combined)

    def _iterates(self, scan: Op, graph: Graph) -> None:
        """What an iteration of a scan takes besides its kernels on XLA:GPU: one that counts it, and copies of what is
        stacked and no kernel computes as it updates the stack."""
        self.times = 1
        if self.target.counter_kernel:
            self._compute(self.machine.device.kernel_overhead, (), scan)
        if self.target.fusing.updates_apart:
            base = base_tensors(graph)
            updated = {t for kernel in self.traffic.kernels[graph] if kernel.updates for t in kernel.writes}
            for t in dict.fromkeys(graph.outputs[Scan.of(scan.params).stacked]):
                if base.get(t, t) not in updated and t.literal is None and not t.on_host:
                    self._copy(t, self._wait([base.get(t, t)]), scan)

    def _slices(self, scan: Op, graph: Graph) -> None:
        """Copies of an iteration's part of what matmuls read, which take whole arrays."""
        base, parts = base_tensors(graph), {*graph.inputs[Scan.of(scan.params).sliced]}
        taken = (base.get(t, t) for kernel in self.traffic.kernels[graph] for t in self._operands(kernel))
        for t in dict.fromkeys(taken):
            if t in parts:
                self.ready[t] = self._copy(t, (), scan)

    def _operands(self, kernel: Kernel) -> Iterable[Tensor]:
        """What a matmul takes as it is: the operands, and what it adds to."""
        if kernel.root.name not in PRODUCTS:
            return ()
        return (t for op in kernel.ops if op is kernel.root or kernel.root.outputs[0] in op.inputs for t in op.inputs)

    def _copy(self, t: Tensor, after: tuple[int, ...], op: Op) -> tuple[int, ...]:
        return self._compute(copy_seconds(self.machine.device, self._local(t), t.itemsize), after, op)

    def _compute(self, seconds: float, after: tuple[int, ...], op: Op) -> tuple[int, ...]:
        return self._add(Task(COMPUTE, seconds, after, op)) if seconds else self._join(after)

    def _copies(self, graph: Graph, op: Op, after: tuple[int, ...]) -> tuple[int, ...]:
        """What comes from the host comes once its first reader has all else: before that there may be no room.

        In a loop that does not pipeline copies, what goes there is awaited before the next kernel, and so is what comes
        an iteration ahead, but for the last of these.
        """
        seconds = host_seconds(op.inputs, self.mesh, self.machine.device)
        awaited = self.loop is not None and not self.target.pipelines_copies
        if op.name == "to_host":
            return self._add(Task(DEVICE_TO_HOST, seconds, after, op, blocking=awaited))
        ahead = [] if self.loop is None else prefetched(self.loop)
        if op in ahead:
            early = ahead.index(op) < len(ahead) - self.target.copies_beside
            self._add(Task(HOST_TO_DEVICE, seconds, (), op, blocking=awaited and early))
            return ()
        readers = (k for k in self.traffic.kernels[graph] if op.outputs[0] in k.reads)
        after = self._wait(t for k in itertools.islice(readers, 1) for t in k.reads)
        return self._add(Task(HOST_TO_DEVICE, seconds, after, op))

    def _reads(self, hosted: Sequence[Tensor], kernel: Kernel, after: tuple[int, ...]) -> tuple[int, ...]:
        """What a kernel waits for the link that reads arguments on the host: it runs, and nothing else does."""
        if not hosted:
            return after
        device = self.machine.device
        waits = max(0.0, host_seconds(hosted, self.mesh, device) - kernel_seconds(kernel, device))
        return self._add(Task(HOST_TO_DEVICE, waits, after, kernel.root, blocking=True))

    def _local(self, t: Tensor) -> tuple[int, ...]:
        assert t.layout is not None
        return t.layout.local_shape(t.shape, self.mesh)

    def _copied(self, graph: Graph) -> dict[Op, int]:
        """All-gathers that make results of the program, and what XLA:TPU copies for each: the result, which is not
        written where it belongs, and the argument that it replaces."""
        if not self.target.gathers_apart:
            return {}
        outputs, inputs = set(graph.outputs), {(t.shape, t.dtype, t.layout) for t in graph.inputs}
        made = ((op, op.move, op.outputs[0]) for op in graph.ops if outputs.intersection(op.outputs))
        return {
            op: 1 + ((t.shape, t.dtype, t.layout) in inputs)
            for op, move, t in made
            if move is not None and move.collective == "all_gather"
        }

    def _wait(self, tensors: Iterable[Tensor]) -> tuple[int, ...]:
        found = dict.fromkeys(i for t in tensors for i in self.ready.get(t, ()))
        return tuple(found)

    def _add(self, task: Task) -> tuple[int, ...]:
        self.tasks.append(task if task.times == self.times else replace(task, times=self.times))
        return (len(self.tasks) - 1,)

    def _join(self, after: tuple[int, ...]) -> tuple[int, ...]:
        """The same point in time as one task, so that chains of ops without time do not multiply what they wait for."""
        return after if len(after) < 2 else self._add(Task(COMPUTE, 0.0, after))

    def _collectives(self, op: Op, served: Op | None, after: tuple[int, ...], last: bool = False) -> tuple[int, ...]:
        """The collectives of a move, or of a rule before its local program, one after the other.

        **Arguments:** `last`: what comes is a result of the program, and XLA:TPU does nothing beside it.
        """
        device, move, turned, alike = self.machine.device, op.move, 0.0, None
        if move is not None:
            alike = kind(op, self.target)
            turned = turning_seconds(move, op.inputs[0].shape, op.inputs[0].dtype, self.mesh, device) / 2
        for c in op_collectives(op, self.mesh, self.machine):
            part = self.sent.get(op, 1.0)
            if seconds := c.seconds * part:
                blocking = last or c.kind not in device.asynchronous
                levels = crossed(self.machine, self.mesh, c.axes)
                after = self._compute(turned, after, op)
                after = self._add(Task(COLLECTIVES, seconds, after, served, levels, blocking, c))
                if alike is not None:
                    size = local_bytes(op.outputs[0], self.mesh) * part
                    (at,) = after
                    of = replace(c, bytes=round(c.bytes * part))
                    self.alike.append(Sent(alike, size, at, of, self.times))
                after = self._compute(turned, after, op)
        return after

    def _loop(self, op: Op, after: tuple[int, ...]) -> tuple[int, ...]:
        """A loop starts when all its operands are there, and all its results are there when it ends. The arrays that a
        scan stacks its results in are filled with zeros before."""
        if op.name == "scan":
            stacks = (t for t in op.outputs[Scan.of(op.params).stacked] if not t.on_host)
            seconds = sum(fill_seconds(self.machine.device, self._local(t), t.itemsize) for t in stacks)
            after = self._compute(seconds, after, op)
            if copied := [copy.outputs[0] for copy in prefetched(op)]:
                seconds = host_seconds(copied, self.mesh, self.machine.device)
                after = self._add(Task(HOST_TO_DEVICE, seconds, after, op))
        for body in op.bodies:
            inside = _Writer(self.mesh, self.machine, self.traffic, op).run(body)
            after = self._once(inside, self._join(after))
            if trips(op) > 1 and inside:
                levels = functools.reduce(lambda bits, task: bits | task.levels, inside, 0)
                after = self._add(Task(COMPUTE, 0.0, after, op, levels, body=inside, runs=trips(op) - 1))
        return after

    def _once(self, inside: Sequence[Task], start: tuple[int, ...]) -> tuple[int, ...]:
        """One iteration among the other tasks."""
        first = len(self.tasks)
        for task in inside:
            after = tuple(first + i for i in task.after) or start
            self.tasks.append(replace(task, after=after, times=self.times * task.times))
        awaited = {i for task in inside for i in task.after}
        ends = tuple(first + i for i in range(len(inside)) if i not in awaited)
        return self._join(ends or start)


@functools.lru_cache(maxsize=4096)
def crossed(machine: Machine, mesh: MeshAxes, axes: tuple[str, ...]) -> int:
    """Bits of the network levels (bit i: level i) that some group over `axes` has members apart on; a network without
    levels is a single one."""
    groups = groups_of(machine, mesh, axes)
    if isinstance(machine.network, Matrix):
        return 1
    bits = 0
    for i, level in reversed(list(enumerate(machine.network))):
        positions = groups % level.size
        bits |= int((positions != positions[:, :1]).any()) << i
        groups = groups // level.size
    return bits
