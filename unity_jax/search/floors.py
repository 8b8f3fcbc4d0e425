"""How fast a plan could be at best, before it is assembled and simulated.

Communication that overlaps with arithmetic takes no time of its own, so what the planning problem adds up is no bound
of a step's duration. These are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from unity_jax.cost.timeline import unhidden
from unity_jax.machine.device import Device
from unity_jax.network.reshard import Resharder
from unity_jax.pcg.graph import Graph, Tensor, trips
from unity_jax.search.built import Built
from unity_jax.search.sums import ADDS

LIKELY = 0.95
"""The part of a bound that holds although the plan may start fewer kernels than the program on one device."""


def least_seconds(built: Built) -> float:
    """No plan takes less: the arithmetic of every op, split as well as it can be."""
    return _summed(built, np.min)


def _summed(built: Built, of: Callable[[np.ndarray], float]) -> float:
    """Over all ops, one figure of the arithmetic of each under its strategies; equal ops share an array."""
    distinct = {id(seconds): float(of(seconds)) for seconds in built.arithmetic}
    return sum(distinct[id(seconds)] for seconds in built.arithmetic)


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
    even = _summed(built, np.max) / built.mesh.num_devices  # what is whole on every device takes the most
    return max(0.0, arithmetic_seconds(built, assignment) - even)


def wasted_seconds(built: Built, assignment: Sequence[int], device: Device) -> float:
    """What a finer mesh may save of a plan besides communication."""
    return undivided_seconds(built, device) + uneven_seconds(built, assignment)


def arithmetic_seconds(built: Built, assignment: Sequence[int]) -> float:
    """The arithmetic of a plan: no overlap hides any of it."""
    return sum(float(seconds[choice]) for seconds, choice in zip(built.arithmetic, assignment, strict=True))


def plan_seconds(built: Built, assignment: Sequence[int], graph: Graph, sure: Resharder, full: Resharder) -> float:
    """A bound of one plan's step: its arithmetic and what its communication takes from it; its busiest network; the
    chain of ops and moves that wait for each other.

    How many kernels start, and which, is known of the program as it is on one device: of those bounds that count starts
    a part (`LIKELY`) is taken.

    **Arguments:** `graph`: of the program; `sure`: prices of moves that are sure, however many of them are combined;
    `full`: of moves by themselves.
    """
    machine = sure.machine
    dearest: dict[object, float] = {}
    for tensor, readers in built.needed.items():
        maker = built.made[tensor]  # the same for a tensor and for what barriers make of it
        made = maker.layouts[assignment[maker.node]]
        for reader in readers:
            layout = reader.layouts[assignment[reader.node]]
            if layout != made:
                seconds = float(sure.table(tensor.shape, tensor.dtype, (made, layout))[0, 1]) * reader.repeat
                added = made.partial and any(op.name in ADDS for op in built.nodes[reader.node].ops)
                of = (reader.node, made, layout) if added and len(readers) == 1 else id(maker)  # reduced once (`sums`)
                dearest[of] = max(dearest.get(of, 0.0), seconds)
    sent = sum(dearest.values())  # readers share copies: no more is sure than the one that is dearest to serve
    busy = arithmetic_seconds(built, assignment) + unhidden(machine) * sent
    starts = sum(op.start * op.repeat for op in built.of_ops.values())
    chain = _Chain(built, assignment, full)(graph)
    return max(busy, sent / machine.num_levels, LIKELY * (busy + starts), LIKELY * chain)


class _Chain:
    """The longest chain of ops and moves that wait for each other (the critical path)."""

    def __init__(self, built: Built, assignment: Sequence[int], prices: Resharder) -> None:
        self.built, self.assignment, self.prices = built, assignment, prices

    def __call__(self, graph: Graph) -> float:
        """Seconds of the chain through one run of a graph whose inputs are there; a loop runs its body in turn."""
        ready: dict[Tensor, float] = {}
        for op in graph.ops:
            of = self.built.of_ops.get(op)
            if of is None:
                end = max((ready.get(t, 0.0) for t in op.inputs), default=0.0)
                end += trips(op) * sum(self(body) for body in op.bodies)
            else:
                end = max((ready.get(t, 0.0) + self._moved(t, of.node) for t in op.inputs), default=0.0)
                end += float(of.least[self.assignment[of.node]]) + of.start
            ready.update(dict.fromkeys(op.outputs, end))
        return max((ready.get(t, 0.0) for t in graph.outputs), default=0.0)

    def _moved(self, t: Tensor, node: int) -> float:
        """Seconds to bring a tensor into the layout in which a node reads it."""
        maker = self.built.made.get(t)
        if maker is None:
            return 0.0
        made = maker.layouts[self.assignment[maker.node]]
        wanted = {p.layouts[self.assignment[node]] for p in self.built.needed.get(t, ()) if p.node == node}
        if not wanted or made in wanted:
            return 0.0
        return min(float(self.prices.table(t.shape, t.dtype, (made, layout))[0, 1]) for layout in wanted)
