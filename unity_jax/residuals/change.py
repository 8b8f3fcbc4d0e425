"""What a choice of residuals makes of a graph, and how a place in a graph is told without it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import NamedTuple

from unity_jax.pcg.graph import Graph, Tensor

Position = tuple[int, int]
"""A tensor of a graph: which op makes it, and which of its results it is."""


Origin = Tensor | Hashable
"""What a new tensor is: the tensor that it equals, or is a part of; or words, numbers and tensors that say what it is
for."""


class Change(NamedTuple):
    """A graph that computes the same as another one. **Fields:** `origin`: what each new tensor is, in terms of the
    other graph; in the same order for the same change of graphs that are alike; `hosted`: the inputs that are in the
    memory of the host from step to step."""

    graph: Graph
    origin: Mapping[Tensor, Origin]
    hosted: frozenset[int] = frozenset()

    def alike(self, other: Change, like: Mapping[Tensor, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """New tensors of this change, and those in their place of the same change of another graph, where each tensor
        is `like` one of that."""
        there = defaultdict[Origin, list[Tensor]](list)
        for t, origin in other.origin.items():
            there[origin].append(t)
        here = defaultdict[Origin, list[Tensor]](list)
        for t, origin in self.origin.items():
            here[origin].append(t)
        for origin, tensors in here.items():
            yield from zip(tensors, there[_translated(origin, like)], strict=False)


def _translated(origin: Origin, like: Mapping[Tensor, Tensor]) -> Origin:
    if isinstance(origin, Tensor):
        return like.get(origin, origin)
    return tuple(_translated(part, like) for part in origin) if isinstance(origin, tuple) else origin


def positions(graph: Graph, tensors: Iterable[Tensor]) -> tuple[Position, ...]:
    """Where tensors are made, in the order of the program."""
    wanted = set(tensors)
    return tuple((i, j) for i, op in enumerate(graph.ops) for j, t in enumerate(op.outputs) if t in wanted)


def at(graph: Graph, places: Iterable[Position]) -> list[Tensor]:
    """The tensors at some places. Raises `LookupError` where there are none."""
    return [graph.ops[i].outputs[j] for i, j in places]


def made(graph: Graph) -> Iterator[Tensor]:
    """All that is made in a graph and in those of its loops, in order."""
    for op in graph.ops:
        for body in op.bodies:
            yield from (*body.inputs, *made(body))
        yield from op.outputs
