"""Exact minimization by eliminating variables: min-plus contraction of a tensor network, one variable at a time.

    minimize(network, order(network), table_limit).value   # min over x, in units
    minimize(...).assignment                                # the x, one entry per variable

Eliminating v replaces the factors that mention v by one table over v's neighbours, `min over v of their sum` (Dechter,
Bucket elimination, 1999). Equal contractions are done once.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, log2

import numpy as np

from .network import Factor, Network
from .tables import Store

JOINT_AT_ONCE = 2**18  # entries of a sum that is made whole; larger ones are minimized slice by slice


@dataclass(frozen=True)
class Order:
    """An elimination order, with the entries of the largest table and of all joint sums that it brings (inf: more than
    a float counts)."""

    variables: tuple[int, ...]
    largest: float
    work: float


@dataclass(frozen=True)
class Minimum:
    """The least value, where it is reached, and the factors met at each variable."""

    value: float
    assignment: np.ndarray
    buckets: dict[int, list[Factor]]


def order(
    sizes: Sequence[int], scopes: Sequence[tuple[int, ...]], most: float = inf, most_work: float = inf
) -> Order | None:
    """The greedy order: always the variable whose elimination leaves the smallest table (ties: the lowest number).
    None as soon as a table has more than `most` entries, or all joint sums together more than `most_work`.

    Repeated layers are eliminated alike, and a chain of them from its end, where tables are smallest.
    """
    weight = [log2(k) for k in sizes]
    around: dict[int, set[int]] = {}
    for scope in scopes:
        for v in scope:
            around.setdefault(v, set()).update(scope)
    for v, near in around.items():
        near.discard(v)
    score = {v: sum(weight[n] for n in near) for v, near in around.items()}
    heap = [(round(s, 6), v) for v, s in score.items()]
    heapq.heapify(heap)
    chosen, largest, work = [], 0.0, 0.0
    while heap:
        s, v = heapq.heappop(heap)
        if v not in around or s != round(score[v], 6):
            continue
        near = around.pop(v)
        chosen.append(v)
        largest = max(largest, score[v])
        work += _entries(score[v] + weight[v])
        if work > most_work or _entries(largest) > most:
            return None
        for n in near:
            other = around[n]
            added = near - other
            added.discard(n)
            other |= added
            other.discard(v)
            new = score[n] + sum([weight[m] for m in added]) - weight[v]
            if abs(new - score[n]) > 1e-9:
                score[n] = new
                heapq.heappush(heap, (round(new, 6), n))
    return Order(tuple(chosen), _entries(largest), work)


def _entries(bits: float) -> float:
    """Two to this power, of which a float holds the first thousand."""
    return 2.0**bits if bits < 1024 else inf


def minimize(net: Network, plan: Order, table_limit: float) -> Minimum:
    """Eliminate in the given order; the caller has seen that `plan.largest` is within `table_limit`."""
    store = net.store
    rank = {v: r for r, v in enumerate(plan.variables)}
    buckets: dict[int, list[Factor]] = {v: [] for v in plan.variables}
    for scope, table in net.factors:
        buckets[min(scope, key=rank.__getitem__)].append((scope, table))
    value = net.constant
    for v in plan.variables:
        if buckets[v]:  # empty where nothing is left to pay
            scope, table, least = _eliminated(store, buckets[v], v, net.sizes, table_limit)
            value += least
            if table is not None:
                buckets[min(scope, key=rank.__getitem__)].append((scope, table))
    assignment = np.zeros(len(net.sizes), np.int64)
    for v in reversed(plan.variables):
        assignment[v] = int(np.argmin(conditional(store, buckets[v], v, assignment)))
    return Minimum(value, assignment, buckets)


def conditional(store: Store, factors: Sequence[Factor], v: int, assignment: np.ndarray) -> np.ndarray:
    """The sum of factors as a function of v, every other variable as assigned."""
    total: np.ndarray | float = 0.0
    for scope, table in factors:
        total = total + store[table][tuple([slice(None) if n == v else assignment[n] for n in scope])]
    return np.atleast_1d(total)


def _eliminated(
    store: Store, factors: list[Factor], v: int, sizes: Sequence[int], table_limit: float
) -> tuple[tuple[int, ...], int | None, float]:
    """The scope, the table (its least entry taken out, None if nothing is left) and that least entry."""
    joint = sorted({n for scope, _ in factors for n in scope})
    place = {n: p for p, n in enumerate(joint)}
    parts = tuple(sorted([(table, tuple([place[n] for n in scope])) for scope, table in factors]))
    at = place[v]
    table, least = store.once(
        ("eliminate", at, parts), lambda: _contract(store, parts, at, [sizes[n] for n in joint], table_limit)
    )
    return tuple([n for n in joint if n != v]), table, least


def _contract(
    store: Store, parts: tuple[tuple[int, tuple[int, ...]], ...], at: int, shape: list[int], table_limit: float
) -> tuple[int | None, float]:
    store.contractions += 1
    rank = len(shape)
    terms = []
    for name, positions in parts:
        full = [1] * rank
        for p in positions:
            full[p] = shape[p]
        terms.append(np.moveaxis(store[name].reshape(full), at, 0))
    terms = _gathered(terms)
    rest = [k for p, k in enumerate(shape) if p != at]
    entries = int(np.prod(rest, dtype=np.int64))
    if entries * shape[at] <= min(JOINT_AT_ONCE, table_limit):
        out = sum(terms[1:], terms[0]).min(axis=0)
        store.largest = max(store.largest, entries * shape[at])
    else:
        out = np.full(rest, np.inf)
        for a in range(shape[at]):
            np.minimum(out, sum((t[a] for t in terms[1:]), terms[0][a]), out=out)
        store.largest = max(store.largest, entries)
    least = float(out.min())
    if not np.isfinite(least):
        return None, least
    out = np.broadcast_to(out, rest) - least
    return (store.add(out) if out.any() else None), least


def _gathered(terms: list[np.ndarray]) -> list[np.ndarray]:
    """Terms of one shape added up, small ones first, so that sums grow as late as possible."""
    by_shape: dict[tuple[int, ...], np.ndarray] = {}
    for t in terms:
        by_shape[t.shape] = by_shape[t.shape] + t if t.shape in by_shape else t
    return sorted(by_shape.values(), key=lambda t: (t.size, t.shape))
