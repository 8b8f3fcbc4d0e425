"""The ops of FlexFlow's rules, on terms of which not everything is known yet: what fits, and what must be the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from unity_jax.rewrite.language import Dim, RuleError, Term, unified
from unity_jax.rewrite.rule import Rule
from unity_jax.rewrite.table import apply

REPLICA, ROW, COLUMN = 0, 1, 2

ACTIVATIONS = {0: None, 1: "g", 2: "f"}
"""PM_ACTI, in the numbers of TASO: none, sigmoid, relu."""


@dataclass(frozen=True)
class Op:
    """One op of a rule, as FlexFlow writes it: `inputs` are results of others by op and place."""

    type: str
    inputs: tuple[tuple[int, int], ...]
    para: Mapping[str, int]

    def get(self, key: str) -> int:
        if key not in self.para:
            raise RuleError(f"{self.type} without {key}")
        return self.para[key]


Axes = tuple[Dim, ...]
Place = tuple[tuple[int, int], int]
"""A replica dimension, the rows or the columns of an external input."""


class Refined(Exception):
    """More is known of the types: start again with it."""


@dataclass
class Known:
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
        every = dict.fromkeys(n for r in (*rule.source, *rule.target) for t in r.walk() for n in names_of(t))
        for axes, letters in ((True, "pqrs"), (False, "lmnkabcdeghijuvwxyz")):
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
            raise Refined

    def put(self, place: Place, axis: Dim) -> None:
        """An external input lies on one more axis."""
        self.lying.setdefault(place, []).append(axis)
        raise Refined

    def axes(self, place: Place) -> Axes:
        return tuple(a.renamed(self.names) for a in self.lying.get(place, ()))


@dataclass(frozen=True)
class Tensor:
    """A term with, for each of its three dimensions, the size on a device, the axes that its blocks lie on (innermost
    last), and the place of an external input that decides about these."""

    term: Term
    sizes: tuple[Dim, ...]
    axes: tuple[Axes, ...]
    origin: tuple[Place, ...]

    def become(self, term: Term, at: int, size: Dim | None = None, axes: Axes | None = None) -> Tensor:
        """The tensor after an op along one dimension."""
        sizes = tuple(size if size and i == at else s for i, s in enumerate(self.sizes))
        return Tensor(
            term,
            sizes,
            tuple(axes if axes is not None and i == at else a for i, a in enumerate(self.axes)),
            self.origin,
        )


def names_of(t: Term) -> Iterator[str]:
    for d in (*t.type.devices, *t.type.dims):
        yield from d.names()


# Fitting operands. What does not fit yet is made to: names become one, or an external input lies on one more axis.


def fit(known: Known, x: Tensor, y: Tensor, but: int | None = None) -> None:
    """Both have the same sizes and axes, but for one size."""
    for at in (REPLICA, ROW, COLUMN):
        if at != but:
            known.same(x.sizes[at], y.sizes[at])
    for at in (ROW, COLUMN):
        _fit_axes(known, x, y, x.axes[at], y.axes[at], at)
    _fit_replicas(known, x, y, x.axes[REPLICA], y.axes[REPLICA])


def _fit_replicas(known: Known, x: Tensor, y: Tensor, xs: Axes, ys: Axes) -> None:
    """The axes of replicas are the same in any order."""
    only_x, only_y = (tuple(a for a in r if a not in s) for r, s in ((xs, ys), (ys, xs)))
    _fit_axes(known, x, y, only_x, only_y, REPLICA)


def _fit_axes(known: Known, x: Tensor, y: Tensor, xs: Axes, ys: Axes, at: int) -> None:
    for a, b in zip(xs, ys, strict=False):
        known.same(a, b)
    for longer, place in ((xs[len(ys) :], y.origin[at]), (ys[len(xs) :], x.origin[at])):
        for axis in longer:
            known.put(place, axis)


def _present(known: Known, axes: Axes, x: Tensor) -> Axes:
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


def _place(op: Op, key: str) -> int:
    if op.get(key) not in (REPLICA, ROW, COLUMN):
        raise RuleError(f"{op.type} along dimension {op.get(key)}, of three")
    return op.get(key)


def _linear(known: Known, op: Op, name: str, x: Tensor, w: Tensor) -> list[Tensor]:
    known.same(x.sizes[COLUMN], w.sizes[COLUMN])
    known.same(x.sizes[REPLICA], w.sizes[REPLICA])
    _fit_axes(known, x, w, x.axes[COLUMN], w.axes[COLUMN], COLUMN)
    rest_w, rest_x = _present(known, x.axes[ROW], w), _present(known, w.axes[ROW], x)
    _fit_replicas(known, x, w, rest_x, rest_w)
    term = apply("dot", x.term, w.term, attrs=[x.sizes[COLUMN]])
    activation = op.para.get("PM_ACTI", 0)
    if activation not in ACTIVATIONS:
        raise RuleError(f"unknown PM_ACTI {activation}")
    if function := ACTIVATIONS[activation]:
        term = apply(function, term)
    sizes = (x.sizes[REPLICA], x.sizes[ROW], w.sizes[ROW])
    axes = ((*rest_x, *x.axes[COLUMN]), x.axes[ROW], w.axes[ROW])
    return [Tensor(term, sizes, axes, (x.origin[REPLICA], x.origin[ROW], w.origin[ROW]))]


def _pointwise(function: str) -> Callable[..., list[Tensor]]:
    def run(known: Known, op: Op, name: str, *inputs: Tensor) -> list[Tensor]:
        for x in inputs[1:]:
            fit(known, inputs[0], x)
        return [inputs[0].become(apply(function, *(x.term for x in inputs)), REPLICA)]

    return run


def _concat(known: Known, op: Op, name: str, *inputs: Tensor) -> list[Tensor]:
    at, first = _place(op, "PM_AXIS"), inputs[0]
    for x in inputs[1:]:
        fit(known, first, x, at)
    whole = Dim("+", tuple(x.sizes[at] for x in inputs))
    return [first.become(apply("concat", *(x.term for x in inputs), attrs=[whole]), at, whole)]


def _split(known: Known, op: Op, name: str, x: Tensor) -> list[Tensor]:
    at, count = _place(op, "PM_AXIS"), op.para.get("PM_NUM_OUTPUTS", 2)
    if not 1 < count < 9:
        raise RuleError(f"OP_SPLIT into {count}")
    whole = x.sizes[at]
    if whole.name != "+":
        known.same(whole, Dim("+", tuple(Dim(f"{name}_{i}") for i in range(count))))
    if len(whole.parts) != count:
        raise RuleError(f"no types fit: OP_SPLIT of {whole} into {count}")
    parts = enumerate(whole.parts)
    return [x.become(apply("slice", x.term, attrs=[whole, i]), at, part) for i, part in parts]


def _partition(known: Known, op: Op, name: str, x: Tensor) -> list[Tensor]:
    at, p = _place(op, "PM_PARALLEL_DIM"), _new_axis(known, op, name, x)
    whole = x.sizes[at]
    if whole.name == "+":
        raise RuleError(f"no types fit: {whole} is cut into blocks, but is not known to be a multiple")
    known.same(whole, Dim("*", (p, whole.parts[1] if whole.name == "*" else Dim(f"{name}_{whole.name}"))))
    return [x.become(apply("partition", x.term, attrs=[whole]), at, whole.parts[1], (*x.axes[at], p))]


def _combine(known: Known, op: Op, name: str, x: Tensor) -> list[Tensor]:
    at = _place(op, "PM_PARALLEL_DIM")
    whole = Dim("*", (_last(known, op, name, x, at), x.sizes[at]))
    return [x.become(apply("combine", x.term, attrs=[whole]), at, whole, x.axes[at][:-1])]


def _replicate(known: Known, op: Op, name: str, x: Tensor) -> list[Tensor]:
    at, p = _place(op, "PM_PARALLEL_DIM"), _new_axis(known, op, name, x)
    return [x.become(apply("replicate", x.term, attrs=[p]), at, axes=(*x.axes[at], p))]


def _reduce(known: Known, op: Op, name: str, x: Tensor) -> list[Tensor]:
    """The sum of the blocks; those that an OP_CONCAT made are put on devices first."""
    at, degree = _place(op, "PM_PARALLEL_DIM"), op.get("PM_PARALLEL_DEGREE")
    whole = x.sizes[at]
    if not x.axes[at] and whole.name == "+" and len(whole.parts) == degree:
        for part in whole.parts[1:]:
            known.same(whole.parts[0], part)
        p = _new_axis(known, op, name, x)
        blocks = (apply("slice", x.term, attrs=[whole, i]) for i in range(degree))
        term = apply("partition", apply("stack", *blocks, attrs=[p]), attrs=[p])
        return [x.become(apply("reduce", term, attrs=[p]), at, whole.parts[0])]
    p = _last(known, op, name, x, at)
    return [x.become(apply("reduce", x.term, attrs=[p]), at, axes=x.axes[at][:-1])]


def _new_axis(known: Known, op: Op, name: str, x: Tensor) -> Dim:
    p = known.axis(name, op.get("PM_PARALLEL_DEGREE"))
    if p in x.term.type.devices:
        raise RuleError(f"no types fit: {op.type} of {x.term} onto devices that it lies on already")
    return p


def _last(known: Known, op: Op, name: str, x: Tensor, at: int) -> Dim:
    """The innermost axis, which a combine or reduce takes away."""
    degree = op.get("PM_PARALLEL_DEGREE")
    if not x.axes[at]:
        known.put(x.origin[at], known.axis(name, degree))
    return known.same_degree(x.axes[at][-1], degree)


OPS: dict[str, tuple[int | None, Callable[..., list[Tensor]]]] = {
    "OP_LINEAR": (2, _linear),
    "OP_RELU": (1, _pointwise("f")),
    "OP_SIGMOID": (1, _pointwise("g")),
    "OP_EW_ADD": (2, _pointwise("add")),
    "OP_EW_MUL": (2, _pointwise("mul")),
    "OP_CONCAT": (None, _concat),
    "OP_SPLIT": (1, _split),
    "OP_PARTITION": (1, _partition),
    "OP_COMBINE": (1, _combine),
    "OP_REPLICATE": (1, _replicate),
    "OP_REDUCE": (1, _reduce),
}
"""What each op is, and how many inputs it has."""
