"""Shared reshards: which parts are ordinary edges, what is left, and how far the rest can move a cost.

A `Shared` term is a sum over layouts t of `cost[source, t]` if any consumer wants t. A layout that only one node can
want is an edge between that node and the producer; one that some node always wants is a cost of the producer alone.
Only layouts that two or more nodes might want stay: those are kept as `Rest` (a 0/1 table of wants per node), exact
and small, until pruning is done.

    split(...) of a producer with two consumers, one of which is pinned to layout 3:
    layout 3 becomes a cost of the producer, every other layout an edge to the free consumer, and no rest remains.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .tables import Store

AT_ONCE = 2**16  # differences between rows of costs that are taken together

Piece = tuple[tuple[int, ...], int]  # positions in the term's list of nodes, and the name of a table over them
Left = tuple[tuple[int, ...], int, tuple[int, ...]]  # positions, cost and wants of what nodes might share


@dataclass(frozen=True)
class Rest:
    """What is left of a shared term: `cost[x_0, t]` is paid once for each t that any node wants."""

    nodes: tuple[int, ...]  # the producer first
    cost: int  # (k_producer, targets)
    wants: tuple[int, ...]  # per node, (k_node, targets) bool

    def tabulated(self, store: Store) -> int:
        """The whole term as one table over its nodes, in their order."""
        return store.once(("tabulated", self.cost, self.wants), lambda: store.add(_tabulate(store, self)))


def wanted(store: Store, target: int, layouts: int) -> int:
    """(k, layouts) bool: the layout that each strategy wants."""
    return store.once(("wanted", target, layouts), lambda: store.add(store[target][:, None] == np.arange(layouts)))


def split(store: Store, rest: Rest) -> tuple[tuple[Piece, ...], Left | None]:
    """Edges and unary costs of a term, and what two or more nodes might share, if anything."""
    return store.once(("split", rest.cost, rest.wants), lambda: _split(store, rest))


def _split(store: Store, rest: Rest) -> tuple[tuple[Piece, ...], Left | None]:
    cost, wants = store[rest.cost], [store[w] for w in rest.wants]
    maybe = np.array([w.any(axis=0) for w in wants])  # (nodes, targets)
    always = np.any([w.all(axis=0) for w in wants], axis=0)
    paid = cost.any(axis=0) & maybe.any(axis=0)
    holders = maybe[1:].sum(axis=0)
    pieces: list[Piece] = []
    alone = paid & (always | (holders == 0))
    if alone.any():
        pays = wants[0][:, alone] | always[alone]
        pieces.append(((0,), store.add(np.where(pays, cost[:, alone], 0.0).sum(axis=1))))
    for n in range(1, len(wants)):
        pair = paid & ~always & (holders == 1) & maybe[n]
        if pair.any():
            pays = wants[0][:, None, pair] | wants[n][None, :, pair]
            pieces.append(((0, n), store.add(np.where(pays, cost[:, None, pair], 0.0).sum(axis=2))))
    left = paid & ~always & (holders > 1)
    if not left.any():
        return tuple(pieces), None
    stay = tuple(n for n in range(len(wants)) if n == 0 or maybe[n][left].any())
    reduced = Rest(stay, store.add(cost[:, left]), tuple(store.add(wants[n][:, left]) for n in stay))
    free = tuple(n for n in stay if len(wants[n]) > 1)
    if len(free) > 2:
        return tuple(pieces), (stay, reduced.cost, reduced.wants)
    pieces.append((free, store.add(_tabulate(store, reduced).reshape([len(wants[n]) for n in free]))))
    return tuple(pieces), None


def _tabulate(store: Store, rest: Rest) -> np.ndarray:
    own, producers = distinct(np.hstack([store[rest.cost], store[rest.wants[0]]]))  # of many choices few are distinct
    cost, own = np.split(own, 2, axis=1)
    others = [distinct(store[w]) for w in rest.wants[1:]]
    wants = [own > 0, *(rows for rows, _ in others)]
    rank = len(wants)
    table = np.zeros([len(w) for w in wants])
    for t in range(cost.shape[1]):
        pays = np.zeros((1,) * rank, bool)
        for n, w in enumerate(wants):
            pays = pays | w[:, t].reshape([-1 if axis == n else 1 for axis in range(rank)])
        table += np.where(pays, cost[:, t].reshape([-1] + [1] * (rank - 1)), 0.0)
    return table[np.ix_(producers, *(which for _, which in others))]


def producer_bound(store: Store, rest: Rest) -> int:
    """(k, k) D with D[a, b] >= how much the term can grow when the producer changes from b to a."""
    return store.once(("producer bound", rest.cost, rest.wants), lambda: store.add(_producer_bound(store, rest)))


def _producer_bound(store: Store, rest: Rest) -> np.ndarray:
    cost, own, others = store[rest.cost], store[rest.wants[0]], [store[w] for w in rest.wants[1:]]
    if own.any():  # the producer also consumes: bound each target by itself, wanted by another node or not
        forced = _minus(np.where(own, cost, 0.0)[:, None], np.where(own, cost, 0.0)[None])
        return np.maximum(forced, _minus(cost[:, None], cost[None])).sum(axis=2)
    rows, inverse = distinct(cost)
    sets = [distinct(w)[0].T.astype(float) for w in others]
    step = max(AT_ONCE // rows.size, 1)
    parts = [_growth(rows[a : a + step], rows, sets) for a in range(0, len(rows), step)]
    return np.concatenate(parts)[np.ix_(inverse, inverse)]


def _growth(to: np.ndarray, rows: np.ndarray, sets: list[np.ndarray]) -> np.ndarray:
    """(to, rows) how much a term can grow when its costs become those of one of `to`: at most the sum over nodes of
    what their sets grow by; each node's own set surely shrinks as well."""
    change = _minus(to[:, None], rows[None])  # (to, rows, target)
    grow, shrink = np.maximum(change, 0.0), np.minimum(change, 0.0)
    never = np.isinf(grow).any(axis=2)
    grow[never] = 0.0
    worst = sum((grow @ w).max(axis=2) for w in sets) + np.min([(shrink @ w).max(axis=2) for w in sets], axis=0)
    return np.where(never, np.inf, worst)


def consumer_bound(store: Store, rest: Rest, position: int) -> int:
    """(k, k) D with D[a, b] >= how much the term can grow when the node at `position` changes from b to a."""
    wants = rest.wants[position]
    key = ("consumer bound", rest.cost, wants)
    return store.once(key, lambda: store.add(_consumer_bound(store[rest.cost], store[wants])))


def _consumer_bound(cost: np.ndarray, wants: np.ndarray) -> np.ndarray:
    cost = distinct(cost)[0]
    rows, inverse = distinct(wants)
    newly = rows[:, None] & ~rows[None]  # what a wants and b does not; what b wants another node may want too
    barred = np.isinf(cost)
    seconds = (newly.astype(float) @ np.where(barred, 0.0, cost).T).max(axis=2)
    return np.where(newly @ barred.any(axis=0), np.inf, seconds)[np.ix_(inverse, inverse)]


def distinct(rows: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """The distinct rows of an array, and for each row which of them it is."""
    number: dict[bytes, int] = {}
    which = [number.setdefault(row.tobytes(), len(number)) for row in rows]
    first = {n: i for i, n in reversed(list(enumerate(which)))}
    return rows[[first[n] for n in range(len(number))]], which


def _minus(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a - b where paying `inf` for b is no gain: a bound may not count on leaving a forbidden choice."""
    with np.errstate(invalid="ignore"):
        return np.where(np.isinf(b), 0.0, a - b)
