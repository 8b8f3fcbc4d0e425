"""Which ops become one kernel, and what a kernel reads and writes: a model of how XLA fuses.

XLA computes elementwise ops where their values are used, and joins ops over the same elements into one pass. What it
saves is memory traffic, so this decides both the time of a step and which values are in memory at all. Two forms:

- An op is *absorbed* when every reader computes it again for itself (`xla.producer_fusion`). It is part of several
  kernels and never in memory.
- The rest is grouped by *level*: the number of kernels on the longest path before it. Ops of one level that are joined
  by fusible edges are one kernel, and reading a value that the kernel makes is free. Equal levels exclude cycles.

The compilers differ in what they fuse (`xla.targets`).
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from unity_jax.ops.indexing import is_scatter
from unity_jax.pcg.graph import Graph, Op, Tensor
from unity_jax.xla.aliases import base_tensors, is_alias
from unity_jax.xla.cse import cse
from unity_jax.xla.fusion_operands import Reading
from unity_jax.xla.layout_constraints import Rows, rows
from unity_jax.xla.op_classes import PRODUCTS, REDUCTIONS, elements, is_batched, is_zero, space
from unity_jax.xla.producer_fusion import Absorbed, absorb
from unity_jax.xla.targets import TARGETS, Fusing

Counts = tuple[int, ...]
"""Per operand and result of an op: how often it goes through memory."""


class Use(NamedTuple):
    """How an op runs: what it moves through memory, how many kernels it starts; whether it rides along in the one of
    a matmul, or is alone in its own; how its operands and results lie (`xla.layout_constraints`); whether it is a
    scatter into zeros; whether what it writes is summed by an all-reduce."""

    counts: Counts
    launches: int = 1
    rides: bool = False
    alone: bool = False
    rows: Rows = ()
    zeros: bool = False
    summed: bool = False

    def plus(self, other: Use) -> Use:
        counts = tuple(a + b for a, b in zip(self.counts, other.counts, strict=True))
        rides, alone = self.rides or other.rides, self.alone or other.alone
        zeros, summed = self.zeros or other.zeros, self.summed or other.summed
        return Use(counts, self.launches + other.launches, rides, alone, self.rows or other.rows, zeros, summed)


@dataclass(eq=False)
class Kernel:
    """Ops that run as one: `ops` in program order, absorbed ones included; the tensors it reads from memory and writes
    to it. A collective, a loop or a branch is a kernel of its own.

    `waits`: tensors it does not read and waits for all the same, behind an `optimization_barrier`. `counts` says per op
    which operands and results go through memory: an operand that several ops read counts for the first.
    """

    ops: list[Op]
    reads: list[Tensor]
    writes: list[Tensor]
    waits: list[Tensor]
    counts: dict[Op, Counts] = field(default_factory=dict)
    rows: dict[Op, Rows] = field(default_factory=dict)
    zeros: set[Op] = field(default_factory=set)
    summed: set[Op] = field(default_factory=set)
    _uses: dict[Op, Use] = field(default_factory=dict)

    def use(self, op: Op, launches: int) -> Use:
        """How one of its ops runs here."""
        if op not in self._uses:
            self._uses[op] = self._use(op)
        return self._uses[op]._replace(launches=launches) if launches else self._uses[op]

    def _use(self, op: Op) -> Use:
        root = self.root
        rides = op is not root and root.name in PRODUCTS
        # A constant is broadcast first; what a broadcast writes takes the place of all that is computed before it.
        single = len(self.ops) == 1 and all(t.literal is None for t in op.inputs)
        alone = single or (op is root and op.name == "broadcast_in_dim")
        rows, zeros, summed = self.rows.get(op, ()), op in self.zeros, op in self.summed
        return Use(self.counts[op], 0, rides, alone, rows, zeros, summed)

    @functools.cached_property
    def root(self) -> Op:
        """The op that says what kind of kernel it is: its matmul, if it has one, or its last op."""
        return next((op for op in self.ops if op.name in PRODUCTS), self.ops[-1])


def kernels(graph: Graph, compiler: str) -> Sequence[Kernel]:
    """The kernels of a traced or planned graph (its own ops; bodies have theirs), in an order in which they can run."""
    fusing = TARGETS[compiler].fusing
    graph = cse(graph, fusing) if fusing.cse else graph
    absorbed = absorb(graph, fusing)
    reading = Reading(graph, absorbed)
    groups = _Grouper(graph, fusing, absorbed, reading).run()
    position = {op: i for i, op in enumerate(graph.ops)}
    made = [_kernel(sorted(ops, key=position.__getitem__), reading) for ops in groups]
    for k in made:
        k.ops.sort(key=position.__getitem__)
    _account(made, graph, fusing, reading)
    return _runnable(sorted(made, key=lambda k: position[k.ops[-1]]))


@dataclass(eq=False)
class _Grouper:
    """Groups of ops that are not absorbed, each of one level."""

    graph: Graph
    fusing: Fusing
    absorbed: Absorbed
    reading: Reading
    level: dict[Op, int] = field(default_factory=dict)
    group: dict[Op, int] = field(default_factory=dict)
    members: list[list[Op]] = field(default_factory=list)
    has_product: list[bool] = field(default_factory=list)
    within: set[Op] = field(default_factory=set)  # reductions inside the kernel of a batch of products

    def run(self) -> list[list[Op]]:
        seen: dict[tuple[Tensor, int, int], Op] = {}  # an array, level and number of elements: who reads it there
        for op in self.graph.ops:
            if (op in self.absorbed.ops and op not in self.absorbed.kept) or is_alias(op):
                continue
            joined = self._place(op)
            shared = [(s, self.level[op], space(op)) for s in self._siblings(op)]
            self._join(op, sorted({*joined, *(self.group[seen[key]] for key in shared if key in seen)}))
            seen.update(dict.fromkeys(shared, op))
            if self.fusing.softmax and op.name in REDUCTIONS and any(map(is_batched, self.members[self.group[op]])):
                self.within.add(op)
        return [ops for ops in self.members if ops]

    def _place(self, op: Op) -> set[int]:
        """Give an op its level; the groups there that make what it reads in registers."""
        kept, level, producer = self.absorbed.kept, self.level, self.graph.producer
        before = {producer[s]: None for t in op.inputs for s in self.reading.read(op, t) if s in producer}
        held = (producer[s] for t in op.inputs for s in self.reading.held(t) if s in producer)
        at = max((level[p] + (p in kept or not self._joins(p, op)) for p in before), default=0)
        at = level[op] = max((at, *(level[p] + 1 for p in held)))
        # What is in memory for a device's part is written by the first kernel that computes it.
        again = [p for t in op.inputs for p in self.reading.taken(op, t)]
        written = [p for p in again if not self.absorbed.parts.isdisjoint(kept.get(p, ())) and self._joins(p, op)]
        joined = {self.group[p] for p in (*before, *written) if level[p] == at}
        if sum(self.has_product[g] for g in joined) > 1:
            level[op] += 1
            return set()
        return joined

    def _join(self, op: Op, groups: list[int]) -> None:
        """Make groups one, the first of them or a new one, with an op in it."""
        if not groups:
            groups = [len(self.members)]
            self.members.append([])
            self.has_product.append(False)
        first, *rest = groups
        for g in rest:
            self.group.update(dict.fromkeys(self.members[g], first))
            self.members[first] += self.members[g]
            self.has_product[first] |= self.has_product[g]
            self.members[g] = []
        self.group[op] = first
        self.members[first].append(op)
        self.has_product[first] |= op.name in PRODUCTS

    def _siblings(self, op: Op) -> Sequence[Tensor]:
        """The arrays in memory whose other readers the op joins: constants, and what several reductions read."""
        loops, updated = self.absorbed.loops, self.absorbed.updated
        if not self.fusing.siblings or not (op in loops or op.name in REDUCTIONS) or op in updated:
            return ()
        read = dict.fromkeys(s for t in op.inputs for s in self.reading.read(op, t))
        whole = space(op) if op.name in REDUCTIONS else None
        return [s for s in read if s in self._filled or elements(s) == whole]

    @functools.cached_property
    def _filled(self) -> frozenset[Tensor]:
        """The constants in memory that several read."""
        return frozenset(first.outputs[0] for first in self.absorbed.fills.values())

    def _joins(self, p: Op, c: Op) -> bool:
        """Whether a value of `p` goes to `c` in registers."""
        loops = self.absorbed.loops
        if not (c in loops or c.name in REDUCTIONS) or p in self.absorbed.updated:
            return False
        if p in self.within:
            return c in loops and elements(p.inputs[0]) == elements(c.outputs[0])
        if not (p in loops or (self.fusing.epilogue and p.name in PRODUCTS)):
            return False
        return elements(p.outputs[0]) == space(c)


def _kernel(ops: list[Op], reading: Reading) -> Kernel:
    """The kernel of a group of ops, with all that it may have to write."""
    own = dict.fromkeys(t for op in ops for t in op.outputs)
    reads: dict[Tensor, None] = {}
    waits: dict[Tensor, None] = {}
    every: dict[Op, None] = {}
    for op in ops:
        for t in op.inputs:
            every.update(dict.fromkeys(reading.taken(op, t)))
            reads.update(dict.fromkeys(s for s in reading.read(op, t) if s not in own))
            waits.update(dict.fromkeys(reading.held(t)))
        every[op] = None
    return Kernel(list(every), list(reads), list(own), [t for t in waits if t not in reads])


def _account(made: Iterable[Kernel], graph: Graph, fusing: Fusing, reading: Reading) -> None:
    """Say of kernels what they write and what of their ops goes through memory, and how."""
    read = {t for k in made for t in (*k.reads, *k.waits)}
    read.update(s for t in graph.outputs for s in reading.result(t))
    base = base_tensors(graph)
    summed = {op.inputs[0] for op in graph.ops if _is_all_reduce(op)}
    lie = rows(graph) if fusing.tiles else {}
    for k in made:
        k.writes = [t for t in k.writes if t in read]
        left, written = set(k.reads), set(k.writes)
        for op in k.ops:
            first = []
            for t in op.inputs:
                first.append(base.get(t, t) in left)
                left.discard(base.get(t, t))
            k.counts[op] = (*map(int, first), *(int(t in written) for t in op.outputs))
            if op in lie:
                k.rows[op] = lie[op]
            if not summed.isdisjoint(op.outputs):
                k.summed.add(op)
            made_by = graph.producer.get(op.inputs[0]) if is_scatter(op) else None
            if made_by is not None and is_zero(made_by):
                k.zeros.add(op)


def _is_all_reduce(op: Op) -> bool:
    return op.move is not None and op.move.kind == "reduce"


def _runnable(made: list[Kernel]) -> list[Kernel]:
    """The kernels in an order in which they can run, as near to the given one as that allows."""
    maker = {t: i for i, k in enumerate(made) for t in k.writes}
    before = [{maker[t] for t in (*k.reads, *k.waits) if t in maker} for k in made]
    after: list[list[int]] = [[] for _ in made]
    for i, needs in enumerate(before):
        for j in needs:
            after[j].append(i)
    waits = [len(needs) for needs in before]
    ready = [i for i, n in enumerate(waits) if n == 0]
    order = []
    while ready:
        i = heapq.heappop(ready)
        order.append(made[i])
        for j in after[i]:
            waits[j] -= 1
            if waits[j] == 0:
                heapq.heappush(ready, j)
    return order
