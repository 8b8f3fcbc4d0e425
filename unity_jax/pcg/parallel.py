"""The parallel ops of a planned graph: moves of one tensor from one layout to another, each at most one collective.

>>> whole, rows = Layout(((), ())), Layout((("x",), ()))
>>> gather = Move("combine", ("x",), 0, None, rows, whole)
>>> print(gather, "by", gather.collective)
combine [x,.] -> [.,.] by all_gather
"""

from __future__ import annotations

from dataclasses import dataclass

from unity_jax.pcg.layout import Layout

COLLECTIVES: dict[str, str | None] = {
    "partition": None,  # a dimension's shard is sliced out of equal copies
    "replicate": None,  # equal copies become a partial reduction: one is kept, the others are its identity
    "combine": "all_gather",
    "reduce": "all_reduce",
    "reduce_scatter": "reduce_scatter",
    "exchange": "all_to_all",
    "shift": "permute",
}
"""The kinds of moves from one layout to another, and the collective that each one emits."""

HOST = frozenset(["from_host", "to_host"])
"""The kinds of moves between a device and its host: a layout says how an array is split, not where the shards are."""

SPILLED = "spilled"
"""The parameter of copies from the host of what the step itself put there: whether in a loop they are made an iteration
ahead. Compilers that read arguments on the host by the kernels that need them do not so read these."""


@dataclass(frozen=True)
class Move:
    """One parallel op: `axes` (in mesh order) change state together.

    - `partition`: replicated axes become the minor-most of dimension `dim`
    - `combine`: the minor-most axes of `dim` become replicated
    - `reduce`: partial axes become replicated
    - `reduce_scatter`: axes of a partial sum become the minor-most of `dim`
    - `exchange`: the minor-most axes of `dim` become the minor-most of `target_dim`
    - `replicate`: replicated axes become partial
    - `from_host`, `to_host`: the layout stays, over no axes; what comes from the host or goes there is there
    """

    kind: str
    axes: tuple[str, ...]
    dim: int | None
    target_dim: int | None
    before: Layout
    after: Layout

    @property
    def collective(self) -> str | None:
        """The one collective that it emits; None for a local move."""
        return COLLECTIVES.get(self.kind)

    @staticmethod
    def host(kind: str, layout: Layout) -> Move:
        """A copy from the host or to it (`HOST`)."""
        return Move(kind, (), None, None, layout, layout)

    def __str__(self) -> str:
        return f"{self.kind} {self.before}" + (f" -> {self.after}" if self.kind not in HOST else "")


@dataclass(frozen=True)
class Shift(Move):
    """One pass along a ring: every device sends its shard to the one `by` positions ahead.

    The layout stays as it is; what a device holds is not its own shard any more. **Fields:** `of`: the collective that
    is decomposed; `ways`: how many passes run at once in different directions.
    """

    ring: tuple[int, ...] = ()
    by: int = 1
    of: str = ""
    ways: int = 1

    def __str__(self) -> str:
        return f"shift by {self.by} over {','.join(self.axes)}"

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Who sends to whom."""
        n = len(self.ring)
        return [(self.ring[p], self.ring[(p + self.by) % n]) for p in range(n)]
