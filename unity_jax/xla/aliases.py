"""Ops whose result is their operand, seen differently: they move nothing, and are looked through."""

from __future__ import annotations

import functools
from collections.abc import Set
from dataclasses import dataclass

from unity_jax.pcg.graph import Graph, Op, Tensor
from unity_jax.xla.op_classes import BITCASTS


def is_alias(op: Op) -> bool:
    """Whether the result is the operand, seen differently."""
    return op.name in BITCASTS and not op.bodies


def base_tensors(graph: Graph) -> dict[Tensor, Tensor]:
    """The tensor in memory that each alias is a view of."""
    base: dict[Tensor, Tensor] = {}
    for op in graph.ops:
        if is_alias(op):
            base.update((o, base.get(i, i)) for i, o in zip(op.inputs, op.outputs, strict=False))
    return base


@dataclass(eq=False)
class Readers:
    """The ops that read a tensor of a graph, through aliases; an `optimization_barrier` reads itself. `carried`: so
    many outputs of the graph have to be in memory, the others are written into stacks (None: all)."""

    graph: Graph
    carried: int | None = None

    def __post_init__(self) -> None:
        self._known: dict[Tensor, list[Op]] = {}

    def __call__(self, t: Tensor) -> list[Op]:
        if t not in self._known:
            found: list[Op] = []
            for c in self.graph.readers.get(t, ()):
                if is_alias(c) and c.name != "optimization_barrier":
                    found += [r for i, o in zip(c.inputs, c.outputs, strict=False) if i is t for r in self(o)]
                else:
                    found.append(c)
            self._known[t] = found
        return self._known[t]

    def of(self, op: Op) -> list[Op]:
        """The ops that read a result of an op."""
        return self(op.outputs[0]) if len(op.outputs) == 1 else [c for t in op.outputs for c in self(t)]

    def escapes(self, op: Op) -> bool:
        """Whether a result of an op, or an alias of it, is a result of the program."""
        return not self._escaping.isdisjoint(op.outputs)

    @functools.cached_property
    def _escaping(self) -> Set[Tensor]:
        found = set(self.graph.outputs[: self.carried])
        for op in reversed(self.graph.ops):
            if is_alias(op):
                found.update(i for i, o in zip(op.inputs, op.outputs, strict=False) if o in found)
        return found
