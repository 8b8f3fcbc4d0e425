"""When the ops of a loop's body can run: before the loop, in it, or after it.

    xw = x W              before: of what is sliced and constant only
    g = xw + h V          in the loop: what it carries needs it
    dx = dg W^T           after: only stacked results need it
    dV = dV + h^T dg      after: what is carried is a sum that nothing else reads

Only products are worth it, where one for all steps has more rows, or sums over more of them, than one for each: one
operand is the same in all steps, or its results are summed. What leads to them and follows from them goes with them
where what the loop then slices or stacks is no more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from unity_jax import _compat
from unity_jax.ops.rule import RULES
from unity_jax.ops.rules import POINTWISE
from unity_jax.pcg.graph import Graph, Op, Tensor, trips
from unity_jax.pcg.loops import START, Scan
from unity_jax.rewrite.view import computes
from unity_jax.trace import has_effects
from unity_jax.xla.op_classes import PRODUCTS

BARRIER = "optimization_barrier"
_STAY = frozenset("sharding_constraint layout_constraint shard_map pallas_call threefry2x32".split())
_ADDS = frozenset(["add", "add_any", "sub"])
LINEAR = _ADDS | frozenset(
    "neg copy reshape squeeze expand_dims transpose broadcast_in_dim slice split rev concatenate pad reduce_sum".split()
)
"""Ops that are linear in all their operands together, those that are the same in all steps too."""


class Sum(NamedTuple):
    """A carried value that is only added to. **Fields:** `terms`: what each of `adds` adds in a step, or subtracts."""

    terms: tuple[Tensor, ...]
    adds: tuple[Op, ...]


class Stages:
    """The stages of the ops of a scan.

    **Fields:** `scan`: the scan, without what its body computes twice; `graph`: its body, with a barrier for each
    value of one for several; `fixed`: what is the same in all steps; `early`: what does not depend on what is carried;
    `before`: what the loop reads of what is made before it; `stacked`: what it stacks, beside its results, for what
    comes after it; `sums`: those that leave it, by their places among what is carried; `moved`: those of its results,
    by their places, that it does not stack any more.
    """

    def __init__(self, scan: Op) -> None:
        self.scan = _merged(scan)
        self.roles, (body,) = Scan.of(scan.params), self.scan.bodies
        self.graph = Graph(body.inputs, body.outputs, [part for op in body.ops for part in _parts(op)])
        carried = list(zip(body.inputs[self.roles.carried], body.outputs[self.roles.last], strict=True))
        self.handed_on = [i for i, (before, after) in enumerate(carried) if after is before]
        self.fixed = {*body.inputs[self.roles.constants], *(carried[i][0] for i in self.handed_on)}
        self.early = self.fixed.union(body.inputs[self.roles.sliced])
        for op in self.graph.ops:
            for known in (self.fixed, self.early):
                if may_move(op) and all(t.literal is not None or t in known for t in op.inputs):
                    known.update(op.outputs)
        candidates = {i: s for i, pair in enumerate(carried) if (s := self._sum(*pair)) is not None}
        ends = {after for i, (before, after) in enumerate(carried) if after is not before and i not in candidates}
        core = set[Op]()
        for op in reversed(self.graph.ops):
            if not may_move(op) or not ends.isdisjoint(op.outputs):
                core.add(op)
                ends.update(op.inputs)
        self._late = [op for op in self.graph.ops if op not in core and not self.early.issuperset(op.outputs)]
        after = self._after(candidates)
        found = {i: s for i, s in candidates.items() if not after.isdisjoint(s.adds)}
        self.stacked = self._reach_back(after, {carried[i][0] for i in found})
        out, self.before = self._ahead(after)
        if after or out:  # other sums leave too, where all that they are of is there
            there = self.early.union(self.stacked, body.outputs[self.roles.stacked])
            there.update(t for op in self._late if op in after for t in op.outputs)
            for op in self._late:
                if all(t.literal is not None or t in there for t in op.inputs):
                    there.update(op.outputs)
            found |= {i: s for i, s in candidates.items() if there.issuperset(s.terms)}
        self.sums = dict(sorted(found.items()))
        outside = {t for op in after | out for t in op.outputs}.union(body.inputs[self.roles.sliced])
        outside -= self.fixed
        self.moved = [i for i, t in enumerate(body.outputs) if i >= self.roles.stacked.start and t in outside]
        self.moves = bool(after or out)

    def _sum(self, before: Tensor, after: Tensor) -> Sum | None:
        """What a carried value is a sum of; None if it is no sum, or something else reads it."""
        terms, adds, t = list[Tensor](), list[Op](), before
        while t is not after:
            readers = self.graph.readers.get(t, ())
            if t in self.graph.outputs or len(readers) != 1 or readers[0].name not in _ADDS:
                return None
            adds += readers
            if adds[-1].name == "sub" and adds[-1].inputs[0] is not t:
                return None
            terms += (x for x in adds[-1].inputs if x is not t)
            (t,) = adds[-1].outputs
        alone = after not in self.graph.readers and self.graph.outputs.count(after) == 1
        whole = all(t.shape == after.shape and t.literal is None for t in terms)
        return Sum(tuple(terms), tuple(adds)) if adds and alone and whole and _compat.is_float(after.dtype) else None

    def _after(self, candidates: dict[int, Sum]) -> set[Op]:
        """Products that run after the loop, and what follows from them."""
        late, after = set(self._late), set[Op]()
        for found in candidates.values():
            products = [op for t in found.terms for op in self._contractions(t)]
            if any(op in late or self.early.issuperset(op.outputs) for op in products):
                after.update(found.adds)
                after.update(op for op in products if op in late)
        after.update(op for op in self._late if op.name in PRODUCTS and self._has_fixed(op))
        made = {t for op in after for t in op.outputs}
        for op in self._late:
            if not made.isdisjoint(op.inputs):
                after.add(op)
                made.update(op.outputs)
        after.update(op for s in candidates.values() if not after.isdisjoint(s.adds) for op in s.adds)
        return after

    def _contractions(self, t: Tensor) -> Iterator[Op]:
        """Those ops by which a sum over the steps of some value is added up over the steps."""
        op = self.graph.producer.get(t)
        if op is not None and self.contracts(op):
            yield op
        elif op is not None and self.is_linear(op):
            for x in op.inputs:
                yield from self._contractions(x)

    def contracts(self, op: Op) -> bool:
        """Whether a sum over the steps of what an op makes is one op that adds over the steps too: a product of what
        differs from step to step, or a scatter of that, such as the gradient of an embedding."""
        if not all(_compat.is_float(t.dtype) for t in op.outputs):
            return False
        if op.name == "scatter-add":
            into, *rest = map(self.is_fixed, op.inputs)
            return into and not any(rest) and not op.params["dimension_numbers"].operand_batching_dims
        if op.name == "conv_general_dilated":
            return not self._has_fixed(op) and op.params["feature_group_count"] == op.params["batch_group_count"] == 1
        return op.name == "dot_general" and not self._has_fixed(op)

    def is_linear(self, op: Op) -> bool:
        """Whether a sum over the steps of what an op makes is what it makes of the sum of what is not fixed."""
        if not all(_compat.is_float(t.dtype) for t in (*op.inputs, *op.outputs)):
            return False
        if op.name == "div":
            return self.is_fixed(op.inputs[1])
        if op.name == "mul" or op.name in PRODUCTS:
            return self._has_fixed(op)
        return op.name in LINEAR or op.name == "convert_element_type"

    def is_fixed(self, t: Tensor) -> bool:
        """Whether a value is the same in all steps."""
        return t.literal is not None or t in self.fixed

    def _has_fixed(self, op: Op) -> bool:
        return any(map(self.is_fixed, op.inputs))

    def _reach_back(self, after: set[Op], sums: Collection[Tensor]) -> list[Tensor]:
        """Add what leads to what runs after the loop, where that stacks no more; returns what is stacked for it.

        **Arguments:** `sums`: what is carried of those that leave the loop.
        """
        made, results = {t for op in after for t in op.outputs}, set(self.graph.outputs)
        there = self.early.union(t for t in self.graph.outputs[self.roles.stacked] if t not in made)

        def read(op: Op) -> dict[Tensor, None]:
            known = (there, made, sums)
            return dict.fromkeys(t for t in op.inputs if t.literal is None and not any(t in k for k in known))

        cut = {t: None for op in self.graph.ops if op in after for t in read(op)}
        for op in reversed(self._late):
            less = [t for t in op.outputs if t in cut]
            readers = {r for t in op.outputs for r in self.graph.readers.get(t, ())}
            if op in after or not less or not after.issuperset(readers) or not results.isdisjoint(op.outputs):
                continue
            more = [t for t in read(op) if t not in cut]
            if _is_no_more(more, less):
                after.add(op)
                made.update(op.outputs)
                cut = {t: None for t in (*cut, *more) if t not in less}
        return list(cut)

    def _ahead(self, after: Collection[Op]) -> tuple[set[Op], list[Tensor]]:
        """Products that run before the loop, with what follows from them, and what the loop reads of that. The last of
        it stays in the loop where that then slices less."""
        results, readers = self.graph.outputs, self.graph.readers
        kept = {*results[self.roles.last], *self.fixed.intersection(results[self.roles.stacked])}
        products, out, made = set[Op](), set[Op](), set[Tensor]()
        for op in self.graph.ops:
            if may_move(op) and self.early.issuperset(op.outputs):
                if op.name in PRODUCTS and self._has_fixed(op):
                    products.add(op)
                if op in products or not made.isdisjoint(op.inputs):
                    out.add(op)
                    made.update(op.outputs)

        def read(t: Tensor) -> bool:
            """Whether the loop reads a value."""
            return t in kept or any(r not in out and r not in after for r in readers.get(t, ()))

        for op in [op for op in reversed(self.graph.ops) if op in out - products]:
            now = [t for t in op.outputs if read(t)]
            then = [t for t in dict.fromkeys(op.inputs) if t in made and not read(t)]
            last = out.isdisjoint(r for t in op.outputs for r in readers.get(t, ()))
            if last and _is_no_more(then, now) and not _is_no_more(now, then):
                out.remove(op)
        return out, [t for op in self.graph.ops if op in out for t in op.outputs if read(t)]


def _is_no_more(more: Collection[Tensor], less: Collection[Tensor]) -> bool:
    """Whether some values are no more than others, and no larger."""
    return len(more) <= len(less) and sum(t.nbytes for t in more) <= sum(t.nbytes for t in less)


def can_be_cut(op: Op) -> bool:
    """Whether an op is a loop whose body may be divided."""
    return op.name == "scan" and START not in op.params and trips(op) > 1


def may_move(op: Op) -> bool:
    """Whether an op may run once for all steps: one that is known, and draws no random bits."""
    known = op.name in POINTWISE or op.name in RULES or op.name == BARRIER
    return known and not (op.bodies or op.name in _STAY or op.name.startswith("random_") or has_effects(op))


def _merged(scan: Op) -> Op:
    """A scan whose body computes nothing twice and reads no array twice."""
    (body,), roles = scan.bodies, Scan.of(scan.params)
    names, known, ops = dict[Tensor, Tensor](), dict[object, tuple[Tensor, ...]](), list[Op]()

    def same(key: object, made: tuple[Tensor, ...]) -> bool:
        found = known.setdefault(key, made)
        names.update((a, b) for a, b in zip(made, found, strict=True) if a is not b)
        return found is not made

    for role in (roles.constants, roles.sliced):
        for outer, inner in zip(scan.inputs[role], body.inputs[role], strict=True):
            if outer.literal is None:
                same((role.start, outer), (inner,))
    for op in body.ops:
        op = op.reading(names)
        if op.name == BARRIER or not may_move(op) or not same(computes(op), op.outputs):
            ops.append(op)
    outputs = tuple(names.get(t, t) for t in body.outputs)
    return dataclasses.replace(scan, bodies=(Graph(body.inputs, outputs, ops),))


def _parts(op: Op) -> Iterable[Op]:
    """A barrier of several values as one for each; any other op as it is."""
    if op.name != BARRIER:
        return [op]
    pairs = zip(op.inputs, op.outputs, strict=True)
    return [dataclasses.replace(op, inputs=(before,), outputs=(after,)) for before, after in pairs]
