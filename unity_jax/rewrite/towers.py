"""Towers: parts of a program that do the same to different values, as one part that does it to stacks of two.

    a = tanh(x @ u1) @ u2      t = tanh(stack(x, y) @ stack(u1, v1)) @ stack(u2, v2)
    b = tanh(y @ v1) @ v2      a, b = t[0], t[1]

Step by step this pays late or never: each product alone would stack its operands and cut its result. So all that two
towers do alike, in the forward pass, the backward pass and the update, is stacked in one go, op by op, by rules such as
`dot(x, a), dot(y, b) => unstack(dot(stack(x, y), stack(a, b)))`; what is cut to be stacked again then cancels.
Stacks of two towers are joined to stacks of four in the same way, along the dimension that counts towers. What is
stacked can be split over devices by towers. Likewise the rows of embedding tables: stacked, they are exchanged between
devices at once.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from unity_jax.ops.indexing import addresses_rows
from unity_jax.ops.numbers import is_gather, is_scatter
from unity_jax.ops.rules import rule_of
from unity_jax.pcg.graph import Graph, Op, Tensor
from unity_jax.rewrite.apply import rewritten, target_ops
from unity_jax.rewrite.bind import Match
from unity_jax.rewrite.dims import CannotEmit
from unity_jax.rewrite.estimate import Seconds
from unity_jax.rewrite.find import matches, matches_pair
from unity_jax.rewrite.ops.parts import SLICE
from unity_jax.rewrite.ops.stacks import UNSTACK
from unity_jax.rewrite.relabel import relabels
from unity_jax.rewrite.rule import Rule
from unity_jax.rewrite.sites import Step
from unity_jax.rewrite.view import View, names_of
from unity_jax.trace import has_effects
from unity_jax.xla.op_classes import PRODUCTS

Pair = tuple[Op, Op]

PRODUCTS_EACH = 2
"""How many products of the forward pass a tower has at least: single ones are siblings, which steps merge."""


def towers(graph: Graph) -> list[Pair]:
    """Ops of towers, each with its like in the other of two; of four towers two pairs are found.

    Towers that are alike from their inputs on come first, then those that become alike later: behind embeddings of
    features of other sizes, or pairs of towers that were stacked before.
    """
    products = [op for op in graph.ops if op.name in PRODUCTS and not op.backward]
    alike: dict[object, list[Op]] = {}
    for exact in (True, False):
        number = _upstream(graph, exact)
        for op in products:
            alike.setdefault((exact, number[op.outputs[0]], op.signature), []).append(op)
    readers = _readers(graph)
    found: list[Pair] = []
    taken: set[Op] = set()
    for members in alike.values():
        left = [op for op in members if op not in taken]
        for first, second in zip(left[::2], left[1::2], strict=False):
            pairs = _Pairing(readers, taken).grown(first, second)
            if sum(a.name in PRODUCTS and not a.backward for a, _ in pairs) >= PRODUCTS_EACH:
                found += pairs
                taken.update(op for pair in pairs for op in pair)
    return found


def exchanged(graph: Graph) -> list[Pair]:
    """Ops on rows that gathers read or scatters write, each with its like on rows of another table.

    What they take or make goes from how tables are split to how examples are: of a stack in one exchange, not in two.
    """
    depth: dict[Tensor, int] = {}  # ops of one depth do not depend on each other
    for op in graph.ops:
        depth |= dict.fromkeys(op.outputs, 1 + max((depth.get(t, 0) for t in op.inputs), default=0))
    addressed = {op for op in graph.ops if addresses_rows(op)}
    of_rows = _of_rows(graph, addressed)
    alike: dict[object, list[Op]] = {}
    for op in graph.ops:
        if op in of_rows:
            alike.setdefault((depth[op.outputs[0]], op.backward, op.signature), []).append(op)
    readers = _readers(graph)
    found: list[Pair] = []
    taken = {op for op in graph.ops if op in addressed or _arranges(op)}
    for members in alike.values():
        for first, second in zip(members[::2], members[1::2], strict=False):
            if taken.isdisjoint((first, second)):
                pairs = _Pairing(readers, taken).grown(first, second)
                found += pairs
                taken.update(op for pair in pairs for op in pair)
    return found


def _readers(graph: Graph) -> dict[Tensor, list[Op]]:
    readers: dict[Tensor, list[Op]] = {}
    for op in graph.ops:
        for t in dict.fromkeys(op.inputs):
            readers.setdefault(t, []).append(op)
    return readers


def _of_rows(graph: Graph, addressed: Collection[Op]) -> set[Op]:
    """The first ops that compute something from what gathers read, and the last that make what scatters write."""
    found: set[Op] = set()
    read = {t for op in addressed if is_gather(op) for t in op.outputs}
    for op in graph.ops:
        if op not in addressed and not read.isdisjoint(op.inputs):
            if _arranges(op):
                read.update(op.outputs)
            else:
                found.add(op)
    written = {op.inputs[2] for op in addressed if is_scatter(op)}
    for op in reversed(graph.ops):
        if op not in addressed and not written.isdisjoint(op.outputs):
            if _arranges(op):
                written.update(op.inputs)
            else:
                found.add(op)
    return found


def _arranges(op: Op) -> bool:
    """Whether it only says where values are."""
    return op.name in ("stack", "unstack", "concatenate", "slice", "split") or relabels(op)


def stacked(
    graph: Graph, pairs: Sequence[Pair], rules: Sequence[Rule], emitted: dict[object, Graph | str]
) -> tuple[Graph, list[Step]] | None:
    """The graph with pairs of ops as one op each on stacks, and the steps; None if that cannot be.

    **Arguments:** `rules`: of them those are used that stack or join stacks, and those that cancel; `emitted`: see
    `View`.
    """
    steps: list[Step] = []
    counted = stacks(graph)
    joins: dict[Tensor, Tensor] = {}
    others: dict[Tensor, Tensor] = {}
    for a, b in pairs:
        if len(a.outputs) == 1 and not relabels(a):
            if counted.keys().isdisjoint(a.inputs):
                others[a.outputs[0]] = b.outputs[0]
            elif a.outputs[0] in counted:  # what takes towers from a stack is left as it is
                joins[a.outputs[0]] = b.outputs[0]
    siblings = [r for r in rules if len(r.source) == 2]
    try:
        for left, cut in ((joins, SLICE), (others, UNSTACK)):
            for rule in (r for r in siblings if r.target[0].op == cut):
                view = View(graph, emitted)
                found = [(m, n) for a, b in left.items() for m, n in _first(matches_pair(rule, (a, b), view), view)]
                if found:
                    steps.append(_step(rule, graph, found))
                    graph = rewritten(graph, [m for m, _ in found], view)[0]
                    for m, _ in found:
                        del left[m.roots[0].tensor]
        cancelling = [r for r in rules if len(r.source) == 1]
        while more := _cancelled(graph, cancelling, emitted):
            graph, done = more
            steps += done
    except CannotEmit:
        return None
    return (graph, steps) if steps else None


def _cancelled(
    graph: Graph, rules: Iterable[Rule], emitted: dict[object, Graph | str]
) -> tuple[Graph, list[Step]] | None:
    """What one rule cancels."""
    view = View(graph, emitted)
    for rule in rules:
        anchors = [t for op in graph.ops if rule.source[0].op in names_of(op) for t in op.outputs]
        found = [(m, n) for t in anchors for m, n in _first(matches(rule, t, view), view)]
        if found:
            return rewritten(graph, [m for m, _ in found], view)[0], [_step(rule, graph, found)]
    return None


def _first(every: Iterator[Match], view: View) -> list[tuple[Match, int]]:
    """The first of some matches whose target exists and has towers in the first dimension, and which it is."""
    for n, match in enumerate(every):
        try:
            ops, _ = target_ops(match, view)
        except CannotEmit:
            continue
        if all(op.params["dimension"] == 0 for op in ops if op.name == "concatenate"):
            return [(match, n)]
    return []


def _step(rule: Rule, graph: Graph, found: Sequence[tuple[Match, int]]) -> Step:
    where = {t: (i, j) for i, op in enumerate(graph.ops) for j, t in enumerate(op.outputs)}
    return Step(
        rule.name,
        tuple((*where[m.roots[0].tensor], n, *(i for r in m.roots[1:] for i in where[r.tensor])) for m, n in found),
    )


def stacks(graph: Graph) -> dict[Tensor, int]:
    """Tensors with a dimension that counts towers, and which it is: stacks, and what is made of them index by index."""
    found: dict[Tensor, int] = {}
    repeated: set[Tensor] = set()  # the same for all towers, if there are any
    for op in graph.ops:
        if op.name == "stack":
            found[op.outputs[0]] = op.params["axis"]
        elif op.name == "concatenate" and all(found.get(t) == op.params["dimension"] for t in op.inputs):
            found[op.outputs[0]] = op.params["dimension"]
        elif op.name == "broadcast_in_dim" and not op.inputs[0].shape:
            repeated.update(op.outputs)
        elif not found.keys().isdisjoint(op.inputs) and not op.bodies:
            found |= _stacked_results(op, found, repeated)
    return found


def _stacked_results(op: Op, stacked: Mapping[Tensor, int], repeated: Collection[Tensor]) -> dict[Tensor, int]:
    """The results with a dimension that is the one that counts towers in all operands that have it."""
    rule = rule_of(op)
    made: dict[Tensor, int] = {}
    for t, dims in zip(op.outputs, rule.results, strict=True):
        for d, factors in enumerate(dims):
            having = [
                (x, o.index(factors))
                for x, o in zip(op.inputs, rule.operands, strict=True)
                if len(factors) == 1 and factors in o and x not in repeated
            ]
            if having and all(stacked.get(x) == at for x, at in having):
                made[t] = d
    return made


def _upstream(graph: Graph, exact: bool) -> dict[Tensor, int]:
    """A number for each tensor, equal where all that leads to it is alike; inputs are where their types are.

    **Arguments:** `exact`: whether sizes and literals count, too, and not only which ops there are.
    """
    known: dict[object, int] = {}
    number: dict[Tensor, int] = {}
    for t in graph.inputs:
        number[t] = known.setdefault(str(t) if exact else (t.dtype, len(t.shape)), len(known))
    for op in graph.ops:
        alone: object = id(op) if op.bodies or has_effects(op) else op.signature if exact else op.name
        operands = tuple(number[t] if t.literal is None else str(t.literal) * exact for t in op.inputs)
        for i, t in enumerate(op.outputs):
            number[t] = known.setdefault((alone, operands, i), len(known))
    return number


@dataclass(frozen=True, eq=False)
class Towers:
    """All towers of a graph that are stacked in one go; in place of a `sites.Place`."""

    pairs: tuple[Pair, ...]

    @property
    def root(self) -> Tensor:
        """A result of the first op."""
        return self.pairs[0][0].outputs[0]

    @property
    def gain(self) -> Seconds:
        """Nothing on one device: as much is computed, and weights are stacked."""
        return Seconds(0.0)

    hope = gain

    @functools.cached_property
    def bytes(self) -> int:
        """Of what products take, or of all ops of towers without any."""
        every = [op for pair in self.pairs for op in pair]
        return sum(t.nbytes for op in [op for op in every if op.name in PRODUCTS] or every for t in op.inputs)

    @functools.cached_property
    def key(self) -> tuple[object, ...]:
        return "towers", len(self.pairs), str(self.root)


class _Pairing:
    """Grows pairs of like ops from a first one, along what reads their results and their operands."""

    def __init__(self, readers: dict[Tensor, list[Op]], taken: set[Op]) -> None:
        self.readers, self.taken = readers, set(taken)
        self.other: dict[Tensor, Tensor] = {}
        self.others: set[Tensor] = set()
        self.waiting: list[tuple[Tensor, Tensor]] = []

    def grown(self, first: Op, second: Op) -> list[Pair]:
        pairs = self._add(first, second) if self._alike(first, second) else []
        while self.waiting:
            a, b = self.waiting.pop(0)
            for one in self.readers.get(a, ()):
                if one not in self.taken:
                    like = [two for two in self.readers.get(b, ()) if self._alike(one, two)]
                    if like:
                        pairs += self._add(one, max(like, key=functools.partial(self._known, one)))
        return pairs

    def _add(self, one: Op, two: Op) -> list[Pair]:
        self.taken |= {one, two}
        for a, b in (*zip(one.inputs, two.inputs, strict=True), *zip(one.outputs, two.outputs, strict=True)):
            if a is not b and a.literal is None and a not in self.other:
                self.other[a] = b
                self.others.add(b)
                self.waiting.append((a, b))
        return [(one, two)]

    def _alike(self, one: Op, two: Op) -> bool:
        """Whether two ops do the same, to the same values or to values that may be like each other."""
        if one is two or two in self.taken or one.bodies or has_effects(one) or one.name.startswith("random"):
            return False
        if one.signature != two.signature or one.backward != two.backward:
            return False
        if not all(self._fit(a, b) for a, b in zip(one.inputs, two.inputs, strict=True)):
            return False
        return not self._is_crossed(one, two) and not self._is_crossed(two, one, True)

    def _fit(self, a: Tensor, b: Tensor) -> bool:
        if a is b:
            return True
        if a.literal is not None or b.literal is not None:
            return a.literal is not None and b.literal is not None and str(a.literal) == str(b.literal)
        if a in self.other:
            return self.other[a] is b
        return not {a, b} & self.others and b not in self.other and str(a) == str(b)

    def _is_crossed(self, one: Op, two: Op, turned: bool = False) -> bool:
        """Whether the result goes into the other tower: the gradient of a product of both is made of the other one."""
        wrong = self.other if turned else self.others
        return any(t in wrong for r in one.outputs for op in self.readers.get(r, ()) for t in op.inputs if t is not r)

    def _known(self, one: Op, two: Op) -> int:
        return sum(a is b or a in self.other for a, b in zip(one.inputs, two.inputs, strict=True))
