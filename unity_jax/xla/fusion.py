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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from unity_jax.ops.numbers import is_scatter
from unity_jax.pcg.graph import Graph, Op, Tensor
from unity_jax.pcg.topological import topological
from unity_jax.xla.aliases import Readers, base_tensors, is_alias
from unity_jax.xla.cse import cse
from unity_jax.xla.fusion_operands import Reading
from unity_jax.xla.in_place_updates import absorbed_updates, in_place_updates
from unity_jax.xla.kernel import Kernel
from unity_jax.xla.layout_constraints import rows
from unity_jax.xla.op_classes import PRODUCTS, REDUCTIONS, elements, is_batched, is_zero, space
from unity_jax.xla.producer_fusion import Absorbed, absorb
from unity_jax.xla.targets import TARGETS, Fusing


def kernels(graph: Graph, compiler: str, carried: int | None = None) -> Sequence[Kernel]:
    """The kernels of a traced or planned graph (its own ops; bodies have theirs), in an order in which they can run.

    **Arguments:** `carried`: the graph is the body of a scan, which stacks its outputs behind so many.
    """
    fusing = TARGETS[compiler].fusing
    graph = cse(graph, fusing) if fusing.cse else graph
    carried = carried if fusing.updates_apart else None
    absorbed = absorb(graph, fusing, carried)
    reading = Reading(graph, absorbed)
    groups = _Grouper(graph, fusing, absorbed, reading).run()
    position = {op: i for i, op in enumerate(graph.ops)}
    made = [_kernel(sorted(ops, key=position.__getitem__), reading) for ops in groups]
    if carried is not None:
        made += absorbed_updates(graph, absorbed, reading, carried)
    for k in made:
        k.ops.sort(key=position.__getitem__)
    _account(made, graph, fusing, reading)
    if carried is not None:
        made = in_place_updates(made, graph, reading, carried)
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
        if op in self.absorbed.accumulated:
            level[self.absorbed.accumulated[op]] = at  # it waits for what it adds to
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
        loops, absorbed = self.absorbed.loops, self.absorbed
        if not self.fusing.siblings or op in absorbed.updated or op in absorbed.accumulated:
            return ()
        if not (op in loops or op.name in REDUCTIONS):
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
        loops, accumulated = self.absorbed.loops, self.absorbed.accumulated
        if c in accumulated:
            return p is accumulated[c]
        if not (c in loops or c.name in REDUCTIONS) or p in self.absorbed.updated or p in accumulated:
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
    readers = Readers(graph)
    for k in made:
        k.writes = [t for t in k.writes if t in read or k.updates]
        k.count(base)
        for op in k.ops:
            if op in lie:
                k.rows[op] = lie[op]
            if not summed.isdisjoint(op.outputs):
                k.summed.add(op)
            if fusing.repeats and op.name == "dot_general" and not readers.escapes(op):
                used = readers.of(op)
                if used and all(c in reading.loops or c.name in REDUCTIONS for c in used):
                    k.in_parts.add(op)
            made_by = graph.producer.get(op.inputs[0]) if is_scatter(op) else None
            if made_by is not None and is_zero(made_by):
                k.zeros.add(op)


def _is_all_reduce(op: Op) -> bool:
    return op.move is not None and op.move.kind == "reduce"


def _runnable(made: list[Kernel]) -> list[Kernel]:
    """The kernels in an order in which they can run, as near to the given one as that allows."""
    maker = {t: i for i, k in enumerate(made) for t in k.writes}
    return [made[i] for i in topological([{maker[t] for t in (*k.reads, *k.waits) if t in maker} for k in made])]
