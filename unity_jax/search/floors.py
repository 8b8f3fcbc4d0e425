"""How fast a plan could be at best, before it is assembled and simulated.

Communication that overlaps with arithmetic takes no time of its own, so what the planning problem adds up is no bound
of a step's duration. These are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from unity_jax.cost.timeline import unhidden
from unity_jax.machine.device import Device
from unity_jax.network.reshard import Resharder
from unity_jax.pcg.graph import Graph, Op, Tensor, trips
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.search.built import Built, OpSeconds, Port
from unity_jax.search.sums import ADDS

LIKELY = 0.95
"""The part of a bound that holds although the plan may start fewer kernels than the program on one device."""


def undivided_seconds(built: Built, device: Device) -> float:
    """What reading and writing the arguments takes longer than if each was split over all devices, at best.

    A finer mesh may split what this one cannot: a table of a million rows over 2 of 2 x 3 devices.
    """
    beyond = 0.0
    for node in (built.nodes[i] for i in built.inputs):
        t = node.tensor
        assert t is not None
        least = min(math.prod(layout.local_shape(t.shape, built.mesh)) for layout in node.layouts)
        beyond += t.itemsize * max(0.0, least - math.prod(t.shape) / built.mesh.num_devices)
    return 2 * beyond / device.memory_bandwidth


def uneven_seconds(built: Built, assignment: Sequence[int]) -> float:
    """What the arithmetic of a plan takes longer than if each op was split over all devices without loss.

    A finer mesh may split what this one cannot, or split it better: a recurrent cell that reads all its weights for a
    few rows on each device.
    """
    even = built.most_seconds / built.mesh.num_devices  # what is whole on every device takes the most
    return max(0.0, arithmetic_seconds(built, assignment) - even)


def wasted_seconds(built: Built, assignment: Sequence[int], device: Device) -> float:
    """What a finer mesh may save of a plan besides communication."""
    return undivided_seconds(built, device) + uneven_seconds(built, assignment)


def arithmetic_seconds(built: Built, assignment: Sequence[int]) -> float:
    """The arithmetic of a plan: no overlap hides any of it."""
    return sum(float(seconds[choice]) for seconds, choice in zip(built.arithmetic, assignment, strict=True))


def by_arithmetic(built: Built, seeds: Mapping[str, np.ndarray]) -> list[tuple[str, np.ndarray]]:
    """Plans by name, those first whose arithmetic takes least."""
    return sorted(seeds.items(), key=lambda item: arithmetic_seconds(built, item[1]))


class Floors:
    """Bounds of the steps of plans: of one its arithmetic and what its communication takes from it; its busiest
    network; the chain of ops and moves that wait for each other (the critical path).

    How many kernels start, and which, is known of the program as it is on one device: of those bounds that count starts
    a part (`LIKELY`) is taken.

    **Arguments:** `graph`: of the program; `prices`: of moves on a mesh, those that are sure however many of them are
    combined (true), and of moves by themselves.
    """

    def __init__(self, built: Built, graph: Graph, prices: Callable[[MeshAxes, bool], Resharder]) -> None:
        self.sure, self.full = prices(built.mesh, True), prices(built.mesh, False)
        self.built, self.machine = built, self.sure.machine
        self.starts = sum(op.start * op.repeat for op in built.of_ops.values())
        self.chain = self._chain(graph)

    def seconds(self, assignment: Sequence[int], enough: float = math.inf) -> float:
        """Seconds below which the step of a plan is not; of several bounds the first that is `enough`."""
        choices = [int(a) for a in assignment]
        sent = self._sent(choices)
        busy = arithmetic_seconds(self.built, choices) + unhidden(self.machine) * sent
        least = max(busy, sent / self.machine.num_levels, LIKELY * (busy + self.starts))
        return least if least >= enough else max(least, LIKELY * self._run(self.chain, choices))

    def _sent(self, choices: Sequence[int]) -> float:
        """Seconds of the moves of a plan. Readers share copies: of a tensor no more is sure than the one move that is
        dearest."""
        dearest: dict[object, float] = {}
        for tensor, readers in self.built.needed.items():
            maker = self.built.made[tensor]  # the same for a tensor and for what barriers make of it
            made = maker.layouts[choices[maker.node]]
            for reader in readers:
                layout = reader.layouts[choices[reader.node]]
                if layout is not made and layout != made:
                    seconds = self.sure.seconds(tensor.shape, tensor.dtype, made, layout) * reader.repeat
                    added = made.partial and any(op.name in ADDS for op in self.built.nodes[reader.node].ops)
                    of = (reader.node, made, layout) if added and len(readers) == 1 else id(maker)  # reduced once
                    dearest[of] = max(dearest.get(of, 0.0), seconds)
        return sum(dearest.values())

    def _chain(self, graph: Graph) -> _Chain:
        """The chain of a graph, of which no input is waited for."""
        found, known = list[_Link](), set[Tensor]()
        for op in graph.ops:
            of = self.built.of_ops.get(op)
            inputs = tuple((t, t in known, *self._ends(t, None if of is None else of.node)) for t in op.inputs)
            bodies = tuple(self._chain(body) for body in op.bodies) if of is None else ()
            waits = tuple(i for i in inputs if i[1] or i[2] is not None)
            known.update(op.outputs)
            found.append(_Link(op, of, waits, bodies))
        return _Chain(found, graph.outputs)

    def _ends(self, t: Tensor, node: int | None) -> tuple[Port | None, list[Port]]:
        """Who makes a tensor, and how a node reads it; None if that takes no move."""
        maker = self.built.made.get(t)
        read = [p for p in self.built.needed.get(t, ()) if p.node == node]
        return (maker, read) if maker is not None and read else (None, [])

    def _run(self, chain: _Chain, choices: Sequence[int]) -> float:
        """Seconds of the chain through one run of a graph whose inputs are there; a loop runs its body in turn."""
        ready: dict[Tensor, float] = {}
        for op, of, waits, bodies in chain.links:
            end = 0.0
            for t, is_made, maker, read in waits:
                at = ready[t] if is_made else 0.0
                if maker is not None:
                    at += self._moved(t, maker, read, choices)
                end = max(end, at)
            if of is not None:
                end += float(of.least[choices[of.node]]) + of.start
            elif bodies:
                end += trips(op) * sum(self._run(body, choices) for body in bodies)
            for t in op.outputs:
                ready[t] = end
        return max((ready.get(t, 0.0) for t in chain.outputs), default=0.0)

    def _moved(self, t: Tensor, maker: Port, read: Sequence[Port], choices: Sequence[int]) -> float:
        """Seconds to bring a tensor into the layout in which a node reads it."""
        made, least = maker.layouts[choices[maker.node]], math.inf
        for port in read:
            layout = port.layouts[choices[port.node]]
            if layout is made or layout == made:
                return 0.0
            least = min(least, self.full.seconds(t.shape, t.dtype, made, layout))
        return least


class _Link(NamedTuple):
    """An op in the chain of all: what decides it, which of its inputs it waits for or has moved (whether an op of the
    same graph makes it, who makes it, who reads it), and the chains of its bodies."""

    op: Op
    of: OpSeconds | None
    waits: tuple[tuple[Tensor, bool, Port | None, list[Port]], ...]
    bodies: tuple[_Chain, ...]


class _Chain(NamedTuple):
    """The ops of a graph, and its results."""

    links: list[_Link]
    outputs: Sequence[Tensor]
