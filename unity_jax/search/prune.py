"""Strategies that no optimum needs: forbidden ones, and those that another strategy beats whatever the rest chooses.

Goldstein's dead-end elimination (Biophys. J. 66, 1994): b may go if some a costs no more in the worst surroundings,

    u[a] - u[b] + sum over neighbours of max_j (T[a, j] - T[b, j]) <= 0

**Example:** costs 1 and 9 with an edge that differs by at most 5 between the two: the second goes, 1 - 9 + 5 <= 0.

The relation is transitive, and strategies that beat each other are ordered by index, so every removed strategy leads to
one that stays. With a memory limit, b must also need at least a's bytes at every time, so that optima under the limit
(and under every price of memory) are preserved too.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from .model import Model
from .reshard import Rest, consumer_bound, producer_bound
from .tables import Store

AT_ONCE = 2**16
"""Differences between the rows of a table that are taken together; of larger tables those of distinct rows are taken
row by row."""


def pruned(model: Model) -> Model:
    """The model without dead-end strategies; its optimum costs the same."""
    todo = [i for i, d in enumerate(model.domains) if len(model.store[d]) > 1]
    while todo:
        around = _terms(model)
        kept = {}
        for i in todo:
            if model.size(i) > 1:
                survivors = _survivors(model, i, around[i])
                if survivors is not None:
                    kept[i] = survivors
        if not kept:
            return model
        touched = set(kept)
        for i in kept:
            for term, _ in around[i]:
                touched.update(term.nodes if isinstance(term, Rest) else term)
        model, todo = model.restricted(kept), sorted(touched)
    return model


_Terms = dict[int, list[tuple[tuple[int, int] | Rest, int]]]


def _terms(model: Model) -> _Terms:
    """Per node, the terms that it is in and its position in each."""
    around: _Terms = defaultdict(list)
    for pair in model.pairs:
        around[pair[0]].append((pair, 0))
        around[pair[1]].append((pair, 1))
    for rest in model.rests:
        for position, node in enumerate(rest.nodes):
            around[node].append((rest, position))
    return around


def _survivors(model: Model, node: int, terms: list[tuple[tuple[int, int] | Rest, int]]) -> int | None:
    """The name of the positions to keep, or None for all of them."""
    store = model.store
    bounds = []
    for term, position in terms:
        if not isinstance(term, Rest):
            bounds.append(_pair_bound(store, model.pairs[term], position))
        elif position == 0:
            bounds.append(producer_bound(store, term))
        else:
            bounds.append(consumer_bound(store, term, position))
    bounds += [store.once(("ordered", b), lambda b=b: store.add(_ordered(store[b]))) for b in model.ordered[node]]
    key = ("survivors", model.unary[node], tuple(sorted(bounds)))
    return store.once(key, lambda: _keep(store, model.unary[node], bounds))


def _keep(store: Store, unary: int, bounds: list[int]) -> int | None:
    u = store[unary]
    alive = np.isfinite(u)
    if not alive.any():
        return store.add(np.zeros(1, np.int64))  # nothing is allowed: any strategy tells
    worst = u[:, None] - np.where(alive, u, 0.0)[None]
    for b in bounds:
        worst = worst + store[b]
    beats = worst <= 0
    index = np.arange(len(u))
    beats &= ~beats.T | (index[:, None] < index[None])
    keep = np.flatnonzero(alive & ~beats.any(axis=0))
    return None if len(keep) == len(u) else store.add(keep)


def _ordered(weight: np.ndarray) -> np.ndarray:
    """0 where a weighs no more than b, inf elsewhere."""
    return np.where(weight[:, None] <= weight[None], 0.0, np.inf)


def _pair_bound(store: Store, table: int, side: int) -> int:
    """(k, k) D with D[a, b] the most that an edge can grow when one end changes from b to a."""
    key = ("pair bound", table, side)
    return store.once(key, lambda: store.add(_growth(store[table] if side == 0 else store[table].T)))


def _growth(table: np.ndarray) -> np.ndarray:
    if len(table) * table.size <= AT_ONCE:
        return _between(table, table)
    columns = np.unique(table, axis=1)
    rows, inverse = np.unique(columns, axis=0, return_inverse=True)
    growth = np.concatenate([_between(rows[a : a + 1], rows) for a in range(len(rows))])
    inverse = inverse.reshape(-1)
    return growth[np.ix_(inverse, inverse)]


def _between(to: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """(to, rows) the most that any entry grows from one of `rows` to one of `to`; what is forbidden already does not
    grow."""
    change = np.where(np.isinf(rows), 0.0, rows)
    change = np.where(np.isinf(to), np.inf, to)[:, None] - change[None]
    return np.where(np.isinf(rows)[None], -np.inf, change).max(axis=2)
