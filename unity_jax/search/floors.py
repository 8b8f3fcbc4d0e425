"""How fast a plan could be at best, before it is assembled and simulated.

Communication that overlaps with arithmetic takes no time of its own, so what the planning problem adds up is no bound
of a step's duration. These are.
"""

from __future__ import annotations

from collections.abc import Sequence

from unity_jax.cost.reshard import Resharder
from unity_jax.cost.timeline import unhidden
from unity_jax.search.build import Built


def least_seconds(built: Built) -> float:
    """No plan takes less: the arithmetic of every op, split as well as it can be."""
    distinct = {id(seconds): float(seconds.min()) for seconds in built.arithmetic}
    return sum(distinct[id(seconds)] for seconds in built.arithmetic)


def arithmetic_seconds(built: Built, assignment: Sequence[int]) -> float:
    """The arithmetic of a plan: no overlap hides any of it."""
    return sum(float(seconds[choice]) for seconds, choice in zip(built.arithmetic, assignment, strict=True))


def plan_seconds(built: Built, assignment: Sequence[int], collectives: Resharder) -> float:
    """A bound of one plan's step: its arithmetic and what its communication takes from it, or its busiest network.

    **Arguments:** `collectives`: prices of moves without slices.
    """
    machine = collectives.machine
    sent = 0.0
    for tensor, readers in built.needed.items():
        maker = built.made[tensor]
        made = maker.layouts[assignment[maker.node]]
        # Readers share copies, so no more is sure than the one that is dearest to serve.
        wanted = {reader.layouts[assignment[reader.node]]: reader.repeat for reader in readers}
        sent += max(
            (
                float(collectives.table(tensor.shape, tensor.dtype, (made, layout))[0, 1]) * repeat
                for layout, repeat in wanted.items()
                if layout != made
            ),
            default=0.0,
        )
    arithmetic = arithmetic_seconds(built, assignment)
    return max(arithmetic + unhidden(machine) * sent, sent / machine.num_levels)
