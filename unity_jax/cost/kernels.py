"""Which ops become one kernel, and what a kernel reads and writes: a model of how XLA fuses.

XLA computes elementwise ops where their values are used, and joins ops over the same elements into one pass. What it
saves is memory traffic, so this decides both the time of a step and which values are in memory at all. Two forms:

- An op is *absorbed* when every reader computes it again for itself: it is cheap, and reading its operands costs no
  more than reading its result. It is part of several kernels and never in memory.
- The rest is grouped by *level*: the number of kernels on the longest path before it. Ops of one level that are joined
  by fusible edges are one kernel, and reading a value that the kernel makes is free. Equal levels exclude cycles.

The compilers differ in what they fuse (`Fusing`): XLA:TPU fuses any elementwise producer and consumer into its
convolution; XLA:GPU takes producers that make the input of a matmul no larger, and no consumers; its convolutions are
calls of a library. What passes an `optimization_barrier` is in memory; XLA:TPU computes it again in the matmuls that
read it beside the barrier. So is, on TPU, what a device takes its part of and others read as a whole.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from unity_jax.cost.rows import Rows, is_partition, rows
from unity_jax.ops.indexing import compares, is_scatter
from unity_jax.ops.rule import is_pointwise
from unity_jax.pcg.graph import Graph, Op, Tensor

_ALIASES = frozenset("reshape squeeze expand_dims optimization_barrier copy sharding_constraint".split())
_SHAPES = frozenset("broadcast_in_dim iota transpose slice rev pad concatenate dynamic_slice".split())
REDUCTIONS = frozenset("reduce_sum reduce_max reduce_min reduce_and reduce_or reduce_prod argmax argmin".split())
PRODUCTS = frozenset(["dot_general", "conv_general_dilated"])
_CASTS = 6
"""How many readers XLA:TPU casts a value for, each for itself: the six products that read a normalized value, forward
and backward; for the eight products of a ring it casts once."""
_COSTLY = frozenset("exp exp2 expm1 log log1p logistic tanh sin cos erf erf_inv erfc pow rsqrt sqrt div".split())
_ACTIVATIONS = frozenset("erf erfc logistic".split())
"""Those that XLA:TPU computes again, in the backward pass that is: what they are of is there, too."""
_READS_ONCE = frozenset("gather reduce_window_max reduce_window_sum select_and_scatter_add".split())
_JOINS = frozenset(["concatenate", "pad"])
"""What no matmul computes while it reads."""
_CACHED = 1 / 16
"""Operands of no more than this part of a result are read from a cache, as are the numbers that stand for rows."""


Counts = tuple[int, ...]
"""Per operand and result of an op: how often it goes through memory."""


class Use(NamedTuple):
    """How an op runs: what it moves through memory, how many kernels it starts; whether it rides along in the one of
    a matmul, or is alone in its own; how its operands and results lie (`cost.rows`); whether it is a scatter into
    zeros; whether what it writes is summed by an all-reduce."""

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


@dataclass(frozen=True)
class Fusing:
    """What a compiler fuses.

    With matmuls: `grows`: producers whose operands are larger than their result, in every dot that reads them;
    `epilogue`: elementwise consumers and reductions; `softmax`: what follows a reduction of the rows of a batch of
    products. `by_position`: what can be computed from an element's position is elementwise: random bits hash it, a
    scatter of one element per row compares it, and other scatters fill in a constant operand themselves. `tiles`:
    arrays lie in tiles, so that it matters which dimension comes last. `costly`: functions that are computed once, for
    all readers. `repeats`: these, too, are computed
    by every reader, gathers and windows included, if one is no loop and that moves no more bytes (`PriorityFusion` of
    XLA:GPU, which weighs time). `siblings`: equal constants are one array if one of them has to be in memory, and loops
    and reductions over as many elements that read that array are one kernel, as are reductions of any array
    (`MultiOutputFusion` of XLA:GPU).
    """

    grows: bool = False
    epilogue: bool = False
    softmax: bool = False
    by_position: bool = False
    tiles: bool = False
    costly: frozenset[str] = _COSTLY
    repeats: bool = False
    siblings: bool = False


FUSING = {
    "tpu": Fusing(grows=True, epilogue=True, softmax=True, by_position=True, tiles=True, costly=_COSTLY - _ACTIVATIONS),
    "gpu": Fusing(repeats=True, siblings=True),
    "cpu": Fusing(),
}


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

    def use(self, op: Op, launches: int) -> Use:
        """How one of its ops runs here."""
        rides = op is not self.root and self.root.name in PRODUCTS
        # A constant is broadcast first; what a broadcast writes takes the place of all that is computed before it.
        single = len(self.ops) == 1 and all(t.literal is None for t in op.inputs)
        alone = single or (op is self.root and op.name == "broadcast_in_dim")
        rows, zeros, summed = self.rows.get(op, ()), op in self.zeros, op in self.summed
        return Use(self.counts[op], launches, rides, alone, rows, zeros, summed)

    @functools.cached_property
    def root(self) -> Op:
        """The op that says what kind of kernel it is: its matmul, if it has one, or its last op."""
        return next((op for op in self.ops if op.name in PRODUCTS), self.ops[-1])


def is_alias(op: Op) -> bool:
    """Whether the result is the operand, seen differently."""
    return op.name in _ALIASES and not op.bodies


def is_loop(op: Op, fusing: Fusing) -> bool:
    """Whether every result element takes few operand elements, so that it can be computed where it is used."""
    if op.bodies:
        return False
    if fusing.by_position and (op.name == "random_bits" or compares(op)):
        return True
    if (move := op.params.get("move")) is not None:
        return move.kind in ("partition", "replicate")
    return op.name in _SHAPES or is_pointwise(op)


@dataclass(eq=False)
class _Fuser:
    graph: Graph
    fusing: Fusing
    absorbed: set[Op] = field(default_factory=set)
    parts: set[Op] = field(default_factory=set)  # what is computed of a device's part only, and what takes the part
    kept: dict[Op, frozenset[Op]] = field(default_factory=dict)  # in memory for these readers; others compute it again
    sources: dict[Tensor, tuple[Tensor, ...]] = field(default_factory=dict)
    taken: dict[Tensor, tuple[Op, ...]] = field(default_factory=dict)
    held: dict[Tensor, tuple[Tensor, ...]] = field(default_factory=dict)
    loops: set[Op] = field(default_factory=set)
    within: set[Op] = field(default_factory=set)
    prologue: set[Op] = field(default_factory=set)  # what matmuls compute before they multiply
    updated: set[Op] = field(default_factory=set)  # sums that a scatter writes into
    fills: dict[Op, Op] = field(default_factory=dict)  # constants that are read from the array that the first one makes

    def run(self) -> list[Kernel]:
        self.loops = {op for op in self.graph.ops if is_loop(op, self.fusing)}
        outputs = set(self.graph.outputs)
        if self.fusing.siblings:
            self._fill()
        self._absorb(outputs)
        # What computing a tensor in place takes: the tensors to read, the absorbed ops to run, what to wait for.
        for op in self.graph.ops:
            if op in self.absorbed or is_alias(op):
                reads: dict[Tensor, None] = {}
                ops: dict[Op, None] = {}
                held: dict[Tensor, None] = {}
                for t in op.inputs:
                    reads.update(dict.fromkeys(self._read(op, t)))
                    ops.update(dict.fromkeys(self._taken(op, t)))
                    held.update(dict.fromkeys(self.held.get(t, ())))
                if op in self.fills:
                    reads[self.fills[op].outputs[0]] = None
                elif op in self.absorbed:
                    ops[op] = None
                if op.name == "optimization_barrier":
                    held.update(reads)
                self.held.update((o, tuple(held)) for o in op.outputs)
                if is_alias(op):  # one operand per result
                    for i, o in zip(op.inputs, op.outputs, strict=False):
                        self.sources[o], self.taken[o] = self._read(op, i), self._taken(op, i)
                else:
                    for o in op.outputs:
                        self.sources[o], self.taken[o] = tuple(reads), tuple(ops)
        return self._group(outputs)

    def _read(self, op: Op, t: Tensor) -> tuple[Tensor, ...]:
        """What an op reads from memory to have an operand."""
        if (whole := self._whole(op, t)) is not None:
            return (whole,)
        return self.sources.get(t, (t,) if t.literal is None else ())

    def _taken(self, op: Op, t: Tensor) -> tuple[Op, ...]:
        """The absorbed ops that an op computes to have an operand."""
        return () if self._whole(op, t) is not None else self.taken.get(t, ())

    def _whole(self, op: Op, t: Tensor) -> Tensor | None:
        """What an operand is a view of, if that is in memory for the op although others compute it again."""
        made_by = self.graph.producer.get(t)
        while made_by is not None and is_alias(made_by) and made_by.name != "optimization_barrier":
            t = made_by.inputs[made_by.outputs.index(t)]
            made_by = self.graph.producer.get(t)
        return t if made_by is not None and op in self.kept.get(made_by, ()) else None

    # Absorbing

    def _fill(self) -> None:
        """Find the constants that are the same as one that a scatter writes into, which is in memory: XLA:GPU makes
        them once, and copies for the scatters."""
        equal: dict[object, list[Op]] = {}
        for op in self.graph.ops:
            if op.name == "broadcast_in_dim" and op.inputs[0].literal is not None and op.inputs[0].rank == 0:
                out, value = op.outputs[0], op.inputs[0].literal
                equal.setdefault((out.shape, str(out.dtype), value.tobytes(), out.layout), []).append(op)
        for ops in equal.values():
            read = [op for op in ops if not all(map(is_scatter, self.graph.readers.get(op.outputs[0], ())))]
            if len(read) > 1 and len(read) < len(ops):
                self.fills.update(dict.fromkeys(read[1:], read[0]))
                self.loops.discard(read[0])

    def _absorb(self, outputs: set[Tensor]) -> None:
        readers = self._readers()
        at_hand = self._at_hand() if self.fusing.epilogue else self.loops
        if not self.fusing.grows:
            self._enter(readers)
        sources: dict[Tensor, frozenset[Tensor]] = {}  # what recomputing a tensor would read
        self._update()
        if self.fusing.grows:
            self._find_parts(readers)
        for op in self.graph.ops:
            if is_alias(op):
                sources.update((o, sources.get(i, frozenset([i]))) for i, o in zip(op.inputs, op.outputs, strict=False))
                continue
            if (
                op not in self.loops
                or op in self.updated
                or any(t in outputs or self._escapes(t, outputs) for t in op.outputs)
            ):
                continue
            if op in self.fills:
                self.absorbed.add(op)
                sources.update((t, frozenset(self.fills[op].outputs)) for t in op.outputs)
                continue
            used = [c for t in op.outputs for c in readers(t)]
            cast = self.fusing.grows and op.name == "convert_element_type"
            kept = self._keeps(op, used) if self.fusing.grows else frozenset[Op]()
            if kept == {*used}:
                self.kept[op] = kept
                continue
            used = [c for c in used if c not in kept]
            if not used or not all(self._takes(c, op) for c in used) or any(self._spreads(c, readers) for c in used):
                continue
            if cast and not kept and op not in at_hand and any(c.name in REDUCTIONS for c in used):
                continue  # the reduction writes it for the others
            above = frozenset[Tensor]().union(*(sources.get(t, (t,) if t.literal is None else ()) for t in op.inputs))
            if kept and self._grown(op, above, len(set(used))):
                continue
            alone = len(used) == 1 and not kept
            if alone or (cast and len(used) <= _CASTS) or (not cast and self._is_cheap(op, used, above)):
                self.absorbed.add(op)
                if kept:
                    self.kept[op] = kept
                sources.update((o, above) for o in op.outputs)

    def _keeps(self, op: Op, used: Sequence[Op]) -> frozenset[Op]:
        """The readers that XLA:TPU has it in memory for, while the others compute it again."""
        cast = op.name == "convert_element_type"
        whole = len({*used}) > 1 and op.name not in _SHAPES and op not in self.parts
        return frozenset(
            c
            for c in used
            if c.name == "optimization_barrier" or (cast and is_scatter(c)) or (whole and c in self.parts)
        )

    def _find_parts(self, readers: Callable[[Tensor], list[Op]]) -> None:
        """Find what is computed of a device's part only. XLA:TPU takes the part as early as it can, of what others
        read, too, which is then in memory as a whole: of an all-reduced array that is normalized, in float32, both the
        array and its distance from the mean (ResNeXt and BERT, split by features). Products cast what they read."""
        for op in reversed(self.graph.ops):
            cast = op.name == "convert_element_type"
            used = [c for t in op.outputs for c in readers(t) if not (cast and c.name in PRODUCTS)]
            alone = op in self.loops and op.name not in _SHAPES and len(used) == 1 and used[0] in self.parts
            if alone or is_partition(op):
                self.parts.add(op)

    def _is_cheap(self, op: Op, used: Sequence[Op], above: frozenset[Tensor]) -> bool:
        """Whether each of the ops that use it may compute it again from what is above."""
        apart = self.fusing.repeats and any(c not in self.loops for c in used)  # no kernel joins the readers
        if not (apart or op.name not in self.fusing.costly or (self.fusing.grows and self._scales(op))):
            return False
        grown = self._grown(op, above, len(set(used)))
        return not grown or (self.fusing.grows and all(c.name == "dot_general" for c in used))

    def _grown(self, op: Op, above: Set[Tensor], readers: int) -> bool:
        """Whether more bytes move if every reader computes it from what is above.

        XLA:GPU weighs all that moves: either every reader reads the operands, or one kernel does and writes the result,
        which the readers read.
        """
        made = sum(t.nbytes for t in op.outputs)
        if not self.fusing.repeats:
            return sum(t.nbytes for t in above) > made
        taken = sum(t.nbytes for t in above if t.nbytes > made * _CACHED)
        return taken * readers > taken + made + made * readers

    def _update(self) -> None:
        """Scatters into zeros whose result is added to something: XLA scatters into that instead."""
        for op in self.graph.ops:
            if op.name != "scatter-add" or (self.fusing.by_position and compares(op)):
                continue
            used, zeros = self.graph.readers.get(op.outputs[0], []), self.graph.producer.get(op.inputs[0])
            if len(used) == 1 and used[0].name in ("add", "add_any") and zeros is not None and _is_zero(zeros):
                self.absorbed.add(op)
                self.updated.add(used[0])

    def _enter(self, readers: Callable[[Tensor], list[Op]]) -> None:
        """Find what can be computed inside all the matmuls that read it: it takes no more bytes than it makes."""
        for op in reversed(self.graph.ops):
            used = [c for t in op.outputs for c in readers(t)]
            inside = used and all(c.name == "dot_general" or c in self.prologue for c in used)
            if op in self.loops and inside and op.name not in _JOINS and self._enters(op):
                self.prologue.add(op)

    def _scales(self, op: Op) -> bool:
        """Whether it divides rows by a number each, which becomes a product with its inverse."""
        by = self.graph.producer.get(op.inputs[1]) if op.name == "div" else None
        return by is not None and by.name == "broadcast_in_dim"

    def _at_hand(self) -> set[Op]:
        """The ops whose operands a compiler that fuses epilogues has at hand: those of a chain that begins with a
        matmul or with arguments, where nothing else reads what lies between."""
        found: set[Op] = set()
        multiplied: set[Op] = set()  # of chains that begin with a matmul
        for op in self.graph.ops:
            if not (op in self.loops or is_alias(op)):
                continue
            size = _elements(op.outputs[0]) if op.outputs else 0
            whole = [(t, self.graph.producer.get(t)) for t in op.inputs if t.literal is None and _elements(t) == size]
            made = [(t, p) for t, p in whole if p is not None]
            alone = [p for t, p in made if len(self.graph.readers[t]) == 1]
            # What a matmul's kernel writes can be cast again, whoever reads it too.
            known = [p for _, p in made] if op.name == "convert_element_type" else alone
            if any(p.name in PRODUCTS for _, p in made) or multiplied.intersection(known):
                multiplied.add(op)
            if op in multiplied or found.intersection(alone) or not made:
                found.add(op)
        return found

    def _readers(self) -> Callable[[Tensor], list[Op]]:
        """The ops that read a tensor, through aliases."""
        known: dict[Tensor, list[Op]] = {}

        def readers(t: Tensor) -> list[Op]:
            if t not in known:
                found: list[Op] = []
                for c in self.graph.readers.get(t, ()):
                    if is_alias(c) and c.name != "optimization_barrier":
                        found += [r for i, o in zip(c.inputs, c.outputs, strict=False) if i is t for r in readers(o)]
                    else:
                        found.append(c)
                known[t] = found
            return known[t]

        return readers

    def _escapes(self, t: Tensor, outputs: set[Tensor]) -> bool:
        """Whether an alias of the tensor is a result of the program."""
        return any(
            o in outputs or self._escapes(o, outputs)
            for c in self.graph.readers.get(t, ())
            if is_alias(c)
            for i, o in zip(c.inputs, c.outputs, strict=False)
            if i is t
        )

    def _takes(self, consumer: Op, producer: Op) -> bool:
        if consumer in self.prologue:
            return self._enters(producer)
        if self.fusing.grows and self._is_multiplied_part(consumer):
            return producer.name in _SHAPES
        if (
            consumer in self.loops
            or consumer.name in REDUCTIONS
            or (self.fusing.repeats and consumer.name in _READS_ONCE)
        ):
            return True
        if is_scatter(consumer) and self.fusing.repeats and producer.outputs[0] in consumer.inputs[1:]:
            return True
        if is_scatter(consumer) and (self.fusing.by_position or consumer in self.absorbed):
            return producer.outputs[0] is consumer.inputs[0] and all(t.literal is not None for t in producer.inputs)
        if consumer.name not in PRODUCTS or producer.name in _JOINS:
            return False
        if self.fusing.grows:
            return True
        return consumer.name == "dot_general" and self._enters(producer)

    def _spreads(self, op: Op, readers: Callable[[Tensor], list[Op]]) -> bool:
        """Whether it is a broadcast in memory. XLA:TPU computes nothing in it: it reads what it broadcasts there, too
        (the updates of DLRM's tables; no fusion of 28 programs for v5e broadcasts what it computes)."""
        if not self.fusing.tiles or op.name != "broadcast_in_dim":
            return False
        return not all(self._takes(c, op) for c in readers(op.outputs[0]))

    def _is_multiplied_part(self, op: Op) -> bool:
        """Whether it takes a device's part of an array into a batch of products. XLA:TPU does so as it reads the array,
        which is in memory: it computes nothing of it in the matmul."""
        return is_partition(op) and any(map(is_batched, self.graph.readers.get(op.outputs[0], ())))

    def _enters(self, op: Op) -> bool:
        """Whether a matmul of a compiler that weighs it computes an op as it reads: the op takes no more bytes than it
        makes. A device's part of an array is taken first."""
        taken = sum(t.nbytes for t in op.inputs if t.literal is None)
        return taken <= sum(t.nbytes for t in op.outputs) and not is_partition(op)

    # Grouping

    def _group(self, outputs: set[Tensor]) -> list[Kernel]:
        producer = self.graph.producer
        level: dict[Op, int] = {}
        group: dict[Op, int] = {}
        members: list[list[Op]] = []
        has_product: list[bool] = []
        reading: dict[tuple[Tensor, int, int], Op] = {}  # an array, level and number of elements: who reads it there
        for op in self.graph.ops:
            if (op in self.absorbed and op not in self.kept) or is_alias(op):
                continue
            before = {producer[s]: None for t in op.inputs for s in self._read(op, t) if s in producer}
            at = max((level[p] + (p in self.kept or not self._joins(p, op)) for p in before), default=0)
            held = (producer[s] for t in op.inputs for s in self.held.get(t, ()) if s in producer)
            at = max((at, *(level[p] + 1 for p in held)))
            level[op] = at
            # What is in memory for a device's part is written by the first kernel that computes it.
            again = [p for t in op.inputs for p in self._taken(op, t) if self.parts.intersection(self.kept.get(p, ()))]
            written = [p for p in again if self._joins(p, op)]
            joined = sorted({group[p] for p in (*before, *written) if level[p] == at})
            if joined and sum(has_product[g] for g in joined) > 1:
                level[op], joined = at + 1, []
            shared = [(s, level[op], _space(op)) for s in self._siblings(op)]
            joined = sorted({*joined, *(group[reading[key]] for key in shared if key in reading)})
            if not joined:
                joined = [len(members)]
                members.append([])
                has_product.append(False)
            first, *rest = joined
            for g in rest:
                for other in members[g]:
                    group[other] = first
                members[first] += members[g]
                has_product[first] |= has_product[g]
                members[g] = []
            group[op] = first
            reading.update(dict.fromkeys(shared, op))
            members[first].append(op)
            has_product[first] |= op.name in PRODUCTS
            if self.fusing.softmax and op.name in REDUCTIONS and any(map(is_batched, members[first])):
                self.within.add(op)
        return self._kernels(members, outputs)

    def _siblings(self, op: Op) -> Sequence[Tensor]:
        """The arrays in memory whose other readers the op joins: constants, and what several reductions read."""
        if not self.fusing.siblings or not (op in self.loops or op.name in REDUCTIONS) or op in self.updated:
            return ()
        read = dict.fromkeys(s for t in op.inputs for s in self._read(op, t))
        whole = _space(op) if op.name in REDUCTIONS else None
        return [s for s in read if s in self._filled or _elements(s) == whole]

    @functools.cached_property
    def _filled(self) -> frozenset[Tensor]:
        """The constants in memory that several read."""
        return frozenset(first.outputs[0] for first in self.fills.values())

    def _joins(self, p: Op, c: Op) -> bool:
        """Whether a value of `p` goes to `c` in registers."""
        if not (c in self.loops or c.name in REDUCTIONS) or p in self.updated:
            return False
        if p in self.within:
            return c in self.loops and _elements(p.inputs[0]) == _elements(c.outputs[0])
        if not (p in self.loops or (self.fusing.epilogue and p.name in PRODUCTS)):
            return False
        return _elements(p.outputs[0]) == _space(c)

    def _kernels(self, members: list[list[Op]], outputs: set[Tensor]) -> list[Kernel]:
        position = {op: i for i, op in enumerate(self.graph.ops)}
        made: list[Kernel] = []
        for ops in members:
            if not ops:
                continue
            own = dict.fromkeys(t for op in ops for t in op.outputs)
            reads: dict[Tensor, None] = {}
            waits: dict[Tensor, None] = {}
            every: dict[Op, None] = {}
            for op in sorted(ops, key=position.__getitem__):
                for t in op.inputs:
                    every.update(dict.fromkeys(self._taken(op, t)))
                    reads.update(dict.fromkeys(s for s in self._read(op, t) if s not in own))
                    waits.update(dict.fromkeys(self.held.get(t, ())))
                every[op] = None
            inside = sorted(every, key=position.__getitem__)
            made.append(Kernel(inside, list(reads), list(own), [t for t in waits if t not in reads]))
        read = {t for k in made for t in (*k.reads, *k.waits)}
        read.update(s for t in outputs for s in self.sources.get(t, (t,)))
        base = base_tensors(self.graph)
        lie = rows(self.graph) if self.fusing.tiles else {}
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
                if any(_is_all_reduce(c) for t in op.outputs for c in self.graph.readers.get(t, ())):
                    k.summed.add(op)
                made_by = self.graph.producer.get(op.inputs[0]) if is_scatter(op) else None
                if made_by is not None and _is_zero(made_by):
                    k.zeros.add(op)
        return _runnable(sorted(made, key=lambda k: position[k.ops[-1]]))


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


def is_batched(op: Op) -> bool:
    return op.name == "dot_general" and bool(op.params["dimension_numbers"][1][0])


def _is_all_reduce(op: Op) -> bool:
    return "move" in op.params and op.params["move"].kind == "reduce"


def _is_zero(op: Op) -> bool:
    values = [t.literal for t in op.inputs]
    return op.name == "broadcast_in_dim" and all(v is not None and not np.any(v) for v in values)


def _space(op: Op) -> int:
    """Elements that a loop or a reduction runs over."""
    return _elements(op.inputs[0] if op.name in REDUCTIONS else op.outputs[0])


def _elements(t: Tensor) -> int:
    return math.prod(t.shape)


def kernels(graph: Graph, compiler: str) -> Sequence[Kernel]:
    """The kernels of a traced or planned graph (its own ops; bodies have theirs), in an order in which they can run."""
    fusing = FUSING[compiler]
    return _Fuser(_once(graph, fusing) if fusing.grows else graph, fusing).run()


def _once(graph: Graph, fusing: Fusing) -> Graph:
    """The graph with a copy in place of each elementwise op that does what an earlier one does (`HloCSE` of XLA): a
    normalization takes the mean from its operand for the result and for the variance. Constants are no matter: every
    reader makes its own."""
    base = base_tensors(graph)
    outputs = {base.get(t, t) for t in graph.outputs}
    made: dict[object, list[Op]] = {}
    first: dict[Tensor, Tensor] = {}
    ops: list[Op] = []
    for op in graph.ops:
        ops.append(op)
        same = op.name != "optimization_barrier" and (is_alias(op) or is_loop(op, fusing))
        if not same or all(t.literal is not None for t in op.inputs):
            continue
        view = is_alias(op) or (op.name == "broadcast_in_dim" and _elements(op.inputs[0]) == _elements(op.outputs[0]))
        read = tuple(None if t.literal is not None and t.rank == 0 else first.get(t, t) for t in op.inputs)
        given = tuple((t.shape, str(t.dtype), t.layout) for t in op.outputs)
        alike = made.setdefault(("view" if view else op.name, read, given), [])
        earlier = next((e for e in alike if view or e.signature == op.signature), None)
        if earlier is None:
            alike.append(op)
        elif outputs.isdisjoint(op.outputs):
            first.update(zip(op.outputs, earlier.outputs, strict=True))
            ops[-1] = Op("copy", earlier.outputs, op.outputs)
    return Graph(graph.inputs, graph.outputs, ops)


def base_tensors(graph: Graph) -> dict[Tensor, Tensor]:
    """The tensor in memory that each alias is a view of."""
    base: dict[Tensor, Tensor] = {}
    for op in graph.ops:
        if is_alias(op):
            base.update((o, base.get(i, i)) for i, o in zip(op.inputs, op.outputs, strict=False))
    return base


@dataclass(frozen=True, eq=False)
class Traffic:
    """The kernels of a program, told per op, so that its costs can be added up op by op.

    `written`: every tensor that is in memory at some time; `kernels` of every graph; `uses` of every op. Bodies are
    included.
    """

    written: set[Tensor] = field(default_factory=set)
    kernels: dict[Graph, Sequence[Kernel]] = field(default_factory=dict)
    uses: dict[Op, Use] = field(default_factory=dict)

    @staticmethod
    def of(graph: Graph, compiler: str) -> Traffic:
        """The traffic of a traced or planned graph and its bodies."""
        traffic = Traffic()
        traffic._add(graph, compiler)
        return traffic

    def _add(self, graph: Graph, compiler: str) -> None:
        base = base_tensors(graph)
        self.written.update(graph.inputs, graph.outputs)
        uses: dict[Op, Use] = {}
        self.kernels[graph] = kernels(graph, compiler)
        for kernel in self.kernels[graph]:
            self.written.update(kernel.writes)
            for op in kernel.counts:
                use = kernel.use(op, int(op is kernel.root))
                uses[op] = uses[op].plus(use) if op in uses else use
        self.written.update(t for t, s in base.items() if s in self.written)
        for op in graph.ops:
            self.uses[op] = uses.get(op) or Use((0,) * (len(op.inputs) + len(op.outputs)), 0)
            for body in op.bodies:
                self._add(body, compiler)
