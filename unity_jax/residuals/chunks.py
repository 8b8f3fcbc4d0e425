"""A chunked loss, or attention: the ops around the largest arrays run by rows, a chunk of them after the other.

    q, k, v                 for each of 8 chunks of heads, or of rows of q: scores, softmax, their part of the output
    gradient of the output  for each of these chunks: scores and softmax again, their part of the gradients of q, k, v
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

from unity_jax.pcg.graph import Graph, Tensor
from unity_jax.residuals.change import Change
from unity_jax.residuals.loop import looped
from unity_jax.residuals.pair import in_pairs
from unity_jax.residuals.region import NoRegionError, around

PARTS = (8, 32, 128)
"""How many chunks, few at first: an eighth of the largest array is seldom still the largest."""


def chunked(graph: Graph, seeds: Sequence[Tensor], dim: int, parts: int) -> Change | None:
    """The graph with the ops around some arrays by chunks along a dimension of them; None where that can be around
    none: they meet in the middle, or must know which rows they have and these are not consecutive.

    **Arguments:** `seeds`: made in the graph, or in the body of a loop of it.
    """
    change = Change(graph, {})
    for seed in seeds:
        while (made := _within(change.graph, seed, dim, parts)) is not None:
            change = change.then(made)
    return None if change.graph is graph else change


def _within(graph: Graph, seed: Tensor, dim: int, parts: int) -> Change | None:
    """The graph with the last region around an array by chunks: in it, in a layer that two of its scans have forward
    and backward, or in the body of a loop."""

    def here(inside: Graph) -> Change | None:
        region = around(inside, seed, dim, parts)
        with contextlib.suppress(NoRegionError):
            return None if region is None else looped(inside, region, parts, inside.producer[seed])
        return None

    layers = in_pairs(graph, lambda pair: here(pair.joined))
    if layers.origin:
        return layers
    for i, op in enumerate(graph.ops):
        for k, body in enumerate(op.bodies):
            made = _within(body, seed, dim, parts)
            if made is not None:
                bodies = (*op.bodies[:k], made.graph, *op.bodies[k + 1 :])
                ops = [*graph.ops[:i], dataclasses.replace(op, bodies=bodies), *graph.ops[i + 1 :]]
                return Change(Graph(graph.inputs, graph.outputs, ops), made.origin)
    return here(graph)
