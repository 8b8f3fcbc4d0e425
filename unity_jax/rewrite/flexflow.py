"""Rules in the JSON form that FlexFlow published (`{"rule": [{"name", "srcOp", "dstOp", "mappedOutput"}, ...]}`).

Its tensors have a replica dimension, rows and columns, and sizes and degrees go unsaid, so both are inferred: operands
of an op must fit, and both sides must give the same types. The form says nothing of what a tensor with replicas holds.
Here, a device axis of its own: OP_REPLICATE puts equal copies on it, OP_REDUCE sums over it, OP_CONCAT along the
replica dimension puts one operand on each of its devices, and a replicated input is any value on each. OP_PARTITION
cuts rows or columns into blocks on a device axis, OP_COMBINE puts the blocks back. A compute op needs its operands on
the same devices. What holds only when each shard is taken for a whole tensor has no types, or is false, in this
reading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unity_jax.rewrite.language import Dim, RuleError, Term, Type, apply, unified, variable
from unity_jax.rewrite.rule import Rule

REPLICA, ROW, COLUMN = 0, 1, 2

ACTIVATIONS = {0: None, 1: "g", 2: "f"}
"""PM_ACTI, in the numbers of TASO: none, sigmoid, relu."""

_PASSES = 100
"""Inferring ends after so many refinements."""


def imported(data: Mapping[str, Any]) -> Rule:
    """A rule in the language.

    **Raises:** `RuleError` that names the rule, where it is malformed, has an unknown op, or no types fit.
    """
    name = str(data.get("name", "rule without a name")) if isinstance(data, Mapping) else "rule without a name"
    try:
        sides = {side: [_Op.read(op) for op in _field(data, side, list)] for side in ("srcOp", "dstOp")}
        keys = ("srcOpId", "srcTsId", "dstOpId", "dstTsId")
        results = [tuple(_field(m, k, int) for k in keys) for m in _field(data, "mappedOutput", list)]
        known = _Known()
        for _ in range(_PASSES):
            try:
                rule = _built(name, sides, results, known)
                known.rename(rule)
                return _built(name, sides, results, known)
            except _Refined:
                known.settle()
        raise RuleError("no types fit: operands need more and more device axes")
    except RuleError as error:
        raise RuleError(f"{name}: {str(error).removeprefix(f'{name}: ')}") from error


def _field(data: Any, key: str, kind: type) -> Any:
    if not isinstance(data, Mapping) or not isinstance(data.get(key), kind):
        raise RuleError(f"needs {key!r}, {'a list' if kind is list else 'a number' if kind is int else 'text'}")
    return data[key]


@dataclass(frozen=True)
class _Op:
    type: str
    inputs: tuple[tuple[int, int], ...]
    para: Mapping[str, int]

    @staticmethod
    def read(data: Any) -> _Op:
        inputs = tuple((_field(i, "opId", int), _field(i, "tsId", int)) for i in _field(data, "input", list))
        para = {_field(p, "key", str): _field(p, "value", int) for p in _field(data, "para", list)}
        return _Op(_field(data, "type", str), inputs, para)

    def get(self, key: str) -> int:
        if key not in self.para:
            raise RuleError(f"{self.type} without {key}")
        return self.para[key]


Axes = tuple[Dim, ...]
Place = tuple[tuple[int, int], int]
"""A replica dimension, the rows or the columns of an external input."""


class _Refined(Exception):
    """More is known of the types: start again with it."""


@dataclass
class _Known:
    """What is known of sizes and device axes: what names stand for, the degrees of axes, and those that external
    inputs lie on."""

    names: dict[str, Dim] = field(default_factory=dict)
    degree: dict[str, int] = field(default_factory=dict)
    lying: dict[Place, list[Dim]] = field(default_factory=dict)

    def settle(self) -> None:
        """Names stand for what is known of them in the end."""
        for _ in self.names:
            self.names = {n: d.renamed(self.names) for n, d in self.names.items()}

    def rename(self, rule: Rule) -> None:
        """Short names for the sizes and axes of a rule."""
        every = dict.fromkeys(n for r in (*rule.source, *rule.target) for t in r.walk() for n in _names(t))
        for axes, letters in ((True, "pqrs"), (False, "mnklabcdeghijuvwxyz")):
            found = [n for n in every if (n in self.degree) == axes]
            short = {n: Dim(letters[i : i + 1] or f"{letters[0]}_{i}") for i, n in enumerate(found)}
            self.names = short | {n: d.renamed(short) for n, d in self.names.items()}
            self.degree |= {d.name: self.degree[n] for n, d in short.items() if axes}

    def axis(self, name: str, degree: int) -> Dim:
        found = Dim(name).renamed(self.names)
        return self.same_degree(found, degree)

    def same_degree(self, axis: Dim, degree: int) -> Dim:
        if self.degree.setdefault(axis.name, degree) != degree:
            raise RuleError(f"an axis of {self.degree[axis.name]} devices and one of {degree}")
        return axis

    def same(self, a: Dim, b: Dim) -> None:
        """Two sizes, or two axes, are one."""
        names = unified(a, b)
        if names is None:
            raise RuleError(f"no types fit: sizes {a} and {b} are never the same")
        for n, d in names.items():
            if n in self.degree:
                self.same_degree(d, self.degree[n])
        self.names |= names
        if names:
            raise _Refined

    def put(self, place: Place, axis: Dim) -> None:
        """An external input lies on one more axis."""
        self.lying.setdefault(place, []).append(axis)
        raise _Refined

    def axes(self, place: Place) -> Axes:
        return tuple(a.renamed(self.names) for a in self.lying.get(place, ()))


@dataclass(frozen=True)
class _Tensor:
    """A term with its rows and columns, the axes that its replicas, rows and columns lie on (the last one innermost),
    and the places of external inputs that decide about these."""

    term: Term
    row: Dim
    column: Dim
    axes: tuple[Axes, Axes, Axes]
    origin: tuple[Place, Place, Place]

    def size(self, at: int) -> Dim:
        return self.row if at == ROW else self.column

    def with_size(self, at: int, size: Dim) -> tuple[Dim, Dim]:
        return (size, self.column) if at == ROW else (self.row, size)

    def with_axes(self, at: int, axes: Axes) -> tuple[Axes, Axes, Axes]:
        return tuple(axes if i == at else a for i, a in enumerate(self.axes))  # type: ignore[return-value]


def _built(name: str, sides: Mapping[str, Sequence[_Op]], results: Sequence[tuple[int, ...]], known: _Known) -> Rule:
    builders = {side: _Side(side, ops, known) for side, ops in sides.items()}
    source = [builders["srcOp"].tensor(op, at) for op, at, _, _ in results]
    target = [builders["dstOp"].tensor(op, at) for _, _, op, at in results]
    for a, b in zip(source, target, strict=True):
        _fit(known, a, b)
    every = dict.fromkeys(t for r in (*source, *target) for t in r.term.walk() if not t.op)
    return Rule(name, tuple(every), tuple(s.term for s in source), tuple(t.term for t in target))


def _names(t: Term) -> Iterator[str]:
    for d in (*t.type.devices, *t.type.dims):
        yield from d.names()


class _Side:
    """The tensors of one side."""

    def __init__(self, side: str, ops: Sequence[_Op], known: _Known) -> None:
        self.side, self.ops, self.known = side, ops, known
        self.made: dict[int, list[_Tensor]] = {}

    def tensor(self, op: int, at: int) -> _Tensor:
        if op < 0:
            return self.external(op, at)
        if op not in self.made:
            if op >= len(self.ops):
                raise RuleError(f"{self.side} has no op {op}")
            self.made[op] = []  # in the making
            self.made[op] = self.apply(op)
        if not 0 <= at < len(self.made[op]):
            raise RuleError(f"{self.side}: op {op} has no tensor {at}, or needs itself")
        return self.made[op][at]

    def external(self, op: int, at: int) -> _Tensor:
        known, name = self.known, f"x{-op}" + (f"_{at}" if at else "")
        row, column = (Dim(f"{d}{name[1:]}").renamed(known.names) for d in "mn")
        origin = tuple(((op, at), place) for place in (REPLICA, ROW, COLUMN))
        axes = tuple(known.axes(place) for place in origin)
        if len({a for each in axes for a in each}) < sum(map(len, axes)):
            raise RuleError(f"no types fit: {name} would lie twice on the same devices")
        term = variable(name, Type((row, column), tuple(a for each in axes for a in each)))
        return _Tensor(term, row, column, axes, origin)  # type: ignore[arg-type]

    def apply(self, at: int) -> list[_Tensor]:
        op = self.ops[at]
        if op.type not in _OPS:
            raise RuleError(f"unknown op {op.type}")
        count, run = _OPS[op.type]
        inputs = [self.tensor(*i) for i in op.inputs]
        if not inputs or (count is not None and len(inputs) != count):
            raise RuleError(f"{op.type} with {len(inputs)} inputs")
        return run(self.known, op, f"{self.side[0]}{at}", *inputs)


# Fitting operands. What does not fit yet is made to: names become one, or an external input lies on one more axis.


def _fit(known: _Known, x: _Tensor, y: _Tensor, but: int | None = None) -> None:
    """Both have the same sizes and axes, but for one size."""
    for at in (ROW, COLUMN):
        if at != but:
            known.same(x.size(at), y.size(at))
        _fit_axes(known, x, y, x.axes[at], y.axes[at], at)
    only_x = tuple(a for a in x.axes[REPLICA] if a not in y.axes[REPLICA])
    only_y = tuple(a for a in y.axes[REPLICA] if a not in x.axes[REPLICA])
    _fit_axes(known, x, y, only_x, only_y, REPLICA)


def _fit_axes(known: _Known, x: _Tensor, y: _Tensor, xs: Axes, ys: Axes, at: int) -> None:
    for a, b in zip(xs, ys, strict=False):
        known.same(a, b)
    for longer, place in ((xs[len(ys) :], y.origin[at]), (ys[len(xs) :], x.origin[at])):
        for axis in longer:
            known.put(place, axis)


def _present(known: _Known, axes: Axes, x: _Tensor) -> Axes:
    """Axes are among those of the replicas of `x`; those that are left."""
    rest = tuple(a for a in x.axes[REPLICA] if a not in axes)
    for axis in axes:
        if axis not in x.axes[REPLICA]:
            alike = [a for a in rest if known.degree[a.name] == known.degree[axis.name]]
            if alike:
                known.same(alike[0], axis)
            known.put(x.origin[REPLICA], axis)
    return rest


# Ops


def _place(op: _Op, key: str, of: Sequence[int] = (ROW, COLUMN)) -> int:
    if op.get(key) not in of:
        raise RuleError(f"{op.type} along dimension {op.get(key)} has no meaning here")
    return op.get(key)


def _linear(known: _Known, op: _Op, name: str, x: _Tensor, w: _Tensor) -> list[_Tensor]:
    known.same(x.column, w.column)
    _fit_axes(known, x, w, x.axes[COLUMN], w.axes[COLUMN], COLUMN)
    rest_w, rest_x = _present(known, x.axes[ROW], w), _present(known, w.axes[ROW], x)
    only_x, only_w = (tuple(a for a in r if a not in s) for r, s in ((rest_x, rest_w), (rest_w, rest_x)))
    _fit_axes(known, x, w, only_x, only_w, REPLICA)
    term = apply("dot", x.term, w.term, attrs=[x.column])
    activation = op.para.get("PM_ACTI", 0)
    if activation not in ACTIVATIONS:
        raise RuleError(f"unknown PM_ACTI {activation}")
    if ACTIVATIONS[activation]:
        term = apply(ACTIVATIONS[activation], term)  # type: ignore[arg-type]
    axes = ((*rest_x, *x.axes[COLUMN]), x.axes[ROW], w.axes[ROW])
    return [_Tensor(term, x.row, w.row, axes, (x.origin[REPLICA], x.origin[ROW], w.origin[ROW]))]


def _unary(function: str) -> Callable[..., list[_Tensor]]:
    def run(known: _Known, op: _Op, name: str, x: _Tensor) -> list[_Tensor]:
        return [_Tensor(apply(function, x.term), x.row, x.column, x.axes, x.origin)]

    return run


def _binary(function: str) -> Callable[..., list[_Tensor]]:
    def run(known: _Known, op: _Op, name: str, x: _Tensor, y: _Tensor) -> list[_Tensor]:
        _fit(known, x, y)
        return [_Tensor(apply(function, x.term, y.term), x.row, x.column, x.axes, x.origin)]

    return run


def _concat(known: _Known, op: _Op, name: str, *inputs: _Tensor) -> list[_Tensor]:
    at, first = _place(op, "PM_AXIS", (REPLICA, ROW, COLUMN)), inputs[0]
    for x in inputs[1:]:
        _fit(known, first, x, at)
    if at == REPLICA:
        if first.axes[REPLICA]:
            raise RuleError("OP_CONCAT of replicas that are replicated already")
        p = known.axis(name, len(inputs))
        term = apply("partition", apply("stack", *(x.term for x in inputs), attrs=[p]), attrs=[p])
        return [_Tensor(term, first.row, first.column, first.with_axes(at, (p,)), first.origin)]
    whole = Dim("+", tuple(x.size(at) for x in inputs))
    term = apply("concat", *(x.term for x in inputs), attrs=[whole])
    return [_Tensor(term, *first.with_size(at, whole), first.axes, first.origin)]


def _split(known: _Known, op: _Op, name: str, x: _Tensor) -> list[_Tensor]:
    at, count = _place(op, "PM_AXIS"), op.para.get("PM_NUM_OUTPUTS", 2)
    if not 1 < count < 9:
        raise RuleError(f"OP_SPLIT into {count}")
    whole = x.size(at)
    if whole.name != "+":
        known.same(whole, Dim("+", tuple(Dim(f"{name}_{i}") for i in range(count))))
    if len(whole.parts) != count:
        raise RuleError(f"OP_SPLIT of {whole} into {count}")
    parts = enumerate(whole.parts)
    return [
        _Tensor(apply("slice", x.term, attrs=[whole, i]), *x.with_size(at, part), x.axes, x.origin) for i, part in parts
    ]


def _partition(known: _Known, op: _Op, name: str, x: _Tensor) -> list[_Tensor]:
    at = _place(op, "PM_PARALLEL_DIM")
    p = _new_axis(known, op, name, x)
    whole = x.size(at)
    if whole.name == "+":
        raise RuleError(f"no types fit: {whole} is cut into blocks, but is not known to be a multiple")
    known.same(whole, Dim("*", (p, whole.parts[1] if whole.name == "*" else Dim(f"{name}_{whole.name}"))))
    term = apply("partition", x.term, attrs=[whole])
    return [_Tensor(term, *x.with_size(at, whole.parts[1]), x.with_axes(at, (*x.axes[at], p)), x.origin)]


def _combine(known: _Known, op: _Op, name: str, x: _Tensor) -> list[_Tensor]:
    at = _place(op, "PM_PARALLEL_DIM")
    p = _last(known, op, name, x, at)
    whole = Dim("*", (p, x.size(at)))
    term = apply("combine", x.term, attrs=[whole])
    return [_Tensor(term, *x.with_size(at, whole), x.with_axes(at, x.axes[at][:-1]), x.origin)]


def _replicate(known: _Known, op: _Op, name: str, x: _Tensor) -> list[_Tensor]:
    at = _place(op, "PM_PARALLEL_DIM", (REPLICA,))
    p = _new_axis(known, op, name, x)
    term = apply("replicate", x.term, attrs=[p])
    return [_Tensor(term, x.row, x.column, x.with_axes(at, (*x.axes[at], p)), x.origin)]


def _reduce(known: _Known, op: _Op, name: str, x: _Tensor) -> list[_Tensor]:
    at = _place(op, "PM_PARALLEL_DIM", (REPLICA,))
    p = _last(known, op, name, x, at)
    term = apply("reduce", x.term, attrs=[p])
    return [_Tensor(term, x.row, x.column, x.with_axes(at, x.axes[at][:-1]), x.origin)]


def _new_axis(known: _Known, op: _Op, name: str, x: _Tensor) -> Dim:
    p = known.axis(name, op.get("PM_PARALLEL_DEGREE"))
    if p in x.term.type.devices:
        raise RuleError(f"no types fit: {op.type} of {x.term} onto devices that it lies on already")
    return p


def _last(known: _Known, op: _Op, name: str, x: _Tensor, at: int) -> Dim:
    """The innermost axis, which a combine or reduce takes away."""
    degree = op.get("PM_PARALLEL_DEGREE")
    if not x.axes[at]:
        known.put(x.origin[at], known.axis(name, degree))
    return known.same_degree(x.axes[at][-1], degree)


_OPS: dict[str, tuple[int | None, Callable[..., list[_Tensor]]]] = {
    "OP_LINEAR": (2, _linear),
    "OP_RELU": (1, _unary("f")),
    "OP_SIGMOID": (1, _unary("g")),
    "OP_EW_ADD": (2, _binary("add")),
    "OP_EW_MUL": (2, _binary("mul")),
    "OP_CONCAT": (None, _concat),
    "OP_SPLIT": (1, _split),
    "OP_PARTITION": (1, _partition),
    "OP_COMBINE": (1, _combine),
    "OP_REPLICATE": (1, _replicate),
    "OP_REDUCE": (1, _reduce),
}
"""What each op is, and how many inputs it has."""
