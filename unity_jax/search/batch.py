"""Which dimensions run over the examples of a batch: those whose splitting divides the work.

An index class runs through the factors of op rules (`ops/rule.py`): the rows of `x[b,k]` are those of `x @ w`, of its
cotangent and of the loss. The batch is, of the index classes of the arguments that are not state, the one that divides
most arithmetic into independent parts. So it is dimension 0 of tokens `[B, T]`, and dimension 1 of rollouts `[T, B]`
and of the images `[5, B, ...]` of five updates in a row. What is drawn in the step (noise that becomes images) has a
batch of its own, unless it meets that of an argument; so have captions that meet the images only in a loss over all
pairs of both. Batches that are joined to one, or cut out of one, go on (two views of each image).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence, Set

from unity_jax.ops.follow import Dims, Paths, factor_at
from unity_jax.pcg.graph import Graph, Op, Tensor, nested, trips
from unity_jax.program import Program
from unity_jax.search.rule_cache import RuleCache

TIE = 0.01
"""What part of the work an index may divide less than another and count as equal: then the first dimension is it."""

CUTS = ("concatenate", "slice", "split")
"""What joins parts along a dimension, or cuts them out of it."""

_known: weakref.WeakKeyDictionary[Graph, dict[int, Dims]] = weakref.WeakKeyDictionary()


def batch_dims(program: Program, rules: RuleCache, ways: int) -> Dims:
    """Every dimension of the traced graph, sub-graphs included, that runs over the examples of a batch.

    **Arguments:** `ways`: the number of devices; a dimension of 5 divides nothing by 8.
    """
    known = _known.setdefault(program.graph, {})
    if ways not in known:
        known[ways] = _Batch(program, rules, ways).found
    return known[ways]


def batch_arguments(program: Program, rules: RuleCache, ways: int) -> tuple[tuple[int, int], ...]:
    """The arguments that hold the examples of a batch one by one, each with the dimension that they are."""
    rows = batch_dims(program, rules, ways)
    inputs = enumerate(program.graph.inputs)
    return tuple((i, d) for i, t in inputs for d in range(t.rank) if rows.get((t, d)) == 1)


def position_dims(program: Program, rules: RuleCache, batch: Dims) -> Dims:
    """Every dimension that comes from the first dimension beside the batch of an argument: positions of sequences."""
    state = set(program.ties.values())
    held = dict(batch.keys())
    others = [
        (t, next(d for d in range(t.rank) if d != held[t]))
        for i, t in enumerate(program.graph.inputs)
        if i not in state and t in held and t.rank > 1
    ]
    return Paths(program.graph, rules).forward(others)


def batch_factors(op: Op, rules: RuleCache, found: Dims) -> set[int]:
    """The factors of an op that one of the dimensions in `found` indexes."""
    rule = rules(op)
    return {
        f
        for tensors, side in ((op.inputs, rule.operands), (op.outputs, rule.results))
        for t, dims in zip(tensors, side, strict=True)
        for d in range(t.rank)
        if (t, d) in found and (at := factor_at(rule, dims[d], found[t, d])) is not None
        for f in at[:1]
    }


class _Batch:
    """Chooses the index classes that are the batch. **Fields:** `found`: their dimensions, one of a tensor; `held`: the
    tensors that have one."""

    def __init__(self, program: Program, rules: RuleCache, ways: int) -> None:
        graph, self.rules, self.ways = program.graph, rules, ways
        self.paths = Paths(graph, rules)
        self.work = {op: repeat * rules(op).flops for op, repeat in ahead(graph)}
        self.state = {graph.inputs[i] for i in program.ties.values()}
        self.classes: list[Dims] = []
        self.cuts = [op for _, g, _ in nested(graph) for op in g.ops if op.name in CUTS]
        self.held: set[Tensor] = set()
        self.found: dict[tuple[Tensor, int], int] = {}
        drawn = [t for _, g, _ in nested(graph) for op in g.ops if op.name.startswith("random_") for t in op.outputs]
        for roots in (self._arguments(program), *([t] for t in drawn)):
            while index := self._best([t for t in roots if t not in self.held]):
                self.found |= {(t, d): major for (t, d), major in index.items() if t not in self.held}
                self.held.update(t for t, _ in index)

    def _arguments(self, program: Program) -> list[Tensor]:
        """Those that no output replaces; of a function that replaces nothing (an evaluation), those of its last one."""
        last = max((name.split("]")[0] for name in program.in_paths), default="")
        named = zip(program.leaves, program.in_paths, strict=True)
        return [t for t, name in named if t not in self.state and (self.state or name.startswith(last))]

    def _best(self, roots: Sequence[Tensor]) -> Dims | None:
        """The index class of these tensors that divides most; of equal ones that of the first dimension. After the
        first one, none that runs over a dimension of the state.
        """
        free = [(t.shape[d], d, index) for t in roots for d, index in self._of(t) if self._is_free(index)]
        scores = [(self._divided(index, n), d, index) for n, d, index in free]
        most = max((score for score, *_ in scores), default=0.0)
        near = [(d, -score, index) for score, d, index in scores if score >= (1 - TIE) * most > 0]
        return min(near, key=lambda n: n[:2])[2] if near else None

    def _of(self, t: Tensor) -> Iterator[tuple[int, Dims]]:
        """The index classes of the dimensions of a tensor."""
        for d, n in enumerate(t.shape):
            if n > 1:
                index = next((c for c in self.classes if c.get((t, d)) == 1), None)
                if index is None:
                    index = self._everywhere(t, d)
                    self.classes.append(index)
                yield d, index

    def _everywhere(self, t: Tensor, d: int) -> Dims:
        """The index class of a dimension, of a tensor one: it goes on in what is joined of parts along it, and in parts
        that are cut out."""
        found: dict[tuple[Tensor, int], int] = {}
        held, seeds = set[Tensor](), [(t, d)]
        while seeds:
            found |= {at: major for at, major in self.paths.everywhere(seeds).items() if at[0] not in held}
            held.update(t for t, _ in found)
            seeds = [at for op in self.cuts for at in _beyond(op, found, held)]
        return found

    def _is_free(self, index: Dims) -> bool:
        return not self.found or self.state.isdisjoint(t for t, _ in index)

    def _divided(self, index: Dims, size: int) -> float:
        """Arithmetic of the forward pass that no device has to do if so many split an index of this size, of the ops
        that do not sum over it: examples do not meet before their gradients do. None, where most of it has another
        batch: the index is a dimension beside that.
        """
        apart = beside = 0.0
        for op in {op: None for t, _ in index for op in self.paths.ops.get(t, ()) if op in self.work}:
            factors = batch_factors(op, self.rules, index)
            if factors and all(self.rules(op).factors[f].kind == "pass" for f in factors):
                if self.held.isdisjoint((*op.inputs, *op.outputs)):
                    apart += self.work[op]
                else:
                    beside += self.work[op]
        return apart * (1 - -(-size // self.ways) / size) if apart > beside else 0.0


def _beyond(op: Op, index: Dims, held: Set[Tensor]) -> Iterator[tuple[Tensor, int]]:
    """The dimensions of what an op joins or cuts along an index that do not hold it (`held` does) yet."""
    tensors = (*op.inputs, *op.outputs)
    for d in range(op.outputs[0].rank):
        sizes = [t.shape[d] for t in tensors if index.get((t, d)) == 1]
        yield from ((t, d) for t in tensors if sizes and t not in held and t.shape[d] not in (1, sizes[0]))


def ahead(graph: Graph, repeat: int = 1) -> Iterator[tuple[Op, int]]:
    """The ops before any of the backward pass, of sub-graphs too, and how often each runs in a step."""
    late: set[Tensor] = set()
    for op in graph.ops:
        if op.backward or not late.isdisjoint(op.inputs):
            late.update(op.outputs)
        elif op.bodies:
            for body in op.bodies:
                yield from ahead(body, repeat * trips(op))
        else:
            yield op, repeat
