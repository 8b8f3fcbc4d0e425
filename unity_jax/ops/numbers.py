"""Which dimensions of their operands gathers and scatters address, and which they take whole."""

from __future__ import annotations

from dataclasses import dataclass

from unity_jax.pcg.graph import Op


def is_gather(op: Op) -> bool:
    """Whether it looks rows up, or sums of them."""
    return op.name.startswith("gather")


def is_scatter(op: Op) -> bool:
    """Whether it puts rows in place, or adds to them."""
    return op.name.startswith("scatter")


@dataclass(frozen=True)
class Numbers:
    """What gathers and scatters have in common. A *window* is the block of the operand that one index vector selects.

    `window_dims`: where the operand's dimensions appear in the result of a gather (the updates of a scatter), in
    order, without the `dropped` (collapsed, inserted) and the `batching` ones; `indexed`: the operand dimension that
    each component of an index vector addresses; `indices_batching`: the batch dimensions of the indices, one for each
    of `batching`.
    """

    window_dims: tuple[int, ...]
    dropped: tuple[int, ...]
    indexed: tuple[int, ...]
    batching: tuple[int, ...]
    indices_batching: tuple[int, ...]

    @staticmethod
    def of(op: Op) -> Numbers:
        n = op.params["dimension_numbers"]
        if is_gather(op):
            return Numbers(
                n.offset_dims,
                n.collapsed_slice_dims,
                n.start_index_map,
                n.operand_batching_dims,
                n.start_indices_batching_dims,
            )
        return Numbers(
            n.update_window_dims,
            n.inserted_window_dims,
            n.scatter_dims_to_operand_dims,
            n.operand_batching_dims,
            n.scatter_indices_batching_dims,
        )

    def windowed(self, rank: int) -> list[int]:
        """The operand dimensions that `window_dims` stand for."""
        return [d for d in range(rank) if d not in self.dropped and d not in self.batching]
