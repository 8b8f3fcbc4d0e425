"""Which strategies of which rules were run: every kind that a rule offered, and every kind that a plan drew."""

from __future__ import annotations

import collections

from tests.numerics.harness import Case, Planned
from unity_jax.ops.rule import Rule, Strategy
from unity_jax.pcg.graph import Op
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.search.assemble import is_free

KINDS = ("none", "pass", "sum", "max", "min", "halo", "linear0", "linear1", "uneven", "indivisible")
"""`none`: a mesh axis without work; `linear0`: partial sums through `Rule.linear[0]`; `uneven`: a factor split with
padding; `indivisible`: some dimension is no multiple of some mesh axis, however it is split."""


class Coverage:
    """Counts per (primitive, kind) over the plans recorded."""

    def __init__(self) -> None:
        self.drawn: collections.Counter[tuple[str, str]] = collections.Counter()
        self.offered: set[tuple[str, str]] = set()

    def record(self, case: Case, plan: Planned) -> None:
        """Count the ops of a plan that was run."""
        _record(self, case, plan)

    def missing(self) -> list[str]:
        """What was offered and never drawn."""
        return sorted(f"{name}: {kind}" for name, kind in self.offered - set(self.drawn))

    def always_divisible(self) -> list[str]:
        """The primitives that were never met with a dimension that does not divide."""
        return sorted(name for name in self.names if not self.drawn[name, "indivisible"])

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self.offered}

    def merge(self, other: Coverage) -> None:
        self.drawn.update(other.drawn)
        self.offered |= other.offered

    def __str__(self) -> str:
        """A table: one line per primitive, `-` where no rule offered the kind, `0` where it was not drawn."""
        width = max(map(len, self.names), default=0)
        lines = [" " * width + "".join(f"{k:>12}" for k in KINDS)]
        for name in sorted(self.names):
            cells = []
            for k in KINDS:
                offered = (name, k) in self.offered or k == "indivisible"
                cells.append(f"{self.drawn[name, k] if offered else '-':>12}")
            lines.append(f"{name:<{width}}" + "".join(cells))
        return "\n".join(lines)


def kinds(op: Op, rule: Rule, strategy: Strategy, mesh: MeshAxes) -> set[str]:
    """What running an op under a strategy shows."""
    n = len(rule.factors)
    found = {"none" if s < 0 else f"linear{s - n}" if s >= n else rule.factors[s].kind for s in strategy}
    ways = collections.Counter[int]()
    for s, size in zip(strategy, mesh.sizes, strict=True):
        if 0 <= s < n:
            ways[s] = (ways[s] or 1) * size
    if any(rule.factors[s].size % k for s, k in ways.items()):
        found.add("uneven")
    dims = [d for t in (*op.inputs, *op.outputs) for d in t.shape if d > 1]
    if any(d % size for d in dims for size in mesh.sizes):
        found.add("indivisible")
    return found


def _record(coverage: Coverage, case: Case, plan: Planned) -> None:
    for op in plan.graph.walk():
        if op.shard is None:
            continue
        shard = op.shard
        coverage.drawn.update((op.name, k) for k in kinds(shard.op, shard.rule, shard.strategy, plan.axes))
        # A constant is made as its readers want it: nothing is drawn for it.
        options = [shard.strategy] if is_free(shard.op) else case.rules.strategies(shard.op, plan.axes)
        offered = {k for s in options for k in kinds(shard.op, shard.rule, s, plan.axes)}
        coverage.offered |= {(op.name, k) for k in offered - {"indivisible"}}


def steer(case: Case, plan: Planned, coverage: Coverage, machine: str = "cpu") -> Planned:
    """The plan with strategies changed to kinds that were offered and not drawn yet, where ops can show them."""
    shown = set(coverage.drawn)
    strategies = plan.decisions.strategies
    for op in case.program.graph.walk():
        if op not in strategies:
            continue
        rule = case.rules(op)
        options = case.rules.strategies(op, plan.axes)
        new = [{(op.name, k) for k in kinds(op, rule, s, plan.axes)} - shown for s in options]
        best = max(range(len(options)), key=lambda i: len(new[i]))
        if new[best]:
            strategies[op] = options[best]
        shown |= {(op.name, k) for k in kinds(op, rule, strategies[op], plan.axes)}
    return case.planned(plan.axes, plan.decisions, machine)
