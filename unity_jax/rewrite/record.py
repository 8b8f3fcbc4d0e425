"""What the search rewrote, in a form that can be read, saved, and done again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unity_jax.pcg.graph import Graph, Path
from unity_jax.rewrite.rule import Rule
from unity_jax.rewrite.sites import Step


@dataclass(frozen=True)
class Rewrite:
    """One rewrite of a program: a rule, applied to all places of one kind, and the steps that followed from it.

    **Fields:** `rule`: its name; `where`: the user's line of the first place; `count`: how many places; `saved`:
    predicted seconds per step; `proof`: why the rule is true; `steps`: in order, each with the graph it is for.
    """

    rule: str
    where: str
    count: int
    saved: float
    proof: str
    steps: tuple[tuple[Path, Step], ...]

    def __str__(self) -> str:
        times = f" ({self.count} times)" if self.count > 1 else ""
        more = f", then {len(self.steps) - 1} more steps" if len(self.steps) > 1 else ""
        return f"{self.rule} at {self.where}{times}{more}: saves {self.saved * 1e3:.3g} ms"

    def to_json(self) -> dict[str, Any]:
        steps = [{"graph": path, "rule": step.rule, "spots": step.spots} for path, step in self.steps]
        return {**{k: getattr(self, k) for k in ("rule", "where", "count", "saved", "proof")}, "steps": steps}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Rewrite:
        steps = tuple(
            (
                tuple((int(i), int(j)) for i, j in s["graph"]),
                Step(str(s["rule"]), tuple(tuple(map(int, spot)) for spot in s["spots"])),
            )
            for s in data["steps"]
        )
        rule, where, proof = (str(data[k]) for k in ("rule", "where", "proof"))
        return Rewrite(rule, where, int(data["count"]), float(data["saved"]), proof, steps)


def replay(graph: Graph, rewrites: Sequence[Rewrite], rules: Sequence[Rule]) -> Graph:
    """The graph after some rewrites. Raises `LookupError` where a rule or a place is not there."""
    by_name = {r.name: r for r in rules}
    for done in rewrites:
        for path, step in done.steps:
            graph = with_graph(graph, path, step.applied(graph_at(graph, path), by_name[step.rule]))
    return graph


# Graphs within graphs


def graph_at(graph: Graph, path: Path) -> Graph:
    for i, j in path:
        graph = graph.ops[i].bodies[j]
    return graph


def with_graph(graph: Graph, path: Path, new: Graph) -> Graph:
    """A graph with one of the graphs within it replaced."""
    if not path:
        return new
    (i, j), rest = path[0], path[1:]
    op = graph.ops[i]
    bodies = tuple(with_graph(b, rest, new) if k == j else b for k, b in enumerate(op.bodies))
    ops = [*graph.ops[:i], dataclasses.replace(op, bodies=bodies), *graph.ops[i + 1 :]]
    return Graph(graph.inputs, graph.outputs, ops)
