"""A program with the layers of its scans in place of these: what a layer stacks for its backward pass is one tensor,
that stands for as many as there are layers, as in the folded program of an unrolled model.

So what is in memory between both passes, and what it takes to compute it again, is told in the same way of both.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from unity_jax.pcg.graph import Graph, Op, Tensor, trips
from unity_jax.pcg.loops import Scan
from unity_jax.residuals.pair import LOSS, Pair, pairs
from unity_jax.residuals.turn import renamed
from unity_jax.xla.kernel import Kernel
from unity_jax.xla.traffic import Traffic


class Flat:
    """A program whose scans forward and backward (`residuals.pair`) are one layer each.

    **Fields:** `pairs`: these scans; `graph`, whose results are those of the program and what layers give to the next
    ones; `origin`: of each tensor of a layer, that of the scan's body.
    """

    def __init__(self, program: Graph) -> None:
        self._program, self.pairs = program, pairs(program)
        self.origin: dict[Tensor, Tensor] = {}
        self._names: dict[Tensor, Tensor] = {}
        self._inputs: list[Tensor] = []
        self._carried: list[Tensor] = []
        self._layers: dict[Op, list[Op]] = {}
        self._ends: dict[Op, Op] = {}
        for pair in self.pairs:
            self._add(pair)
        ops = [part for op in program.ops for part in (*self._layers.get(op, ()), self._ends.get(op, op))]
        self.graph = Graph((*program.inputs, *self._inputs), (*program.outputs, *self._carried), ops)

    def _add(self, pair: Pair) -> None:
        first, second, names = pair.forward, pair.backward, self._names
        fresh = functools.partial(dataclasses.replace, times=first.times * trips(first))
        for op in (first, second):
            (body,), roles = op.bodies, Scan.of(op.params)
            names.update(zip(body.inputs[roles.constants], op.inputs[roles.constants], strict=True))
            for t in (*body.inputs[roles.carried], *body.inputs[roles.sliced]):
                names[t] = fresh(t)
        joined = pair.joined
        given = {t: names[t] for t in joined.inputs}
        ops = renamed(joined.ops, given, fresh, lambda op: op)
        names.update(given)
        names.update((t, names[of]) for t, of in pair.same.items())
        outside = {*first.inputs, *second.inputs}
        self.origin.update((t, body) for body, t in given.items() if t not in outside)
        self._carried += [names[t] for t in pair.carried]
        self._inputs += [names[t] for t in joined.inputs if names[t] not in outside]
        for op, is_late in ((first, False), (second, True)):
            self._layers[op] = [part for part in ops if part.backward == is_late and part.name != LOSS]
            (body,) = op.bodies
            inside = [names.get(t, t) for t in (*body.inputs, *body.outputs)]
            here = dict.fromkeys(t for t in inside if t.literal is None)
            outer = (t for t in op.inputs if t not in pair.stacks)
            left = tuple(t for t in op.outputs if t not in pair.stacks)
            self._ends[op] = dataclasses.replace(op, inputs=tuple(dict.fromkeys((*outer, *here))), outputs=left)

    def kernels(self, traffic: Traffic) -> list[Kernel]:
        """Those of the program, each scan's after those of its body.

        **Arguments:** `traffic`: of the program.
        """
        found, written = list[Kernel](), set[Tensor]()
        for k in traffic.kernels[self._program]:
            op = self._program.producer.get(k.root.outputs[0]) if k.root.outputs else None
            if op is None or op not in self._ends:
                found.append(k)
                continue
            layer = [self._named(inner) for inner in traffic.kernels[op.bodies[0]]]
            written.update(t for inner in layer for t in inner.writes)
            end = self._ends[op]
            reads = [t for t in end.inputs if t.literal is None]
            more = [] if op.backward else self._stacked(op, written)
            found += [*layer, Kernel([end], reads, [*end.outputs, *more], [])]
        return found

    def _stacked(self, op: Op, written: set[Tensor]) -> list[Tensor]:
        """What a forward scan stacks that no kernel writes: views, and what its layers are given."""
        there = (self._names.get(t, t) for t in op.bodies[0].outputs[Scan.of(op.params).stacked])
        return [t for t in dict.fromkeys(there) if t.literal is None and t not in written]

    def _named(self, k: Kernel) -> Kernel:
        def over(ts: Sequence[Tensor]) -> list[Tensor]:
            return list(dict.fromkeys(self._names.get(t, t) for t in ts))

        makers = (self.graph.producer.get(t) for op in k.ops for t in over(op.outputs[:1]))
        return Kernel([op for op in dict.fromkeys(makers) if op is not None], over(k.reads), over(k.writes), [])
