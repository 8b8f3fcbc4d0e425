"""What every op of a program moves through memory, bodies included, as its kernels do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from unity_jax.pcg.graph import Graph, Op, Tensor
from unity_jax.xla.aliases import base_tensors
from unity_jax.xla.fusion import Kernel, Use, kernels


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
