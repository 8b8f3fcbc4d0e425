"""Where XLA:GPU puts the buffers of a program.

It knows all lives, and takes the largest buffer first: each goes into the smallest gap between those that are there at
the same time, or else above them (`GlobalDecreasingSizeBestFitHeap` in
https://github.com/openxla/xla/blob/main/xla/service/heap_simulator/heap_simulator.cc).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Life = tuple[int, int, int]
"""The first and the last time when a buffer exists, and its bytes."""


def packed_bytes(lives: Sequence[Life]) -> int:
    """The bytes up to the highest address that is used."""
    order = sorted((life for life in lives if life[2]), key=lambda life: (-life[2], life[0]))
    first, last, size = np.array(order, np.int64).reshape(-1, 3).T
    at = np.zeros_like(size)
    for i in range(len(order)):
        near = np.flatnonzero((first[:i] <= last[i]) & (last[:i] >= first[i]))
        if near.size:
            near = near[np.argsort(at[near], kind="stable")]
            free_from = np.maximum.accumulate(at[near] + size[near])
            starts = np.concatenate(([0], free_from))
            gaps = at[near] - starts[:-1]
            fits = np.flatnonzero(gaps >= size[i])
            at[i] = starts[fits[np.argmin(gaps[fits])]] if fits.size else free_from[-1]
    return int((at + size).max(initial=0))
