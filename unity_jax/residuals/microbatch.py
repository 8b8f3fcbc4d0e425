"""Gradient accumulation: forward and backward of a step by microbatches, the update after them.

    loss, gradients = f(params, batch)        for each of 4 microbatches of the batch:
    params = update(params, gradients)            loss, gradients: what there was, and its part
                                              params = update(params, gradients)

The rows of the batch are followed from the arguments through the whole step (`ops.follow`); what has them runs by
microbatches. It is exact, or there is none: what all rows are needed for in the middle (the count of a masked mean) is
computed of the whole batch before, where that is small, and stands in the way where it is not (batch statistics).
Random bits are those of the whole batch, whose every fourth row a microbatch has (GPipe, section 2,
https://arxiv.org/abs/1811.06965; Mist, section 4, https://arxiv.org/abs/2503.19050).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from unity_jax import _compat
from unity_jax.ops.follow import Paths
from unity_jax.ops.rule import Rule
from unity_jax.ops.rules import rule_of
from unity_jax.pcg.graph import Graph, Op, Tensor
from unity_jax.pcg.loops import Scan
from unity_jax.residuals.change import Change
from unity_jax.residuals.loop import looped
from unity_jax.residuals.recompute import is_constant
from unity_jax.residuals.region import NoRegionError, Region, check_apart, operands
from unity_jax.trace import has_effects
from unity_jax.xla.op_classes import PRODUCTS

SMALL = 2**-6
"""The part of the largest array that has rows, up to which something may be computed of the whole batch before."""


def microbatched(graph: Graph, arguments: Sequence[tuple[Tensor, int]], parts: int) -> Change:
    """The graph with so many microbatches.

    **Arguments:** `arguments`: those that hold rows of the batch, each with the dimension that they are.
    **Raises:** `NoRegionError` with the line that needs the whole batch in the middle.
    """
    region = _region(graph, arguments, parts)
    source = max((op for op in region.ops if op.name in PRODUCTS), key=lambda op: op.outputs[0].nbytes, default=None)
    return looped(graph, region, parts, source or region.ops[0])


def _region(graph: Graph, arguments: Sequence[tuple[Tensor, int]], parts: int) -> Region:
    sizes = {t.shape[d] for t, d in arguments}
    if len(sizes) != 1 or parts < 2 or min(sizes) % parts:
        raise NoRegionError
    (size,) = sizes
    known = dict[object, Rule]()

    def rule(op: Op) -> Rule:
        if op.signature not in known:
            known[op.signature] = rule_of(op)
        return known[op.signature]

    found = Paths(graph, rule).everywhere(arguments)
    whole = ((t, d) for (t, d), major in found.items() if major == 1 and t.shape[d] % size == 0)
    rows = dict(whole)  # of others no part is a block of rows
    largest = max((t.nbytes for t in rows), default=0)
    walk = _Walk(graph, rows, parts, SMALL * largest, rule)
    walk.through()
    body = [op for op in walk.inside if op not in walk.before or any(t in rows for t in op.outputs)]
    inside, reads = set(body), {t for op in body for t in op.inputs}
    constants = {op for op in graph.ops if is_constant(op) and not reads.isdisjoint(op.outputs)}
    ops = tuple(op for op in graph.ops if op in constants or op in inside)
    cut, whole = operands(ops, {t for op in ops for t in op.outputs}, rows)
    alone = frozenset(walk.inside) - walk.before
    read = {t for op in graph.ops if op not in alone for t in op.inputs}.union(graph.outputs)
    results = [t for op in ops if op in alone for t in op.outputs if t in read]
    results.sort(key=lambda t: t.times)  # a loop stands for as many as its first result: for one
    stacked, sums = (tuple(t for t in results if t in of) for of in (rows, walk.terms))
    if not results:
        raise NoRegionError(walk.lost)
    if len(stacked) + len(sums) < len(results) or (sums or stacked)[0].times > 1:
        raise NoRegionError  # what each microbatch computes anew, and something else needs
    return Region(ops, size, rows, walk.factors, walk.rules, cut, whole, stacked, sums, True, alone)


@dataclass(eq=False)
class _Walk:
    """What runs by microbatches, in the order of the program.

    **Fields:** `inside`: these ops; `before`: ops that all rows are needed for, which is small; `terms`: results that
    are parts of sums; `late`: what is known only after all microbatches; `anew`: what has no rows and comes out of a
    barrier with some that do (the weights of layers with `jax.checkpoint`), so that each microbatch computes what is
    made of it; `factors` and `rules` of ops that are cut; `lost`: the first line behind which there are no rows.
    """

    graph: Graph
    rows: Mapping[Tensor, int]
    parts: int
    small: float
    rule: Callable[[Op], Rule]
    inside: dict[Op, None] = field(default_factory=dict)
    before: set[Op] = field(default_factory=set)
    terms: set[Tensor] = field(default_factory=set)
    late: set[Tensor] = field(default_factory=set)
    anew: set[Tensor] = field(default_factory=set)
    factors: dict[Op, int] = field(default_factory=dict)
    rules: dict[Op, Rule] = field(default_factory=dict)
    zeros: set[Tensor] = field(default_factory=set)
    lost: str = ""

    def through(self) -> None:
        """Go through the program."""
        for op in self.graph.ops:
            try:
                if not self._has_rows(op):
                    self._beside(op)
                    continue
                if has_effects(op):
                    raise NoRegionError(op.source)
                for t in op.inputs:
                    if t in self.late:
                        self._compute_before(op, t)
                self._cut(op)
                self.inside[op] = None
            except NoRegionError:
                if op.bodies or op.name in PRODUCTS:
                    raise
                self.lost = self.lost or op.source
                self.late.update(op.outputs)  # it may be for what comes after the microbatches
                self.factors.pop(op, None)

    def _has_rows(self, op: Op) -> bool:
        return any(t in self.rows for t in (*op.inputs, *op.outputs))

    def _beside(self, op: Op) -> None:
        """An op without rows."""
        if not self.late.isdisjoint(op.inputs):
            self.late.update(op.outputs)
        elif not self.anew.isdisjoint(op.inputs) and not has_effects(op):
            self.anew.update(op.outputs)
            self.inside[op] = None
        if _is_zeros(op, self.zeros):
            self.zeros.update(op.outputs)

    def _compute_before(self, reader: Op, t: Tensor) -> None:
        """Have a tensor that all rows are needed for before the microbatches."""
        found, waiting = set[Op](), [t]
        while waiting:
            made_by = self.graph.producer.get(waiting.pop())
            if made_by is not None and made_by not in found:
                found.add(made_by)
                waiting += made_by.inputs
        mine = {op for op in found if op in self.inside or not self.late.isdisjoint(op.outputs)}
        if any(op.bodies or op.name in PRODUCTS or u.nbytes > self.small for op in mine for u in op.outputs):
            raise NoRegionError(reader.source)
        self.before |= mine
        for op in mine:
            self.late.difference_update(op.outputs)
            self.terms.difference_update(op.outputs)

    def _cut(self, op: Op) -> None:
        """An op with rows: note its factor, and what its results are."""
        if op.name == "scan":
            self._scan(op)
            late = [t for t in op.outputs if t in self.terms]
        elif op.bodies:
            raise NoRegionError(op.source)
        elif op.name == "optimization_barrier":
            self.anew.update(t for t in op.outputs if t not in self.rows)
            late = []
        else:
            self._split(op)
            late = [t for t in op.outputs if t not in self.rows]
            self.terms.update(late)
        self.late.update(late)

    def _split(self, op: Op) -> None:
        """Raise `NoRegionError` unless a part of the rows of an op is computed without the others."""
        rule = self.rules[op] = self.rule(op)
        sides = [*zip(op.inputs, rule.operands, strict=True), *zip(op.outputs, rule.results, strict=True)]
        found = {dims[self.rows[t]][:1] for t, dims in sides if t in self.rows}
        if len(found) != 1 or found == {()}:
            raise NoRegionError(op.source)
        ((factor,),) = found
        for t, dims in sides:
            held = [d for d, at in enumerate(dims) if factor in at]
            if held and (t not in self.rows or held != [self.rows[t]]):
                raise NoRegionError(op.source)
        try:
            check_apart(op, rule, factor, self.parts)
        except NoRegionError:
            raise NoRegionError(op.source) from None
        self.factors[op] = factor

    # Loops over layers

    def _scan(self, op: Op) -> None:
        """A loop whose iterations have rows each, or, of stacked values, rows of another dimension."""
        (body,), roles = op.bodies, Scan.of(op.params)
        if not self.late.isdisjoint(op.inputs):
            raise NoRegionError(op.source)
        for inner, outer in zip(body.inputs[roles.sliced], op.inputs[roles.sliced], strict=True):
            if self.rows.get(outer, 0) == 0 and outer in self.rows:
                raise NoRegionError(op.source)
            self._agree(op, inner, outer)
        for inner, outer in zip(body.inputs[roles.constants], op.inputs[roles.constants], strict=True):
            self._agree(op, inner, outer)
        carried, ends = body.inputs[roles.carried], body.outputs[roles.last]
        totals, before = set[Tensor](), None
        while totals != before:  # what terms are added to
            before = totals
            terms = self._within(body.ops, set(totals), False)
            totals = {t for t, end in zip(carried, ends, strict=True) if end in terms}
        terms = self._within(body.ops, set(totals), True)
        for t, start, end in zip(carried, op.inputs[roles.carried], ends, strict=True):
            self._agree(op, t, start)
            starts = t not in totals or start in self.zeros or _is_zero(start)
            if not starts or (end in self.rows) != (t in self.rows):
                raise NoRegionError(op.source)
        for t, inner in zip(op.outputs, body.outputs, strict=True):
            self._agree(op, inner, t)
            if inner in terms:
                self.terms.add(t)

    def _agree(self, op: Op, inner: Tensor, outer: Tensor) -> None:
        """Raise `NoRegionError` unless both have rows or neither."""
        if (inner in self.rows) != (outer in self.rows) and outer.literal is None and inner.literal is None:
            raise NoRegionError(op.source)

    def _within(self, ops: Iterable[Op], terms: set[Tensor], surely: bool) -> set[Tensor]:
        """Which results of ops of a loop are terms of sums over the microbatches.

        **Arguments:** `terms`: so far; `surely`: all of them, so that what no sum can go through stands in the way.
        """
        for op in ops:
            if has_effects(op):
                raise NoRegionError(op.source)
            taken = {i for i, t in enumerate(op.inputs) if t in terms}
            if self._has_rows(op) and op.name != "optimization_barrier":
                if taken and surely:
                    raise NoRegionError(op.source)
                if op.name == "scan":
                    self._scan(op)
                    terms.update(t for t in op.outputs if t in self.terms)
                elif op.bodies:
                    raise NoRegionError(op.source)
                else:
                    self._split(op)
                    terms.update(t for t in op.outputs if t not in self.rows)
            elif op.name == "optimization_barrier":
                terms.update(op.outputs[i] for i in taken)
            elif taken:
                sets = self._linear(op)
                rest = {i for i, t in enumerate(op.inputs) if t in self.zeros}
                if surely and not any(taken <= linear <= taken | rest for linear in sets):
                    raise NoRegionError(op.source)
                terms.update(op.outputs)
            elif _is_zeros(op, self.zeros):
                self.zeros.update(op.outputs)
        return terms

    def _linear(self, op: Op) -> Sequence[Set[int]]:
        """The operand sets in which an op is linear. Parts that are rounded each and then added up in a wide type lose
        no more than a sum that is rounded."""
        if op.name == "convert_element_type" and all(_compat.is_float(t.dtype) for t in (*op.inputs, *op.outputs)):
            return [{0}]
        return () if op.bodies else self.rule(op).linear


def _is_zeros(op: Op, zeros: set[Tensor]) -> bool:
    """Whether an op makes zeros: spreads or casts some."""
    spreads = op.name in ("broadcast_in_dim", "convert_element_type", "reshape")
    return spreads and all(t in zeros or _is_zero(t) for t in op.inputs[:1])


def _is_zero(t: Tensor) -> bool:
    return t.literal is not None and t.rank == 0 and not t.literal
