"""A traced graph as the rules see it: dimensions have identities, and ops that only relabel dimensions vanish.

A value is a tensor with an identity for each of its dimensions. Values that come from one another by `transpose`,
`squeeze` or `broadcast_in_dim` are the same value with dimensions permuted or missing: a value does not depend on a
dimension that it was broadcast over. What remains is looked up in a table from primitives to ops of the language.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from unity_jax.ops.rule import is_pointwise
from unity_jax.pcg.graph import Graph, Op, Tensor

Ids = tuple[int, ...]


class Value(NamedTuple):
    """A tensor, with the identity of each of its dimensions."""

    tensor: Tensor
    ids: Ids


@dataclass(frozen=True)
class Selection:
    """How rows are chosen: by numbers in a tensor (`indices`, with identities), or as `size` rows from `start` on.

    `params` are those of the gather or scatter.
    """

    kind: str  # "gather", "slice" or "dynamic_slice"
    ids: Ids
    indices: Value | None = None
    start: int = 0
    params: tuple[tuple[str, Any], ...] = ()


class Seen(NamedTuple):
    """An op of the language with the dimensions that its attributes name, each a tuple of identities.

    `symbol`: of an unknown function, the op that it stands for; of a selection, how rows are chosen.
    """

    op: str
    args: tuple[Value, ...]
    attrs: tuple[Any, ...] = ()
    symbol: Any = None


class Dims:
    """Identities of dimensions: their sizes, and which have turned out to be the same."""

    def __init__(self) -> None:
        self.size: dict[int, int] = {}
        self._same: dict[int, int] = {}
        self._next = itertools.count()

    def copy(self) -> Dims:
        found = Dims.__new__(Dims)
        found.size, found._same, found._next = dict(self.size), dict(self._same), self._next
        return found

    def fresh(self, size: int) -> int:
        i = next(self._next)
        self.size[i] = int(size)
        return i

    def find(self, i: int) -> int:
        while i in self._same:
            i = self._same[i]
        return i

    def all(self, ids: Sequence[int]) -> Ids:
        return tuple(self.find(i) for i in ids)

    def unite(self, a: int, b: int) -> bool:
        """Say that two dimensions are one. False if their sizes differ."""
        a, b = self.find(a), self.find(b)
        if a != b:
            self._same[max(a, b)] = min(a, b)
        return self.size[a] == self.size[b]


class View:
    """The graph, with what makes and what reads each tensor."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.maker = dict(graph.producer)
        self.rests: dict[Op, Op] = {}
        self.readers: dict[Tensor, list[Op]] = {}
        for op in graph.ops:
            for t in dict.fromkeys(self.source(t) for t in op.inputs):
                self.readers.setdefault(t, []).append(op)

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
        while (op := self.maker.get(t)) is not None and _relabels(op):
            t = op.inputs[0]
        return t

    def value(self, value: Value, dims: Dims) -> Value:
        """The same value where it is made, before it was relabelled."""
        t, ids = value
        while (op := self.maker.get(t)) is not None and _relabels(op):
            ids = _RELABELLED[op.name](op, ids, dims)
            t = op.inputs[0]
        return Value(t, ids)

    def seen(self, value: Value, dims: Dims) -> Iterator[Seen]:
        """The ops of the language that make a value (where it is made, see `value`)."""
        op = self.maker.get(value.tensor)
        if op is None or op.bodies:
            return
        if op.name in _SEEN:
            yield from _SEEN[op.name][0](self, op, value, dims)
        if _is_function(op):
            yield from _function(self, op, value, dims)


# Ops that only relabel dimensions: identities of the operand's from those of the result's.


def _relabels(op: Op) -> bool:
    if op.name == "reshape":
        return _kept(op) is not None
    return op.name in _RELABELLED and len(op.inputs) == 1


def _transposed(op: Op, ids: Ids, dims: Dims) -> Ids:
    where = op.params["permutation"]
    return tuple(ids[where.index(d)] for d in range(len(ids)))


def _broadcast(op: Op, ids: Ids, dims: Dims) -> Ids:
    """Dimensions of size one that were widened have an identity of their own."""
    found = []
    for size, d in zip(op.inputs[0].shape, op.params["broadcast_dimensions"], strict=True):
        found.append(ids[d] if op.outputs[0].shape[d] == size else dims.fresh(1))
    return tuple(found)


def _squeezed(op: Op, ids: Ids, dims: Dims) -> Ids:
    left = iter(ids)
    gone = {d % op.inputs[0].rank for d in op.params["dimensions"]}
    return tuple(dims.fresh(1) if d in gone else next(left) for d in range(op.inputs[0].rank))


def _reshaped(op: Op, ids: Ids, dims: Dims) -> Ids:
    kept = _kept(op)
    assert kept is not None
    return tuple(dims.fresh(1) if d is None else ids[d] for d in kept)


def _kept(op: Op) -> list[int | None] | None:
    """Where each dimension of the operand is in the result of a reshape that only adds or drops dimensions of one."""
    shape, result = op.inputs[0].shape, op.outputs[0].shape
    if op.params.get("dimensions") is not None or [n for n in shape if n != 1] != [n for n in result if n != 1]:
        return None
    places = iter(d for d, n in enumerate(result) if n != 1)
    return [None if n == 1 else next(places) for n in shape]


_RELABELLED: dict[str, Callable[[Op, Ids, Dims], Ids]] = {
    "transpose": _transposed,
    "broadcast_in_dim": _broadcast,
    "squeeze": _squeezed,
    "reshape": _reshaped,
}


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
    yield Seen("dot", _values(op, ids), (tuple(contracted),), op)


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
    yield Seen("conv", _values(op, [lhs, rhs]), ((features,), image, window), op)


def _arithmetic(name: str) -> Callable[[View, Op, Value, Dims], Iterator[Seen]]:
    def seen(view: View, op: Op, value: Value, dims: Dims) -> Iterator[Seen]:
        yield Seen(name, _pointwise_values(op, value, dims), (), op)

    return seen


def _reduction(name: str) -> Callable[[View, Op, Value, Dims], Iterator[Seen]]:
    def seen(view: View, op: Op, value: Value, dims: Dims) -> Iterator[Seen]:
        (x,) = op.inputs
        left = iter(value.ids)
        ids = [dims.fresh(n) if d in op.params["axes"] else next(left) for d, n in enumerate(x.shape)]
        yield Seen(name, _values(op, [ids]), (tuple(ids[d] for d in op.params["axes"]),), op)

    return seen


def _function(view: View, op: Op, value: Value, dims: Dims) -> Iterator[Seen]:
    """A pointwise op as an unknown function of the operands that are no constants."""
    found = [v for v in _pointwise_values(op, value, dims) if view.source(v.tensor).literal is None]
    if len(found) == 1 or (len(found) == 2 and found[0].tensor is found[1].tensor):
        yield Seen("f", (found[0],), (), op)
    elif len(found) == 2:
        yield Seen("h", tuple(found), (), op)


def _concat(view: View, op: Op, value: Value, dims: Dims) -> Iterator[Seen]:
    """Of two: of more, the first and the rest."""
    at = op.params["dimension"]
    operands = op.inputs if len(op.inputs) == 2 else (op.inputs[0], view.rest(op).outputs[0])
    parts = [dims.fresh(t.shape[at]) for t in operands]
    args = tuple(Value(t, _put_at(value.ids, at, part)) for t, part in zip(operands, parts, strict=True))
    yield Seen("concat", args, ((value.ids[at], *parts),), op)


def _stack(view: View, op: Op, value: Value, dims: Dims) -> Iterator[Seen]:
    at = op.params.get("axis", 0)
    rest = (*value.ids[:at], *value.ids[at + 1 :])
    yield Seen("stack", _values(op, [rest] * len(op.inputs)), ((value.ids[at],),), op)


def _unstack(view: View, op: Op, value: Value, dims: Dims) -> Iterator[Seen]:
    at = op.params.get("axis", 0)
    ids = (*value.ids[:at], dims.fresh(len(op.outputs)), *value.ids[at:])
    yield Seen("unstack", _values(op, [ids]), ((ids[at],), op.outputs.index(value.tensor)), op)


def _slice(view: View, op: Op, value: Value, dims: Dims) -> Iterator[Seen]:
    shape, start = op.inputs[0].shape, op.params["start_indices"]
    cut = [d for d, n in enumerate(shape) if n != op.outputs[0].shape[d]]
    if len(cut) == 1 and not any(s != 1 for s in op.params["strides"] or ()):
        yield from _cut(op, value, dims, cut[0], start[cut[0]], op.params["limit_indices"][cut[0]])


def _split(view: View, op: Op, value: Value, dims: Dims) -> Iterator[Seen]:
    at, sizes = op.params["axis"], op.params["sizes"]
    i = op.outputs.index(value.tensor)
    start = int(sum(sizes[:i]))
    yield from _cut(op, value, dims, at, start, start + int(sizes[i]))


def _cut(op: Op, value: Value, dims: Dims, at: int, start: int, limit: int) -> Iterator[Seen]:
    """Rows from `start` to `limit`: a part of a sum if they are first or last, and a selection."""
    whole = dims.fresh(op.inputs[0].shape[at])
    args = _values(op, [_put_at(value.ids, at, whole)])
    if start == 0 or limit == dims.size[whole]:
        yield Seen("slice", args, ((whole, value.ids[at]), 0 if start == 0 else 1), op)
    yield Seen("take", args, ((whole,),), Selection("slice", (value.ids[at],), None, int(start)))


def _pad(view: View, op: Op, value: Value, dims: Dims) -> Iterator[Seen]:
    config = op.params["padding_config"]
    cut = [d for d, c in enumerate(config) if tuple(c) != (0, 0, 0)]
    if len(cut) != 1 or not _is_zero(op.inputs[1]):
        return
    (at,) = cut
    low, high, inside = map(int, config[at])
    if low < 0 or high < 0 or inside:
        return
    part = dims.fresh(op.inputs[0].shape[at])
    args = (Value(op.inputs[0], _put_at(value.ids, at, part)),)
    if low == 0 or high == 0:
        yield Seen("pad", args, ((value.ids[at], part), 0 if low == 0 else 1), op)
    yield Seen("put", args, ((part,), (value.ids[at],)), Selection("slice", (part,), None, low))


def _dynamic_slice(view: View, op: Op, value: Value, dims: Dims) -> Iterator[Seen]:
    x, *starts = op.inputs
    cut = [d for d, n in enumerate(x.shape) if n != op.outputs[0].shape[d]]
    if len(cut) != 1 or any(not _is_zero(s) for d, s in enumerate(starts) if d != cut[0]):
        return
    (at,) = cut
    whole = dims.fresh(x.shape[at])
    rows = Selection("dynamic_slice", (value.ids[at],), Value(starts[at], ()))
    yield Seen("take", (Value(x, _put_at(value.ids, at, whole)),), ((whole,),), rows)


def _gather(view: View, op: Op, value: Value, dims: Dims) -> Iterator[Seen]:
    """Rows of one dimension, by numbers; dimensions that operand and numbers share are a batch."""
    x, indices = op.inputs
    n = op.params["dimension_numbers"]
    batch = tuple(n.operand_batching_dims)
    if len(n.start_index_map) != 1 or n.collapsed_slice_dims != n.start_index_map:
        return
    (rows,) = n.start_index_map
    sizes = op.params["slice_sizes"]
    if any(sizes[d] != x.shape[d] for d in range(x.rank) if d != rows and d not in batch):
        return
    found = [dims.fresh(x.shape[d]) for d in range(x.rank)]
    kept = [d for d in range(x.rank) if d != rows and d not in batch]
    for d, out in zip(kept, n.offset_dims, strict=True):
        found[d] = value.ids[out]
    numbers = [i for d, i in enumerate(value.ids) if d not in n.offset_dims]
    for d, at in zip(batch, n.start_indices_batching_dims, strict=True):
        found[d] = numbers[at]
    selection = Selection("gather", tuple(numbers), Value(indices, (*numbers, dims.fresh(1))), 0, _rows(op))
    yield Seen("take", (Value(x, tuple(found)),), ((found[rows],),), selection)


def _scatter(view: View, op: Op, value: Value, dims: Dims) -> Iterator[Seen]:
    """Rows added at their numbers: into zeros, or into a table."""
    table, indices, updates = op.inputs
    n = op.params["dimension_numbers"]
    batch = tuple(n.operand_batching_dims)
    if len(n.scatter_dims_to_operand_dims) != 1 or n.inserted_window_dims != n.scatter_dims_to_operand_dims:
        return
    (rows,) = n.scatter_dims_to_operand_dims
    kept = [d for d in range(table.rank) if d != rows and d not in batch]
    windows = [updates.shape[d] for d in n.update_window_dims]
    if windows != [table.shape[d] for d in kept]:
        return
    found = [-1] * updates.rank
    for d, at in zip(kept, n.update_window_dims, strict=True):
        found[at] = value.ids[d]
    places = [d for d in range(updates.rank) if d not in n.update_window_dims]
    for d, at in zip(batch, n.scatter_indices_batching_dims, strict=True):
        found[places[at]] = value.ids[d]
    added = tuple(at for at in places if found[at] < 0)
    for at in added:
        found[at] = dims.fresh(updates.shape[at])
    numbers = tuple(found[at] for at in places)
    selection = Selection("gather", numbers, Value(indices, (*numbers, dims.fresh(1))), 0, _rows(op))
    attrs = (tuple(found[at] for at in added), (value.ids[rows],))
    if _is_zero(view.source(table)):
        yield Seen("put", (Value(updates, tuple(found)),), attrs, selection)
    else:
        yield Seen("scatter", (Value(table, value.ids), Value(updates, tuple(found))), attrs, selection)


def _rows(op: Op) -> tuple[tuple[str, Any], ...]:
    keys = ("mode", "fill_value", "unique_indices", "indices_are_sorted")
    return tuple((k, op.params[k]) for k in keys if k in op.params)


def _values(op: Op, ids: Sequence[Sequence[int]]) -> tuple[Value, ...]:
    return tuple(Value(t, tuple(i)) for t, i in zip(op.inputs, ids, strict=True))


def _pointwise_values(op: Op, value: Value, dims: Dims) -> tuple[Value, ...]:
    """Operands of an elementwise op: a dimension of size one, or a scalar, is the same everywhere."""
    shape = op.outputs[0].shape

    def ids(t: Tensor) -> Ids:
        return tuple(i if n == m else dims.fresh(1) for i, n, m in zip(value.ids, t.shape, shape, strict=True))

    return tuple(Value(t, ids(t) if t.rank else ()) for t in op.inputs)


def _put_at(ids: Ids, at: int, new: int) -> Ids:
    return (*ids[:at], new, *ids[at + 1 :])


def _is_zero(t: Tensor) -> bool:
    return t.literal is not None and np.ndim(t.literal) == 0 and not np.any(t.literal)


_SEEN: dict[str, tuple[Callable[[View, Op, Value, Dims], Iterator[Seen]], str]] = {
    "dot_general": (_dot, "dot"),
    "conv_general_dilated": (_conv, "conv"),
    "add": (_arithmetic("add"), "add"),
    "add_any": (_arithmetic("add"), "add"),
    "sub": (_arithmetic("sub"), "sub"),
    "mul": (_arithmetic("mul"), "mul"),
    "neg": (_arithmetic("neg"), "neg"),
    "convert_element_type": (_arithmetic("convert"), "convert"),
    "reduce_sum": (_reduction("sum"), "sum"),
    "reduce_max": (_reduction("fold"), "fold"),
    "reduce_min": (_reduction("fold"), "fold"),
    "concatenate": (_concat, "concat"),
    "stack": (_stack, "stack"),
    "unstack": (_unstack, "unstack"),
    "slice": (_slice, "slice take"),
    "split": (_split, "slice take"),
    "pad": (_pad, "pad put"),
    "dynamic_slice": (_dynamic_slice, "take"),
    "gather": (_gather, "take"),
    "scatter-add": (_scatter, "put scatter"),
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
