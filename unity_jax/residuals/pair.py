"""A scan over layers and that of the backward pass, as one graph: one layer forward, the loss, the same layer backward.

    ys = scan forward                      y = tanh(x W)        of the forward scan
    ...                          ->        dx = loss x
    dxs = scan backward, reads ys          dx = dx * (1 - y * y)    of the backward scan

What the forward scan stacks and only the backward scan reads, iteration by iteration, is one tensor there; so is what
both have of the same argument. Whatever then computes the same is made two scans again: what goes from one half to the
other is stacked (`Pair.split`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from unity_jax.pcg.graph import Graph, Op, Tensor, trips
from unity_jax.pcg.loops import Scan
from unity_jax.residuals.change import Change, Origin
from unity_jax.trace import without_dead_code
from unity_jax.xla.op_classes import PRODUCTS

LOSS = "loss"
"""The op of a joined graph that stands for all between both scans: of what the last layer gives it makes cotangents."""


class Halves(NamedTuple):
    """Two scans again. **Fields:** `origin`: what tensors are that there were not, see `Change`."""

    forward: Op
    backward: Op
    origin: Mapping[Tensor, Origin]


@dataclass(frozen=True, eq=False)
class Pair:
    """Two scans over the same iterations. **Fields:** `stacks`: of each result of the forward scan that only the
    backward scan reads, its place among those that are stacked."""

    forward: Op
    backward: Op
    stacks: Mapping[Tensor, int]

    @functools.cached_property
    def same(self) -> dict[Tensor, Tensor]:
        """Of inputs of the backward body, those tensors of the forward body that they are."""
        (body, back), (roles, late) = self._bodies, self._roles
        stacked = {t: body.outputs[roles.stacked][i] for t, i in self.stacks.items()}
        sliced = dict(zip(self.forward.inputs[roles.sliced], body.inputs[roles.sliced], strict=True))
        whole = dict(zip(self.forward.inputs[roles.constants], body.inputs[roles.constants], strict=True))
        found = {}
        for role, known in ((late.sliced, {**sliced, **stacked}), (late.constants, whole)):
            for inner, outer in zip(back.inputs[role], self.backward.inputs[role], strict=True):
                if outer.literal is None and outer in known and known[outer].literal is None:
                    found[inner] = known[outer]
        return found

    @property
    def _bodies(self) -> tuple[Graph, Graph]:
        return self.forward.bodies[0], self.backward.bodies[0]

    @property
    def _roles(self) -> tuple[Scan, Scan]:
        return Scan.of(self.forward.params), Scan.of(self.backward.params)

    def makes(self, t: Tensor) -> bool:
        """Whether a tensor is made in one of both bodies."""
        return any(t in body.producer for body in self._bodies)

    @property
    def carried(self) -> tuple[Tensor, ...]:
        """What a layer gives to the next one, in the forward body."""
        return tuple(t for t in self._bodies[0].outputs[self._roles[0].last] if t.literal is None)

    @functools.cached_property
    def joined(self) -> Graph:
        """One layer forward and backward. Its first inputs are those of the forward body."""
        (body, back), (roles, late) = self._bodies, self._roles
        first = [dataclasses.replace(op, backward=False) if op.backward else op for op in body.ops]
        turn = Op(LOSS, self.carried, back.inputs[late.carried], backward=True)
        others = [t for t in (*back.inputs[late.constants], *back.inputs[late.sliced]) if t not in self.same]
        kept = [t for i, t in enumerate(body.outputs[roles.stacked]) if i not in self.stacks.values()]
        results = (*body.outputs[roles.last], *kept, *(self.same.get(t, t) for t in back.outputs))
        return Graph((*body.inputs, *others), results, [*first, turn, *reading(back.ops, self.same)])

    def split(self, changed: Graph) -> Halves:
        """Both scans again, of a joined graph that computes the same. What it reads of tensors of neither scan, which
        are there before, is the same for all layers."""
        (body, back), (roles, late) = self._bodies, self._roles
        ops = [op for op in changed.ops if op.backward and op.name != LOSS]
        outputs = changed.outputs[len(changed.outputs) - len(back.outputs) :]
        own = {t for op in ops for t in op.outputs}.union(back.inputs[late.carried])
        reads = dict.fromkeys(t for op in ops for t in op.inputs if t.literal is None and t not in own)
        reads.update(dict.fromkeys(t for t in outputs if t.literal is None and t not in own))
        there = {self.same.get(t, t): t for t in reversed(back.inputs)}
        outer = dict(zip(back.inputs, self.backward.inputs, strict=True))
        whole = dict(zip(body.inputs[roles.constants], self.forward.inputs[roles.constants], strict=True))
        sliced = dict(zip(body.inputs[roles.sliced], self.forward.inputs[roles.sliced], strict=True))
        layer = {t for op in changed.ops if not op.backward for t in op.outputs}.union(body.inputs[roles.carried])
        before = set(back.inputs[late.constants])
        names, origin = dict[Tensor, Tensor](), dict[Tensor, Origin]()
        constants, parts, stacked = list[tuple[Tensor, Tensor]](), list[tuple[Tensor, Tensor]](), dict[Tensor, Tensor]()
        for t in reads:
            inner = names[t] = there[t] if t in there else dataclasses.replace(t, name="")
            if inner not in outer:
                origin[inner] = t
            if t in layer or outer.get(inner) in self.stacks:
                stack = outer.get(inner) or Tensor((trips(self.forward), *t.shape), t.dtype, times=self.forward.times)
                if inner not in outer:
                    origin[stack] = ("stacked", t)
                stacked[t] = stack
                parts.append((stack, inner))
            elif inner in outer:
                (constants if inner in before else parts).append((outer[inner], inner))
            elif t in sliced:
                parts.append((sliced[t], inner))
            else:
                constants.append((whole.get(t, t), inner))
        carried = list(zip(self.backward.inputs[late.carried], back.inputs[late.carried], strict=True))
        operands = [*constants, *carried, *parts]
        inside = Graph(tuple(t for _, t in operands), tuple(names.get(t, t) for t in outputs), reading(ops, names))
        params = {**self.backward.params, "num_consts": len(constants), "num_carry": len(carried)}
        second = dataclasses.replace(
            self.backward, inputs=tuple(t for t, _ in operands), params=params, bodies=(inside,)
        )
        return Halves(self._first(changed, stacked), second, origin)

    def _first(self, changed: Graph, stacked: Mapping[Tensor, Tensor]) -> Op:
        """The forward scan that stacks these, beside what others read."""
        body, roles = self.forward.bodies[0], Scan.of(self.forward.params)
        every = list(zip(body.outputs, self.forward.outputs, strict=True))
        used = [*every[roles.last], *(pair for pair in every[roles.stacked] if pair[1] not in self.stacks)]
        used += stacked.items()
        early = [op for op in changed.ops if not op.backward]
        inside = without_dead_code(Graph(body.inputs, tuple(t for t, _ in used), early))
        outputs = tuple(t for _, t in used)
        params = roles.with_constants(self.forward.params, roles.constants.stop)
        return dataclasses.replace(self.forward, outputs=outputs, params=params, bodies=(inside,))


def pairs(graph: Graph) -> list[Pair]:
    """The scans of a graph with the scans that are their backward pass."""
    found: dict[Op, Pair] = {}
    for op in (op for op in graph.ops if op.name == "scan" and op.backward):
        stacks: dict[Op, dict[Tensor, int]] = {}
        for t in op.inputs[Scan.of(op.params).sliced]:
            of = graph.producer.get(t)
            if of is not None and of.name == "scan" and not of.backward and trips(of) == trips(op):
                place = of.outputs.index(t) - Scan.of(of.params).stacked.start
                made = of.bodies[0].outputs[of.outputs.index(t)]
                if place >= 0 and made.literal is None and graph.readers[t] == [op] and t not in graph.outputs:
                    stacks.setdefault(of, {})[t] = place
        free = [of for of in stacks if of not in found and of.times == op.times]
        if free:
            first = max(free, key=lambda of: len(stacks[of]))
            found[first] = Pair(first, op, stacks[first])
    return list(found.values())


def stacked(graph: Graph) -> dict[Tensor, Op]:
    """What the layers of scans stack for the scans of their backward pass alone, loops over microbatches included, with
    the scans that stack it."""
    both = pairs(graph)
    inside = [found for op in _loops_beside(graph, both) for found in stacked(op.bodies[0]).items()]
    return {**dict(inside), **{t: pair.forward for pair in both for t in pair.stacks}}


def in_layer(scan: Op, stack: Tensor) -> Tensor:
    """What a layer of a scan makes of a stack."""
    return scan.bodies[0].outputs[scan.outputs.index(stack)]


def in_pairs(graph: Graph, both: Iterable[Pair], change: Callable[[Pair], Change | None]) -> Change:
    """The graph whose scans, forward and backward (`both`), do what is made of their joined graphs; None leaves them.
    """
    replaced, origin = dict[Op, Op](), dict[Tensor, Origin]()
    for pair in both:
        changed = change(pair)
        if changed is not None:
            halves = pair.split(changed.graph)
            replaced.update({pair.forward: halves.forward, pair.backward: halves.backward})
            origin |= {**changed.origin, **halves.origin}
    return Change(Graph(graph.inputs, graph.outputs, [replaced.get(op, op) for op in graph.ops]), origin)


def loops(graph: Graph) -> list[Op]:
    """The scans of a graph whose bodies have a forward and a backward pass: over microbatches, or chunks of a loss."""
    return _loops_beside(graph, pairs(graph))


def _loops_beside(graph: Graph, both: Iterable[Pair]) -> list[Op]:
    halves = {op for pair in both for op in (pair.forward, pair.backward)}
    scans = [op for op in graph.ops if op.name == "scan" and op not in halves]
    return [op for op in scans if len({inner.backward for inner in op.bodies[0].ops}) == 2]


def innermost(graph: Graph) -> Graph:
    """The graph that most products of a step are in: the body of its loop over microbatches, where it has one."""
    bodies = (op.bodies[0] for op in loops(graph))
    inside = next((body for body in bodies if 2 * _products(body) > _products(graph)), None)
    return graph if inside is None else innermost(inside)


def _products(graph: Graph) -> int:
    return sum(op.name in PRODUCTS for op in graph.walk())


def in_loops(graph: Graph, change: Callable[[Graph], Change]) -> Change:
    """The same change of the bodies of such loops, and then of the graph itself."""
    bodies = {op: made for op in loops(graph) if (made := in_loops(op.bodies[0], change)).graph is not op.bodies[0]}
    if not bodies:
        return change(graph)
    ops = [dataclasses.replace(op, bodies=(bodies[op].graph,)) if op in bodies else op for op in graph.ops]
    origin = {t: o for made in bodies.values() for t, o in made.origin.items()}
    spilled = frozenset(t for made in bodies.values() for t in made.spilled)
    changed = Change(Graph(graph.inputs, graph.outputs, ops), origin, spilled=spilled)
    return changed.then(change(changed.graph))


def reading(ops: Iterable[Op], names: Mapping[Tensor, Tensor]) -> list[Op]:
    """Ops of the backward pass that read other tensors."""
    found = (op.reading(names) for op in ops)
    return [op if op.backward else dataclasses.replace(op, backward=True) for op in found]
