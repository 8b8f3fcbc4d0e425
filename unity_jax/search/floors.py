"""How fast a plan could be at best, before it is assembled and simulated.

Communication that overlaps with arithmetic takes no time of its own, so what the planning problem adds up is no bound
of a step's duration. These are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from unity_jax.cost.reshard import Resharder
from unity_jax.cost.timeline import unhidden
from unity_jax.machine.device import Device
from unity_jax.search.built import Built


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


def arithmetic_seconds(built: Built, assignment: Sequence[int]) -> float:
    """The arithmetic of a plan: no overlap hides any of it."""
    return sum(float(seconds[choice]) for seconds, choice in zip(built.arithmetic, assignment, strict=True))


def plan_seconds(built: Built, assignment: Sequence[int], collectives: Resharder) -> float:
    """A bound of one plan's step: its arithmetic and what its communication takes from it, or its busiest network.

    **Arguments:** `collectives`: prices of moves that are sure.
    """
    machine = collectives.machine
    dearest: dict[int, float] = {}
    for tensor, readers in built.needed.items():
        maker = built.made[tensor]  # the same for a tensor and for what barriers make of it
        made = maker.layouts[assignment[maker.node]]
        for reader in readers:
            layout = reader.layouts[assignment[reader.node]]
            if layout != made:
                seconds = float(collectives.table(tensor.shape, tensor.dtype, (made, layout))[0, 1]) * reader.repeat
                dearest[id(maker)] = max(dearest.get(id(maker), 0.0), seconds)
    sent = sum(dearest.values())  # readers share copies: no more is sure than the one that is dearest to serve
    arithmetic = arithmetic_seconds(built, assignment)
    return max(arithmetic + unhidden(machine) * sent, sent / machine.num_levels)
