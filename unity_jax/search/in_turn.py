"""State that comes from the host for its update comes in turn, so that little of it is on the device at a time.

    gradient a, gradient b, ...      copy a in, update a, copy a out
                                             copy b in, update b, copy b out
                                                     copy c in ...             once a is out

What is updated together (the moments of a weight) is one turn, and turns are in the order in which gradients come. An
`optimization_barrier` ties the copies of each turn to those out of the second before it, of the first ones to their
gradients: XLA:TPU begins copies as early as it can, and XLA:GPU, whose kernels read the host where it is, makes all
results of one shape by one kernel (`HorizontalLoopFusion`), which are on the device together until they are copied out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from unity_jax.pcg.graph import Graph, Op, Tensor, barrier
from unity_jax.pcg.topological import runnable

AT_ONCE = 2
"""How many turns are on the device at a time: one comes while another one goes."""


class _Turn(NamedTuple):
    """**Fields:** `copies` in; `bits` of these; `gradient`: the last that they are put together with, if it is made;
    `results`: what is copied out."""

    copies: list[Op]
    bits: int
    gradient: Tensor | None
    results: list[Tensor]


def in_turn(graph: Graph) -> Graph:
    """A planned graph, with its copies from the host in turn."""
    bits, of = dict[Op, int](), dict[Tensor, int]()  # a bit for each copy from the host; those that a tensor is made of
    for op in graph.ops:
        if op.name == "from_host":
            bits[op] = 1 << len(bits)
        made_of = bits.get(op, 0)
        for t in op.inputs:
            made_of |= of.get(t, 0)
        of.update(dict.fromkeys(op.outputs, made_of))
    place: dict[Op, float] = {op: i for i, op in enumerate(graph.ops)}
    instead, before, turns = dict[Op, Op](), 0, _turns(graph, bits, of)
    for n, turn in enumerate(turns):
        last = turns[n - AT_ONCE].results if n >= AT_ONCE else [turn.gradient] if turn.gradient is not None else []
        awaited = [t for t in last if not of.get(t, 0) & ~before]  # else they would wait for each other
        before |= turn.bits
        if awaited:
            waiting = barrier((*(op.inputs[0] for op in turn.copies), *awaited))
            place[waiting] = place[turn.copies[0]] - 0.5
            for op, t in zip(turn.copies, waiting.outputs, strict=False):
                instead[op] = dataclasses.replace(op, inputs=(t,))
                place[instead[op]] = place.pop(op)
    return Graph(graph.inputs, graph.outputs, runnable(place)) if instead else graph


def _turns(graph: Graph, bits: Mapping[Op, int], of: Mapping[Tensor, int]) -> list[_Turn]:
    """What is updated together: what some result on the device is made of, of few copies first."""
    needed, latest = {op.outputs[0] for op in graph.ops if op.name == "to_host"}, dict[int, int]()
    order = {t: i for i, op in enumerate(graph.ops) for t in op.outputs}
    made = {i: t for t, i in order.items()}
    for op in reversed(graph.ops):
        if op not in bits and of[op.outputs[0]] and not needed.isdisjoint(op.outputs):
            needed.update(op.inputs)
            alone = max((order[t] for t in op.inputs if t in order and not of[t]), default=-1)
            latest[of[op.outputs[0]]] = max(alone, latest.get(of[op.outputs[0]], -1))
    groups, taken = list[int](), 0
    together = {of[t] for t in graph.outputs if t in of and not t.on_host}
    for group in (*sorted(together, key=lambda b: (b.bit_count(), b)), *bits.values()):
        if group & ~taken:
            groups.append(group & ~taken)
            taken |= group
    found = []
    for group in groups:
        at = max((i for b, i in latest.items() if b & group), default=-1)
        results = [t for t in graph.outputs if t.on_host and of.get(t, 0) & group]
        found.append((at, _Turn([op for op, b in bits.items() if b & group], group, made.get(at), results)))
    return [turn for _, turn in sorted(found, key=lambda item: (item[0], item[1].bits))]
