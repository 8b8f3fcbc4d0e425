"""Memory inside the planning problem: which bytes each choice keeps alive, and from when to when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from unity_jax.pcg.graph import Graph, Op, Tensor
from unity_jax.program import Program
from unity_jax.search.built import Built
from unity_jax.search.problem import Problem, Usage

APART = 8
"""Ops of other layers that may be among those of one."""


def usage(program: Program, built: Built, written: set[Tensor]) -> list[Usage]:
    """One record per written tensor: the bytes of each choice of the node that makes it, from its op to its last
    reader.

    Time is the position of an op in program order, loop bodies unrolled once. Inputs that are not donated live
    throughout, and those of the host take nothing. What outlives the layer that stands for others, and the next one, is
    there once for each of them.
    """
    born: dict[Tensor, int] = {}
    dies: dict[Tensor, int] = {}
    end = _times(program.graph, 0, born, dies)
    _read_on(program.graph, written, dies)
    donated, hosted = {program.graph.inputs[i] for i in program.donated}, program.on_host
    for t in program.graph.inputs:
        born[t] = 0
        dies[t] = dies.get(t, 0) + 1 if t in donated else end + 1
    sent = {program.graph.outputs[o] for results in hosted.values() for o in results}
    dies.update((t, born[t] + 1 if t in sent else end + 1) for t in program.graph.outputs if t in born)
    mesh, ends = built.mesh, _ends_of_layers(program.graph, born)
    found = []
    for t, port in built.made.items():
        if t in written and t in born and t not in hosted and t not in program.spilled:
            copies = t.times if t not in ends or dies.get(t, 0) > ends[t] else 1
            sizes = np.array(
                [copies * t.itemsize * np.prod(lay.local_shape(t.shape, mesh), dtype=float) for lay in port.layouts]
            )
            found.append(Usage(port.node, sizes, born[t], max(dies.get(t, 0), born[t] + 1)))
    return found


def _ends_of_layers(graph: Graph, born: Mapping[Tensor, int]) -> dict[Tensor, int]:
    """When the layer is over that is next to the one that stands for others, of what that makes."""
    found, layer = dict[Tensor, int](), list[Tensor]()
    for op in [*graph.ops, None]:
        if op is not None and op.times > 1:
            layer += op.outputs
        elif layer and (op is None or born[op.outputs[0]] - born[layer[-1]] > APART):
            first, last = born[layer[0]], born[layer[-1]]
            found.update(dict.fromkeys(layer, 2 * last - first + APART))
            layer = []
    return found


def least_peak(usage: Sequence[Usage]) -> float:
    """A bound on the peak of every plan: the bytes alive if each tensor took its smallest layout."""
    change = np.zeros(2 + max((u.end for u in usage), default=0))
    for u in usage:
        change[u.start] += u.bytes.min()
        change[u.end] -= u.bytes.min()
    return float(np.cumsum(change).max())


def divided(usage: Sequence[Usage], ways: int) -> list[Usage]:
    """As if every tensor was split evenly so many ways."""
    return [Usage(u.node, u.bytes.max(keepdims=True) / ways, u.start, u.end) for u in usage]


def priced_by_memory(problem: Problem) -> Problem:
    """The problem with bytes at the busiest time step as its first concern: its solution is a plan that needs little
    memory.
    """
    first = [int(np.argmin(u)) for u in problem.unary]
    busiest = int(np.argmax(problem.profile(first)))
    unary = list(problem.unary)
    scale = 1.0 + sum(float(u[np.isfinite(u)].max(initial=0.0)) for u in unary)
    for u in problem.usage:
        if u.start <= busiest < u.end:
            unary[u.node] = unary[u.node] + u.bytes * (scale / max(1.0, u.bytes.max()))
    return Problem(unary, problem.edges, problem.shared, [], None)


def _times(graph: Graph, clock: int, born: dict[Tensor, int], dies: dict[Tensor, int]) -> int:
    for op in graph.ops:
        start = clock
        for body in op.bodies:
            clock = _times(body, clock, born, dies)
        clock += 1
        _visit(op, start, clock, born, dies)
    dies.update((t, clock) for t in graph.outputs)
    return clock


def _read_on(graph: Graph, written: set[Tensor], dies: dict[Tensor, int]) -> None:
    """What is read for the sake of something that is nowhere in memory is read whenever that is: a kernel of the
    backward pass computes again what is fused with it."""
    for op in reversed(graph.ops):
        for body in op.bodies:
            _read_on(body, written, dies)
        later = max((dies.get(t, 0) for t in op.outputs if t not in written), default=0)
        for t in op.inputs if later else ():
            dies[t] = max(dies.get(t, 0), later)


def _visit(op: Op, start: int, clock: int, born: dict[Tensor, int], dies: dict[Tensor, int]) -> None:
    born.update((t, start) for t in op.outputs)
    for t in op.inputs:
        dies[t] = max(dies.get(t, 0), clock)
