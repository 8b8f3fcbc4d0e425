"""How far a search went: what a plan says about what it was chosen from.

    >>> both = Searched(("x=8",), ("x=4",), variants=3, allowed=32) + Searched(("x=4",), variants=4, allowed=32)
    >>> both.meshes, both.skipped, both.variants
    (('x=8', 'x=4'), (), 7)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Searched:
    """What a search tried; the sum of two is what both tried.

    **Fields:** `meshes`: those that were planned for; `skipped`: those that were not, because what was found before
    could hardly be improved, or nothing could fit; `inexact`: those for which no assignment of strategies is proved to
    be the best: domains were restricted, one axis was planned at a time, or memory was short; `variants`: rewritten
    programs that were planned, of those `allowed` (0: no rewrites were searched); `out_of_budget`: whether there were
    more to try when no more were allowed; `compiled`: of how many plans the compiler's own estimates decided which one
    is the best (0: of none); `entire`: where microbatches would have saved memory, the user's lines that need the whole
    batch at once.
    """

    meshes: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    inexact: tuple[str, ...] = ()
    variants: int = 0
    allowed: int = 0
    out_of_budget: bool = False
    compiled: int = 0
    entire: tuple[str, ...] = ()

    def __add__(self, other: Searched) -> Searched:
        meshes = tuple(dict.fromkeys((*self.meshes, *other.meshes)))
        return Searched(
            meshes,
            tuple(m for m in dict.fromkeys((*self.skipped, *other.skipped)) if m not in meshes),
            tuple(dict.fromkeys((*self.inexact, *other.inexact))),
            self.variants + other.variants,
            self.allowed + other.allowed,
            self.out_of_budget or other.out_of_budget,
            self.compiled + other.compiled,
            tuple(dict.fromkeys((*self.entire, *other.entire))),
        )

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Searched:
        """Of what `dataclasses.asdict` gives."""
        meshes, skipped, inexact = (tuple(map(str, data[k])) for k in ("meshes", "skipped", "inexact"))
        numbers = int(data["variants"]), int(data["allowed"]), bool(data["out_of_budget"]), int(data.get("compiled", 0))
        return Searched(meshes, skipped, inexact, *numbers, tuple(map(str, data.get("entire", ()))))


UNKNOWN = Searched()
"""Of plans made by hand, or saved before plans said what they were chosen from."""
