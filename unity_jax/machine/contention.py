"""How much copies and collectives slow each other and the arithmetic beside them: five coefficients.

>>> A100.seconds(compute=2e-3, collectives=1e-3)  # the collective is hidden, but steals 47 % of its time
0.002471

With C, G, H and D the seconds that compute, collectives, copies from the host and copies to the host take alone, all
started together they take

    max(C + aG + b(H+D),  H + pG + qD,  D + pG + qH,  G + s(H+D))

Every row is a resource: it is used at full rate by one stream and in part by the others, and a step ends no sooner than
its busiest resource. Perfect overlap is all zeros; ones are one stream after the other. The streams are those of Mist
(arXiv:2503.19050), which has 28 factors in place of these five.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np
from scipy.optimize import least_squares, linprog

ASYNCHRONOUS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute")
"""The collectives that XLA:GPU starts and awaits apart, so that other work runs in between: all kinds."""

STREAMS = ("compute", "collectives", "host_to_device", "device_to_host")
"""What can run at the same time, in the order of all vectors here."""


@dataclass(frozen=True)
class Contention:
    """The part of a stream's own time that it takes from another, between 0 (nothing) and 1 (all of it).

    **Fields:** `compute_by_collectives` (a) and `compute_by_copies` (b): what compute loses; `copies_by_collectives`
    (p) and `copies_by_copies` (q): what a copy loses to collectives and to copies in the other direction;
    `collectives_by_copies` (s): what collectives lose to copies.
    """

    compute_by_collectives: float = 0.0
    compute_by_copies: float = 0.0
    copies_by_collectives: float = 0.0
    copies_by_copies: float = 0.0
    collectives_by_copies: float = 0.0

    def __post_init__(self) -> None:
        if not all(0 <= x <= 1 for x in astuple(self)):
            raise ValueError(f"contention coefficients lie between 0 and 1, got {self}")

    @functools.cached_property
    def _uses(self) -> np.ndarray:
        return _uses(astuple(self))

    def seconds(
        self,
        compute: float = 0.0,
        collectives: float = 0.0,
        host_to_device: float = 0.0,
        device_to_host: float = 0.0,
    ) -> float:
        """Seconds of streams that start together, from the seconds that each takes alone."""
        return float((self._uses @ (compute, collectives, host_to_device, device_to_host)).max())

    def rates(self, left: Sequence[float]) -> tuple[float, ...]:
        """The parts of their own speed at which streams run now, given the seconds `left` of each alone (0: idle).

        No resource is used beyond its full rate, and streams started together end when `seconds` says. Where it can,
        every running stream uses its own resource fully, so that short work ends early: a matmul beside an all-gather
        runs at 1 - a, the all-gather at full speed. Where that would use some resource beyond its rate, all end
        together.
        """
        running = tuple([i for i, x in enumerate(left) if x > 0])
        if running not in self._steady:
            self._steady[running] = self._solve(running)
        steady = self._steady[running]
        if steady is not None:
            return steady
        together = self.seconds(*left)
        return tuple(x / together for x in left)

    @functools.cached_property
    def _steady(self) -> dict[tuple[int, ...], tuple[float, ...] | None]:
        """By running streams, as far as they have been asked for: the rates at which each uses its own resource fully;
        None if there are none that leave every other resource less used, however much of the work is done."""
        return {}

    def _solve(self, running: tuple[int, ...]) -> tuple[float, ...] | None:
        own, rates = self._uses[np.ix_(running, running)], np.zeros(4)
        if not running or np.linalg.cond(own) > 1e9:
            return None
        rates[list(running)] = np.linalg.solve(own, np.ones(len(running)))
        for idle in set(range(4)) - set(running):
            # The row of an idle stream never binds if it lies below a mean of running rows.
            below = linprog(np.ones(len(running)), A_ub=-own.T, b_ub=-self._uses[idle, running])
            if below.fun > 1 + 1e-9:
                return None
        return None if (rates < 0).any() else tuple(map(float, rates))


PERFECT = Contention()

A100 = Contention(0.471, 0.008, 0.002, 0.622, 0.01)
"""Eight A100 on NVLink, from `experiments/validation/contention.py`: a collective takes half of its time from a matmul
beside it, and copies, which have engines of their own, share only the link to the host."""

L4 = Contention(0.098, 0.987, 0.966, 0.974, 0.957)
"""Eight L4 on PCIe, from the same: copies from the host and to it are behind all else, one after the other."""

PULL = 1e-2
"""The relative error of one measurement that weighs as much, in a fit, as a coefficient of 0 in place of 1."""


def fit(alone: np.ndarray, together: np.ndarray) -> Contention:
    """The coefficients that explain measured overlaps best, in relative error (a robust least squares).

    Of coefficients that explain the measurements equally well, the largest: what nothing shows to overlap does not.

    **Arguments:** `alone`: (measurements, 4) seconds of each of `STREAMS` alone, 0 where it did not run; `together`:
    seconds of all of them started together. Every pair of streams should occur; more than pairs are not needed.
    """
    alone, together = np.asarray(alone, float), np.asarray(together, float)

    def error(coefficients: np.ndarray) -> np.ndarray:
        misses = (alone @ _uses(coefficients).T).max(axis=1) / together - 1
        return np.concatenate([misses, PULL * (1 - coefficients)])

    starts = (0.02, 0.5, 0.95)  # a row that no measurement reaches has no slope, so several starts
    found = [least_squares(error, [x] * 5, bounds=(0, 1), loss="soft_l1", f_scale=0.05) for x in starts]
    return Contention(*(round(float(x), 4) for x in min(found, key=lambda f: f.cost).x))


def _uses(coefficients: Sequence[float] | np.ndarray) -> np.ndarray:
    """(resources, streams): the part of each resource that a stream uses at full rate."""
    a, b, p, q, s = coefficients
    return np.array([[1, a, b, b], [0, 1, s, s], [0, p, 1, q], [0, p, q, 1]])
