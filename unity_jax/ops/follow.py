"""Where an index of a program goes: the dimensions that run over the same rows, through ops, loops and branches.

    x[b, k] -> dot_general -> y[b, n] -> reshape -> z[b n]        b: dimension 0 of x, of y, and the major part of z's

An index runs through the factors of op rules (`ops.rule`): the rows of `x` are those of `x @ w` and of its cotangent.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from unity_jax.ops.rule import Dims as Factors
from unity_jax.ops.rule import Rule
from unity_jax.pcg.graph import Graph, Op, Tensor, nested
from unity_jax.pcg.loops import Scan

Dims = Mapping[tuple[Tensor, int], int]
"""Dimensions that hold an index, each with the number of elements major to the index in it: 1, but `T` for the index
`b` of a dimension that merges `[T, B]`."""


class Paths:
    """Follows indices through the ops of a graph and of its sub-graphs."""

    def __init__(self, graph: Graph, rules: Callable[[Op], Rule]) -> None:
        self.rules = rules
        self.ops: dict[Tensor, dict[Op, None]] = {}  # by each tensor that an op reads or makes
        self.same: dict[Tensor, list[tuple[Tensor, int, bool]]] = {}  # equal tensors: dimensions lost, whether forward
        for _, inner, _ in nested(graph):
            for op in inner.ops:
                if op.bodies or op.name == "optimization_barrier":
                    for a, b, lost in _equal(op):
                        self.same.setdefault(a, []).append((b, lost, True))
                        self.same.setdefault(b, []).append((a, -lost, False))
                else:
                    for t in (*op.inputs, *op.outputs):
                        self.ops.setdefault(t, {})[op] = None

    def everywhere(self, seeds: Iterable[tuple[Tensor, int]]) -> Dims:
        """All dimensions that an index reaches, forward and backward; of a tensor only the first."""
        found: dict[tuple[Tensor, int], int] = {}
        held: set[Tensor] = set()
        self._spread([(t, d, 1) for t, d in seeds], found, held)
        return found

    def forward(self, seeds: Iterable[tuple[Tensor, int]]) -> Dims:
        """All dimensions that are computed from dimensions of inputs."""
        found: dict[tuple[Tensor, int], int] = {}
        self._spread([(t, d, 1) for t, d in seeds], found, None)
        return found

    def _spread(
        self,
        seeds: Sequence[tuple[Tensor, int, int]],
        found: dict[tuple[Tensor, int], int],
        held: set[Tensor] | None,
    ) -> None:
        queue: deque[tuple[Tensor, int, int]] = deque()

        def reach(t: Tensor, d: int, major: int) -> None:
            if (t, d) not in found and t.literal is None and (held is None or t not in held):
                found[t, d] = major
                queue.append((t, d, major))
                if held is not None:
                    held.add(t)

        for seed in seeds:
            reach(*seed)
        while queue:
            t, d, major = queue.popleft()
            for other, lost, ahead in self.same.get(t, ()):
                if (ahead or held is not None) and 0 <= d - lost < other.rank:
                    reach(other, d - lost, major)
            for op in self.ops.get(t, ()):
                for place in self._reached(op, t, d, major, backward=held is not None):
                    reach(*place)

    def _reached(self, op: Op, t: Tensor, d: int, major: int, backward: bool) -> Iterator[tuple[Tensor, int, int]]:
        rule = self.rules(op)
        sides = [(op.inputs, rule.operands), (op.outputs, rule.results)]
        for tensors, side in sides if backward else sides[:1]:
            for own, dims in zip(tensors, side, strict=True):
                if own is not t or (at := factor_at(rule, dims[d], major)) is None:
                    continue
                factor, inner = at
                for others, places in sides if backward else sides[1:]:
                    yield from _holding(rule, factor, inner, others, places)


def factor_at(rule: Rule, dims: Sequence[int], major: int) -> tuple[int, int] | None:
    """The factor of a dimension that has an index with so many elements major to it, and how many of them it has."""
    outer = 1
    for f in dims:
        size = rule.factors[f].size
        if outer <= major < outer * size:
            return (f, major // outer) if major % outer == 0 else None
        outer *= size
    return None


def _holding(
    rule: Rule, factor: int, inner: int, tensors: Sequence[Tensor], side: Sequence[Factors]
) -> Iterator[tuple[Tensor, int, int]]:
    for t, dims in zip(tensors, side, strict=True):
        for d, factors in enumerate(dims):
            if factor in factors:
                before = factors[: factors.index(factor)]
                yield t, d, math.prod(rule.factors[f].size for f in before) * inner


def _equal(op: Op) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Tensors that are the same inside and outside of sub-graphs, from what is known first to what follows from it, and
    how many leading dimensions are lost."""
    if op.name == "optimization_barrier":
        yield from ((i, o, 0) for i, o in zip(op.inputs, op.outputs, strict=True))
    for body in op.bodies:
        if op.name == "scan":
            roles = Scan.of(op.params)
            for i, (inner, outer) in enumerate(zip(body.inputs, op.inputs, strict=True)):
                yield outer, inner, int(i >= roles.sliced.start)
            before = body.inputs[roles.carried]
            for i, (inner, outer) in enumerate(zip(body.outputs, op.outputs, strict=True)):
                yield inner, outer, -int(i >= roles.stacked.start)
                if i < len(before):
                    yield inner, before[i], 0
        else:
            skip = 1 if op.name == "cond" else len(op.inputs) - len(body.inputs)
            yield from ((outer, inner, 0) for inner, outer in zip(body.inputs, op.inputs[skip:], strict=True))
            if len(body.outputs) == len(op.outputs):
                yield from ((inner, outer, 0) for inner, outer in zip(body.outputs, op.outputs, strict=True))
