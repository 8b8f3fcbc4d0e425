"""What few users need of `auto_shard`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from unity_jax.search.options import SearchOptions


@dataclass(frozen=True, kw_only=True)
class Options(SearchOptions):
    """What few users need.

    **Fields:** those of `SearchOptions`: `rewrite`: whether the program may be rewritten, or is planned as it is (None:
    rewritten for several devices, as it is for one), `checkpoint`: "keep" keeps the user's `jax.checkpoint` as written
    ("choose": what it recomputes is kept where memory is left and that is faster, and what its policy offloads goes to
    the host where memory is short), `attention`: by a kernel where that is faster ("choose"), as written ("xla"), or by
    a kernel wherever it is found ("kernel"), `loops`: products that need not be in a loop run once for all of its steps
    where that is faster ("choose"), as written ("xla"), or wherever they can ("batch"), and on TPUs loops are one
    kernel each where that is faster ("choose"), or wherever they can ("kernel"), `bags`: rows of a table that are
    summed are never there together where that is faster ("choose"), are as written ("xla"), or never are wherever that
    can be ("rows"), and `compile_candidates`: how many of
    the best plans are compiled, so that the memory that the compiler allocates and, on TPU, the cycles that it
    estimates decide;
    `cache`: folder of plans found earlier (None: no cache; the default is `$UNITY_JAX_CACHE`, or `unity_jax` in the
    user's cache folder); `ties`: path of a result to the path of the argument that it replaces, where neither donation
    nor equal paths say so.
    """

    cache: str | Path | None = "default"
    ties: Mapping[str, str] | None = None

    @property
    def search(self) -> SearchOptions:
        """Those of them that the search takes."""
        return SearchOptions(**{f.name: getattr(self, f.name) for f in fields(SearchOptions)})


NO_OPTIONS = Options()
"""All as it is by default."""
