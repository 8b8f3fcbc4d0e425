"""What a choice of residuals makes of a graph, and how a place in a graph is told without it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Set
from typing import Any, NamedTuple

from unity_jax.pcg.graph import Graph, Tensor

Position = tuple[int, ...]
"""A tensor of a graph: which op makes it, and which of its results it is; before that, of each loop that this is in,
which op the loop is, and which of its bodies."""


Origin = Tensor | Hashable
"""What a new tensor is: the tensor that it equals, or is a part of; or words, numbers and tensors that say what it is
for."""


class Change(NamedTuple):
    """A graph that computes the same as another one. **Fields:** `origin`: what each new tensor is, in terms of the
    other graph; in the same order for the same change of graphs that are alike; `hosted`: the inputs that are in the
    memory of the host from step to step; `spilled`: the stacks that are there from the forward to the backward pass."""

    graph: Graph
    origin: Mapping[Tensor, Origin]
    hosted: frozenset[int] = frozenset()
    spilled: frozenset[Tensor] = frozenset()

    def then(self, other: Change) -> Change:
        """This change and one of what it makes, as one."""
        origin = {**self.origin, **{t: _translated(o, self.origin) for t, o in other.origin.items()}}
        return Change(other.graph, origin, self.hosted | other.hosted, self.spilled | other.spilled)

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


def _translated(origin: Origin, like: Mapping[Tensor, Any]) -> Origin:
    if isinstance(origin, Tensor):
        return like.get(origin, origin)
    return tuple(_translated(part, like) for part in origin) if isinstance(origin, tuple) else origin


def positions(graph: Graph, tensors: Iterable[Tensor]) -> tuple[Position, ...]:
    """Where tensors are made, in the order of the program, and of those within a loop."""
    return tuple(_positions(graph, set(tensors), ()))


def _positions(graph: Graph, wanted: Set[Tensor], path: Position) -> Iterator[Position]:
    for i, op in enumerate(graph.ops):
        for k, body in enumerate(op.bodies):
            yield from _positions(body, wanted, (*path, i, k))
        yield from ((*path, i, j) for j, t in enumerate(op.outputs) if t in wanted)


def at(graph: Graph, places: Iterable[Position]) -> list[Tensor]:
    """The tensors at some places. Raises `LookupError` where there are none."""
    return [_at(graph, place) for place in places]


def _at(graph: Graph, place: Position) -> Tensor:
    i, j, *inner = place
    return _at(graph.ops[i].bodies[j], tuple(inner)) if inner else graph.ops[i].outputs[j]


def made(graph: Graph) -> Iterator[Tensor]:
    """All that is made in a graph and in those of its loops, in order."""
    for op in graph.ops:
        for body in op.bodies:
            yield from (*body.inputs, *made(body))
        yield from op.outputs
