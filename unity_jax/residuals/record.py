"""How a program was changed to need less memory, in a form that can be read, saved, and done again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unity_jax.pcg.graph import Graph, Tensor
from unity_jax.residuals.change import Change, Position, at, positions
from unity_jax.residuals.choice import Choice
from unity_jax.residuals.chunks import chunked
from unity_jax.residuals.microbatch import microbatched
from unity_jax.residuals.recompute import recomputed
from unity_jax.residuals.region import NoRegionError
from unity_jax.residuals.slices import by_layer
from unity_jax.text import seconds, short_source, size
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

    @property
    def name(self) -> str:
        """What is done, in a word."""
        return "recomputes"

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


@dataclass(frozen=True)
class Chunk:
    """A loss that is computed by chunks of rows.

    **Fields:** `seed`: the array that the region is around; `dim`: its dimension that is cut; `parts`: into how many;
    `where`: the user's line of it; `bytes`: of it, those that are not there at a time, on each device.
    """

    seed: Position
    dim: int
    parts: int
    where: str
    bytes: int

    @property
    def name(self) -> str:
        """What is done, in a word."""
        return "chunked loss"

    def __str__(self) -> str:
        return f"chunked loss in {self.parts} parts at {short_source(self.where)} ({size(self.bytes)})"

    def applied(self, graph: Graph) -> Change:
        """The graph after it. Raises `LookupError` for a graph that it was not made for."""
        (seed,) = at(graph, [self.seed])
        made = chunked(graph, seed, self.dim, self.parts) if self.dim < seed.rank else None
        if made is None:
            raise LookupError(f"there is no loss to be chunked at {self.where}")
        return made

    def moved(self, graph: Graph, to: Graph, like: Mapping[Tensor, Tensor]) -> Chunk:
        """The same for another graph, whose tensors have their `like` in this one."""
        (seed,) = at(graph, [self.seed])
        made = (t for op in to.ops for t in op.outputs)
        (there, *_) = positions(to, (t for t in made if like.get(t, t) is seed))
        return dataclasses.replace(self, seed=there)


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

    @property
    def name(self) -> str:
        """What is done, in a word."""
        return "microbatches"

    @property
    def where(self) -> str:
        """No line of the user: it is the whole step."""
        return ""

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

    @property
    def name(self) -> str:
        """What is done, in a word."""
        return "state on the host"

    @property
    def where(self) -> str:
        """No line of the user: it is arguments."""
        return ""

    def __str__(self) -> str:
        leaves = f"{self.count} leaves" if self.count > 1 else "a leaf"
        copies = f"{seconds(self.seconds)} of copies, {seconds(self.exposed)} exposed"
        layers = ", updated layer by layer" * self.by_layer
        return f"keeps {leaves} of the state ({size(self.bytes)}) on the host{layers}, {copies}"

    def applied(self, graph: Graph) -> Change:
        """The graph as it is, or with loops over layers."""
        return by_layer(graph, self.hosted) if self.by_layer else Change(graph, {}, frozenset(self.hosted))

    def moved(self, graph: Graph, to: Graph, like: Mapping[Tensor, Tensor]) -> Offload:
        """The same for another graph, whose tensors have their `like` in this one."""
        hosted = {graph.inputs[i] for i in self.hosted}
        return dataclasses.replace(self, hosted=tuple(i for i, t in enumerate(to.inputs) if like.get(t, t) in hosted))


Saving = Recompute | Chunk | Microbatch | Offload

_KINDS = {"recompute": Recompute, "chunk": Chunk, "microbatch": Microbatch, "offload": Offload}


def to_json(saving: Saving) -> dict[str, Any]:
    """What a plan file holds of it."""
    (kind,) = (name for name, of in _KINDS.items() if type(saving) is of)
    return {"kind": kind, **dataclasses.asdict(saving)}


def from_json(data: Mapping[str, Any]) -> Saving:
    """Of what `to_json` gives. Raises `LookupError` for a kind that there is not."""
    kind = _KINDS[data["kind"]]
    return kind(**{f.name: _READ[f.name](data[f.name]) for f in dataclasses.fields(kind)})


def _position(data: Sequence[Any]) -> Position:
    i, j = data
    return int(i), int(j)


_READ: dict[str, Callable[[Any], Any]] = {
    "values": lambda data: tuple(map(_position, data)),
    "hosted": lambda data: tuple(map(int, data)),
    "arguments": lambda data: tuple(map(_position, data)),
    "seed": _position,
    "compiler": str,
    "where": str,
    "count": int,
    "bytes": int,
    "seconds": float,
    "exposed": float,
    "by_layer": bool,
    "dim": int,
    "parts": int,
    "rows": int,
}
"""How each field is read."""
