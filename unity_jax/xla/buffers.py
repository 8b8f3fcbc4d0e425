"""The steps of a planned program and the buffers between them, as XLA makes them of its kernels.

A buffer lives from the step that makes it to the last that reads it, in the layout of its kernels (`storage`):

- XLA:GPU joins constant arrays of one shape into one kernel, the stacks of loops among them: all exist from the first;
- XLA computes gathers from a value (the logits of the labels) with what else reads it, so that they do not hold it;
- what XLA:TPU gathers of parts that are no whole tiles is copied together;
- it gathers no result in the place of a donated argument: what reads the argument reads a copy of it, made at the start
  of the step, and the gathered array is copied there at the end;
- it casts before a loop what all iterations cast of it;
- it fills the stacks of a loop right before the loop;
- it copies what a kernel reads in another layout: what it broadcasts to scatter it, what no product has made and a
  batched product reads (`storage`);
- XLA:GPU gives cuBLAS memory for a matmul, and may leave any matmul to it;
- XLA:GPU makes one of several small collectives; what they take and make is there at the same time (`combining`). What
  one all-reduce sums is copied to one array before, and out of it after;
- an all-reduce takes the place of its operand; XLA:TPU makes one of a reduce-scatter along the lanes of tiles whose
  parts are no whole ones of four bytes (`Storage.scatters`), and combines it with others;
- XLA:GPU reduces gradients of scanned layers an iteration later; the first iteration is then outside the loop
  (`pipelining`);
- what it reduces too much for one kernel takes two.

In which order the steps run, and where the buffers are, is told in `memory`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from unity_jax.cost.estimates import collective_microseconds, kernel_microseconds
from unity_jax.cost.program import kernel_seconds, kernel_work
from unity_jax.machine.machine import Machine
from unity_jax.network.collectives import op_collectives
from unity_jax.ops.indexing import is_scatter
from unity_jax.pcg.graph import Graph, Op, Tensor, trips
from unity_jax.pcg.loops import Scan
from unity_jax.xla.aliases import base_tensors, is_alias
from unity_jax.xla.collective_combiner import Sent, kind, together
from unity_jax.xla.collective_pipeliner import pipelined
from unity_jax.xla.dots import split
from unity_jax.xla.fusion import Kernel
from unity_jax.xla.layout_assignment import Storage
from unity_jax.xla.layout_constraints import is_partition
from unity_jax.xla.op_classes import PRODUCTS, REDUCTIONS, is_batched
from unity_jax.xla.scheduler import BETWEEN, Step
from unity_jax.xla.steps import Steps
from unity_jax.xla.traffic import Traffic

_OWN_BUFFER = frozenset("dot_general conv_general_dilated gather sort all_to_all".split())
"""Kernels that cannot write over what they read."""

_NO_TIME = frozenset(["broadcast_in_dim", "iota"])
"""What takes no time in the eyes of XLA's scheduler where it is a kernel of its own."""

_LOOPS = frozenset(["scan", "while"])


class Buffers(Steps):
    """The steps of a graph and the buffers between them."""

    def __init__(
        self,
        graph: Graph,
        traffic: Traffic,
        storage: Storage,
        machine: Machine,
        replacing: Mapping[Tensor, Tensor] | None = None,
    ) -> None:
        super().__init__(graph, storage, machine, replacing or {})
        self.traffic = traffic
        self.bodies: dict[int, tuple[Buffers, ...]] = {}  # what runs inside a step
        self.products: set[int] = set()  # steps that multiply
        self.sent: list[Sent] = []  # the collectives that may be combined
        self.gathered: dict[Tensor, Tensor] = {}  # what is gathered from a value, before anything else reads it
        self.reduced: dict[Tensor, frozenset[Tensor]] = {}  # what reductions read
        self.lasting: set[int] = set()  # buffers that exist until the end
        self.slots: dict[Tensor, tuple[int, int]] = {}  # of an iteration's results: the stack, and what fills it
        for kernel in traffic.kernels[graph]:
            self._kernel(kernel)
        self._combine()

    def _kernel(self, kernel: Kernel) -> None:
        root = kernel.root
        copied = self._turned(kernel)
        after = [self.maker[t] for t in self._awaited(kernel) if t in self.maker and t not in copied]
        reads = [self.of[t] for t in kernel.reads if t in self.of and t not in copied]
        for t in (t for t in kernel.reads if t in self.inputs):
            if t.shape in self.storage.tables:
                copied[t] = self.storage.rows(t)
            elif t in self.copied:
                copied.setdefault(t, self.storage(t))
            elif t not in copied:
                after.append(self._argument(t))
        for t, size in copied.items():
            after.append(at := self._copied(t, size))
            reads += self.steps[at].makes
        makes = list(kernel.writes)
        if root.name == "scan" and self.target.fills_first:
            stacks = set(root.outputs[Scan.of(root.params).stacked]).intersection(makes)
            makes = [t for t in makes if t not in stacks]
            filled = {t: self._filled(t) for t in sorted(stacks, key=kernel.writes.index)}
            after += filled.values()
            reads += [self.of[t] for t in filled]
            if self.target.peels and (late := pipelined(root, self.traffic.kernels[root.bodies[0]])):
                self._peeled(kernel, makes, late, filled)
                return
        elif self.target.joins_constants and root.name == "broadcast_in_dim" and not kernel.reads and len(makes) == 1:
            self.maker[makes[0]] = self._filled(makes[0])
            return
        self._step(kernel, tuple(dict.fromkeys(after)), tuple(reads), makes)

    def _peeled(
        self, kernel: Kernel, makes: Sequence[Tensor], late: Sequence[Kernel], filled: Mapping[Tensor, int]
    ) -> None:
        """The first iteration of a scan, the loop of the others, and the reductions of the last (`pipelining`)."""
        root, (body,) = kernel.root, kernel.root.bodies
        roles = Scan.of(root.params)
        base, known = base_tensors(body), (self.of, self.maker)
        for inner, outer in zip(body.inputs, root.inputs, strict=True):
            for table in known:
                if (t := self.base.get(outer, outer)) in table:
                    table[inner] = table[t]
        ends = (base.get(t, t) for t in body.outputs[roles.stacked])
        stacks = dict(zip(ends, root.outputs[roles.stacked], strict=True))
        for inner, outer in stacks.items():
            if outer in filled:
                self.slots[inner] = self.of[outer], filled[outer]
        made = {t for k in late for t in k.writes}
        for k in self.traffic.kernels[body]:
            if k not in late:
                self._kernel(k)
        pending = [t for k in late for t in k.reads if t not in made]
        carry = [base.get(t, t) for t in body.outputs[roles.last]]
        others = [self.base.get(t, t) for t in (*root.inputs[roles.constants], *root.inputs[roles.sliced])]
        slots = [t for t in stacks if t in self.slots]
        read = list(dict.fromkeys((*others, *carry, *pending, *slots)))
        loop = replace(kernel, reads=read, writes=[*kernel.writes, *pending])
        after = tuple(dict.fromkeys((*(self.maker[t] for t in loop.reads if t in self.maker), *filled.values())))
        held = [self.of[t] for t in loop.reads if t in self.of] + [self.slots[t][0] for t in slots]
        self._step(loop, after, tuple(dict.fromkeys(held)), makes)
        for k in late:
            self._kernel(k)
        for t in made.intersection(stacks):
            self.maker[stacks[t]] = self.maker[t]
        for t in stacks:
            self.slots.pop(t, None)

    def _step(self, kernel: Kernel, after: tuple[int, ...], reads: tuple[int, ...], makes: Sequence[Tensor]) -> None:
        root = kernel.root
        slots = {t: self.slots[t] for t in makes if t in self.slots}
        move = root.params["move"].kind if "move" in root.params and len(kernel.ops) == 1 else None
        if self._sums(root):
            whole, result = root.inputs[0], root.outputs[0]
            self.of[result] = self.new(whole, self.storage(whole))
            self._collective(kernel, after, reads, (self.of[result],))
            return
        if move in self.target.beside | self.target.combined:
            if self.target.gathers_apart and move == "combine":
                self.of.update((t, self.new(t, self.storage(t))) for t in makes if t in self.replacing)
                self.lasting.update(self.of[t] for t in makes if t in self.replacing)
            buffers = tuple(map(self._buffer, makes))
            gathered = move == "combine" and not self.storage.in_tiles(root.outputs[0], root.params["move"])
            parts = tuple(self.new(t, self.storage(t)) for t in makes) if gathered else buffers
            self._collective(kernel, after, reads, parts)
            if gathered:
                self.maker.update((t, self.add(Step((self.maker[t],), parts, buffers))) for t in makes)
            for t, (slot, filled) in slots.items():
                self.maker[t] = self.add(Step((self.maker[t], filled), (self.of[t], slot), ()))
            return
        makes = [t for t in makes if t not in slots]
        reads, after = (*reads, *(b for b, _ in slots.values())), (*after, *(filled for _, filled in slots.values()))
        turned = [t for t in makes if t.shape in self.storage.tables and t in self.outputs]
        buffers = tuple(self.new(t, self.storage.rows(t)) if t in turned else self._buffer(t) for t in makes)
        own = root.name in _OWN_BUFFER or bool(root.bodies) or ("move" in root.params and move != "reduce")
        own = own or self._normalizes(kernel)
        workspace = sum(self.storage(t) for t in root.outputs if t not in kernel.writes) if root.bodies else 0.0
        if self.target.library and root.name == "dot_general" and root.shard is not None:
            _, *parts = split(root.shard)
            workspace = max(sum(parts), self.storage.device.workspace_bytes)
        loops = self.target.weighs_loops and root.name in _LOOPS
        passes = sum(self.storage(t) for t in (*kernel.reads, *root.outputs)) if loops else 0.0
        cost = kernel_microseconds(kernel, self.machine)
        if not self.target.tabled and root.bodies:
            inner = [k for b in root.bodies for k in self.traffic.kernels[b]]
            cost = trips(root) * sum(kernel_microseconds(k, self.machine) for k in inner)
        if move is not None and (sent := [*op_collectives(root, self.storage.mesh, self.machine)]):
            cost = collective_microseconds(sent, self.machine)
        parts = self._parts(root)
        if parts:
            ends = tuple(b for t, b in zip(makes, buffers, strict=True) if t in root.outputs)
            part = self.new(root.outputs[0], parts)
            beside = (part, *(b for b in buffers if b not in ends))
            first = self.add(Step(after, reads, beside, cost, writes_over=not own))
            self.maker.update((t, first) for t in kernel.writes)
            after, reads, buffers, cost = (first,), (part,), ends, BETWEEN
        step = Step(after, reads, buffers, cost, workspace=round(workspace), writes_over=not own, passes=passes)
        if self.target.at_once and len(kernel.ops) == 1 and root.name in _NO_TIME:
            step = replace(step, at_once=True)
        if self.storage.device.chip_bytes:
            step = self._timed(step, kernel)
        at = self.add(step)
        if root.name in PRODUCTS:
            self.products.add(at)
        self.bodies[at] = tuple(Buffers(b, self.traffic, self.storage, self.machine) for b in root.bodies)
        self.maker.update((t, at) for t in (root.outputs if parts else kernel.writes))
        if root.name in REDUCTIONS:
            self.reduced.update((t, frozenset((*kernel.reads, *makes))) for t in root.outputs)
        if root.name == "gather" and not self._is_sent(root.outputs[0]):
            self.gathered.update((t, kernel.writes[0]) for t in kernel.reads[:1] if t in self.of)
        for t in turned:
            self.maker[t] = self.add(Step((at,), (buffers[makes.index(t)],), (self._buffer(t),)))

    def _collective(
        self, kernel: Kernel, after: tuple[int, ...], reads: tuple[int, ...], makes: tuple[int, ...]
    ) -> None:
        """The step of a collective, or its start and its done."""
        (result,), move = kernel.root.outputs, kernel.root.params["move"]
        # An all-reduce takes the place of its operand; what gathers or scatters needs its operand to the end.
        summed = move.kind == "reduce" or self._sums(kernel.root)
        held = makes if summed else (*reads, *makes)
        seconds = sum(self.size[b] for b in (*reads, *makes)) / self.storage.device.memory_bandwidth
        start = done = self.add(Step(after, reads, makes, writes_over=summed, seconds=seconds))
        if move.kind in self.target.beside:
            done = self.add(Step((start,), held, (), start=start))
        (collective,) = op_collectives(kernel.root, self.storage.mesh, self.machine)
        sent = self.storage(kernel.root.inputs[0] if summed else result)
        alike = kind(kernel.root, self.target, summed)
        self.sent.append(Sent(done if alike is None else alike, sent, start, done, collective))
        self.maker.update((t, done) for t in kernel.writes)

    def _combine(self) -> None:
        """One collective in place of each group that XLA makes one of."""
        place = list(range(len(self.steps)))
        flights: list[tuple[int, int]] = []
        for group in together(self.sent, self.steps, self.ends(), self.target.combined_bytes):
            start, done = max(s.start for s in group), max(s.done for s in group)
            for s in group:
                place[s.start], place[s.done] = start, done
            self._merge(start, [s.start for s in group])
            took = collective_microseconds([s.of for s in group], self.machine)
            if done == start:
                self.steps[start] = replace(self.steps[start], cost=took)
            else:
                self._merge(done, [s.done for s in group])
                self.steps[done] = replace(self.steps[done], start=start, latency=took)
            if self.target.concatenates and len(group) > 1 and self.steps[start].writes_over:
                flights.append((start, done))
        left = [i for i, at in enumerate(place) if i == at]
        number = {i: n for n, i in enumerate(left)}
        at = [number[i] for i in place]
        for n, i in enumerate(left):
            step = self.steps[i]
            after = tuple(dict.fromkeys(at[j] for j in step.after if at[j] != n))
            self.steps[n] = replace(step, after=after, start=None if step.start is None else at[step.start])
        del self.steps[len(left) :]
        self.bodies = {at[i]: inner for i, inner in self.bodies.items()}
        self.products = {at[i] for i in self.products}
        self.maker = {t: at[i] for t, i in self.maker.items()}
        self.left = {at[i]: size for i, size in self.left.items()}
        self._concatenate([(at[start], at[done]) for start, done in flights])

    def _merge(self, at: int, several: Sequence[int]) -> None:
        """Put one step in the place of several alike."""
        steps = [self.steps[i] for i in several]
        after, reads, makes = (
            tuple(dict.fromkeys(itertools.chain.from_iterable(of)))
            for of in zip(*((s.after, s.reads, s.makes) for s in steps), strict=True)
        )
        over, seconds = steps[0].writes_over, sum(s.seconds for s in steps)
        self.steps[at] = Step(after, reads, makes, writes_over=over, seconds=seconds)

    def _concatenate(self, flights: Sequence[tuple[int, int]]) -> None:
        """Copies of what XLA:GPU reduces in one all-reduce: its operands to one array, and its results out of it."""
        copies: dict[int, int] = {}  # of a result, the step that copies it
        dones = {done for _, done in flights}
        for start, done in flights:
            step = self.steps[start]
            whole = [self.new(self.tensors[step.makes[0]], sum(self.size[b] for b in step.makes)) for _ in range(2)]
            copied = self.add(Step(step.after, step.reads, (whole[0],)))
            self.steps[start] = replace(step, after=(copied,), reads=(whole[0],), makes=(whole[1],))
            self.steps[done] = replace(self.steps[done], reads=(whole[1],))
            copies.update((b, self.add(Step((done,), (whole[1],), (b,)))) for b in step.makes)
        late = set(copies.values())
        for i, step in enumerate(self.steps):
            if i not in late and dones.intersection(step.after):
                own = {copies[b] for b in step.reads if b in copies}
                self.steps[i] = replace(step, after=tuple({*step.after} | own))

    def _awaited(self, kernel: Kernel) -> list[Tensor]:
        """The values that are there before a kernel runs."""
        return [*kernel.reads, *kernel.waits, *(self.gathered[t] for t in kernel.reads if t in self.gathered)]

    def _turned(self, kernel: Kernel) -> dict[Tensor, float]:
        """What XLA:TPU copies since a kernel reads it in another layout, and the bytes of the copy. Scatters want rows;
        what they broadcast is part of an array with its long dimension last, the batch of products (DLRM's plans)."""
        root = kernel.root
        if self.target.copies_spread and root.name == "broadcast_in_dim" and self._is_scattered(root.outputs[0]):
            return {t: self.storage(t) for t in kernel.reads if t in self.of}
        found: dict[Tensor, float] = {}
        if self.target.casts_first and root.name == "scan":
            return self._cast(root)
        for t in root.inputs if is_batched(root) else ():
            made_by = self.graph.producer.get(t)
            while made_by in kernel.ops and (is_partition(made_by) or made_by.name == "transpose"):
                (t,) = made_by.inputs
                made_by = self.graph.producer.get(t)
            base, size = self.base.get(t, t), self.storage.multiplied(t)
            if base in kernel.reads and base in self.of and size > self.storage(base):
                found[base] = size
        return found

    def _cast(self, root: Op) -> dict[Tensor, float]:
        """What XLA:TPU casts before a loop since its iterations cast all that they read of it, and the bytes then."""
        found: dict[Tensor, float] = {}
        (body,), roles = root.bodies, Scan.of(root.params)
        base, carried = base_tensors(body), set(body.inputs[roles.carried])
        for t, inner in zip(root.inputs, body.inputs, strict=True):
            used = [op for op in body.ops for x in op.inputs if base.get(x, x) is inner and not is_alias(op)]
            casts = {op.outputs[0].itemsize if op.name == "convert_element_type" else math.inf for op in used}
            if used and inner not in carried and (size := max(casts)) < t.itemsize:
                found[self.base.get(t, t)] = self.storage(t) * size / t.itemsize
        return found

    def _parts(self, root: Op) -> float:
        """Bytes of what XLA:GPU reduces so much to first that it takes two kernels; 0 for what one reduces
        (https://github.com/openxla/xla/blob/main/xla/service/gpu/transforms/tree_reduction_rewriter.h)."""
        if not self.target.halves or root.name not in REDUCTIONS or not root.params.get("axes"):
            return 0.0
        (operand, *_), result = root.inputs, root.outputs[0]
        last = operand.rank - 1 in root.params["axes"]
        kept = math.prod(self.storage.local(result))
        reduced = math.prod(self.storage.local(operand)) / max(kept, 1)
        return kept * math.sqrt(reduced) * result.itemsize if reduced > (2**14 if last else 2**12) else 0.0

    def _normalizes(self, kernel: Kernel) -> bool:
        """Whether XLA:GPU makes it one Triton kernel with the reduction of its rows, which writes over nothing."""
        if not self.target.normalizes or any(op.name == "transpose" for op in kernel.ops):
            return False
        rows = (self.reduced[t].difference([t]) for t in kernel.reads if t in self.reduced)
        return any(r.intersection(kernel.reads) for r in rows)

    def _sums(self, root: Op) -> bool:
        """Whether XLA:TPU sums all of what each device needs a part of, which the kernels that read it take out."""
        move = root.params.get("move")
        scattered = self.target.sums_lanes and move is not None and move.kind == "reduce_scatter"
        return scattered and not self.storage.scatters(root.outputs[0], move)

    def _is_sent(self, t: Tensor) -> bool:
        return any("move" in op.params for op in self.graph.readers.get(t, ()))

    def _is_scattered(self, t: Tensor) -> bool:
        return any(is_scatter(op) and t is op.inputs[2] for op in self.graph.readers.get(t, ()))

    def _timed(self, step: Step, kernel: Kernel) -> Step:
        """A step with what decides about buffers on the chip; what is in a loop makes that itself."""
        device, inner = self.storage.device, [k for b in kernel.root.bodies for k in self.traffic.kernels[b]]
        if inner:
            seconds = trips(kernel.root) * sum(kernel_seconds(k, device) for k in inner)
            return replace(step, seconds=seconds, streams=False)
        work = kernel_work(kernel, device)
        return replace(step, seconds=work.seconds(device), streams=work.matrix <= max(work.memory, work.chip))
