"""A traced graph as the rules see it: dimensions have identities, and ops that only relabel dimensions vanish.

Values that come from one another by relabelling (`relabel`) are the same value with dimensions permuted, split, merged
or missing. What remains is looked up in a table from primitives to ops of the language.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from unity_jax.ops.rules import is_pointwise
from unity_jax.pcg.graph import Graph, Op, Tensor
from unity_jax.rewrite import selections
from unity_jax.rewrite.dims import Dims, Ids, Seen, Value, put_at, values
from unity_jax.rewrite.language import Term
from unity_jax.rewrite.relabel import relabelled, relabels
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


@functools.cache
def outline(term: Term) -> Outline:
    """The outline of a term that is no variable."""
    return _outline(seen_as(term.op), frozenset(outline(a) for a in term.args if a.op))


_outline = functools.cache(Outline)


class View:
    """The graph, with what makes and what reads each tensor.

    **Arguments:** `emitted`: targets of rules as traced so far, for views of graphs that are alike; see `emit`.
    """

    def __init__(self, graph: Graph, emitted: dict[object, Graph | str] | None = None) -> None:
        self.graph = graph
        self.emitted = {} if emitted is None else emitted
        self.maker = dict(graph.producer)
        self.sources: dict[Tensor, Tensor] = {}
        self.made_as: dict[tuple[Outline, Tensor], bool] = {}
        self.outputs = {self.source(t) for t in graph.outputs}
        self.rests: dict[Op, Op] = {}
        self.readers: dict[Tensor, list[Op]] = {}
        for op in graph.ops:
            for t in dict.fromkeys(self.source(t) for t in op.inputs):
                self.readers.setdefault(t, []).append(op)

    @functools.cached_property
    def computed(self) -> dict[object, Op]:
        """The ops of the graph by what they compute, loops and branches aside."""
        return {computes(op): op for op in reversed(self.graph.ops) if not op.bodies}

    def rest(self, op: Op) -> Op:
        """The concatenation of all operands but the first, which the graph does not hold: the rules join two."""
        if op not in self.rests:
            first, *others = op.inputs
            shape = list(op.outputs[0].shape)
            shape[op.params["dimension"]] -= first.shape[op.params["dimension"]]
            made = dataclasses.replace(op, inputs=tuple(others), outputs=(Tensor(tuple(shape), first.dtype),))
            self.rests[op] = self.maker[made.outputs[0]] = made
        return self.rests[op]

    def virtual(self, t: Tensor) -> Op | None:
        """The op that makes a tensor which the graph does not hold."""
        return self.maker.get(t) if t not in self.graph.producer else None

    def source(self, t: Tensor) -> Tensor:
        """The tensor that `t` is without its relabelling."""
        found = self.sources.get(t)
        if found is None:
            op = self.maker.get(t)
            found = self.sources[t] = self.source(op.inputs[0]) if op is not None and relabels(op) else t
        return found

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
        if key not in self.made_as:
            op = self.maker.get(self.source(t))
            self.made_as[key] = (
                op is not None
                and outline.op in names_of(op)
                and all(any(self.may_be(a, t) for t in self.operands(op)) for a in outline.args)
            )
        return self.made_as[key]

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
        if op is None or op.name not in _SUMS:
            return [value]
        found = []
        for operand in _pointwise_values(op, value, dims):
            inner = self.value(operand, dims)
            found += self.summands(inner, dims) if self.is_summand(inner.tensor) else [inner]
        return found

    def operands(self, op: Op) -> Iterator[Tensor]:
        """What an op takes; of a sum, what is added up."""
        for t in map(self.source, op.inputs):
            if op.name in _SUMS and self.is_summand(t):
                yield from self.operands(self.maker[t])
            else:
                yield t

    def is_summand(self, t: Tensor) -> bool:
        """Whether a sum is read by another sum and by nothing else."""
        op, readers = self.maker.get(t), self.readers.get(t, ())
        return (
            op is not None
            and op.name in _SUMS
            and len(readers) == 1
            and readers[0].name in _SUMS
            and t not in self.outputs
        )

    def seen(self, value: Value, dims: Dims) -> Iterator[Seen]:
        """The ops of the language that make a value (where it is made, see `value`)."""
        op = self.maker.get(value.tensor)
        if op is None or op.bodies:
            return
        if op.name in _SEEN:
            yield from _SEEN[op.name][0](self, op, value, dims)
        if _is_function(op):
            yield from _function(self, op, value, dims)


# Ops of the language. Each function takes the op, its result as a value, and makes the values of its operands.


def _dot(view: View, op: Op, value: Value, dims: Dims) -> Iterator[Seen]:
    (lhs_k, rhs_k), (lhs_b, rhs_b) = op.params["dimension_numbers"]
    ids: list[list[int]] = [[-1] * t.rank for t in op.inputs]
    left = iter(value.ids)
    for a, b in zip(lhs_b, rhs_b, strict=True):
        ids[0][a] = ids[1][b] = next(left)
    contracted = []
    for a, b in zip(lhs_k, rhs_k, strict=True):
        contracted.append(dims.fresh(op.inputs[0].shape[a]))
        ids[0][a] = ids[1][b] = contracted[-1]
    for side in ids:
        for d, i in enumerate(side):
            if i < 0:
                side[d] = next(left)
    yield Seen("dot", values(op, ids), (tuple(contracted),), op)


def _conv(view: View, op: Op, value: Value, dims: Dims) -> Iterator[Seen]:
    """Images and windows have identities of their own; places of the result are not places of the image."""
    numbers = op.params["dimension_numbers"]
    if op.params["feature_group_count"] != 1 or op.params["batch_group_count"] != 1:
        return
    features = dims.fresh(op.inputs[0].shape[numbers.lhs_spec[1]])
    lhs = [dims.fresh(n) for n in op.inputs[0].shape]
    rhs = [dims.fresh(n) for n in op.inputs[1].shape]
    lhs[numbers.lhs_spec[0]], rhs[numbers.rhs_spec[0]] = (value.ids[d] for d in numbers.out_spec[:2])
    lhs[numbers.lhs_spec[1]] = rhs[numbers.rhs_spec[1]] = features
    image = tuple(lhs[d] for d in numbers.lhs_spec[2:])
    window = tuple(rhs[d] for d in numbers.rhs_spec[2:])
    yield Seen("conv", values(op, [lhs, rhs]), ((features,), image, window), op)


def _arithmetic(name: str) -> Callable[[View, Op, Value, Dims], Iterator[Seen]]:
    def seen(view: View, op: Op, value: Value, dims: Dims) -> Iterator[Seen]:
        yield Seen(name, _pointwise_values(op, value, dims), (), op)

    return seen


def _reduction(name: str) -> Callable[[View, Op, Value, Dims], Iterator[Seen]]:
    def seen(view: View, op: Op, value: Value, dims: Dims) -> Iterator[Seen]:
        (x,) = op.inputs
        left = iter(value.ids)
        ids = [dims.fresh(n) if d in op.params["axes"] else next(left) for d, n in enumerate(x.shape)]
        yield Seen(name, values(op, [ids]), (tuple(ids[d] for d in op.params["axes"]),), op)

    return seen


def _function(view: View, op: Op, value: Value, dims: Dims) -> Iterator[Seen]:
    """A pointwise op as an unknown function of the operands that are no constants."""
    found = [v for v in _pointwise_values(op, value, dims) if view.source(v.tensor).literal is None]
    if len(found) == 1 or (len(found) == 2 and found[0].tensor is found[1].tensor):
        yield Seen("f", (found[0],), (), op)
    elif len(found) == 2:
        yield Seen("h", tuple(found), (), op)


def _quotient(view: View, op: Op, value: Value, dims: Dims) -> Iterator[Seen]:
    """Division by a constant keeps zero, unless that is zero or not a number."""
    x, divisor = _pointwise_values(op, value, dims)
    constant = view.source(divisor.tensor).literal
    if constant is None or view.source(x.tensor).literal is not None:
        return
    if np.all(constant) and not np.any(np.isnan(constant)):
        yield Seen("convert", (x,), (), op)


def _concat(view: View, op: Op, value: Value, dims: Dims) -> Iterator[Seen]:
    """Of two: of more, the first and the rest."""
    at = op.params["dimension"]
    operands = op.inputs if len(op.inputs) == 2 else (op.inputs[0], view.rest(op).outputs[0])
    parts = [dims.fresh(t.shape[at]) for t in operands]
    args = tuple(Value(t, put_at(value.ids, at, part)) for t, part in zip(operands, parts, strict=True))
    yield Seen("concat", args, ((value.ids[at], *parts),), op)


def _stack(view: View, op: Op, value: Value, dims: Dims) -> Iterator[Seen]:
    at = op.params.get("axis", 0)
    rest = (*value.ids[:at], *value.ids[at + 1 :])
    yield Seen("stack", values(op, [rest] * len(op.inputs)), ((value.ids[at],),), op)


def _unstack(view: View, op: Op, value: Value, dims: Dims) -> Iterator[Seen]:
    at = op.params.get("axis", 0)
    ids = (*value.ids[:at], dims.fresh(len(op.outputs)), *value.ids[at:])
    yield Seen("unstack", values(op, [ids]), ((ids[at],), op.outputs.index(value.tensor)), op)


def _pointwise_values(op: Op, value: Value, dims: Dims) -> tuple[Value, ...]:
    """Operands of an elementwise op: a dimension of size one, or a scalar, is the same everywhere."""
    shape = op.outputs[0].shape

    def ids(t: Tensor) -> Ids:
        return tuple(i if n == m else dims.fresh(1) for i, n, m in zip(value.ids, t.shape, shape, strict=True))

    return tuple(Value(t, ids(t) if t.rank else ()) for t in op.inputs)


_SUMS = ("add", "add_any")

_SEEN: dict[str, tuple[Callable[[View, Op, Value, Dims], Iterator[Seen]], str]] = {
    "dot_general": (_dot, "dot"),
    "conv_general_dilated": (_conv, "conv"),
    **dict.fromkeys(_SUMS, (_arithmetic("add"), "add")),
    "sub": (_arithmetic("sub"), "sub"),
    "mul": (_arithmetic("mul"), "mul"),
    "neg": (_arithmetic("neg"), "neg"),
    "convert_element_type": (_arithmetic("convert"), "convert"),
    "div": (_quotient, "convert"),
    "reduce_sum": (_reduction("sum"), "sum"),
    "reduce_max": (_reduction("fold"), "fold"),
    "reduce_min": (_reduction("fold"), "fold"),
    "concatenate": (_concat, "concat"),
    "stack": (_stack, "stack"),
    "unstack": (_unstack, "unstack"),
    "slice": (selections.seen_slice, "slice unstack take"),
    "split": (selections.seen_split, "slice unstack take"),
    "pad": (selections.seen_pad, "pad put"),
    "dynamic_slice": (selections.seen_dynamic_slice, "take"),
    "gather": (selections.seen_gather, "take"),
    "scatter-add": (selections.seen_scatter, "put scatter"),
}
"""By primitive: how its ops are seen, and as which ops of the language."""


def names_of(op: Op) -> tuple[str, ...]:
    """The ops of the language that an op may be seen as."""
    if op.bodies:
        return ()
    names = tuple(_SEEN[op.name][1].split()) if op.name in _SEEN else ()
    return (*names, "f", "h") if _is_function(op) else names


def seen_as(name: str) -> str:
    """How a view shows an op of the language: functions of one operand are all `f`."""
    return "f" if name == "g" else name


def _is_function(op: Op) -> bool:
    return len(op.outputs) == 1 and is_pointwise(op)
