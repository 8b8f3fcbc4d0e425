"""A kernel of a program: ops that run as one, what it reads and writes, and how each of its ops runs."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from unity_jax.pcg.graph import Op, Tensor
from unity_jax.xla.layout_constraints import Rows
from unity_jax.xla.op_classes import PRODUCTS

Counts = tuple[int, ...]
"""Per operand and result of an op: how often it goes through memory."""


class Use(NamedTuple):
    """How an op runs: what it moves through memory, how many kernels it starts; whether it rides along in the one of
    a matmul, or is alone in its own; how its operands and results lie (`xla.layout_constraints`); whether it is a
    scatter into zeros; whether what it writes is summed by an all-reduce; whether what reads it adds up the parts that
    its depth is split into (`xla.dots.split`)."""

    counts: Counts
    launches: int = 1
    rides: bool = False
    alone: bool = False
    rows: Rows = ()
    zeros: bool = False
    summed: bool = False
    in_parts: bool = False

    def plus(self, other: Use) -> Use:
        counts = tuple(a + b for a, b in zip(self.counts, other.counts, strict=True))
        rides, alone = self.rides or other.rides, self.alone or other.alone
        zeros, summed = self.zeros or other.zeros, self.summed or other.summed
        rows, parts = self.rows or other.rows, self.in_parts or other.in_parts
        return Use(counts, self.launches + other.launches, rides, alone, rows, zeros, summed, parts)


@dataclass(eq=False)
class Kernel:
    """Ops that run as one: `ops` in program order, absorbed ones included; the tensors it reads from memory and writes
    to it. A collective, a loop or a branch is a kernel of its own.

    `waits`: tensors it does not read and waits for all the same, behind an `optimization_barrier`. `counts` says per op
    which operands and results go through memory: an operand that several ops read counts for the first. `updates`: it
    writes its result into what a loop stacks (`xla.in_place_updates`).
    """

    ops: list[Op]
    reads: list[Tensor]
    writes: list[Tensor]
    waits: list[Tensor]
    counts: dict[Op, Counts] = field(default_factory=dict)
    rows: dict[Op, Rows] = field(default_factory=dict)
    zeros: set[Op] = field(default_factory=set)
    summed: set[Op] = field(default_factory=set)
    in_parts: set[Op] = field(default_factory=set)
    updates: bool = False
    _uses: dict[Op, Use] = field(default_factory=dict)

    def count(self, base: Mapping[Tensor, Tensor]) -> None:
        """Say what of its ops goes through memory, when it is known what it reads and writes.

        **Arguments:** `base`: what aliases are views of.
        """
        left, written = set(self.reads), set(self.writes)
        for op in self.ops:
            first = []
            for t in op.inputs:
                whole = base.get(t, t)
                first.append(int(whole in left))
                left.discard(whole)
            self.counts[op] = (*first, *[int(t in written) for t in op.outputs])

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
        return Use(self.counts[op], 0, rides, alone, rows, zeros, summed, op in self.in_parts)

    @functools.cached_property
    def root(self) -> Op:
        """The op that says what kind of kernel it is: its matmul, if it has one, or its last op."""
        return next((op for op in self.ops if op.name in PRODUCTS), self.ops[-1])
