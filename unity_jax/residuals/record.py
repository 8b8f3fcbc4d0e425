"""How a program was changed to need less memory, in a form that can be read, saved, and done again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from unity_jax.pcg.graph import Graph, Op, Tensor, nested, trips
from unity_jax.residuals.change import Change, Position, at, made, positions
from unity_jax.residuals.choice import Choice
from unity_jax.residuals.chunks import chunked
from unity_jax.residuals.keep import kept
from unity_jax.residuals.microbatch import microbatched
from unity_jax.residuals.pair import in_layer, stacked
from unity_jax.residuals.ranges import Layers, cut
from unity_jax.residuals.recompute import can_repeat, recomputed
from unity_jax.residuals.region import NoRegionError
from unity_jax.residuals.slices import by_layer
from unity_jax.text import seconds, short_source, size
from unity_jax.xla.traffic import Traffic


@dataclass(frozen=True)
class _OfValues:
    """What is done with some values.

    **Fields:** `values`: where they are; `where`: the user's line of the largest one; `count`: how many it is done
    with; `bytes` of these, and `seconds` that it takes, on each device; `layers`: the first ones, which have other
    values than the rest, if they do: then the places are in the graph with these apart (`residuals.ranges`).
    """

    values: tuple[Position, ...]
    where: str
    count: int
    bytes: int
    seconds: float
    layers: Layers | None = field(default=None, kw_only=True)

    def moved(self, graph: Graph, to: Graph, like: Mapping[Tensor, Tensor]) -> Self:
        """The same for another graph, whose tensors have their `like` in this one."""
        return dataclasses.replace(self, values=_moved(self.values, graph, to, like, self.layers))


@dataclass(frozen=True)
class Recompute(_OfValues):
    """Values that the backward pass computes again.

    **Fields**, besides those of all: `count` of those that need not be kept, and their `bytes`; `seconds` to compute
    them again; `layers` that compute more of them again; `compiler`: the one whose kernels say what is in memory.
    """

    compiler: str = field(kw_only=True)
    name: ClassVar[str] = "recomputes"
    effect: ClassVar[str] = "saves memory"

    @staticmethod
    def of(graph: Graph, choice: Choice, compiler: str, nbytes: float) -> Recompute:
        """A choice for a graph; `nbytes` that it frees on each device."""
        where, count, values = _largest(graph, choice), sum(choice.freed.values()), positions(graph, choice.values)
        return Recompute(values, where, count, round(nbytes), choice.seconds, compiler=compiler)

    def __str__(self) -> str:
        times = f"{self.count} values, " if self.count > 1 else ""
        few = f"more in {self.layers}, " if self.layers else ""
        return f"recomputes {short_source(self.where)} ({times}{few}{size(self.bytes)})"

    def applied(self, graph: Graph) -> Change:
        """The graph after it. Raises `LookupError` for a graph that it was not made for."""
        apart = _apart(graph, self.layers)
        values = frozenset(at(apart.graph, self.values))
        makers = (op for op in apart.graph.walk() if not values.isdisjoint(op.outputs))
        if any(op.backward or not can_repeat(op) for op in makers):
            raise LookupError(f"something at {self.where} is not computed again")
        return apart.then(recomputed(apart.graph, values, Traffic.of(apart.graph, self.compiler).written))


@dataclass(frozen=True)
class Keep(_OfValues):
    """Values that the user's `jax.checkpoint` has the backward pass compute again, and that are kept instead.

    **Fields**, besides those of all: `values`: where they are computed again; `seconds` that the backward pass takes
    less; `layers` that keep fewer of them.
    """

    name: ClassVar[str] = "keeps"
    effect: ClassVar[str] = "uses memory"

    @staticmethod
    def of(graph: Graph, choice: Choice, nbytes: float, layers: Layers | None = None) -> Keep:
        """A choice for a graph; `nbytes` that are kept on each device."""
        where, count = _largest(graph, choice), sum(choice.freed.values())
        return Keep(positions(graph, choice.values), where, count, round(nbytes), choice.seconds, layers=layers)

    def __str__(self) -> str:
        few = f"fewer in {self.layers}, " if self.layers else ""
        return (
            f"keeps {self.count} values that jax.checkpoint would recompute, as of {short_source(self.where)} "
            f"({few}{size(self.bytes)}, {seconds(self.seconds)} saved)"
        )

    def applied(self, graph: Graph) -> Change:
        """The graph after it. Raises `LookupError` for a graph that it was not made for."""
        apart = _apart(graph, self.layers)
        return apart.then(kept(apart.graph, frozenset(at(apart.graph, self.values))))


def _largest(graph: Graph, choice: Choice) -> str:
    """The user's line of the largest value of a choice, of the first one of these."""
    makers = {t: (i, op) for i, op in enumerate(graph.walk()) for t in op.outputs}
    largest = max(choice.freed, key=lambda t: (t.nbytes, -makers[t][0]))
    return makers[largest][1].source


def _apart(graph: Graph, layers: Layers | None) -> Change:
    """The graph with the first layers apart, if some are."""
    return cut(graph, layers) if layers else Change(graph, {})


def _moved(
    places: Sequence[Position],
    graph: Graph,
    to: Graph,
    like: Mapping[Tensor, Tensor],
    layers: Layers | None = None,
) -> tuple[Position, ...]:
    """The places of the same values in another graph."""
    near, far = _apart(graph, layers), _apart(to, layers)
    like = {**like, **dict(far.alike(near, like))}
    values = frozenset(at(near.graph, places))
    return positions(far.graph, (t for t in made(far.graph) if like.get(t, t) in values))


@dataclass(frozen=True)
class Chunk:
    """A loss, or attention, that is computed by chunks of rows.

    **Fields:** `seeds`: the arrays that the regions are around; `dim`: their dimension that is cut; `parts`: into how
    many; `where`: the user's line of the first; `bytes`: of it, those that are not there at a time, on each device.
    """

    seeds: tuple[Position, ...]
    dim: int
    parts: int
    where: str
    bytes: int
    name: ClassVar[str] = "chunks"
    effect: ClassVar[str] = "saves memory"

    def __str__(self) -> str:
        return f"{self.parts} chunks of {short_source(self.where)} ({size(self.bytes)})"

    def applied(self, graph: Graph) -> Change:
        """The graph after it. Raises `LookupError` for a graph that it was not made for."""
        seeds = at(graph, self.seeds)
        fits = 0 <= self.dim < min((t.rank for t in seeds), default=0)
        change = chunked(graph, seeds, self.dim, self.parts) if fits else None
        if change is None:
            raise LookupError(f"there are no rows to be chunked at {self.where}")
        return change

    def moved(self, graph: Graph, to: Graph, like: Mapping[Tensor, Tensor]) -> Chunk:
        """The same for another graph, whose tensors have their `like` in this one."""
        return dataclasses.replace(self, seeds=_moved(self.seeds, graph, to, like))


class NeedsWholeBatchError(LookupError):
    """There are no microbatches: its text is the user's line that needs the whole batch at once, if it is known."""


@dataclass(frozen=True)
class Microbatch:
    """Forward and backward by microbatches.

    **Fields:** `arguments`: those that hold rows of the batch, each with the dimension that they are; `parts`: how many
    microbatches; `rows`: how many rows the batch has.
    """

    arguments: tuple[Position, ...]
    parts: int
    rows: int
    name: ClassVar[str] = "microbatches"
    effect: ClassVar[str] = "saves memory"
    where: ClassVar[str] = ""

    def __str__(self) -> str:
        return f"{self.parts} microbatches of {self.rows // self.parts} of {self.rows} rows, gradients accumulated"

    def applied(self, graph: Graph) -> Change:
        """The graph after it. Raises `NeedsWholeBatchError`, with the user's line, where it cannot be."""
        try:
            return microbatched(graph, [(graph.inputs[i], d) for i, d in self.arguments], self.parts)
        except NoRegionError as error:
            raise NeedsWholeBatchError(str(error)) from None

    def moved(self, graph: Graph, to: Graph, like: Mapping[Tensor, Tensor]) -> Microbatch:
        """The same for another graph, whose tensors have their `like` in this one."""
        place = {like.get(t, t): i for i, t in enumerate(to.inputs)}
        return dataclasses.replace(self, arguments=tuple((place[graph.inputs[i]], d) for i, d in self.arguments))


@dataclass(frozen=True)
class Offload:
    """State that is in the memory of the host from step to step, and on its device only while it is updated.

    **Fields:** `hosted`: which inputs of the graph; `by_layer`: whether those that hold all layers are updated layer by
    layer; `count` of these, those of all layers; `bytes` on each device; `seconds` that copies of these take from the
    host and back, one after the other, and the `exposed` part of them, by which the step is longer.
    """

    hosted: tuple[int, ...]
    by_layer: bool
    count: int
    bytes: int
    seconds: float
    exposed: float
    name: ClassVar[str] = "state on the host"
    effect: ClassVar[str] = "saves memory"
    where: ClassVar[str] = ""

    def __str__(self) -> str:
        leaves = f"{self.count} leaves" if self.count > 1 else "a leaf"
        layers = ", updated layer by layer" * self.by_layer
        return f"keeps {leaves} of the state ({size(self.bytes)}) on the host{layers}, {_copies(self)}"

    def applied(self, graph: Graph) -> Change:
        """The graph as it is, or with loops over layers."""
        return by_layer(graph, self.hosted) if self.by_layer else Change(graph, {}, frozenset(self.hosted))

    def moved(self, graph: Graph, to: Graph, like: Mapping[Tensor, Tensor]) -> Offload:
        """The same for another graph, whose tensors have their `like` in this one."""
        hosted = {graph.inputs[i] for i in self.hosted}
        return dataclasses.replace(self, hosted=tuple(i for i, t in enumerate(to.inputs) if like.get(t, t) in hosted))


@dataclass(frozen=True)
class Spill(_OfValues):
    """Activations that are in the memory of the host from the forward to the backward pass: what layers of a scan stack
    goes there layer by layer, and comes back so.

    **Fields**, besides those of all: `values`: the stacks, of which each layer is counted; `seconds` of their copies,
    and the `exposed` part of them, as of `Offload`; `layers` of which more are there.
    """

    exposed: float = field(kw_only=True)
    name: ClassVar[str] = "activations on the host"
    effect: ClassVar[str] = "saves memory"

    @staticmethod
    def of(graph: Graph, stacks: Mapping[Tensor, Op], bytes_of: Mapping[Tensor, int], bandwidth: float) -> Spill:
        """Some stacks of a graph, each with the scan that makes it.

        **Arguments:** `bytes_of` each of them, as often as a step has it, on one device; `bandwidth` of its link to the
        host, bytes/s.
        """
        runs = {op: n for _, inside, n in nested(graph) for op in inside.ops}
        took = 2 * sum(runs[scan] * bytes_of[t] for t, scan in stacks.items()) / bandwidth
        largest = max(stacks, key=lambda t: bytes_of[t])
        (body,) = stacks[largest].bodies
        source = body.producer.get(in_layer(stacks[largest], largest), stacks[largest]).source
        count, nbytes = sum(map(trips, stacks.values())), sum(bytes_of[t] for t in stacks)
        return Spill(positions(graph, stacks), source, count, nbytes, took, exposed=took)

    def __str__(self) -> str:
        few = f"more in {self.layers}, " if self.layers else ""
        return (
            f"keeps {self.count} activations ({few}{size(self.bytes)}), as of {short_source(self.where)}, on the host "
            f"for the backward pass, {_copies(self)}"
        )

    def applied(self, graph: Graph) -> Change:
        """The graph as it is, or with its first layers apart. Raises `LookupError` for a graph that it was not made
        for."""
        apart = _apart(graph, self.layers)
        stacks = frozenset(at(apart.graph, self.values))
        if not stacks <= stacked(apart.graph).keys():
            raise LookupError(f"something at {self.where} is not stacked for the backward pass")
        return apart.then(Change(apart.graph, {}, spilled=stacks))


def _copies(how: Offload | Spill) -> str:
    """What copies from the host and to it take."""
    return f"{seconds(how.seconds)} of copies, {seconds(how.exposed)} exposed"


Saving = Recompute | Keep | Chunk | Microbatch | Offload | Spill

_KINDS = {
    "recompute": Recompute,
    "keep": Keep,
    "chunk": Chunk,
    "microbatch": Microbatch,
    "offload": Offload,
    "spill": Spill,
}


def to_json(saving: Saving) -> dict[str, Any]:
    """What a plan file holds of it."""
    (kind,) = (name for name, of in _KINDS.items() if type(saving) is of)
    return {"kind": kind, **dataclasses.asdict(saving)}


def from_json(data: Mapping[str, Any]) -> Saving:
    """Of what `to_json` gives. Raises `LookupError` for a kind that there is not."""
    kind, data = _KINDS[data["kind"]], {"layers": None, **data}
    return kind(**{f.name: _READ[f.name](data[f.name]) for f in dataclasses.fields(kind)})


def _positions(data: Sequence[Sequence[Any]]) -> tuple[Position, ...]:
    found = tuple(tuple(map(int, place)) for place in data)
    if any(min(place) < 0 or len(place) % 2 for place in found):
        raise ValueError(f"{found} are no positions")
    return found


_READ: dict[str, Callable[[Any], Any]] = {
    "values": _positions,
    "arguments": _positions,
    "seeds": _positions,
    "hosted": lambda data: tuple(map(int, data)),
    "compiler": str,
    "where": str,
    "count": int,
    "bytes": int,
    "seconds": float,
    "layers": lambda data: data and Layers(*map(int, data)),
    "exposed": float,
    "by_layer": bool,
    "dim": int,
    "parts": int,
    "rows": int,
}
"""How each field is read."""
