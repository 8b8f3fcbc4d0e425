"""The compiler has the last word on memory: where the program of a plan needs more than the limit, the plan is made
again with as much less for it as the compiler was seen to need beyond what was predicted; then with twice as much less
as it was seen to need of that one, since what is predicted to save memory may save less.

    unity_jax: train_step needs 71.2 GiB as compiled, the limit is 70 GiB: planned again within 68.6 GiB

Before that, the first plan leaves a part of the limit, if it can (`reserving`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

from unity_jax import progress
from unity_jax.residuals.record import Keep, Spill
from unity_jax.search.candidate import Candidate, sparing
from unity_jax.search.limits import LIMITS
from unity_jax.text import size

T = TypeVar("T")

TIMES = 3
"""How often a plan is made again."""

UNTOLD = 1.1
"""Times the limit that a program is taken to need where the compiler gives up without saying how much it is."""


def reserving(limit: float, search: Callable[[int, int], Candidate]) -> Candidate:
    """The plan within a limit; if it saves memory, rather one that leaves as much of the limit as compilers may need
    beyond what is predicted, or half of that, unless that costs too much time (`sparing`).

    **Arguments:** `search` makes a plan that leaves so many bytes, and so many that what is kept in place of computing
    it again, here or on the host, rather leaves.
    """
    spares = [round(part * limit) for part in LIMITS.reserve] if math.isfinite(limit) else [0]
    found = search(0, spares[0])
    kinds = {type(how) for how in found.program.savings}
    if not kinds or Keep in kinds <= {Keep, Spill} or not found.fits(limit):
        return found
    for spare in spares:
        if found.fits(limit - spare):
            break
        other = sparing([found, search(spare, 0)], limit, spare)
        if other is not found:
            return other
    return found


def corrected(
    name: str,
    first: T,
    limit: float,
    needs: Callable[[T], float],
    predicted: Callable[[T], int],
    again: Callable[[int], T],
) -> tuple[T, int]:
    """The first plan whose program is within the limit, or the last one that was tried: none is made behind one that
    does not fit by prediction.

    **Arguments:** `name` of the function; `limit` in bytes per device; what the program of a plan `needs` as compiled
    (infinity if the compiler does not say), and was `predicted` to need; `again` makes a plan that leaves a margin of
    so many bytes.
    **Returns:** the plan, and the bytes by which the compiler goes beyond the prediction: with them it fits if and only
    if its program does.
    """
    found, margin, times = first, 0, 0
    while True:
        peak = needs(found)
        beyond = round(peak if math.isfinite(peak) else UNTOLD * max(limit, predicted(found))) - predicted(found)
        fits = predicted(found) + margin <= limit
        if peak <= limit or not fits or times == TIMES:
            return found, margin if peak <= limit and fits else beyond
        times += 1
        margin = times * beyond
        many = size(peak) if math.isfinite(peak) else "more than there is"
        within = size(max(limit - margin, 0))
        progress.tell(f"{name} needs {many} as compiled, the limit is {size(limit)}: planned again within {within}")
        found = again(margin)
