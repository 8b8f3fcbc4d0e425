"""The problem in interned form: domains, one table per pair of nodes, and what is left of shared reshards.

`Model.of(problem, store)` merges duplicate edges, turns separable tables into unary costs and splits shared terms; it
never changes the cost of an assignment. A node with one strategy has no edges left after that.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .problem import Problem, Shared
from .reshard import Rest, split, wanted
from .tables import Store


@dataclass
class Model:
    """Costs in units of the store; tables, domains and wants are names in it."""

    domains: list[int]  # per node, the original strategies that are left
    unary: list[int]
    pairs: dict[tuple[int, int], int]  # i < j
    rests: list[Rest]
    ordered: list[tuple[int, ...]]  # per node, tables of bytes: a strategy may only give way to one with no more bytes
    store: Store

    def size(self, node: int) -> int:
        """How many strategies a node has left."""
        return len(self.store[self.domains[node]])

    def strategies(self) -> int:
        """How many strategies all nodes have left together."""
        return sum(len(self.store[d]) for d in self.domains)

    def values(self, node: int) -> np.ndarray:
        """The original strategies that a node has left."""
        return self.store[self.domains[node]]

    def positions(self, assignment: Sequence[int] | np.ndarray) -> np.ndarray:
        """An assignment in original strategies as positions in the domains; the first where a strategy is gone."""
        found = [self._places(d).get(int(a), 0) for d, a in zip(self.domains, assignment, strict=True)]
        return np.array(found, np.int64)

    def _places(self, domain: int) -> dict[int, int]:
        return self.store.once(("places", domain), lambda: {int(a): i for i, a in enumerate(self.store[domain])})

    def original(self, assignment: Sequence[int] | np.ndarray) -> np.ndarray:
        """Positions in the domains (anything after the last node is ignored) as original strategies."""
        first, values = self._flat
        return values[first + np.asarray(assignment[: len(self.domains)])]

    @functools.cached_property
    def _flat(self) -> tuple[np.ndarray, np.ndarray]:
        """The domains one behind the other, and where each begins."""
        domains = [self.values(i) for i in range(len(self.domains))]
        first = np.cumsum([0, *map(len, domains)])[:-1]
        return first, np.concatenate([np.zeros(0, np.int64), *domains])

    @staticmethod
    def of(problem: Problem, store: Store) -> Model:
        """The model of a problem, all strategies present."""
        domains = [store.once(("range", len(u)), lambda u=u: store.add(np.arange(len(u)))) for u in problem.unary]
        tables: dict[tuple[int, int], list[int]] = defaultdict(list)
        unary = [[store.costs(u)] for u in problem.unary]
        for e in problem.edges:
            name = store.costs(e.table)
            if e.i == e.j:
                unary[e.i].append(store.once(("diagonal", name), lambda n=name: store.add(store[n].diagonal())))
            elif e.i < e.j:
                tables[e.i, e.j].append(name)
            else:
                tables[e.j, e.i].append(store.transposed(name))
        rests = [_rest(problem, store, s) for s in problem.shared if s.consumers]
        ordered: list[tuple[int, ...]] = [()] * len(domains)
        for u in problem.usage if problem.limit is not None else ():
            ordered[u.node] = (*ordered[u.node], store.plain(u.bytes))
        model = Model(domains, [store.sum(u) for u in unary], {}, [], ordered, store)
        return model._with(tables, rests)

    def _with(self, tables: dict[tuple[int, int], list[int]], rests: Sequence[Rest]) -> Model:
        """This model's nodes with the given terms, each in its simplest form."""
        store = self.store
        unary: dict[int, list[int]] = defaultdict(list)
        left = []
        for rest in rests:
            pieces, shared = split(store, rest)
            for positions, name in pieces:
                _place(store, unary, tables, tuple(rest.nodes[p] for p in positions), name)
            if shared is not None:
                left.append(Rest(tuple(rest.nodes[p] for p in shared[0]), *shared[1:]))
        pairs = {}
        for (i, j), names in sorted(tables.items()):
            rows, columns, table = separated(store, store.sum(names))
            if rows is not None:
                unary[i].append(rows)
            if columns is not None:
                unary[j].append(columns)
            if table is not None:
                pairs[i, j] = table
        merged = [store.sum([u, *unary[i]]) if i in unary else u for i, u in enumerate(self.unary)]
        return Model(self.domains, merged, pairs, left, self.ordered, store)

    def restricted(self, kept: dict[int, int]) -> Model:
        """The model with the kept positions (a name of an index array) of some nodes' domains."""
        store = self.store
        domains, unary, ordered = list(self.domains), list(self.unary), list(self.ordered)
        for i, k in kept.items():
            domains[i], unary[i] = store.taken(domains[i], k), store.taken(unary[i], k)
            ordered[i] = tuple(store.taken(b, k) for b in ordered[i])
        tables: dict[tuple[int, int], list[int]] = defaultdict(list)
        for (i, j), t in self.pairs.items():
            tables[i, j].append(store.taken(t, kept.get(i), kept.get(j)))
        rests = []
        for r in self.rests:
            if any(n in kept for n in r.nodes):
                wants = tuple(store.taken(w, kept.get(n), None) for n, w in zip(r.nodes, r.wants, strict=True))
                r = Rest(r.nodes, store.taken(r.cost, kept.get(r.nodes[0]), None), wants)
            rests.append(r)
        return Model(domains, unary, {}, [], ordered, store)._with(tables, rests)

    def choose(self, keep: Callable[[int], np.ndarray]) -> Model:
        """The model where node i keeps only the strategies for which `keep(i)` is true (of those that are left)."""
        kept = {}
        for i, d in enumerate(self.domains):
            if len(self.store[d]) > 1:
                positions = np.flatnonzero(keep(i))
                if 0 < len(positions) < len(self.store[d]):
                    kept[i] = self.store.add(positions)
        return self.restricted(kept) if kept else self


def _rest(problem: Problem, store: Store, s: Shared) -> Rest:
    """A shared term with every layout still in it; the wants of a node with several operands are joined."""
    source, cost = store.labels(s.source), store.costs(s.cost)
    layouts = len(store[cost])
    wants: dict[int, list[int]] = {s.producer: []}
    for node, target in zip(s.consumers, s.targets, strict=True):
        wants.setdefault(node, []).append(wanted(store, store.labels(target), layouts))
    nothing = store.once(
        ("nothing", len(problem.unary[s.producer]), layouts),
        lambda: store.add(np.zeros((len(problem.unary[s.producer]), layouts), bool)),
    )
    wants[s.producer].append(nothing)
    joined = tuple(_union(store, tuple(sorted(w))) for w in wants.values())
    return Rest(tuple(wants), store.once(("rows", cost, source), lambda: store.add(store[cost][store[source]])), joined)


def _union(store: Store, names: tuple[int, ...]) -> int:
    return store.once(("union", names), lambda: store.add(np.any([store[n] for n in names], axis=0)))


def _place(
    store: Store,
    unary: dict[int, list[int]],
    tables: dict[tuple[int, int], list[int]],
    scope: tuple[int, ...],
    name: int,
) -> None:
    if len(scope) == 1:
        unary[scope[0]].append(name)
    elif scope[0] < scope[1]:
        tables[scope[0], scope[1]].append(name)
    else:
        tables[scope[1], scope[0]].append(store.transposed(name))


def separated(store: Store, name: int) -> tuple[int | None, int | None, int | None]:
    """A table as rows + columns + rest, each row and column minimum taken out; parts that are zero are None."""
    return store.once(("separated", name), lambda: _separated(store, store[name]))


def _separated(store: Store, table: np.ndarray) -> tuple[int | None, int | None, int | None]:
    rows = table.min(axis=1)
    table = table - np.where(np.isfinite(rows), rows, 0.0)[:, None]
    columns = table.min(axis=0)
    table = table - np.where(np.isfinite(columns), columns, 0.0)[None]
    # A row of inf is the row's own cost; whatever stands in the table there no longer matters.
    table[np.isinf(rows)] = 0.0
    table[:, np.isinf(columns)] = 0.0
    rows, columns, rest = (store.add(part) if part.any() else None for part in (rows, columns, table))
    return rows, columns, rest
