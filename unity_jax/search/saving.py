"""Less memory for more time: where no plan fits, what the backward pass reads is computed again instead of kept.

    step of 57 GiB in 839 ms, where all that is kept would be 155 GiB for a step of 713 ms

Ever more is computed again, best first (`residuals.choice`), until a plan fits: layouts are searched anew for each, so
that what is kept is split, or computed again, whichever takes less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from unity_jax.cost.program import local_bytes
from unity_jax.pcg.graph import Tensor
from unity_jax.pcg.mesh import WHOLE
from unity_jax.program import Program
from unity_jax.residuals.choice import Choice, choices
from unity_jax.residuals.record import Recompute
from unity_jax.rewrite.estimate import by_kernels
from unity_jax.search.candidate import Candidate, best
from unity_jax.search.rule_cache import RuleCache
from unity_jax.xla.traffic import Traffic

AMOUNTS = (1.0, 1.5, 2.5, math.inf)
"""How many times what does not fit is freed: the first of these with which a plan fits is taken, since a peak moves
when what made it is gone."""


def fitting(found: Candidate, limit: float, plan: Callable[[Program], Candidate]) -> Candidate:
    """The fastest plan that fits of those that need less memory than one that does not; else that which needs least.

    **Arguments:** `found`: the best plan of a program as it is; `plan`: makes that of another form of it.
    """
    tried = [found]
    for program in _recomputing(found, limit):
        tried.append(plan(program))
        if tried[-1].fits(limit):
            break
    return best(tried, limit)


def _recomputing(found: Candidate, limit: float) -> Iterator[Program]:
    """The program of a plan with ever more values computed again in the backward pass."""
    program, device, rules = found.program, found.machine.device, RuleCache()
    traffic = Traffic.of(program.graph, device.compiler)
    seconds = by_kernels(device, lambda op: rules.shard(op, WHOLE, ()))
    every = list(choices(program.graph, traffic, seconds, found.machine.num_devices))
    local, excess = _local(found), found.memory.peak_bytes - limit
    taken = set[int]()
    for amount in AMOUNTS:
        enough = (i for i, c in enumerate(every) if _freed(c, local) >= amount * excess)
        at = next(enough, len(every) - 1)
        if at >= 0 and at not in taken:
            taken.add(at)
            how = Recompute.of(program.graph, every[at], device.compiler, _freed(every[at], local))
            yield program.saving(how.applied(program.graph).graph, how)


def _freed(choice: Choice, local: dict[Tensor, int]) -> float:
    """By how much less is live at once on one device."""
    whole = sum(t.times * t.nbytes for t in choice.freed)
    return choice.bytes * sum(t.times * local.get(t, t.nbytes) for t in choice.freed) / whole


def _local(found: Candidate) -> dict[Tensor, int]:
    """Bytes of the tensors of a program on one device, as a plan holds them."""
    return {
        t: local_bytes(planned, found.mesh)
        for op in found.graph.ops
        if op.traced is not None
        for t, planned in zip(op.traced.outputs, op.outputs, strict=True)
    }
