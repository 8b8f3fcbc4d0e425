"""Which ops every reader computes again for itself: they are part of several kernels and never in memory.

An op is absorbed when each of its readers can compute it where it reads it, and reading its operands costs no more than
reading its result. What passes an `optimization_barrier` is in memory; XLA:TPU computes it again in the matmuls that
read it beside the barrier. So is, on TPU, what a device takes its part of and others read as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from unity_jax.ops.indexing import compares
from unity_jax.ops.numbers import is_scatter
from unity_jax.pcg.graph import Graph, Op, Tensor
from unity_jax.xla.aliases import Readers, is_alias
from unity_jax.xla.gemm_rewriter import gemm_rewriter
from unity_jax.xla.layout_constraints import is_partition
from unity_jax.xla.op_classes import (
    JOINS,
    PRODUCTS,
    READERS,
    REDUCTIONS,
    SHAPES,
    WINDOWS,
    elements,
    is_batched,
    is_loop,
    is_zero,
)
from unity_jax.xla.targets import ACTIVATIONS, Fusing

_CASTS = 6
"""How many readers XLA:TPU casts a value for, each for itself: the six products that read a normalized value, forward
and backward; for the eight products of a ring it casts once."""
_CACHED = 1 / 16
"""Operands of no more than this part of a result are read from a cache, as are the numbers that stand for rows."""
_CACHE_READ = 0.1
"""What reading such an operand takes XLA:GPU in its own estimate, as a part of reading the result from memory. It
counts where as many kernels read it as a function is that is written out."""
_WRITTEN_OUT = {"erfc": 29}
"""How many kernels read the operand of a function that is written out in simpler ops before XLA:GPU fuses any
(StableHLO's `erfc` of float32), when it decides whether they compute what they read
(`CalculateProducerPriority` in https://github.com/openxla/xla/blob/main/xla/service/gpu/transforms/priority_fusion.cc)."""


@dataclass(eq=False)
class Absorbed:
    """The ops that are computed where they are read.

    `kept`: those of them that are in memory for some readers, and these readers. `loops`: all ops of which every result
    element takes few operand elements. `parts`: what is computed of a device's part only, and what takes that part.
    `updated`: sums that a scatter writes into. `fills`: constants that are read from the array that another one makes.
    `accumulated`: sums that a matmul adds its products to (`xla.gemm_rewriter`), and that matmul.
    """

    ops: set[Op] = field(default_factory=set)
    kept: dict[Op, frozenset[Op]] = field(default_factory=dict)
    loops: set[Op] = field(default_factory=set)
    parts: set[Op] = field(default_factory=set)
    updated: set[Op] = field(default_factory=set)
    fills: dict[Op, Op] = field(default_factory=dict)
    accumulated: dict[Op, Op] = field(default_factory=dict)


def absorb(graph: Graph, fusing: Fusing, carried: int | None = None) -> Absorbed:
    """What a compiler absorbs in a traced or planned graph.

    **Arguments:** `carried`: see `xla.fusion.kernels`.
    """
    found = Absorbed(loops={op for op in graph.ops if is_loop(op, fusing)})
    readers = Readers(graph, carried)
    for scatter, total in _updates(graph, fusing):
        found.ops.add(scatter)
        found.updated.add(total)
    for first, others in _fills(graph, found.ops).items() if fusing.siblings else ():
        found.loops.discard(first)
        found.fills.update(dict.fromkeys(others, first))
    if fusing.accumulates:
        found.accumulated = gemm_rewriter(graph, Readers(graph))
    if fusing.grows:
        found.parts = _parts(graph, found.loops, readers)
    prologue = frozenset[Op]() if fusing.grows else _prologue(graph, found.loops, readers)
    _Absorber(graph, fusing, readers, found, prologue).run()
    return found


def _fills(graph: Graph, merged: Set[Op]) -> dict[Op, list[Op]]:
    """The constants that are read and the same as one that a scatter writes into, the first of each kind with the
    others: XLA:GPU makes them once, and copies for the scatters. As no scatter computes what it writes into, nothing
    does that reads the same (`CanFuseWithAllNonBitcastUsers` in
    https://github.com/openxla/xla/blob/main/xla/service/gpu/transforms/priority_fusion.cc).

    **Arguments:** `merged`: scatters that write into something else.
    """
    equal: dict[object, list[Op]] = {}
    for op in graph.ops:
        if op.name == "broadcast_in_dim" and op.inputs[0].literal is not None and op.inputs[0].rank == 0:
            out, value = op.outputs[0], op.inputs[0].literal
            equal.setdefault((out.shape, str(out.dtype), value.tobytes(), out.layout), []).append(op)
    fills: dict[Op, list[Op]] = {}
    for ops in equal.values():
        readers = {op: graph.readers.get(op.outputs[0], ()) for op in ops}
        written = any(is_scatter(c) and c not in merged for used in readers.values() for c in used)
        read = [op for op, used in readers.items() if not all(map(is_scatter, used))]
        if written and read:
            fills[read[0]] = read[1:]
    return fills


def _updates(graph: Graph, fusing: Fusing) -> list[tuple[Op, Op]]:
    """The scatters into zeros whose result is added to something, and these sums: XLA scatters into that instead. Of
    two scatters it makes one, of the rows of both, if that concatenates fewer elements than there are to add to; else
    it leaves them (`AlgebraicSimplifierVisitor::HandleAdd` in
    https://github.com/openxla/xla/blob/main/xla/hlo/transforms/simplifiers/algebraic_simplifier.cc)."""
    found: dict[Op, list[Op]] = {}
    for op in graph.ops:
        if op.name != "scatter-add" or (fusing.by_position and compares(op)):
            continue
        used, zeros = graph.readers.get(op.outputs[0], []), graph.producer.get(op.inputs[0])
        if len(used) == 1 and used[0].name in ("add", "add_any") and zeros is not None and is_zero(zeros):
            found.setdefault(used[0], []).append(op)
    return [
        (scatter, total)
        for total, scatters in found.items()
        for scatter in scatters
        if len(scatters) == 1 or sum(_held(s, 2) for s in scatters) < _held(scatter, 0)
    ]


def _held(op: Op, i: int) -> int:
    """Elements of an operand; of a planned op on each device."""
    return elements(op.inputs[i]) if op.shard is None else math.prod(op.shard.operand_shape(i))


def _parts(graph: Graph, loops: Set[Op], readers: Readers) -> set[Op]:
    """What is computed of a device's part only. XLA:TPU takes the part as early as it can, of what others read, too,
    which is then in memory as a whole: of an all-reduced array that is normalized, in float32, both the array and its
    distance from the mean (ResNeXt and BERT, split by features). Products cast what they read."""
    found: set[Op] = set()
    for op in reversed(graph.ops):
        cast = op.name == "convert_element_type"
        used = [c for c in readers.of(op) if not (cast and c.name in PRODUCTS)]
        alone = op in loops and op.name not in SHAPES and len(used) == 1 and used[0] in found
        if alone or is_partition(op):
            found.add(op)
    return found


def _prologue(graph: Graph, loops: Set[Op], readers: Readers) -> frozenset[Op]:
    """What can be computed inside all the matmuls that read it, before they multiply: it takes no more bytes than it
    makes."""
    found: set[Op] = set()
    for op in reversed(graph.ops):
        used = readers.of(op)
        inside = used and all(c.name == "dot_general" or c in found for c in used)
        if op in loops and inside and op.name not in JOINS and _enters(op):
            found.add(op)
    return frozenset(found)


def _enters(op: Op) -> bool:
    """Whether a matmul of a compiler that weighs it computes an op as it reads: the op takes no more bytes than it
    makes. A device's part of an array is taken first."""
    taken = sum(t.nbytes for t in op.inputs if t.literal is None)
    return taken <= sum(t.nbytes for t in op.outputs) and not is_partition(op)


_NOTHING: frozenset[Tensor] = frozenset()


@dataclass(eq=False)
class _Absorber:
    graph: Graph
    fusing: Fusing
    readers: Readers
    found: Absorbed
    prologue: Set[Op]
    sources: dict[Tensor, frozenset[Tensor]] = field(default_factory=dict)  # what recomputing a tensor would read

    def run(self) -> None:
        for op in self.graph.ops:
            if is_alias(op):
                for i, o in zip(op.inputs, op.outputs, strict=False):
                    self.sources[o] = self.sources.get(i, frozenset([i]))
            elif self._absorbs(op):
                above = self.found.fills[op].outputs if op in self.found.fills else self._above(op)
                self.found.ops.add(op)
                self.sources.update(dict.fromkeys(op.outputs, frozenset(above)))

    def _above(self, op: Op) -> frozenset[Tensor]:
        """What computing an op in place would read."""
        known = (self.sources.get(t, (t,) if t.literal is None else ()) for t in op.inputs)
        return _NOTHING.union(*known)

    def _absorbs(self, op: Op) -> bool:
        """Whether its readers compute it, but for those that it is kept for."""
        if op not in self.found.loops or self._is_whole(op) or self.readers.escapes(op):
            return False
        if op in self.found.fills:
            return True
        every = self.readers.of(op)
        kept = self._keeps(op, every) if self.fusing.grows else frozenset()
        used = [c for c in every if c not in kept]
        absorbs = bool(used) and self._computes(op, used, kept)
        if kept and (absorbs or not used):
            self.found.kept[op] = kept
        return absorbs

    def _is_whole(self, op: Op) -> bool:
        """Whether it is a sum in memory, to which something is added."""
        return op in self.found.updated or op in self.found.accumulated

    def _keeps(self, op: Op, used: Sequence[Op]) -> frozenset[Op]:
        """The readers that XLA:TPU has it in memory for, while the others compute it again: what a cast is of is one
        array alone (`InstructionFusion::ComputeGloballyUnfusible`)."""
        cast = op.name == "convert_element_type"
        whole = len({*used}) > 1 and op.name not in SHAPES and op not in self.found.parts
        return frozenset(
            c
            for c in used
            if c.name == "optimization_barrier"
            or (cast and not self._takes(c, op))
            or (whole and c in self.found.parts)
        )

    def _computes(self, op: Op, used: Sequence[Op], kept: Set[Op]) -> bool:
        """Whether the ops that use it compute it, each for itself, beside those that it is kept for."""
        if not all(self._takes(c, op) for c in used) or any(map(self._spreads, used)):
            return False
        cast = self.fusing.grows and op.name == "convert_element_type"
        if kept and self._grows(op, {*used}):
            return False
        if len(used) == 1 and not kept:
            return True
        return len(used) <= _CASTS if cast else self._is_cheap(op, used)

    def _is_cheap(self, op: Op, used: Sequence[Op]) -> bool:
        """Whether each of the ops that use it may compute it again."""
        apart = self.fusing.repeats and any(c not in self.found.loops for c in used)  # no kernel joins the readers
        if not (apart or not self._is_costly(op, used) or (self.fusing.grows and self._scales(op))):
            return False
        return not self._grows(op, {*used}) or (self.fusing.grows and all(c.name == "dot_general" for c in used))

    def _is_costly(self, op: Op, used: Sequence[Op]) -> bool:
        """Whether it is a function that is computed once. So is, on TPU, an activation where what is computed of it is
        in memory, too: both are written at once (BERT, which takes the slices of a GELU for a ring)."""
        if op.name in ACTIVATIONS and self.fusing.grows:
            return any(self._keeps(c, self.readers.of(c)) for c in used)
        return op.name in self.fusing.costly

    def _scales(self, op: Op) -> bool:
        """Whether it divides rows by a number each, which becomes a product with its inverse."""
        by = self.graph.producer.get(op.inputs[1]) if op.name == "div" else None
        return by is not None and by.name == "broadcast_in_dim"

    def _grows(self, op: Op, used: Set[Op]) -> bool:
        """Whether more bytes move if all that use it compute it from what is above. What is small beside the result
        costs nothing (`EffectivelyAtMostUnary` in
        https://github.com/openxla/xla/blob/main/xla/service/instruction_fusion.cc does not count what is broadcast).

        XLA:GPU weighs all that moves: either every reader reads the operands, or one kernel does and writes the result,
        which the readers read.
        """
        above, made = self._above(op), sum(t.nbytes for t in op.outputs)
        if not self.fusing.repeats:
            return sum(t.nbytes for t in above if t.nbytes > made * _CACHED) > made
        readers = sum(_WRITTEN_OUT.get(c.name, 1) for c in used)
        cached = _CACHE_READ * made if readers > len(used) else 0.0
        taken = sum(t.nbytes if t.nbytes > made * _CACHED else cached for t in above if t.shape)
        return taken * readers > taken + made + made * readers

    def _takes(self, consumer: Op, producer: Op) -> bool:
        """Whether an op can compute another one as it reads it."""
        if consumer in self.found.accumulated:
            return False
        if consumer in self.prologue:
            return _enters(producer)
        if self.fusing.grows and self._is_multiplied_part(consumer):
            return producer.name in SHAPES
        if (
            consumer in self.found.loops
            or consumer.name in REDUCTIONS
            or (self.fusing.repeats and consumer.name in READERS)
            or (self.fusing.grows and consumer.name in WINDOWS and producer.name not in self.fusing.costly)
        ):
            return True
        if is_scatter(consumer) and self.fusing.repeats and producer.outputs[0] in consumer.inputs[1:]:
            return True
        if is_scatter(consumer) and (self.fusing.by_position or consumer in self.found.ops):
            return producer.outputs[0] is consumer.inputs[0] and all(t.literal is not None for t in producer.inputs)
        if consumer.name not in PRODUCTS or producer.name in JOINS:
            return False
        if self.fusing.grows:
            return True
        return consumer.name == "dot_general" and _enters(producer)

    def _spreads(self, op: Op) -> bool:
        """Whether it is a broadcast in memory. XLA:TPU computes nothing in it: it reads what it broadcasts there, too
        (the updates of DLRM's tables; no fusion of 28 programs for v5e broadcasts what it computes)."""
        if not self.fusing.tiles or op.name != "broadcast_in_dim":
            return False
        return not all(self._takes(c, op) for c in self.readers(op.outputs[0]))

    def _is_multiplied_part(self, op: Op) -> bool:
        """Whether it takes a device's part of an array into a batch of products. XLA:TPU does so as it reads the array,
        which is in memory: it computes nothing of it in the matmul."""
        return is_partition(op) and any(map(is_batched, self.graph.readers.get(op.outputs[0], ())))
