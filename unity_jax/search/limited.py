"""Plans within a memory limit: what they need at least, and solutions under a limit that their true peaks tighten.

Liveness in the planning problem is that of the program in its order, and so only near what a plan needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from unity_jax.pcg.graph import Tensor
from unity_jax.search.built import Built
from unity_jax.search.candidate import Candidate
from unity_jax.search.limits import LIMITS
from unity_jax.search.memory_model import least_peak
from unity_jax.search.refine import by_axis, by_one_axis_at_a_time, carried
from unity_jax.search.solver import solve
from unity_jax.search.tables import Store


class Held(NamedTuple):
    """A plan as an assignment of a problem; `keep`: see `Decisions`."""

    built: Built
    assignment: np.ndarray
    keep: bool


def argument_bytes(built: Built, assignment: Sequence[int], hosted: Container[Tensor]) -> int:
    """Bytes of a plan's arguments on one device: it needs no less memory.

    **Arguments:** `hosted`: those that are on the host.
    """
    total = 0
    for node in (built.nodes[i] for i in built.inputs):
        t = node.tensor
        assert t is not None
        if t not in hosted:
            shape = node.layouts[int(assignment[node.index])].local_shape(t.shape, built.mesh)
            total += t.itemsize * math.prod(shape)
    return total


def followed(held: Held, build: Callable[[bool], Built], store: Callable[[Built], Store]) -> Held:
    """The plan of a variant that is as that of the program before, with what is best for what differs.

    **Arguments:** `build`: the problem of the variant, by `keep`; `store`: of problems that are alike.
    """
    built = build(held.keep)
    found = carried(held.built, held.assignment, built, store(built), improving=False)
    return held._replace(built=built, assignment=found)


def tightened(
    built: Built, seeds: Sequence[np.ndarray], limit: float, make: Callable[[np.ndarray], Candidate], store: Store
) -> Iterator[Candidate]:
    """Solutions under the limit, the last one within it if one is found: what the liveness of the problem misses
    tightens its limit, and it is solved again.

    **Arguments:** `make`: the plan of an assignment; `store`: of problems that are alike.
    """
    problem, least = built.problem, limit
    for _ in range(LIMITS.tightened):
        problem.limit = least
        if least_peak(problem.usage) > least:  # nothing does: what is nearest to it
            assignment, possible = min(seeds, key=problem.rank), False
        elif by_one_axis_at_a_time(built):
            assignment = by_axis(built, seeds)
            possible = problem.fits(assignment)
        else:
            solution = solve(problem, seeds=seeds, store=store)
            assignment, possible = solution.assignment, solution.feasible
        made = make(assignment)
        yield made
        excess = made.memory.peak_bytes - limit
        least = min(least, problem.peak(assignment)) - excess
        if excess <= 0 or least <= 0 or not possible:
            return


def with_rivals(
    chosen: Candidate, found: Sequence[Candidate], limit: float, count: int, most: float = 0.0
) -> Candidate:
    """The chosen candidate with the next best ones: at most so many that fit, or those that take so many seconds at
    most."""
    others = sorted((c for f in found for c in (f, *f.rivals)), key=lambda c: c.seconds)
    if count:
        known = {(c.seconds, c.memory.peak_bytes): c for c in others if c.fits(limit)}
        known.pop((chosen.seconds, chosen.memory.peak_bytes), None)
        taken = [*known.values()][:count]
    else:
        taken = [*{c.seconds: c for c in others if chosen.seconds < c.seconds <= most}.values()]
    return chosen.noting(rivals=tuple(c.noting(rivals=()) for c in taken)) if taken else chosen
