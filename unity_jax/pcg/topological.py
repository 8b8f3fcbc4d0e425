"""The order in which things can come that need others before them."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence, Set

from unity_jax.pcg.graph import Op


def topological(before: Sequence[Set[int]], rank: Sequence[float] | None = None) -> list[int]:
    """Each after what it needs, and of those that can come next that of the lowest rank, the first of equal ones; what
    needs its own followers is left out.

    **Arguments:** `before`: which each needs; `rank`: their own order, if not that of `before`.
    """
    after: list[list[int]] = [[] for _ in before]
    for i, needs in enumerate(before):
        for j in needs:
            after[j].append(i)
    waits = [len(needs) for needs in before]
    rank = range(len(before)) if rank is None else rank
    ready = [(rank[i], i) for i, n in enumerate(waits) if n == 0]
    heapq.heapify(ready)
    order = list[int]()
    while ready:
        _, i = heapq.heappop(ready)
        order.append(i)
        for j in after[i]:
            waits[j] -= 1
            if waits[j] == 0:
                heapq.heappush(ready, (rank[j], j))
    return order


def runnable(place: Mapping[Op, float]) -> list[Op]:
    """The ops in an order in which they can run, else by place."""
    ops = sorted(place, key=place.__getitem__)
    maker = {t: i for i, op in enumerate(ops) for t in op.outputs}
    return [ops[i] for i in topological([{maker[t] for t in op.inputs if t in maker} for op in ops])]
