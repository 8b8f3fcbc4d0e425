"""What a choice of residuals makes of a graph, and how a place in a graph is told without it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from unity_jax.pcg.graph import Graph, Tensor

Position = tuple[int, int]
"""A tensor of a graph: which op makes it, and which of its results it is."""


class Change(NamedTuple):
    """A graph that computes the same as another one. **Fields:** `origin`: of each new tensor the tensor of the other
    graph that it equals, or else a number; the same ones for the same change of graphs that are alike."""

    graph: Graph
    origin: Mapping[Tensor, Tensor | int]


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
