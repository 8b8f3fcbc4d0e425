"""What the backward pass computes again is used up before it computes more again.

                                                       dy', dw' = optimization_barrier dy, dw
    x', dy' = optimization_barrier x, dy       ->      x', dy'' = optimization_barrier x, dy'
    y' = tanh x'                                       y' = tanh x'
    ...                                                ...
    w' = w - dw                                        w' = w - dw'

Nothing but the update reads the gradient of a weight, so that compilers put it off: XLA:GPU's latency-hiding scheduler
to the end of the backward pass, where all that gradients are made of is alive together. What is computed again would be
alive for longer only. Therefore the barrier of what is computed again (`residuals.recompute`) waits for the gradients
that come before it in the program, and what reads these comes behind it.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect
from collections.abc import Mapping, Sequence

from unity_jax.ops.rules import is_pointwise
from unity_jax.pcg.graph import Graph, Op, Tensor, barrier
from unity_jax.pcg.topological import runnable
from unity_jax.xla.op_classes import PRODUCTS, REDUCTIONS

_GRADIENTS = PRODUCTS | REDUCTIONS
"""What makes the gradient of a weight or a bias."""


def used_up(graph: Graph) -> Graph:
    """A planned graph whose barriers, those in loops included, wait for the gradients before them."""
    inner = {op: tuple(map(used_up, op.bodies)) for op in graph.ops if op.bodies}
    changed = {op: dataclasses.replace(op, bodies=bodies) for op, bodies in inner.items() if bodies != op.bodies}
    if changed:
        graph = Graph(graph.inputs, graph.outputs, [changed.get(op, op) for op in graph.ops])
    barriers = [op for op in graph.ops if _begins_again(op)]
    return _waiting(graph, barriers) if barriers else graph


def _begins_again(op: Op) -> bool:
    """Whether it is the barrier of what the backward pass computes again."""
    return op.name == "optimization_barrier" and op.backward and op.traced is not None


def _waiting(graph: Graph, barriers: Sequence[Op]) -> Graph:
    """The same of the ops of a graph itself: ahead of such a barrier stands one over the last that it waits for and the
    gradients."""
    place: dict[Op, float] = {op: i for i, op in enumerate(graph.ops)}
    late, since, ties = dict[Tensor, Tensor](), dict[Tensor, float](), dict[Op, dict[Tensor, Tensor]]()
    for first, gradients in _gradients(graph, barriers, place).items():
        at = place[first]
        last = max(first.inputs, key=lambda t: place[graph.producer[t]] if t in graph.producer else -1.0)
        waiting = barrier((last, *gradients))
        for epilogue in gradients.values():
            place.update((op, min(place[op], at - 0.75)) for op in epilogue)
        place[waiting] = at - 0.25
        ties |= {waiting: {}, first: {last: waiting.outputs[0]}}
        late.update(zip(gradients, waiting.outputs[1:], strict=True))
        since.update(dict.fromkeys(gradients, at))
    order, needed = dict[Op, float](), _needed(graph, since)
    for op, at in place.items():
        behind = [t for t in op.inputs if since.get(t, math.inf) < needed.get(op, math.inf)]
        tie = ties.get(op, {t: late[t] for t in behind})
        order[op.reading(tie)] = at
    return Graph(graph.inputs, tuple(late.get(t, t) for t in graph.outputs), runnable(order))


def _needed(graph: Graph, since: Mapping[Tensor, float]) -> dict[Op, float]:
    """Where the first barrier is that waits for what an op makes."""
    found = dict[Op, float]()
    for op in reversed(graph.ops):
        first = [since.get(t, math.inf) for t in op.outputs]
        first += [found[reader] for t in op.outputs for reader in graph.readers.get(t, ()) if reader in found]
        if (at := min(first)) < math.inf:
            found[op] = at
    return found


def _gradients(graph: Graph, barriers: Sequence[Op], place: Mapping[Op, float]) -> dict[Op, dict[Tensor, Sequence[Op]]]:
    """By barrier, the gradients that it waits for, and no barrier else, each with its epilogue: the next one in the
    program, or the one after that if cotangents are summed over devices on the way there, beside which it can run."""
    found, awaited = dict[Op, dict[Tensor, Sequence[Op]]](), _awaited(graph)
    ends = [place[barrier] for barrier in barriers]
    sums = {bisect(ends, place[op]) for op in graph.ops if _is_sum(op) and not awaited.isdisjoint(op.outputs)}
    for op in graph.ops:
        if op.backward and op.name in _GRADIENTS and op.outputs[0].rank:
            coming = bisect(ends, place[op])
            coming += not sums.isdisjoint((coming, coming + 1))
            if coming < len(barriers):
                t, epilogue = _with_epilogue(graph, op, place, ends[coming])
                if t not in awaited:
                    found.setdefault(barriers[coming], {})[t] = epilogue
    return found


def _is_sum(op: Op) -> bool:
    return op.move is not None and op.move.kind in ("reduce", "reduce_scatter")


def _awaited(graph: Graph) -> set[Tensor]:
    """What some barrier waits for."""
    found = set[Tensor]()
    for op in reversed(graph.ops):
        if _begins_again(op) or not found.isdisjoint(op.outputs):
            found.update(op.inputs)
    return found


def _with_epilogue(graph: Graph, op: Op, place: Mapping[Op, float], before: float) -> tuple[Tensor, list[Op]]:
    """What is made of a gradient alone, element by element, that can be at some place already, and the ops that do: it
    is added to an accumulator or, without an optimizer's state, to a weight, which nothing reads any more."""

    def ready(t: Tensor) -> bool:
        if t in graph.producer:
            return place[graph.producer[t]] < before
        return all(place[other] < before for other in graph.readers.get(t, ()) if other is not reader)

    t, ops = op.outputs[0], list[Op]()
    while len(readers := graph.readers.get(t, ())) == 1 and is_pointwise(reader := readers[0]):
        if len(reader.outputs) != 1 or not all(ready(u) for u in reader.inputs if u is not t):
            break
        ops.append(reader)
        t = reader.outputs[0]
    return t, ops
