"""A min-plus tensor network: variables with sizes, factors over sorted scopes, and the model written as one.

Nodes with one strategy vanish into a constant. What is left of a shared reshard becomes a single table when that is
small, and otherwise one 0/1 variable per layout, "this layout is made": the producer pays for it, and a consumer that
wants the layout forbids 0. Both are exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .model import Model
from .reshard import Rest
from .tables import Store

Factor = tuple[tuple[int, ...], int]  # ascending variables, and the name of the table over them

SMALL_TABLE = 2**17  # a shared term is tabulated up to this many entries


@dataclass
class Network:
    """min over x of constant + the sum of all factors at x, in units of the store."""

    store: Store
    sizes: list[int]  # one per variable; variables are numbered as the model's nodes, then layout indicators
    factors: list[Factor]
    constant: float


def network(model: Model, table_limit: int, relaxed: bool = False) -> Network:
    """The model as a network without variables of size one.

    `relaxed`: shared terms that are too large for a table become edges that never add up to more than the term, which
    bounds the model from below and spares the indicators.
    """
    store = model.store
    sizes = [model.size(i) for i in range(len(model.domains))]
    constant = float(sum(store[u][0] for u, k in zip(model.unary, sizes, strict=True) if k == 1))
    factors: list[Factor] = [((i,), u) for i, (u, k) in enumerate(zip(model.unary, sizes, strict=True)) if k > 1]
    factors += list(model.pairs.items())
    for rest in model.rests:
        free = [n for n in rest.nodes if sizes[n] > 1]
        entries = float(np.prod([float(sizes[n]) for n in free]))
        if entries <= min(SMALL_TABLE, table_limit):
            factors.append(_single(store, rest, free))
        elif relaxed:
            factors += _parts(store, rest, sizes)
        else:
            factors += _indicators(store, rest, sizes)
    return Network(store, sizes, factors, constant)


def _single(store: Store, rest: Rest, free: list[int]) -> Factor:
    order = tuple(int(n) for n in np.argsort(free))

    def make() -> int:
        table = rest.tabulate(store)
        return store.add(table.reshape([k for k in table.shape if k > 1]).transpose(order))

    return tuple(sorted(free)), store.once(("single", rest.cost, rest.wants, order), make)


def _parts(store: Store, rest: Rest, sizes: list[int]) -> list[Factor]:
    """An edge per consumer with an equal part of what its layout alone costs: the term is at least each of those."""
    parts = len(rest.nodes) - 1
    factors: list[Factor] = []
    for node, wants in zip(rest.nodes[1:], rest.wants[1:], strict=True):
        scope = tuple(n for n in sorted((rest.nodes[0], node)) if sizes[n] > 1)
        flipped = node < rest.nodes[0]

        def make(wants: int = wants, flipped: bool = flipped) -> int:
            table = _part(store[rest.cost], store[wants], parts)
            table = table.T if flipped else table
            return store.add(table.reshape([k for k in table.shape if k > 1]))

        if scope:
            factors.append((scope, store.once(("part", rest.cost, wants, parts, flipped), make)))
    return factors


def _part(cost: np.ndarray, wants: np.ndarray, parts: int) -> np.ndarray:
    pays = np.zeros((len(cost), len(wants)))
    for t in range(cost.shape[1]):
        pays += np.where(wants[None, :, t], cost[:, t, None], 0.0)
    return np.floor(pays / parts)


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
