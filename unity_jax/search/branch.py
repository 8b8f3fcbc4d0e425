"""Branch and bound over what the prices leave open: every assignment whose priced cost is below the best that fits.

After exact elimination, the buckets tell for any partial assignment (in reverse order) exactly how much more than the
minimum its best completion costs. A depth-first walk therefore only ever enters branches that hold an assignment with
`priced cost < ceiling`; if it ends within its number of steps, the best one that fits is the optimum.
"""

from __future__ import annotations

import numpy as np

from .eliminate import Minimum, Order, conditional
from .limits import LIMITS
from .model import Model
from .network import Network
from .problem import Problem


def best_within(
    problem: Problem, model: Model, net: Network, plan: Order, found: Minimum, allowance: float, known: float
) -> tuple[np.ndarray | None, bool]:
    """The cheapest assignment below `known` seconds that fits, and whether every such assignment was looked at.

    `allowance` is the price of the whole limit in units: whatever fits pays at most that much for its bytes.
    """
    store, scale = net.store, net.store.scale
    x = np.zeros(len(net.sizes), np.int64)
    best, ceiling = None, known * scale + allowance
    # The stack holds, for each variable being tried: its values still to try (best last) and what completions cost.
    stack: list[tuple[list[int], np.ndarray]] = []
    value, steps = found.value, LIMITS.steps
    variables = plan.variables[::-1]
    while steps:
        steps -= 1
        if len(stack) < len(variables):
            v = variables[len(stack)]
            costs = conditional(store, found.buckets[v], v, x)
            stack.append((np.argsort(costs, kind="stable")[::-1].tolist(), value + (costs - costs.min())))
        else:
            full = model.original(x)
            if problem.fits(full) and problem.cost(full) < known:
                best, known = full, problem.cost(full)
                ceiling = known * scale + allowance
        while stack and not (stack[-1][0] and stack[-1][1][stack[-1][0][-1]] < ceiling):
            stack.pop()
        if not stack:
            return best, True
        values, costs = stack[-1]
        x[variables[len(stack) - 1]] = values[-1]
        value = float(costs[values.pop()])
    return best, False
