"""What every op of a program moves through memory, bodies included, as its kernels do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary

from unity_jax.pcg.graph import Graph, Op, Tensor
from unity_jax.pcg.loops import Scan
from unity_jax.xla.aliases import base_tensors
from unity_jax.xla.fusion import kernels
from unity_jax.xla.kernel import Kernel, Use


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

    def _add(self, graph: Graph, compiler: str, carried: int | None = None) -> None:
        known = _known.setdefault(graph, {})
        if (compiler, carried) not in known:
            known[compiler, carried] = _Own.of(graph, compiler, carried)
        own = known[compiler, carried]
        self.written.update(own.written)
        self.kernels[graph] = own.kernels
        self.uses.update(own.uses)
        for op in graph.ops:
            stacks = Scan.of(op.params).stacked.start if op.name == "scan" else None
            for body in op.bodies:
                self._add(body, compiler, stacks)


class _Own(NamedTuple):
    """The traffic of a graph without its bodies."""

    written: set[Tensor]
    kernels: Sequence[Kernel]
    uses: dict[Op, Use]

    @staticmethod
    def of(graph: Graph, compiler: str, carried: int | None) -> _Own:
        base, every = base_tensors(graph), kernels(graph, compiler, carried)
        written = {*graph.inputs, *graph.outputs}
        uses: dict[Op, Use] = {}
        for kernel in every:
            written.update(kernel.writes)
            for op in kernel.counts:
                use = kernel.use(op, int(op is kernel.root))
                uses[op] = uses[op].plus(use) if op in uses else use
        written.update([t for t, s in base.items() if s in written])
        least = {n: Use((0,) * n, 0) for n in {len(op.inputs) + len(op.outputs) for op in graph.ops}}
        all_uses = {op: uses.get(op) or least[len(op.inputs) + len(op.outputs)] for op in graph.ops}
        return _Own(written, every, all_uses)


_known: WeakKeyDictionary[Graph, dict[tuple[str, int | None], _Own]] = WeakKeyDictionary()
"""Variants of a program have most bodies in common. By compiler and by how many outputs a body carries."""
