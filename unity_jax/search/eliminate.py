"""Exact minimization by eliminating variables: min-plus contraction of a tensor network, one variable at a time.

    minimize(network, order(network)).value       # min over x, in units
    minimize(...).assignment                      # the x, one entry per variable
    eliminated(network, easy(network, most))      # only variables that bring small tables

Eliminating v replaces the factors that mention v by one table over v's neighbours, `min over v of their sum` (Dechter,
Bucket elimination, 1999). Equal contractions are done once.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import inf, log2

import numpy as np

from .network import Factor, Network
from .tables import Store

PART = 2**17  # entries of a sum that are made at once: so many stay in a core's cache


@dataclass(frozen=True)
class Order:
    """An elimination order, with the entries of the largest table and of all joint sums that it brings (inf: more than
    a float counts)."""

    variables: tuple[int, ...]
    largest: float
    work: float


@dataclass(frozen=True)
class Eliminated:
    """A network without some of its variables, and the factors met at each of those, in the order of elimination. The
    minimum over what is left is the same, for every value of each variable that is left."""

    left: Network
    buckets: dict[int, list[Factor]]


@dataclass(frozen=True)
class Minimum:
    """The least value, where it is reached, and the factors met at each variable."""

    value: float
    assignment: np.ndarray
    buckets: dict[int, list[Factor]]


def order(
    sizes: Sequence[int], scopes: Sequence[tuple[int, ...]], most: float = inf, most_work: float = inf
) -> Order | None:
    """The greedy order (`_greedy`); None as soon as a table has more than `most` entries, or all joint sums together
    more than `most_work`."""
    chosen, largest, work = [], 0.0, 0.0
    for v, table, joint in _greedy(sizes, _neighbours(scopes)):
        chosen.append(v)
        largest = max(largest, table)
        work += joint
        if work > most_work or largest > most:
            return None
    return Order(tuple(chosen), largest, work)


def easy(net: Network, most: float) -> tuple[int, ...]:
    """The variables that can be eliminated, in the greedy order, for tables of at most so many entries."""
    steps = _greedy(net.sizes, _neighbours([scope for scope, _ in net.factors]))
    return tuple([v for v, _, _ in takewhile(lambda step: step[1] <= most, steps)])


def hard(sizes: Sequence[int], scopes: Sequence[tuple[int, ...]], most: float) -> list[tuple[int, int]]:
    """The pairs of variables that share a factor after those are eliminated that bring tables of at most so many
    entries."""
    around = _neighbours(scopes)
    next((None for _, table, _ in _greedy(sizes, around) if table > most), None)
    return [(v, n) for v, near in around.items() for n in near if v < n]


def _neighbours(scopes: Sequence[tuple[int, ...]]) -> dict[int, set[int]]:
    """With which variables each shares a factor."""
    around: dict[int, set[int]] = {}
    for scope in scopes:
        for v in scope:
            around.setdefault(v, set()).update(scope)
    for v, near in around.items():
        near.discard(v)
    return around


def _greedy(sizes: Sequence[int], around: dict[int, set[int]]) -> Iterator[tuple[int, float, float]]:
    """Always the variable whose elimination leaves the smallest table (ties: the lowest number), with the entries of
    that table and of the joint sum (inf: more than a float counts); when the next one is asked for it is eliminated
    from `around`.

    Repeated layers are eliminated alike, and a chain of them from its end, where tables are smallest.
    """
    weight = [log2(k) for k in sizes]
    score = {v: sum(weight[n] for n in near) for v, near in around.items()}
    heap = [(round(s, 6), v) for v, s in score.items()]
    heapq.heapify(heap)
    while heap:
        s, v = heapq.heappop(heap)
        if v not in around or s != round(score[v], 6):
            continue
        yield v, _entries(score[v]), _entries(score[v] + weight[v])
        near = around.pop(v)
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


def _entries(bits: float) -> float:
    """Two to this power, of which a float holds the first thousand."""
    return 2.0**bits if bits < 1024 else inf


def eliminated(net: Network, variables: Sequence[int]) -> Eliminated:
    """Eliminate variables one after the other; the caller has seen that no table becomes too large."""
    rank = {v: r for r, v in enumerate(variables)}
    buckets: dict[int, list[Factor]] = {v: [] for v in variables}
    left: list[Factor] = []

    def put(factor: Factor) -> None:
        first = min(factor[0], key=lambda v: rank.get(v, len(rank)))
        buckets.get(first, left).append(factor)

    for factor in net.factors:
        put(factor)
    value = net.constant
    for v in variables:
        if buckets[v]:  # empty where nothing is left to pay
            scope, table, least = _contracted(net.store, buckets[v], v, net.sizes)
            value += least
            if table is not None:
                put((scope, table))
    return Eliminated(Network(net.store, net.sizes, left, value), buckets)


def minimize(net: Network, plan: Order) -> Minimum:
    """Eliminate all variables; the caller has seen that `plan.largest` is not too large."""
    found = eliminated(net, plan.variables)
    return Minimum(found.left.constant, completed(found, {}), found.buckets)


def completed(found: Eliminated, known: Mapping[int, int]) -> np.ndarray:
    """The best assignment, an entry per variable, with known values of the variables that are left."""
    assignment = np.zeros(len(found.left.sizes), np.int64)
    assignment[list(known)] = list(known.values())
    for v in reversed(found.buckets):
        assignment[v] = int(np.argmin(conditional(found.left.store, found.buckets[v], v, assignment)))
    return assignment


def conditional(store: Store, factors: Sequence[Factor], v: int, assignment: np.ndarray) -> np.ndarray:
    """The sum of factors as a function of v, every other variable as assigned."""
    total: np.ndarray | float = 0.0
    for scope, table in factors:
        total = total + store[table][tuple([slice(None) if n == v else assignment[n] for n in scope])]
    return np.atleast_1d(total)


def excesses(found: Eliminated, known: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
    """How much more than a lower bound every value of each variable costs at least, also of those eliminated.

    The least cost of v's values is over those of its neighbours s, which are known when elimination is undone: with J
    the sum of the factors met at v,

        excess[v][a]  =  min over s of  J(a, s) - min over v of J(., s) + max over n in s of excess[n][s_n]

    **Arguments:** `known`: the excess of the variables that are left, none negative.
    """
    store, sizes = found.left.store, found.left.sizes
    excess = dict(known)
    for v in reversed(found.buckets):
        joint, at, parts = _layout(found.buckets[v], v)
        if not joint:
            excess[v] = np.zeros(sizes[v])
            continue
        others = [n for n in joint if n != v]
        around = 0.0
        for axis, n in enumerate(others):
            around = np.maximum(around, excess[n].reshape([-1] + [1] * (len(others) - 1 - axis)))
        slack = _slack(_terms(store, parts, at, [sizes[n] for n in joint]))
        excess[v] = (slack + around).reshape(sizes[v], -1).min(axis=1)
    return excess


def _slack(terms: list[np.ndarray]) -> np.ndarray:
    """How much more than its least along the first axis the sum of terms is; inf where that is inf."""
    total = sum(terms[1:], terms[0])
    least = total.min(axis=0)
    return total - np.where(np.isfinite(least), least, 0.0)


def _layout(factors: Sequence[Factor], v: int) -> tuple[list[int], int, tuple[tuple[int, tuple[int, ...]], ...]]:
    """The variables of factors, where v is among them, and per factor its table and where its variables are."""
    joint = sorted({n for scope, _ in factors for n in scope})
    place = {n: p for p, n in enumerate(joint)}
    parts = tuple(sorted([(table, tuple([place[n] for n in scope])) for scope, table in factors]))
    return joint, place.get(v, 0), parts


def _contracted(
    store: Store, factors: list[Factor], v: int, sizes: Sequence[int]
) -> tuple[tuple[int, ...], int | None, float]:
    """The scope, the table (its least entry taken out, None if nothing is left) and that least entry."""
    joint, at, parts = _layout(factors, v)
    table, least = store.once(("eliminate", at, parts), lambda: _contract(store, parts, at, [sizes[n] for n in joint]))
    return tuple([n for n in joint if n != v]), table, least


def _contract(
    store: Store, parts: tuple[tuple[int, tuple[int, ...]], ...], at: int, shape: list[int]
) -> tuple[int | None, float]:
    store.contractions += 1
    terms = _terms(store, parts, at, shape)
    rest = [k for p, k in enumerate(shape) if p != at]
    if int(np.prod(shape, dtype=np.int64)) <= PART:
        out = np.broadcast_to(_sum(terms).min(axis=0), rest)
    else:
        out = np.full(rest, np.inf)
        for part in _parts(rest, PART):
            cuts = [t[(slice(None), *map(_whole, part, t.shape[1:]))] for t in terms]
            into = out[(*part, ...)]
            for a in range(shape[at]):
                np.minimum(into, _sum([c[a] for c in cuts]), out=into)
    store.largest = max(store.largest, out.size)
    least = float(out.min())
    if not np.isfinite(least):
        return None, least
    out = out - least
    return (store.add(out) if out.any() else None), least


def _sum(terms: Sequence[np.ndarray]) -> np.ndarray:
    return sum(terms[1:], terms[0])


def _parts(shape: Sequence[int], most: int) -> Iterator[tuple[slice, ...]]:
    """An array of this shape in parts of at most so many entries that lie side by side."""
    inner = 1
    for axis in reversed(range(len(shape))):
        if inner * shape[axis] > most:
            step = max(most // inner, 1)
            after = [slice(None)] * (len(shape) - axis - 1)
            for before in np.ndindex(*shape[:axis]):
                ahead = [slice(i, i + 1) for i in before]
                yield from ((*ahead, slice(a, a + step), *after) for a in range(0, shape[axis], step))
            return
        inner *= shape[axis]
    yield (slice(None),) * len(shape)


def _whole(cut: slice, size: int) -> slice:
    """A part along an axis; all of one over which a term does not change."""
    return cut if size > 1 else slice(None)


def _terms(
    store: Store, parts: tuple[tuple[int, tuple[int, ...]], ...], at: int, shape: Sequence[int]
) -> list[np.ndarray]:
    """The tables of factors, each with all axes, the one that is eliminated first."""
    terms = []
    for name, positions in parts:
        full = [1] * len(shape)
        for p in positions:
            full[p] = shape[p]
        terms.append(np.ascontiguousarray(np.moveaxis(store[name].reshape(full), at, 0)))
    return _gathered(terms)


def _gathered(terms: list[np.ndarray]) -> list[np.ndarray]:
    """Terms of one shape added up, small ones first, so that sums grow as late as possible."""
    by_shape: dict[tuple[int, ...], np.ndarray] = {}
    for t in terms:
        by_shape[t.shape] = by_shape[t.shape] + t if t.shape in by_shape else t
    return sorted(by_shape.values(), key=lambda t: (t.size, t.shape))
