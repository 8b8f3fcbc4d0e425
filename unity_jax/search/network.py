"""A min-plus tensor network: variables with sizes, factors over sorted scopes, and the model written as one.

Nodes with one strategy vanish into a constant. What is left of a shared reshard becomes a single table when that is
small, and otherwise one 0/1 variable per layout, "this layout is made": the producer pays for it, and a consumer that
wants the layout forbids 0. Both are exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, prod

import numpy as np

from .model import Model
from .reshard import Rest
from .tables import Store

Factor = tuple[tuple[int, ...], int]  # ascending variables, and the name of the table over them

SMALL_TABLE = 2**17  # a shared term is tabulated up to this many entries
SMALL_PART = 2**14  # and so is each of those that bound a larger one from below


@dataclass
class Network:
    """min over x of constant + the sum of all factors at x, in units of the store."""

    store: Store
    sizes: list[int]  # one per variable; variables are numbered as the model's nodes, then layout indicators
    factors: list[Factor]
    constant: float


def network(model: Model, table_limit: int, relaxed: bool = False) -> Network:
    """The model as a network without variables of size one.

    `relaxed`: shared terms that are too large for a table become several that never add up to more than the term, which
    bounds the model from below and spares the indicators.
    """
    store = model.store
    sizes = [model.size(i) for i in range(len(model.domains))]
    constant = float(sum(store[u][0] for u, k in zip(model.unary, sizes, strict=True) if k == 1))
    factors: list[Factor] = [((i,), u) for i, (u, k) in enumerate(zip(model.unary, sizes, strict=True)) if k > 1]
    factors += list(model.pairs.items())
    for rest in model.rests:
        if prod([sizes[n] for n in rest.nodes]) <= min(SMALL_TABLE, table_limit):
            factors.append(_single(store, rest, sizes))
        elif relaxed:
            factors += [_single(store, part, sizes) for part in _parts(store, rest, sizes, table_limit)]
        else:
            factors += _indicators(store, rest, sizes)
    return Network(store, sizes, factors, constant)


def _single(store: Store, rest: Rest, sizes: list[int]) -> Factor:
    free = [n for n in rest.nodes if sizes[n] > 1]
    order = tuple(sorted(range(len(free)), key=free.__getitem__))

    def make() -> int:
        name = rest.tabulated(store)
        table = store[name].reshape([k for k in store[name].shape if k > 1]).transpose(order)
        return name if order == tuple(range(len(rest.nodes))) else store.add(table)

    return tuple(sorted(free)), store.once(("single", rest.cost, rest.wants, order), make)


def _parts(store: Store, rest: Rest, sizes: list[int], table_limit: int) -> list[Rest]:
    """Terms that never add up to more than a large one, of as many of its consumers each as a small table has room for:
    those that may want a layout pay equal parts of it."""
    most = min(SMALL_PART, table_limit)
    groups: list[list[int]] = []
    entries = inf
    for position, node in enumerate(rest.nodes[1:], 1):
        if entries * sizes[node] > most:
            groups.append([])
            entries = sizes[rest.nodes[0]]
        groups[-1].append(position)
        entries *= sizes[node]
    return [_part(store, rest, (0, *group)) for group in groups]


def _part(store: Store, rest: Rest, positions: tuple[int, ...]) -> Rest:
    def make() -> int:
        may_want = np.array([store[w].any(axis=0) for w in rest.wants])  # (nodes, layouts)
        part = may_want[list(positions[1:])].sum(axis=0) / may_want[1:].sum(axis=0)
        return store.add(np.floor(np.where(part > 0, store[rest.cost] * np.where(part > 0, part, 1.0), 0.0)))

    cost = store.once(("part", rest.cost, rest.wants, positions), make)
    return Rest(tuple([rest.nodes[p] for p in positions]), cost, tuple([rest.wants[p] for p in positions]))


def _indicators(store: Store, rest: Rest, sizes: list[int]) -> list[Factor]:
    """One new variable per target layout, last in every scope."""
    factors: list[Factor] = []
    for t in range(store[rest.cost].shape[1]):
        u = len(sizes)
        sizes.append(2)
        for position, (node, wants) in enumerate(zip(rest.nodes, rest.wants, strict=True)):
            cost = rest.cost if position == 0 else None
            key = ("indicator", cost, wants, t)
            table = store.once(key, lambda c=cost, w=wants, t=t: _indicator(store, c, w, t))
            if table is not None:
                factors.append(((node, u) if sizes[node] > 1 else (u,), table))
    return factors


def _indicator(store: Store, cost: int | None, wants: int, t: int) -> int | None:
    want = store[wants][:, t]
    table = np.zeros((len(want), 2))
    if cost is not None:
        table[:, 1] = store[cost][:, t]
    table[want, 0] = np.inf
    if not table.any():
        return None
    return store.add(table if len(table) > 1 else table[0])
