"""Loops over layers in two ranges, so that the first layers may do otherwise than the rest: as many of them as there is
no memory for compute again what the others keep.

    scan forward, 24 layers               scan forward, the first 10        scan forward, 14
    ...                             ->    ...
    scan backward, 24 layers              scan backward, these 14           scan backward, the first 10

The first ones, since these are the last of the backward pass: when what they compute again is there, what the others
kept is gone (Megatron-LM's "block" recomputation; Mist's number of checkpointed layers, section 4 of
https://arxiv.org/abs/2503.19050). A scan over a range takes arrays of all layers as they are, from the layer `start` of
them on (`pcg.loops`); what it stacks is put together behind it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp

from unity_jax import _compat
from unity_jax.pcg.graph import Graph, Op, Tensor, trips
from unity_jax.pcg.loops import START, Scan
from unity_jax.residuals.change import Change, Origin, made
from unity_jax.residuals.flat import Flat
from unity_jax.residuals.loop import computed
from unity_jax.residuals.pair import Pair, in_loops, innermost, pairs, stacked
from unity_jax.residuals.turn import renamed
from unity_jax.rewrite.sites import Kinds


class Layers(NamedTuple):
    """The first so many of so many layers; of loops over others, as large a part of them."""

    first: int
    of: int

    def __str__(self) -> str:
        return f"{self.first} of {self.of} layers"

    def among(self, count: int, unit: int = 1) -> int:
        """How many of a loop over `count` layers, of which `unit` belong together."""
        return count * self.first // (self.of * unit) * unit


@dataclass(frozen=True, eq=False)
class Parts:
    """How a folded program has its first layers apart.

    **Fields:** `count`: of its layers; `apart`: the program so folded, and what this one has in place of its tensors.
    """

    count: int
    apart: Callable[[Layers], tuple[Any, Mapping[Tensor, Tensor]]]


def cut(graph: Graph, layers: Layers) -> Change:
    """The graph whose scans over layers, forward and backward, are two each, those in loops over microbatches too."""
    return in_loops(graph, lambda inside: _cut(inside, layers))


def layer_count(graph: Graph, values: Set[Tensor]) -> int:
    """Of how many layers these values of a graph are: those of its longest loop that can be cut, or else as many as
    most of them have their like."""
    loops = [trips(pair.forward) for pair in pairs(innermost(graph)) if _can_be_cut(pair)]
    alike = Counter(_alike(graph, values).total.values())
    return max(loops) if loops else max(alike, key=lambda n: (alike[n], -n), default=1)


def early(graph: Graph, values: Iterable[Tensor], layers: Layers) -> frozenset[Tensor]:
    """Those values of a graph, which has been cut, that the first layers make, of each kind of them as many; or of
    stacks, those that the first layers' loops make."""
    values = set(values)
    alike = _alike(graph, values)
    found = {t for t, loop in stacked(graph).items() if t in values and _is_first(loop)}
    before = dict.fromkeys(alike.total, 0)
    for t, kind, times in alike.members:
        middle, before[kind] = before[kind] + times / 2, before[kind] + times  # some have their like in few layers
        if middle * layers.of < alike.total[kind] * layers.first:
            found.add(t)
    return frozenset(found)


def _is_first(loop: Op) -> bool:
    """Whether a scan is over the first layers, of those that are two."""
    return START in loop.params and (loop.params[START] == 0) != loop.params["reverse"]


class _Alike(NamedTuple):
    """Values in the order of the program, each with what op makes it and of how many layers it is, and how many there
    are of each such op."""

    members: Sequence[tuple[Tensor, int, int]]
    total: Mapping[int, int]


def _alike(graph: Graph, values: Set[Tensor]) -> _Alike:
    flat, total = Flat(innermost(graph)), Counter[int]()
    kind, members = Kinds(flat.graph, {}, 0), list[tuple[Tensor, int, int]]()
    for t in (t for op in flat.graph.ops if not op.backward for t in op.outputs):
        of = flat.origin.get(t, t)
        if of in values:
            members.append((of, kind[t], t.times))
            total[kind[t]] += t.times
    return _Alike(members, total)


def _can_be_cut(pair: Pair) -> bool:
    """Whether what both scans stack can be put together again, and they are not cut already."""
    whole = all(START not in op.params for op in (pair.forward, pair.backward))
    return whole and not any(_compat.is_key(t.dtype) for op in (pair.forward, pair.backward) for t in op.outputs)


def _cut(graph: Graph, layers: Layers) -> Change:
    origin, replaced = dict[Tensor, Origin](), dict[Op, Sequence[Op]]()
    for pair in filter(_can_be_cut, pairs(graph)):
        length = trips(pair.forward)
        first = layers.among(length)
        if not 1 < first < length - 1:  # of one iteration XLA makes no loop, and hoists what it computes
            continue
        ranges = _Range(0, first), _Range(first, length - first)
        if pair.forward.params["reverse"]:
            ranges = _Range(length - first, first), _Range(0, length - first)
        own = {(t, part): _of_range(t, part) for t in pair.stacks for part in ranges}
        origin |= {stack: t for (t, _), stack in own.items()}
        replaced[pair.forward] = _in_ranges(pair.forward, ranges, own, pair.stacks.keys(), origin)
        replaced[pair.backward] = _in_ranges(pair.backward, ranges[::-1], own, pair.stacks.keys(), origin)
    if not replaced:
        return Change(graph, {})
    ops = [part for op in graph.ops for part in replaced.get(op, (op,))]
    return Change(Graph(graph.inputs, graph.outputs, ops), origin)


class _Range(NamedTuple):
    """Iterations of a scan, by their parts of what it slices."""

    start: int
    length: int


Own = Mapping[tuple[Tensor, _Range], Tensor]
"""What is stacked for the backward pass in each range."""


def _in_ranges(
    op: Op, ranges: Sequence[_Range], own: Own, stacks: Set[Tensor], origin: dict[Tensor, Origin]
) -> list[Op]:
    """A scan as scans over ranges, the first one first, with what puts together what they stack.

    **Arguments:** `origin`: what new tensors are; these are added.
    """
    roles, (body,) = Scan.of(op.params), op.bodies
    found, carried = list[Op](), op.inputs[roles.carried]
    parts: dict[Tensor, dict[int, Tensor]] = {t: {} for t in op.outputs[roles.stacked] if t not in stacks}
    for part in ranges:
        last = op.outputs[roles.last]
        if part is not ranges[-1]:
            last = tuple(dataclasses.replace(t, name="") for t in last)
            origin.update(zip(last, op.outputs, strict=False))
        for t, of in parts.items():
            of[part.start] = _of_range(t, part)
            origin[of[part.start]] = t
        stacked = tuple(own[t, part] if t in stacks else parts[t][part.start] for t in op.outputs[roles.stacked])
        sliced = tuple(own.get((t, part), t) for t in op.inputs[roles.sliced])
        params = {**op.params, "length": part.length, START: part.start}
        inputs, outputs = (*op.inputs[roles.constants], *carried, *sliced), (*last, *stacked)
        inside = _copied(body, origin)
        found.append(dataclasses.replace(op, inputs=inputs, outputs=outputs, params=params, bodies=(inside,)))
        carried = last
    for t, of in parts.items():
        operands = [of[start] for start in sorted(of)]
        (joined,), _ = computed(lambda *xs: [jnp.concatenate(xs)], operands, op, t.times)
        found.append(dataclasses.replace(joined, outputs=(t,)))
    return found


def _of_range(t: Tensor, part: _Range) -> Tensor:
    """What is stacked in a range in place of what all layers stack."""
    return dataclasses.replace(t, name="", shape=(part.length, *t.shape[1:]))


def _copied(body: Graph, origin: dict[Tensor, Origin]) -> Graph:
    """The body of a loop with tensors of its own."""
    names = {t: dataclasses.replace(t) for t in body.inputs}
    ops = renamed(body.ops, names, dataclasses.replace, dataclasses.replace)
    found = Graph(tuple(names[t] for t in body.inputs), tuple(names.get(t, t) for t in body.outputs), ops)
    origin.update(zip(found.inputs, body.inputs, strict=True))
    origin.update(zip(made(found), made(body), strict=True))
    return found
