"""A chunked loss: the ops around the largest array of a step run by rows, a chunk of them after the other."""

from __future__ import annotations

import contextlib

from unity_jax.pcg.graph import Graph, Tensor
from unity_jax.residuals.change import Change
from unity_jax.residuals.loop import looped
from unity_jax.residuals.region import NoRegionError, around

PARTS = 8
"""How many chunks: an eighth of the largest array is no longer the largest."""


def chunked(graph: Graph, seed: Tensor, dim: int, parts: int) -> Change | None:
    """The graph with the ops around an array by chunks along a dimension of it; None where that cannot be: they meet in
    the middle, or must know which rows they have and these are not consecutive."""
    region = around(graph, seed, dim, parts)
    with contextlib.suppress(NoRegionError):
        return None if region is None else looped(graph, region, parts, graph.producer[seed])
    return None
