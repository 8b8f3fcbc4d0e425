"""Attention in a graph: a softmax of scores, its product with values, and the gradients of both if they are there.

From the exponentials on every op is followed that computes with them. What it makes is a polynomial (`terms`) or, of
products with q, k, v and the cotangent, an array that the kernel computes. So any way to write softmax, dropout and
their gradients is attention, if it comes to the same; what reads anything in between keeps it from being so.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from unity_jax.implement.constants import Constants
from unity_jax.implement.dims import Dims, Dot, Labelled, labelled_before, relabelled, varying
from unity_jax.implement.scores import Dropout, Finder, Scores, dropout
from unity_jax.implement.terms import NEAR, ONE, Term, Terms, added, factor_of, over_keys, power, product, scaled
from unity_jax.pcg.graph import Graph, Op, Tensor


@dataclass(frozen=True, eq=False)
class Group:
    """An attention.

    **Fields:** `scores`; `v`; `out`: its product with the probabilities, None of what is computed again for gradients
    alone; `drop`, if there is dropout; `cotangent` of `out`, and `gradients` of q, k and v, if there are.
    """

    scores: Scores
    v: Labelled
    out: Labelled | None
    drop: Dropout | None
    cotangent: Labelled | None
    gradients: Mapping[str, Labelled]

    @property
    def place(self) -> Tensor:
        """What tells it from others: the exponentials, which are not computed by kernels."""
        return self.scores.exp.outputs[0]


def groups(graph: Graph, constants: Constants) -> list[Group]:
    """All attentions of a graph; not those of its loops."""
    found = list[Group]()
    finder = Finder(graph, constants)
    for op in graph.ops:
        if op.name == "exp" and (scores := finder.scores(op)) is not None:
            group = _Follower(finder, scores).found()
            if group is not None:
                found.append(group)
    return found


ROUNDED = 2.0**-8
"""By how much a constant differs from it in bfloat16, relative to it."""
P, A, KEPT = Term(p=1), Term(a=1), Term(kept=1)
_Value = tuple[Terms, Dims]


@dataclass(eq=False)
class _Follower:
    """Follows what is computed of a softmax.

    **Fields:** `known`: tensors that are polynomials; `arrays`: what a tensor is of q, k, v and the cotangent; `keep`:
    what is kept of the probabilities is divided by it; `waiting`: which ops are to be looked at, a heap, and `queued`.
    """

    finder: Finder
    scores: Scores
    known: dict[Tensor, _Value] = field(default_factory=dict)
    arrays: dict[Tensor, dict[str, Dims]] = field(default_factory=dict)
    drop: Dropout | None = None
    keep: float = 1.0
    v: Labelled | None = None
    out: Labelled | None = None
    cotangent: Labelled | None = None
    gradients: dict[str, Labelled] = field(default_factory=dict)
    waiting: list[int] = field(default_factory=list)
    queued: set[int] = field(default_factory=set)

    def found(self) -> Group | None:
        """The attention, if it is one."""
        graph, scores = self.finder.graph, self.scores
        assert scores.q is not None and scores.k is not None
        self.known[scores.exp.outputs[0]] = {P.times(Term(total=1)): 1.0}, scores.dims
        self._is("q", scores.q)
        self._is("k", scores.k)
        self._read(scores.exp.outputs[0])
        while self.waiting:
            op = graph.ops[heapq.heappop(self.waiting)]
            self.queued.discard(self.finder.place[op])
            if op.name == "dot_general":
                self._dot(op)
            elif op.name == "optimization_barrier":
                for t, made in zip(op.inputs, op.outputs, strict=True):
                    self._same(t, made, lambda dims: dims)
            elif len(op.outputs) == 1:
                self._follow(op)
        if self.v is None or (self.out is None and not self.gradients):
            return None
        return Group(scores, self.v, self.out, self.drop, self.cotangent, self.gradients)

    def _read(self, t: Tensor) -> None:
        """Look at what reads a tensor, in the order of the program."""
        for op in self.finder.graph.readers.get(t, ()):
            place = self.finder.place[op]
            if place not in self.queued:
                self.queued.add(place)
                heapq.heappush(self.waiting, place)

    def _is(self, name: str, of: Labelled) -> bool:
        """Note what a tensor is; whether that goes with what is known."""
        known = self.arrays.setdefault(of.tensor, {})
        if name in known:
            return known[name] == of.dims
        known[name] = of.dims
        self._read(of.tensor)
        return True

    def _same(self, t: Tensor, made: Tensor, dims: Callable[[Dims], Dims | None]) -> None:
        """What a tensor is that another one is made of by moving it."""
        if t in self.known:
            terms, of = self.known[t]
            moved = dims(of)
            if moved is not None:
                self._know(made, terms, moved)
        for name, of in list(self.arrays.get(t, {}).items()):
            moved = dims(of)
            if moved is not None:
                self._is(name, Labelled(made, moved))

    def _know(self, t: Tensor, terms: Terms, dims: Dims) -> None:
        if t not in self.known:
            self.known[t] = {term: f for term, f in terms.items() if f}, varying(t, dims)
            self._read(t)

    def _follow(self, op: Op) -> None:
        """What an op makes of polynomials."""
        made, t = op.outputs[0], op.inputs[0]
        dims = self.known[t][1] if t in self.known else next(iter(self.arrays.get(t, {}).values()), None)
        if dims is not None and relabelled(op, dims) is not None:
            self._same(t, made, lambda dims: relabelled(op, dims))
        elif op.name in _UNARY and t in self.known:
            terms, dims = self.known[t]
            found = _UNARY[op.name](op, terms)
            if found is not None:
                self._know(made, found, dims)
        elif op.name in _BINARY:
            self._combined(op)
        elif op.name == "reduce_sum" and t in self.known:
            self._summed(op, *self.known[t])
        elif op.name == "select_n" and len(op.inputs) == 3:
            self._selected(op)

    def _combined(self, op: Op) -> None:
        given = [self.known.get(t) for t in op.inputs]
        like = next((g[1] for g in given if g is not None), None)
        if like is None:
            return
        values = [self._operand(t, like) if g is None else g for t, g in zip(op.inputs, given, strict=True)]
        if None in values:
            return
        (x, left), (y, right) = values  # type: ignore[misc]
        dims, terms = _joined(left, right), _BINARY[op.name](x, y)
        if dims is not None and terms is not None:
            self._know(op.outputs[0], terms, dims)

    def _operand(self, t: Tensor, like: Dims) -> _Value | None:
        """What combines with polynomials: a number, or what dropout multiplies with."""
        by = self.finder.constants.scalar(t)
        if by is not None:
            return {ONE: by}, (None,) * t.rank
        dims = varying(t, like)
        factor = self._multiplier(t, dims)
        return None if factor is None else ({KEPT: factor}, dims)

    def _multiplier(self, t: Tensor, dims: Dims) -> float | None:
        """What stands where dropout keeps a probability, and zero elsewhere, if that is what a tensor is."""
        if self._drops(t, dims):
            return 1.0
        op = self.finder.graph.producer.get(t)
        if op is None or op.backward != self.scores.exp.backward:
            return None
        before = labelled_before(op, dims) if len(op.outputs) == 1 else None
        if before is not None:
            return self._multiplier(op.inputs[0], before)
        if op.name in ("mul", "div"):
            by, inner = self.finder.constants.scalar(op.inputs[1]), self._multiplier(op.inputs[0], dims)
            if by and inner is not None:
                return inner * by if op.name == "mul" else inner / by
        return None

    def _drops(self, t: Tensor, dims: Dims) -> bool:
        found = dropout(t, dims, self.finder.graph, self.finder.constants)
        if found is None:
            return False
        self.drop = self.drop or found
        return (self.drop.key, self.drop.bits, self.drop.keep) == (found.key, found.bits, found.keep)

    def _summed(self, op: Op, terms: Terms, dims: Dims) -> None:
        axes, shape = op.params["axes"], op.inputs[0].shape
        found: Terms | None = terms
        for d in axes:
            if dims[d] is not None and dims[d] != self.scores.key:
                return
            if found:
                is_key = dims[d] is not None
                found = over_keys(found, shape[d], self._has_dropout) if is_key else scaled(found, shape[d])
        if found is not None:
            self._know(op.outputs[0], found, tuple(label for d, label in enumerate(dims) if d not in axes))

    @property
    def _has_dropout(self) -> bool:
        return self.drop is not None

    def _selected(self, op: Op) -> None:
        """What is left of probabilities, or of their cotangents, by a mask or by dropout."""
        which, *cases = op.inputs
        for case in (0, 1):
            t, other = cases[case], cases[1 - case]
            if t not in self.known or self.finder.constants.scalar(other) != 0:
                continue
            terms, dims = self.known[t]
            if any(self.finder.hides_alike(mask, which, varying(which, dims), case) for mask in self.scores.masks):
                if all(term.p for term in terms):
                    self._know(op.outputs[0], terms, dims)
            elif case == 1 and self._drops(which, varying(which, dims)):
                self._know(op.outputs[0], product(terms, {KEPT: 1.0}), dims)

    # Products with arrays

    def _dot(self, op: Op) -> None:
        for side in (0, 1):
            ours, other = op.inputs[side], op.inputs[1 - side]
            if ours in self.known:
                self._with_terms(op, side, other, *self.known[ours])
            elif "v" in self.arrays.get(ours, {}) and other not in self.known:
                self._cotangents(op, side, self.arrays[ours]["v"])
            elif "cotangent" in self.arrays.get(ours, {}) and self.v is None and other not in self.known:
                self._values(op, side, self.arrays[ours]["cotangent"])

    def _with_terms(self, op: Op, side: int, other: Tensor, terms: Terms, dims: Dims) -> None:
        """A product of a polynomial and an array: the output, or a gradient."""
        of, names = Dot.of(op), self.arrays.get(other, {})
        over = {dims[d] for d in of.contracted[side] if op.inputs[side].shape[d] > 1}
        kept, slope = self._is_kept(terms), self._slope(terms)
        if kept and over == {self.scores.key} and self.out is None:
            v = self._labelled(other, of, side, dims, {"fv"})
            made = v and of.made(side, dims, v.dims)
            if v is not None and made is not None:
                self.v, self.out = v, Labelled(op.outputs[0], made)
                self._is("v", v)
        elif self.out is None and not self.scores.exp.backward:
            return
        elif kept and over == self._queries and (self.cotangent is None or "cotangent" in names):
            g = self._labelled(other, of, side, dims, {"fv"})
            if g is not None and self._is_cotangent(g):
                self._gradient("v", op, of.made(side, dims, g.dims))
        elif slope and over == {self.scores.key} and "k" in names:
            self._gradient("q", op, of.made(side, dims, names["k"]))
        elif slope and over == self._queries and "q" in names:
            self._gradient("k", op, of.made(side, dims, names["q"]))

    def _is_kept(self, terms: Terms) -> bool:
        """Whether these are the probabilities, or what dropout makes of them, divided by what it keeps: in bfloat16 by
        that as rounded."""
        keep, within = (self.drop.keep, ROUNDED) if self.drop else (1.0, NEAR)
        factor = factor_of(terms, {P.times(KEPT) if self._has_dropout else P: 1.0})
        if factor is None or not _is_near(factor * keep, 1.0, within):
            return False
        self.keep = 1 / factor
        return True

    def _slope(self, terms: Terms) -> bool:
        """Whether it is the cotangent of the products of queries and keys."""
        inner = P.times(A).times(KEPT) if self._has_dropout else P.times(A)
        found = factor_of(terms, {inner: 1.0, P.times(Term(delta=1)): -1.0})
        return found is not None and _is_near(found * self.keep, self.scores.scale)

    @property
    def _queries(self) -> set[object]:
        """The labels of queries, and of heads that share keys."""
        q, k = self.scores.q, self.scores.k
        assert q is not None and k is not None
        return {label for label in q.dims if label is not None and label not in k.dims}

    def _cotangents(self, op: Op, side: int, v: Dims) -> None:
        """The product of values and the cotangent of the output: cotangents of the probabilities."""
        of = Dot.of(op)
        if {v[d] for d in of.contracted[side]} != {"fv"}:
            return
        known = self.arrays.get(op.inputs[1 - side], {}).get("cotangent") or (self.out and self.out.dims) or ()
        batch = {v[d] for d in of.batch[side]}
        free = [label for label in known if label not in (None, "fv") and label not in batch]
        g = self._labelled(op.inputs[1 - side], of, side, v, free)
        made = g and of.made(side, v, g.dims)
        if g is not None and made is not None and self._is_cotangent(g):
            self._know(op.outputs[0], {A: 1.0}, made)

    def _values(self, op: Op, side: int, cotangent: Dims) -> None:
        """The same, where the cotangent is known and the values are not."""
        of = Dot.of(op)
        if {cotangent[d] for d in of.contracted[side]} == {"fv"}:
            v = self._labelled(op.inputs[1 - side], of, side, cotangent, [self.scores.key])
            if v is not None and of.made(side, cotangent, v.dims) is not None:
                self.v = v
                self._is("v", v)

    def _is_cotangent(self, g: Labelled) -> bool:
        known = self.arrays.get(g.tensor, {})
        if self.cotangent is None:
            self.cotangent = g
        elif "cotangent" not in known:
            return False
        return self._is("cotangent", g)

    def _gradient(self, name: str, op: Op, dims: Dims | None) -> None:
        before = self.out and self.finder.graph.producer[self.out.tensor]
        if dims is not None and (before is None or self.finder.place[op] > self.finder.place[before]):
            self.gradients.setdefault(name, Labelled(op.outputs[0], dims))

    def _labelled(self, t: Tensor, of: Dot, side: int, dims: Dims, free: Iterable[object]) -> Labelled | None:
        """An operand of a product with what is known; `free`: what its free dimensions are."""
        found: list[object] = [None] * t.rank
        for role in (of.batch, of.contracted):
            for d, e in zip(role[side], role[1 - side], strict=True):
                found[e] = dims[d]
        left = [d for d in of.free[1 - side] if t.shape[d] > 1 or len(of.free[1 - side]) == 1]
        labels = list(free)
        if len(left) != len(labels):
            return None
        for d, label in zip(left, labels, strict=True):
            found[d] = label
        return Labelled(t, tuple(found))


def _is_near(x: float, y: float, within: float = NEAR) -> bool:
    return abs(x - y) <= within * abs(y)


def _joined(left: Dims, right: Dims) -> Dims | None:
    """Of what two arrays make together, element by element."""
    if len(left) != len(right):
        return left if not right else right if not left else None
    if any(a is not None and b is not None and a != b for a, b in zip(left, right, strict=True)):
        return None
    return tuple(a if a is not None else b for a, b in zip(left, right, strict=True))


def _divided(x: Terms, y: Terms) -> Terms | None:
    inverse = power(y, -1)
    return None if inverse is None else product(x, inverse)


_UNARY: Mapping[str, Callable[[Op, Terms], Terms | None]] = {
    "neg": lambda op, x: scaled(x, -1),
    "square": lambda op, x: power(x, 2),
    "integer_pow": lambda op, x: power(x, op.params["y"]),
}
_BINARY: Mapping[str, Callable[[Terms, Terms], Terms | None]] = {
    "add": added,
    "add_any": added,
    "sub": lambda x, y: added(x, scaled(y, -1)),
    "mul": product,
    "div": _divided,
}
