"""first cut"""
from __future__ import annotations
import numpy as np
from .problem import Problem, Edge, Shared, Usage, Solution
from .tables import Store
from .model import Model
from .prune import pruned
from .network import network
from .eliminate import order, minimize
def solve(problem, *, seeds=(), table_limit=10**7):
    store = Store(largest_cost(problem))
    m = pruned(Model.of(problem, store))
    net = network(m, table_limit)
    o = order(net.sizes, [f[0] for f in net.factors])
    r = minimize(net, o, table_limit)
    x = np.array([store[d][r.assignment[i]] for i, d in enumerate(m.domains)])
    return Solution(x, problem.cost(x), r.value/store.scale, problem.peak(x), True, store.largest), store, o, m
def largest_cost(problem):
    cache = {}
    def top(a):
        hit = cache.get(id(a))
        if hit is None:
            f = np.abs(a[np.isfinite(a)])
            hit = cache[id(a)] = float(f.max(initial=0.0))
        return hit
    return sum(map(top, problem.unary)) + sum(top(e.table) for e in problem.edges) + sum(len(s.consumers)*top(s.cost) for s in problem.shared)
