"""What a search may do, as far as its caller decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """The settings of a search. Plans are kept by all of them (`planning.make`), so that another setting plans anew.

    **Fields:** `rewrite`: whether programs are rewritten by the rules of the library, or planned as they are (None:
    rewritten for several devices; for one of them it gains a few percent, and planning takes ten times as long);
    `checkpoint`: "keep" keeps the user's `jax.checkpoint` as written; by default ("choose") what it has the backward
    pass compute again is kept where there is memory for it and the step is faster so, and what its policy has layers of
    a `scan` offload is on the host only where memory is short;
    `attention`: by a kernel where that is faster ("choose"), by the operations as written ("xla"), or by a kernel
    wherever it is found ("kernel"); `loops`: products that need not be in a loop run once for all of its steps where
    that is faster ("choose"), as written ("xla"), or wherever they can ("batch"), and a TPU runs loops as one kernel
    each where that is faster ("choose"), or every device wherever they can be ("kernel"); `bags`: rows of a table that
    are looked up and summed are added one by one where that is faster ("choose"), are there together, as written
    ("xla"), or are added one by one wherever they can ("rows"), and so are their gradients;
    `compile_candidates`: how many of the best candidates are compiled for the devices (or, offline, for the topology
    that the machine is called by), so that the compiler's own estimates of time and memory decide between them; 0 and 1
    compile none.
    """

    rewrite: bool | None = None
    checkpoint: Literal["choose", "keep"] = "choose"
    attention: Literal["choose", "xla", "kernel"] = "choose"
    loops: Literal["choose", "xla", "batch", "kernel"] = "choose"
    bags: Literal["choose", "xla", "rows"] = "choose"
    compile_candidates: int = 0

    def __post_init__(self) -> None:
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                *others, last = (f'"{word}"' for word in known)
                raise ValueError(f"{name}= takes {', '.join(others)} or {last}, not {getattr(self, name)!r}")
        if not isinstance(self.compile_candidates, int) or self.compile_candidates < 0:
            raise ValueError(f"compile_candidates= takes a number of plans, 0 or more, not {self.compile_candidates!r}")


_CHOICES = {
    "checkpoint": ("choose", "keep"),
    "attention": ("choose", "xla", "kernel"),
    "loops": ("choose", "xla", "batch", "kernel"),
    "bags": ("choose", "xla", "rows"),
}
DEFAULTS = SearchOptions()
