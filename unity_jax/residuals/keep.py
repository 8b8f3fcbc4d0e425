"""The backward pass reads values that `jax.checkpoint` has it compute again, so that it need not.

    y = tanh x                            y = tanh x
    ...                                   ...
    x' = optimization_barrier x           dx = dy * (1 - y * y)
    y' = tanh x'
    dx = dy * (1 - y' * y')

What is computed again is found by what it is: the same op of the same operands, whatever holds them back. Of that only
what is in memory now is kept; the rest the compiler computes where it is read.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping, Set

import numpy as np

from unity_jax.pcg.graph import Graph, Op, Tensor, part
from unity_jax.residuals.change import Change, made
from unity_jax.residuals.choice import Choice
from unity_jax.residuals.flat import Flat
from unity_jax.residuals.pair import Pair, in_loops, in_pairs, reading
from unity_jax.rewrite.apply import in_order
from unity_jax.rewrite.estimate import Seconds
from unity_jax.trace import has_effects, is_rematerialized, without_dead_code
from unity_jax.xla.traffic import Traffic


class Rematerialized:
    """The values in memory that the backward pass computes again by `jax.checkpoint`.

    **Arguments:** `traffic`: of the graph; `seconds`: what a graph takes, see `rewrite.estimate`; `devices`: how many
    share the work.
    **Fields:** `values`, as the backward pass makes them, and `originals`, as the forward pass does.
    """

    def __init__(self, graph: Graph, traffic: Traffic, seconds: Callable[[Graph], Seconds], devices: int) -> None:
        self.graph, self._seconds, self._devices = graph, seconds, devices
        self.values, self.originals = frozenset[Tensor](), frozenset[Tensor]()
        if any(map(is_rematerialized, graph.walk())):
            self._flat = Flat(graph)
            self._originals = _originals(self._flat)
            written = {self._flat.origin.get(t, t) for k in self._flat.kernels(traffic) for t in k.writes}
            self.values = frozenset(t for t in self._originals if t in written)
            self.originals = frozenset(self._originals.values())

    def keeping(self, again: Set[Tensor] = frozenset()) -> Choice | None:
        """All of them kept but those whose like in the forward pass is computed `again`; None if these are none.

        What it returns is read the other way round: `bytes` are those that they take, and `seconds` those that the
        backward pass saves.
        """
        values = frozenset(t for t in self.values if self._originals[t] not in again)
        left = {t for op in _kept(self.graph, values, self._flat, self._originals).graph.walk() for t in op.outputs}
        origin, ops = self._flat.origin, self._flat.graph.ops
        spared = [op for op in ops if left.isdisjoint(origin.get(t, t) for t in op.outputs)]
        rest = {t for op in ops if op not in set(spared) for t in op.inputs}
        read = {t: t.times for op in spared for t in op.outputs if t in rest}
        if not read:
            return None
        nbytes = float(sum(n * t.nbytes for t, n in read.items()))
        seconds = self._seconds(part(spared, read)).on(self._devices) / self._devices
        return Choice({origin.get(t, t): n for t, n in read.items()}, values, nbytes, seconds)


def kept(graph: Graph, values: Set[Tensor]) -> Change:
    """The graph that reads what the forward pass made in place of these values of the backward pass, which are the
    same. Others are computed as before."""

    def change(inside: Graph) -> Change:
        if values.isdisjoint(made(inside)):
            return Change(inside, {})
        return _kept(inside, values, flat := Flat(inside), _originals(flat))

    return in_loops(graph, change)


def _kept(graph: Graph, values: Set[Tensor], flat: Flat, originals: Mapping[Tensor, Tensor]) -> Change:
    """The same, of a graph without the loops over microbatches in it. **Arguments:** `flat`: the graph so, and its
    `originals`."""
    layers = set(flat.origin.values())
    same = {t: of for t, of in originals.items() if t in values}

    def within(pair: Pair) -> Change | None:
        inside = pair.joined
        there = {t for op in inside.ops for t in op.outputs}
        own = {t: of for t, of in same.items() if t in there and (of in there or of not in layers)}
        if not own:
            return None
        late = reading((op for op in inside.ops if op.backward), own)
        ops = [*(op for op in inside.ops if not op.backward), *late]
        outputs = tuple(own.get(t, t) for t in inside.outputs)
        return Change(without_dead_code(Graph(inside.inputs, outputs, ops)), {})

    found = in_pairs(graph, flat.pairs, within)
    outside = _outside(found.graph, {t: of for t, of in same.items() if t not in layers and of not in layers})
    return found.then(outside)


def _outside(graph: Graph, same: Mapping[Tensor, Tensor]) -> Change:
    """The graph whose backward pass reads these values in place of others. What is still computed again reads them
    behind the barrier that it is behind: else it would be computed at once, and kept."""
    behind: dict[Tensor, Op] = {}
    for op in graph.ops:
        held = next((behind[t] for t in op.inputs if t in behind), None)
        if op.name == "optimization_barrier":
            behind.update(dict.fromkeys(op.outputs, op))
        elif held is not None and is_rematerialized(op):
            behind.update(dict.fromkeys(op.outputs, held))
    passed = {t: dataclasses.replace(of, name="", enters=0, leaves=0) for t, of in same.items() if t in behind}
    added = defaultdict[Op, list[Tensor]](list)
    for t in passed:
        added[behind[t]].append(t)
    ops = list[Op]()
    for op in graph.ops:
        if op in added:
            inputs = (*op.inputs, *(same[t] for t in added[op]))
            op = dataclasses.replace(op, inputs=inputs, outputs=(*op.outputs, *(passed[t] for t in added[op])))
        if op.backward:
            (op,) = reading([op], {**same, **passed} if is_rematerialized(op) else same)
        ops.append(op)
    order = in_order(ops, {op: i for i, op in enumerate(graph.ops)})
    outputs = tuple(same.get(t, t) for t in graph.outputs)
    origin = {fresh: same[t] for t, fresh in passed.items()}
    return Change(without_dead_code(Graph(graph.inputs, outputs, order)), origin)


def _originals(flat: Flat) -> dict[Tensor, Tensor]:
    """Of each value that the backward pass computes again, the one that it is."""
    number: dict[Tensor, object] = {}
    known: dict[object, int] = {}
    first: dict[object, Tensor] = {}
    found: dict[Tensor, Tensor] = {}
    for op in flat.graph.ops:
        operands = tuple(_entering(op, t) or number.get(t, t) if t.literal is None else _value(t) for t in op.inputs)
        if op.name == "optimization_barrier":
            number.update(zip(op.outputs, operands, strict=True))
            continue
        what: object = op if op.bodies or has_effects(op) else op.signature
        for i, t in enumerate(op.outputs):
            number[t] = n = known.setdefault((what, operands, i), len(known))
            if not op.backward:
                first.setdefault(n, t)
            elif n in first and is_rematerialized(op):
                found[flat.origin.get(t, t)] = flat.origin.get(first[n], first[n])
    return found


def _entering(op: Op, t: Tensor) -> tuple[int] | None:
    """What a layer of a folded program is given by the one before: of that there are two tensors."""
    number = t.enters or (op.times > 1 and t.leaves)
    return (number,) if number else None


def _value(t: Tensor) -> object:
    """Equal for equal literals, which signatures cut short."""
    return t.literal.tobytes() if isinstance(t.literal, np.ndarray) and t.rank else None
