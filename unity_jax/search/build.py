"""The planning problem of a graph: nodes with choices, their costs, and the costs of moving tensors between them.

A node is an op, a cluster of elementwise ops, or a place with a layout of its own (an input, a loop's constant, carry
or slice, a result held for several readers). Bodies of loops are nodes like any others, with their costs times the trip
count: one problem covers the whole step. Arrays are interned, so that equal parts of the program are the same objects.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from unity_jax import _compat
from unity_jax.cost.program import host_seconds, strategy_seconds
from unity_jax.machine.machine import Machine
from unity_jax.network.reshard import Resharder
from unity_jax.ops.rule import Strategy
from unity_jax.ops.strategies import alike, making, port_layouts
from unity_jax.pcg.graph import Graph, Op, Tensor, trips, with_layout
from unity_jax.pcg.layout import Layout
from unity_jax.pcg.loops import Scan, While
from unity_jax.search.assemble import is_free, lift, passes_layouts, unlift
from unity_jax.search.built import Built, Choices, Layouts, Node, OpSeconds, Port, Space
from unity_jax.search.clusters import Cluster, clusters
from unity_jax.search.moves import Moves
from unity_jax.search.problem import Problem
from unity_jax.search.rule_cache import RuleCache
from unity_jax.search.sample import internal, storable
from unity_jax.xla.kernel import Use
from unity_jax.xla.op_classes import KERNELS, PRODUCTS
from unity_jax.xla.traffic import Traffic


@dataclass(eq=False)
class Builder:
    """Makes problems for one graph, mesh and machine; holds what equal parts share.

    **Arguments:** `ties`: graph output index to the input it replaces; `pins`: layouts that inputs, outputs (by index)
    or inner tensors must have; `traffic`: what goes through memory; `hosted`: inputs, and stacks of scans, in the
    memory of the host.
    """

    graph: Graph
    ties: Mapping[int, int]
    resharder: Resharder
    machine: Machine
    rules: RuleCache
    traffic: Traffic
    pins: Mapping[Tensor, Layout] = field(default_factory=dict)
    output_pins: Mapping[int, Layout] = field(default_factory=dict)
    hosted: Set[Tensor] = frozenset()
    _interned: dict[Hashable, Any] = field(default_factory=dict)

    def build(self, keep: bool) -> Built:
        """The problem in which the backward pass reuses (`keep`) or repeats what the forward pass gathered."""
        return _Build(self, keep).result()

    def name(self, key: Hashable) -> int:
        """A number that stands for a key which is long."""
        number: int = self.intern(("name", key), lambda: len(self._interned))
        return number

    def intern(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if (found := self._interned.get(key)) is None:
            found = self._interned[key] = make()
        return found


class _Build:
    def __init__(self, builder: Builder, keep: bool) -> None:
        self.b, self.keep = builder, keep
        self.mesh = builder.resharder.mesh
        self.nodes: list[Node] = []
        self.unary: list[np.ndarray] = []
        self.arithmetic: list[np.ndarray] = []
        self.made: dict[Tensor, Port] = {}
        self.needed: dict[Tensor, list[Port]] = {}
        self.held: dict[Tensor, Port] = {}
        self.spaces: dict[int, Space] = {}
        self.of_ops: dict[Op, OpSeconds] = {}
        self.members: dict[Op, Choices] = {}
        self.readers = _count_readers(builder.graph)
        self.readers_times = _least_times(builder.graph)
        self.ends = frozenset((*builder.graph.inputs, *builder.graph.outputs))
        self.leaves = {t.leaves: t for op in builder.graph.ops for t in op.outputs if t.leaves}
        self.between: list[tuple[Tensor, Port]] = []  # who reads what leaves a layer in the next one

    # Nodes

    def _place(self, t: Tensor, space: Space, kind: str, repeat: int, backward: bool, lifted: bool = False) -> int:
        """A node for a layout; `lifted`: `t` is the stack of the values that the layout is for."""
        if t in self.b.pins:
            space = self._pinned(t, unlift(self.b.pins[t]) if lifted else self.b.pins[t])
        size = len(space.layouts)
        node = Node(len(self.nodes), kind, size, (), t, space.layouts, (), lifted, repeat)
        self.nodes.append(node)
        self.spaces[node.index] = space
        self.arithmetic.append(self.b.intern(("zeros", size), lambda: np.zeros(size)))
        self.unary.append(self.arithmetic[-1])
        if t in self.b.hosted:
            lie, device = (with_layout(t, x) for x in self._lifted(space, lifted).layouts), self.b.machine.device
            self.unary[-1] = np.array([2 * repeat * t.times * host_seconds([x], self.mesh, device) for x in lie])
        if kind != "output":
            self._make_place(t, node.index, repeat, backward, lifted)
        return node.index

    def _make_place(self, t: Tensor, node: int, repeat: int, backward: bool, lifted: bool = False) -> None:
        space = self._lifted(self.spaces[node], lifted)
        self._make(t, node, space.layouts, space.key, repeat, backward)

    def _lifted(self, space: Space, lifted: bool) -> Space:
        if not lifted:
            return space
        key = "lifted", space.key
        return self.b.intern(key, lambda: Space(self.b.name(key), tuple(map(lift, space.layouts))))

    def _pinned(self, t: Tensor, pin: Layout) -> Space:
        return Space(self.b.name(("pin", pin, t.shape, t.dtype)), (pin,))

    def _space(self, t: Tensor, *, partial: bool = False, stored: bool = False) -> Space:
        """The layouts that a place for `t` may choose from."""
        key = ("space", t.shape, t.dtype, partial, stored)

        def make() -> Space:
            found = storable(t, self.mesh) if stored else internal(t, self.mesh)
            return Space(self.b.name(key), tuple(c for c in found if partial or not c.partial))

        return self.b.intern(key, make)

    def _make(self, t: Tensor, node: int, layouts: Layouts, key: int, repeat: int, backward: bool) -> None:
        self.made[t] = Port(node, layouts, key, repeat, backward)

    def _need(
        self, t: Tensor, node: int, layouts: Layouts, key: int, repeat: int, backward: bool, times: int = 1
    ) -> None:
        """A reader of a tensor. What leaves the layers is read once by what is behind the last one, and what enters the
        first of those that one stands for comes, for the others, from the layer before (`Tensor.leaves`).

        **Arguments:** `times`: for how many the reader stands.
        """
        if t.literal is not None or t not in self.made:
            return
        enters, behind = t.enters and times > 1, t.leaves and times == 1
        count = 1 if enters or behind else max(t.times, self.readers_times.get(t, 1))
        self.needed.setdefault(t, []).append(Port(node, layouts, key, repeat * count, backward))
        if t.enters and times > 1:
            before = self.leaves.get(t.enters)
            if before is not None:
                self.between.append((before, Port(node, layouts, key, repeat * before.times, backward)))

    # Graphs

    def result(self) -> Built:
        g = self.b.graph
        inputs = [self._place(t, self._space(t, stored=True), "input", 1, False) for t in g.inputs]
        self._graph(g, 1)
        outputs: list[int] = []
        backward = any(op.backward for op in g.ops)
        for i, t in enumerate(g.outputs):
            if i in self.b.ties:
                node = inputs[self.b.ties[i]]
            else:
                pin = self.b.output_pins.get(i)
                space = self._pinned(t, pin) if pin is not None else self._space(t, stored=True)
                node = self._place(Tensor(t.shape, t.dtype), space, "output", 1, backward)
                self.nodes[node].tensor = None
            outputs.append(node)
            self._need_place(t, node, 1, backward)
        for t, port in self.between:
            self.needed.setdefault(t, []).append(port)
        moves = Moves(
            self.b.resharder, self.b.intern, self.keep, self.nodes, self.unary, self.made, self.needed, self.held
        )
        edges, shared = moves.all()
        problem = Problem(self.unary, edges, shared, [], None)
        return Built(
            problem, self.arithmetic, self.of_ops, self.nodes, self.made, self.needed, inputs, outputs, self.mesh
        )

    def _need_place(self, t: Tensor, node: int, repeat: int, backward: bool, lifted: bool = False) -> None:
        space = self._lifted(self.spaces[node], lifted)
        self._need(t, node, space.layouts, space.key, repeat, backward)

    def _graph(self, graph: Graph, repeat: int) -> None:
        member = clusters(graph, self.ends)
        done: dict[Cluster, int] = {}
        for op in graph.ops:
            if is_free(op):
                continue
            if passes_layouts(op):
                for source, t in zip(op.inputs, op.outputs, strict=True):
                    if source in self.made:
                        self.made[t] = self.made[source]
            elif op.bodies:
                getattr(self, f"_{op.name}")(op, repeat)
            elif op in member:
                cluster = member[op]
                if cluster not in done:
                    done[cluster] = self._cluster(cluster, repeat)
                self._ports(op, done[cluster], self.members[op], repeat, cluster.made)
            else:
                self._op(op, repeat)

    def _op(self, op: Op, repeat: int) -> None:
        use = self.b.traffic.uses[op]
        does = self.b.intern((op.signature, use), lambda: self._choices(op, use))
        node = self._node("op", (op,), (does.strategies,), does.seconds, ("op", does.number), repeat * op.times)
        self.of_ops[op] = OpSeconds(node, does.seconds[1], does.start, repeat * op.times)
        self._ports(op, node, does, repeat)
        for t, (layouts, _) in zip(op.outputs, does.outs, strict=True):
            if self.readers.get(t, 0) > 1 and any(lay.partial for lay in layouts):
                self._hold(t, repeat, op.backward)

    def _choices(self, op: Op, use: Use, space: Space | None = None, linear: int = 0) -> Choices:
        """What an op brings, by itself or in a cluster that has these layouts."""
        rule, b, mesh = self.b.rules(op), self.b, self.mesh
        own = op.signature if space is None else (op.signature, linear, space.key)

        def ports() -> tuple[Sequence[Strategy], list[list[tuple[Layouts, int]]]]:
            follow = [] if space is None else [making(rule, mesh, layout, linear) for layout in space.layouts]
            does = b.rules.strategies(op, mesh) if space is None else follow
            sides = zip(("in", "out"), port_layouts(rule, mesh, does), strict=True)
            return does, [[(x, b.name((own, side, i))) for i, x in enumerate(every)] for side, every in sides]

        does, (ins, outs) = b.intern(("ports", own), ports)
        return Choices(b.name((own, use)), does, self._seconds(op, does, use), self._start(op, use), ins, outs)

    def _ports(self, op: Op, node: int, does: Choices, repeat: int, inside: Set[Tensor] = frozenset()) -> None:
        """What an op reads, but for what is made `inside` of its cluster, and makes."""
        for t, (layouts, key) in zip(op.inputs, does.ins, strict=True):
            if t not in inside:
                self._need(t, node, layouts, key, repeat, op.backward, op.times)
        for t, (layouts, key) in zip(op.outputs, does.outs, strict=True):
            self._make(t, node, layouts, key, repeat, op.backward)

    def _hold(self, t: Tensor, repeat: int, backward: bool) -> None:
        """A place for a possibly partial result with several readers: they share one reduction."""
        made = self.made.pop(t)
        node = self._place(t, self._space(t, partial=True), "place", repeat, backward)
        port, self.made[t] = self.made[t], made
        self._need_place(t, node, repeat, backward)
        self.held[t] = port

    def _seconds(self, op: Op, strategies: Sequence[Strategy], use: Use) -> np.ndarray:
        """Of each strategy, the seconds it adds to a step and those it takes at least (a row each)."""
        rules, mesh, machine = self.b.rules, self.mesh, self.b.machine
        first, which = alike(rules(op), mesh, strategies)
        shards = (rules.shard(op, mesh, strategies[i]) for i in first)
        seconds = np.array([strategy_seconds(shard, machine, use) for shard in shards]).reshape(-1, 2)
        return np.ascontiguousarray(seconds.T[:, which])

    def _start(self, op: Op, use: Use) -> float:
        """Seconds to start the kernels of an op, those of matmuls and ours aside, whose arithmetic has them; what
        reads nothing is written ahead, and scalars are part of other kernels."""
        scalar = all(t.rank == 0 for t in (*op.inputs, *op.outputs))
        free = op.name in PRODUCTS | KERNELS or not any(use.counts) or scalar
        return 0.0 if free else use.launches * self.b.machine.device.kernel_overhead

    def _node(
        self,
        kind: str,
        ops: tuple[Op, ...],
        strategies: tuple[Sequence[Strategy], ...],
        seconds: np.ndarray,
        key: Hashable,
        repeat: int,
    ) -> int:
        node = Node(len(self.nodes), kind, seconds.shape[1], ops, None, (), strategies, False, repeat)
        self.nodes.append(node)
        added, least = self.b.intern(("unary", key, repeat), lambda: seconds * repeat)
        self.unary.append(added)
        self.arithmetic.append(least)
        return node.index

    # Clusters

    def _cluster(self, cluster: Cluster, repeat: int) -> int:
        first = cluster.ops[0].outputs[0]
        partial = cluster.linear and all(_compat.is_float(op.outputs[0].dtype) for op in cluster.ops)
        space = self._space(Tensor(cluster.shape, first.dtype), partial=partial)
        every: list[Choices] = []
        for op in cluster.ops:
            linear, use = cluster.through.get(op, 0) if partial else 0, self.b.traffic.uses[op]
            key = op.signature, linear, space.key, use
            every.append(self.b.intern(key, lambda: self._choices(op, use, space, linear)))  # noqa: B023
        times = [op.times for op in cluster.ops]
        named = "cluster", *(does.number for does in every), *times
        seconds = self.b.intern(
            named, lambda: np.sum([n * does.seconds for does, n in zip(every, times, strict=True)], axis=0)
        )
        strategies = tuple([does.strategies for does in every])
        node = self._node("cluster", tuple(cluster.ops), strategies, seconds, named, repeat)
        self.nodes[node].layouts = space.layouts
        self.spaces[node] = space
        for op, does in zip(cluster.ops, every, strict=True):
            self.members[op] = does
            self.of_ops[op] = OpSeconds(node, does.seconds[1], does.start, repeat * op.times)
        return node

    # Control flow

    def _body_inputs(
        self,
        tensors: Sequence[Tensor],
        outer: Sequence[Tensor],
        op: Op,
        repeat: int,
        inner: int,
        partial: bool,
        lifted: bool,
    ) -> list[int]:
        nodes = []
        for t, source in zip(tensors, outer, strict=True):
            node = self._place(t, self._space(t, partial=partial), "place", inner, op.backward)
            self._need_place(source, node, repeat, op.backward, lifted)
            nodes.append(node)
        return nodes

    def _scan(self, op: Op, repeat: int) -> None:
        roles, (body,) = Scan.of(op.params), op.bodies
        inner = repeat * op.times * trips(op)

        def inputs(role: slice, partial: bool, lifted: bool) -> list[int]:
            return self._body_inputs(body.inputs[role], op.inputs[role], op, repeat, inner, partial, lifted)

        inputs(roles.constants, False, False)
        carry = inputs(roles.carried, True, False)
        inputs(roles.sliced, False, True)
        self._graph(body, inner)
        for node, t, out in zip(carry, body.outputs, op.outputs, strict=False):
            self._need_place(t, node, inner, op.backward)
            self._make_place(out, node, repeat, op.backward)
        for t, out in zip(body.outputs[roles.stacked], op.outputs[roles.stacked], strict=True):
            node = self._place(out, self._space(t, partial=True), "place", repeat, op.backward, lifted=True)
            self._need_place(t, node, inner, op.backward)

    def _while(self, op: Op, repeat: int) -> None:
        (cond, body), inner = op.bodies, repeat * op.times
        roles = While.of(op.params)
        own, before = body.inputs[: roles.before.start], body.inputs[roles.before]

        def inputs(tensors: Sequence[Tensor], role: slice) -> list[int]:
            return self._body_inputs(tensors, op.inputs[role], op, repeat, inner, False, False)

        inputs(cond.inputs[roles.condition], roles.condition)
        inputs(own, roles.constants)
        carry = inputs(before, roles.carried)
        for t, twin in zip(cond.inputs[roles.tested], before, strict=True):
            self.made[t] = self.made[twin]
        self._graph(cond, inner)
        self._graph(body, inner)
        whole = self._place(Tensor((), np.dtype(bool)), Space(("scalar",), (Layout(()),)), "place", inner, op.backward)
        self.nodes[whole].tensor = None
        self._need_place(cond.outputs[0], whole, inner, op.backward)
        for node, t, out in zip(carry, body.outputs, op.outputs, strict=True):
            self._need_place(t, node, inner, op.backward)
            self._make_place(out, node, repeat, op.backward)

    def _cond(self, op: Op, repeat: int) -> None:
        first, inner = op.bodies[0], repeat * op.times
        self._body_inputs(first.inputs, op.inputs[1:], op, repeat, inner, False, False)
        for branch in op.bodies[1:]:
            for t, twin in zip(branch.inputs, first.inputs, strict=True):
                self.made[t] = self.made[twin]
        outs = [self._place(t, self._space(t), "place", repeat, op.backward) for t in op.outputs]
        for branch in op.bodies:
            self._graph(branch, inner)
            for node, t in zip(outs, branch.outputs, strict=True):
                self._need_place(t, node, inner, op.backward)


def _least_times(graph: Graph) -> dict[Tensor, int]:
    """Of tensors that only layers read which stand for several, for how many these stand at least."""
    found: dict[Tensor, int] = {}
    for op in graph.ops:
        for t in op.inputs:
            found[t] = min(found.get(t, op.times), op.times)
    return found


def _count_readers(graph: Graph) -> dict[Tensor, int]:
    """How many ops and outputs read each tensor, sub-graphs included."""
    count: dict[Tensor, int] = {}
    for op in graph.walk():
        for t in op.inputs:
            count[t] = count.get(t, 0) + 1
        for body in op.bodies:
            for t in body.outputs:
                count[t] = count.get(t, 0) + 1
    for t in graph.outputs:
        count[t] = count.get(t, 0) + 1
    return count
