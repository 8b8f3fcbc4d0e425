"""What has another implementation in a plan, in a form that can be read, saved, and done again."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from unity_jax.implement.attention import attentions, with_kernels
from unity_jax.implement.bags import baggable, bagged
from unity_jax.implement.constants import Constants
from unity_jax.implement.group import Group
from unity_jax.implement.loops import batchable, batched
from unity_jax.implement.persistent import persistable, persisted
from unity_jax.pcg.graph import Graph, trips
from unity_jax.residuals.change import Change, Position, at
from unity_jax.residuals.pair import Pair, in_pairs, pairs
from unity_jax.text import seconds, short_source


@dataclass(frozen=True)
class Implementation(abc.ABC):
    """Places of a program, as it was before, that have another implementation.

    **Fields:** `places`: of some tensors; `where`: the user's line of the first; `saved`: predicted seconds of a step,
    on each device.
    """

    places: tuple[Position, ...]
    where: str
    saved: float
    name: ClassVar[str]
    does: ClassVar[str]

    def __str__(self) -> str:
        times = f" ({len(self.places)} times)" if len(self.places) > 1 else ""
        return f"{self.does} at {short_source(self.where)}{times}: saves {seconds(self.saved)}"

    @abc.abstractmethod
    def applied(self, graph: Graph) -> Graph:
        """The graph after it. Raises `LookupError` for a graph that it was not made for."""


class Attention(Implementation):
    """Attentions that run as kernels. The places are the exponentials of their softmaxes."""

    name, does = "attention", "attention by a kernel"

    def applied(self, graph: Graph) -> Graph:
        wanted, done = set(at(graph, self.places)), list[Group]()

        def choose(_: Graph, found: Sequence[Group], __: int) -> list[Group]:
            chosen = [group for group in found if group.place in wanted]
            done.extend(chosen)
            return chosen

        made = attending(graph, choose)
        if {group.place for group in done} != wanted:
            raise LookupError(f"there is no attention at {self.where}")
        return made


class Loops(Implementation):
    """Loops whose products run once for all steps, as far as they can (`implement.loops`). The places are what they
    make first."""

    name, does = "loops", "products of all steps of a loop at once"

    def applied(self, graph: Graph) -> Graph:
        first = set(at(graph, self.places))
        scans = [op for op in graph.walk() if op.name == "scan" and op.outputs[0] in first]
        if len(scans) < len(first) or not set(scans) <= set(batchable(graph)):
            raise LookupError(f"there is no loop at {self.where} that products can leave")
        return batched(graph, scans)


@dataclass(frozen=True)
class Persistent(Implementation):
    """Loops that run as one kernel each. The places are what they make first.

    **Fields:** `room`: bytes on the chip that a kernel may take.
    """

    room: float
    name, does = "persistent", "loop as one kernel"

    def applied(self, graph: Graph) -> Graph:
        first = set(at(graph, self.places))
        bodies = {op: body for op, body in persistable(graph, self.room).items() if op.outputs[0] in first}
        if len(bodies) < len(first):
            raise LookupError(f"there is no loop at {self.where} that a kernel can run")
        return persisted(graph, bodies)


class Bags(Implementation):
    """Sums of rows that are looked up, and their gradients, as one op each (`implement.bags`). The places are what they
    make."""

    name, does = "bags", "rows of bags added one by one"

    def applied(self, graph: Graph) -> Graph:
        made = set(at(graph, self.places))
        if len(made & {op.outputs[0] for op in baggable(graph)}) < len(made):
            raise LookupError(f"there is no bag of rows at {self.where}")
        return bagged(graph, made)


Choose = Callable[[Graph, Sequence[Group], int], Sequence[Group]]
"""Chooses of the attentions of a graph, which runs so often in a step."""


def attending(graph: Graph, choose: Choose) -> Graph:
    """The graph, and those of its loops, with those of their attentions as kernels that are chosen. A scan over layers
    and its backward pass are looked at as one (`residuals.pair`)."""
    constants = Constants(graph)

    def of(graph: Graph, repeat: int) -> Graph:
        layers = pairs(graph)
        halves = {op for pair in layers for op in (pair.forward, pair.backward)}
        others = [op for op in graph.ops if op.bodies and op not in halves]
        inside = {op: tuple(of(body, repeat * trips(op)) for body in op.bodies) for op in others}
        if any(new is not old for op, bodies in inside.items() for new, old in zip(bodies, op.bodies, strict=True)):
            ops = [dataclasses.replace(op, bodies=inside[op]) if op in inside else op for op in graph.ops]
            graph = Graph(graph.inputs, graph.outputs, ops)
        if layers:
            graph = in_pairs(graph, layers, lambda pair: both(pair, repeat)).graph
        return within(graph, repeat)

    def both(pair: Pair, repeat: int) -> Change | None:
        made = within(pair.joined, repeat * trips(pair.forward))
        return None if made is pair.joined else Change(made, {})

    def within(graph: Graph, repeat: int) -> Graph:
        found = attentions(graph, constants)
        chosen = choose(graph, found, repeat) if found else ()
        return with_kernels(graph, chosen) if chosen else graph

    return of(graph, 1)


_KINDS: Mapping[str, type[Implementation]] = {of.name: of for of in (Attention, Loops, Persistent, Bags)}


def to_json(done: Implementation) -> dict[str, Any]:
    """What a plan file holds of it."""
    return {"kind": done.name, **dataclasses.asdict(done)}


def from_json(data: Mapping[str, Any]) -> Implementation:
    """Of what `to_json` gives. Raises `LookupError` for a kind that there is not."""
    kind, places = _KINDS[data["kind"]], tuple(tuple(map(int, place)) for place in data["places"])
    more = {f.name: data[f.name] for f in dataclasses.fields(kind)[len(dataclasses.fields(Implementation)) :]}
    return kind(places, str(data["where"]), float(data["saved"]), **more)
