"""A traced graph as the rules see it: dimensions have identities, and ops that only relabel dimensions vanish.

Values that come from one another by relabelling (`relabel`) are the same value with dimensions permuted, split, merged
or missing. What remains is looked up in the table of ops (`RuleOp.seen`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from unity_jax.ops.rules import is_pointwise
from unity_jax.pcg.graph import Graph, Op, Tensor
from unity_jax.rewrite.dims import Dims, Ids, Seen, Value
from unity_jax.rewrite.language import Term
from unity_jax.rewrite.relabel import relabelled, relabels
from unity_jax.rewrite.table import OPS, POINTWISE, SEEN_AS
from unity_jax.trace import has_effects


def computes(op: Op) -> object:
    """Equal for ops that compute the same."""
    return op.signature, tuple(id(t) for t in op.inputs if t.literal is None)


@dataclass(frozen=True, eq=False)
class Outline:
    """The ops of a term, as a view shows them: one object for all terms that are equal in this. `args`: the arguments
    that are no variables."""

    op: str
    args: frozenset[Outline]

    @functools.cached_property
    def below(self) -> frozenset[str]:
        """The ops of the arguments."""
        return frozenset(a.op for a in self.args)


def outline(term: Term) -> Outline:
    """The outline of a term that is no variable."""
    known = term.__dict__  # as of a cached property: every match asks
    if "outline" not in known:
        known["outline"] = _outline(term.op, frozenset(outline(a) for a in term.args if a.op))
    found: Outline = known["outline"]
    return found


_outline = functools.cache(Outline)


class View:
    """The graph, with what makes and what reads each tensor.

    **Arguments:** `emitted`: targets of rules as traced so far, for views of graphs that are alike; see `emit`.
    """

    def __init__(self, graph: Graph, emitted: dict[object, Graph | str] | None = None) -> None:
        self.graph = graph
        self.emitted = {} if emitted is None else emitted
        self.maker = dict(graph.producer)
        self.sources: dict[Tensor, Tensor] = {}  # of what was relabelled
        for op in graph.ops:
            if relabels(op):
                t = op.inputs[0]
                self.sources[op.outputs[0]] = self.sources.get(t, t)
        self.made_as: dict[tuple[Outline, Tensor], bool] = {}
        self.below: dict[Op, tuple[Sequence[Tensor], frozenset[str]]] = {}  # see `_below`
        self.outputs = {self.source(t) for t in graph.outputs}
        self.rests: dict[Op, Op] = {}
        self.readers: dict[Tensor, list[Op]] = {}
        for op in graph.ops:
            taken = [self.sources.get(t, t) for t in op.inputs]
            for t in dict.fromkeys(taken) if len(taken) > 1 else taken:
                self.readers.setdefault(t, []).append(op)

    def computing(self, op: Op) -> Op | None:
        """The first op of the graph that computes the same, loops and branches aside."""
        read = next((t for t in op.inputs if t.literal is None), None)
        among = self.graph.ops if read is None else self.graph.readers.get(read, ())
        same = computes(op)
        return next((o for o in among if o.signature is op.signature and not o.bodies and computes(o) == same), None)

    def rest(self, op: Op) -> Op:
        """The concatenation of all operands but the first, which the graph does not hold: the rules join two."""
        if op not in self.rests:
            first, *others = op.inputs
            shape = list(op.outputs[0].shape)
            shape[op.params["dimension"]] -= first.shape[op.params["dimension"]]
            rest = Tensor(tuple(shape), first.dtype, times=op.times)
            made = dataclasses.replace(op, inputs=tuple(others), outputs=(rest,))
            self.rests[op] = self.maker[made.outputs[0]] = made
        return self.rests[op]

    def virtual(self, t: Tensor) -> Op | None:
        """The op that makes a tensor which the graph does not hold."""
        return self.maker.get(t) if t not in self.graph.producer else None

    def source(self, t: Tensor) -> Tensor:
        """The tensor that `t` is without its relabelling."""
        return self.sources.get(t, t)

    def cast_from(self, t: Tensor) -> Tensor:
        """The tensor that `t` is before a change of type: `jnp.pad` casts its zero, an integer, in the program."""
        op = self.maker.get(t)
        return self.cast_from(op.inputs[0]) if op is not None and op.name == "convert_element_type" else t

    @functools.cached_property
    def same(self) -> dict[Tensor, Tensor]:
        """For each result of an op the first that is computed alike: `a[i]` and `b[i]` both make `i` count from the
        end where it is negative. Barriers keep apart what they were put between."""
        first: dict[object, Tensor] = {}
        found: dict[Tensor, Tensor] = {}
        for op in self.graph.ops:
            operands = tuple(id(found.get(t, t)) for t in op.inputs if t.literal is None)
            alone = op.bodies or op.name.startswith(("random", "optimization_barrier")) or has_effects(op)
            for i, t in enumerate(op.outputs):
                found[t] = t if alone else first.setdefault((op.signature, operands, i), t)
        return found

    def may_be(self, outline: Outline, t: Tensor) -> bool:
        """Whether the ops that make a tensor are those of a term, at a glance."""
        key = (outline, t)
        found = self.made_as.get(key)
        if found is None:
            op = self.maker.get(self.source(t))
            found = op is not None and outline.op in names_of(op)
            if op is not None and found and outline.args:
                operands, names = self._below(op)
                found = outline.below <= names and all(any(self.may_be(a, t) for t in operands) for a in outline.args)
            self.made_as[key] = found
        return found

    def _below(self, op: Op) -> tuple[Sequence[Tensor], frozenset[str]]:
        """What an op takes (`operands`), and the ops of the language that this may be seen as."""
        if op not in self.below:
            operands = tuple(dict.fromkeys(self.operands(op)))
            makers = (self.maker.get(t) for t in operands)
            self.below[op] = operands, frozenset(n for made in makers if made is not None for n in names_of(made))
        return self.below[op]

    def has_repeated(self, t: Tensor, times: int) -> bool:
        """Whether an operand of what makes a tensor is one of so many times fewer elements, relabelled."""
        return any(math.prod(t.shape) == times * math.prod(x.shape) for x in self._before(self.maker[t].inputs))

    def _before(self, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
        """Tensors, and what each was before it was relabelled, step by step."""
        for t in tensors:
            yield t
            while (op := self.maker.get(t)) is not None and relabels(op):
                t = op.inputs[0]
                yield t

    def value(self, value: Value, dims: Dims) -> Value:
        """The same value where it is made, before it was relabelled."""
        t, ids = value
        while (op := self.maker.get(t)) is not None and relabels(op):
            before = relabelled(op, ids, dims)
            if before is None:
                break
            t, ids = op.inputs[0], before
        return Value(t, ids)

    def summands(self, value: Value, dims: Dims) -> list[Value]:
        """What is added up to a value, over sums that nothing else reads."""
        op = self.maker.get(value.tensor)
        if op is None or op.name not in SUMS:
            return [value]
        found = []
        for operand in pointwise_values(op, value, dims):
            inner = self.value(operand, dims)
            found += self.summands(inner, dims) if self.is_summand(inner.tensor) else [inner]
        return found

    def operands(self, op: Op) -> Iterator[Tensor]:
        """What an op takes; of a sum, what is added up."""
        for t in map(self.source, op.inputs):
            if op.name in SUMS and self.is_summand(t):
                yield from self.operands(self.maker[t])
            else:
                yield t

    def is_summand(self, t: Tensor) -> bool:
        """Whether a sum is read by another sum and by nothing else."""
        op, readers = self.maker.get(t), self.readers.get(t, ())
        return (
            op is not None
            and op.name in SUMS
            and len(readers) == 1
            and readers[0].name in SUMS
            and t not in self.outputs
        )

    def seen(self, value: Value, dims: Dims, name: str) -> Iterator[Seen]:
        """The ways in which an op of the language makes a value (where it is made, see `value`)."""
        op = self.maker.get(value.tensor)
        if op is None or op.bodies:
            return iter(())
        every = OPS[name].seen
        see = every.get(op.name) or (every.get(POINTWISE) if _is_function(op) else None)
        return see(self, op, value, dims) if see else iter(())


SUMS = ("add", "add_any")
"""Primitives that add two values."""


def names_of(op: Op) -> tuple[str, ...]:
    """The ops of the language that an op may be seen as."""
    known = op.__dict__  # as of a cached property: every view of a graph asks
    if "names_of" not in known:
        known["names_of"] = _names_of(op)
    return known["names_of"]


def _names_of(op: Op) -> tuple[str, ...]:
    if op.bodies:
        return ()
    return (*SEEN_AS.get(op.name, ()), *(SEEN_AS[POINTWISE] if _is_function(op) else ()))


def _is_function(op: Op) -> bool:
    return len(op.outputs) == 1 and is_pointwise(op)


def pointwise_values(op: Op, value: Value, dims: Dims) -> tuple[Value, ...]:
    """Operands of an elementwise op: a dimension of size one, or a scalar, is the same everywhere."""
    shape = op.outputs[0].shape

    def ids(t: Tensor) -> Ids:
        return tuple(i if n == m else dims.fresh(1) for i, n, m in zip(value.ids, t.shape, shape, strict=True))

    return tuple(Value(t, ids(t) if t.rank else ()) for t in op.inputs)
