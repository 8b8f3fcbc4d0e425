"""How a program was changed to need less memory, in a form that can be read, saved, and done again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unity_jax.pcg.graph import Graph, Tensor
from unity_jax.residuals.change import Change, Position, at, positions
from unity_jax.residuals.choice import Choice
from unity_jax.residuals.recompute import recomputed
from unity_jax.text import short_source, size
from unity_jax.xla.traffic import Traffic


@dataclass(frozen=True)
class Recompute:
    """Values that the backward pass computes again.

    **Fields:** `values`: where they are made; `compiler`: the one whose kernels say what is in memory; `where`: the
    user's line of the largest one; `count`: how many need not be kept; `bytes` of these, and `seconds` to compute them
    again, on each device.
    """

    values: tuple[Position, ...]
    compiler: str
    where: str
    count: int
    bytes: int
    seconds: float

    @staticmethod
    def of(graph: Graph, choice: Choice, compiler: str, nbytes: float) -> Recompute:
        """A choice for a graph; `nbytes` that it frees on each device."""
        largest = max(choice.freed, key=lambda t: (t.nbytes, -graph.ops.index(graph.producer[t])))
        count = sum(t.times for t in choice.freed)
        where = graph.producer[largest].source
        return Recompute(positions(graph, choice.values), compiler, where, count, round(nbytes), choice.seconds)

    def __str__(self) -> str:
        times = f"{self.count} values, " if self.count > 1 else ""
        return f"recomputes {short_source(self.where)} ({times}{size(self.bytes)})"

    def applied(self, graph: Graph) -> Change:
        """The graph after it. Raises `LookupError` for a graph that it was not made for."""
        return recomputed(graph, frozenset(at(graph, self.values)), Traffic.of(graph, self.compiler).written)

    def moved(self, graph: Graph, to: Graph, like: Mapping[Tensor, Tensor]) -> Recompute:
        """The same for another graph, whose tensors have their `like` in this one."""
        values = frozenset(at(graph, self.values))
        made = (t for op in to.ops for t in op.outputs)
        return dataclasses.replace(self, values=positions(to, (t for t in made if like.get(t, t) in values)))


Saving = Recompute

_KINDS = {"recompute": Recompute}


def replay(graph: Graph, savings: Sequence[Saving]) -> Graph:
    """The graph after some changes. Raises `LookupError` where a place is not there."""
    for saving in savings:
        graph = saving.applied(graph).graph
    return graph


def to_json(saving: Saving) -> dict[str, Any]:
    (kind,) = (name for name, of in _KINDS.items() if type(saving) is of)
    return {"kind": kind, **dataclasses.asdict(saving)}


def from_json(data: Mapping[str, Any]) -> Saving:
    return Recompute(
        tuple((int(i), int(j)) for i, j in data["values"]),
        str(data["compiler"]),
        str(data["where"]),
        int(data["count"]),
        int(data["bytes"]),
        float(data["seconds"]),
    )
