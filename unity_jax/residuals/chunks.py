"""A chunked loss, or attention: the ops around the largest arrays run by rows, a chunk of them after the other.

    q, k, v                 for each of 8 chunks of heads, or of rows of q: scores, softmax, their part of the output
    gradient of the output  for each of these chunks: scores and softmax again, their part of the gradients of q, k, v
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from unity_jax.pcg.graph import Graph, Tensor
from unity_jax.residuals.change import Change
from unity_jax.residuals.loop import looped
from unity_jax.residuals.pair import in_pairs, pairs
from unity_jax.residuals.region import NoRegionError, around, beside

PARTS = (8, 32, 128)
"""How many chunks, few at first: an eighth of the largest array is seldom still the largest."""


def chunked(graph: Graph, seeds: Sequence[Tensor], dim: int, parts: int) -> Change | None:
    """The graph with the ops around some arrays by chunks along a dimension of them; None where that can be around
    none: they meet in the middle, or must know which rows they have and these are not consecutive.

    **Arguments:** `seeds`: made in the graph, or in the body of a loop of it.
    """
    change, vain = Change(graph, {}), _Vain(set(), set())
    for seed in seeds:
        while (made := _within(change.graph, seed, dim, parts, vain)) is not None:
            change = change.then(made)
    return None if change.graph is graph else change


class _Vain(NamedTuple):
    """Arrays around which there is no region: in layers that two scans have, and within a graph."""

    layers: set[Tensor]
    graphs: set[Tensor]


def _within(graph: Graph, seed: Tensor, dim: int, parts: int, vain: _Vain) -> Change | None:
    """The graph with the last region around an array by chunks: in it, in a layer that two of its scans have forward
    and backward, or in the body of a loop."""

    def here(inside: Graph, known: set[Tensor]) -> Change | None:
        if seed in known or seed not in inside.producer:
            return None
        region = around(inside, seed, dim, parts)
        with contextlib.suppress(NoRegionError):
            if region is not None:
                return looped(inside, region, parts, inside.producer[seed])
        known.update(t for op in beside(inside, seed) for t in op.outputs if t.shape == seed.shape)
        return None

    both = [pair for pair in pairs(graph) if pair.makes(seed)]
    layers = in_pairs(graph, both, lambda pair: here(pair.joined, vain.layers))
    if layers.origin:
        return layers
    for i, op in enumerate(graph.ops):
        for k, body in enumerate(op.bodies):
            made = _within(body, seed, dim, parts, vain)
            if made is not None:
                bodies = (*op.bodies[:k], made.graph, *op.bodies[k + 1 :])
                ops = [*graph.ops[:i], dataclasses.replace(op, bodies=bodies), *graph.ops[i + 1 :]]
                return Change(Graph(graph.inputs, graph.outputs, ops), made.origin)
    return here(graph, vain.graphs)
