"""The language of rewrite rules: small programs over tensors whose sizes are symbols.

    merge-siblings: x[m,k] v[k,n] w[k,o]
      a = dot(x, v; k)
      b = dot(x, w; k)
    =>
      t = dot(x, concat(v, w; n+o); k)
      a = slice(t; n+o, 0)
      b = slice(t; n+o, 1)

A dimension is named by its size: equal names are equal dimensions, and operands are matched by name, not by position.
A name stands for any number of dimensions of a real tensor, or none (`m` of a Linear layer may be batch and sequence).
Sums are what a concatenation makes, `p*n` is `p` blocks of `n`. A tensor may also lie on device axes (`x[m,k]@p`): then
every device of `p` has a value of its own, and ops compute on each device; only parallel ops look across.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass


class RuleError(ValueError):
    """A term or rule that means nothing: the message says which part and why."""


@dataclass(frozen=True, slots=True)
class Dim:
    """A symbolic size: a name, a sum (`n+o`) or a multiple (`p*n`; element i of block b is at b n + i)."""

    name: str
    parts: tuple[Dim, ...] = ()

    def __str__(self) -> str:
        inner = (f"({d})" if d.parts and (self.name == "*" or d.name == "+") else str(d) for d in self.parts)
        return self.name.join(inner) if self.parts else self.name

    def names(self) -> Iterator[str]:
        """The names in it, left to right."""
        if not self.parts:
            yield self.name
        for d in self.parts:
            yield from d.names()

    def renamed(self, names: Mapping[str, Dim]) -> Dim:
        """With other dimensions for some of its names."""
        return Dim(self.name, tuple(p.renamed(names) for p in self.parts)) if self.parts else names.get(self.name, self)


def unified(a: Dim, b: Dim) -> dict[str, Dim] | None:
    """The dimensions to put for names to make two dimensions the same, none if nothing does (J. A. Robinson, 1965)."""
    if a.parts and b.parts:
        if (a.name, len(a.parts)) != (b.name, len(b.parts)):
            return None
        made: dict[str, Dim] = {}
        for x, y in zip(a.parts, b.parts, strict=True):
            inner = unified(x.renamed(made), y.renamed(made))
            if inner is None:
                return None
            made = {n: d.renamed(inner) for n, d in made.items()} | inner
        return made
    if a.parts:
        a, b = b, a
    if a == b:
        return {}
    return None if a.name in b.names() else {a.name: b}


@dataclass(frozen=True, slots=True)
class Type:
    """Dimensions in order, the device axes a value lies on, and, for row numbers, the dimension they count in."""

    dims: tuple[Dim, ...]
    devices: tuple[Dim, ...] = ()
    ids: Dim | None = None

    def __str__(self) -> str:
        text = f"[{','.join(map(str, self.dims))}]" + "".join(f"@{p}" for p in self.devices)
        return text + (f"<{self.ids}" if self.ids else "")


@dataclass(frozen=True)
class Term:
    """A variable (`op` is empty) or an op applied to terms. Equal terms are one value: a program shares them."""

    op: str
    args: tuple[Term, ...]
    attrs: tuple[Dim | int, ...]
    type: Type
    name: str = ""

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.op, self.args, self.attrs, self.type, self.name))

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        if not self.op:
            return self.name
        attrs = "; " + ", ".join(map(str, self.attrs)) if self.attrs else ""
        return f"{self.op}({', '.join(map(str, self.args))}{attrs})"

    def walk(self) -> Iterator[Term]:
        """Every distinct term in it, arguments first."""
        seen: dict[Term, None] = {}

        def visit(t: Term) -> None:
            if t not in seen:
                for a in t.args:
                    visit(a)
                seen[t] = None

        visit(self)
        return iter(seen)


def variable(name: str, type: Type) -> Term:
    return Term("", (), (), _checked(type, name), name)


def apply(op: str, *args: Term, attrs: Sequence[Dim | int] = ()) -> Term:
    """An op applied to terms, with its type.

    **Raises:** `RuleError` where the op is unknown or does not fit the types.
    """
    if op not in OPS:
        raise RuleError(f"unknown op {op!r}: one of {', '.join(OPS)}")
    infer, arity = OPS[op]
    shown = f"{op}({', '.join(str(a.type) for a in args)}; {', '.join(map(str, attrs))})"
    if arity is not None and len(args) != arity:
        raise RuleError(f"{shown}: takes {arity} operands")
    if op not in PARALLEL and len({frozenset(a.type.devices) for a in args}) > 1:
        raise RuleError(f"{shown}: operands lie on different device axes")
    try:
        found = _checked(infer(tuple(a.type for a in args), tuple(attrs)), shown)
    except RuleError:
        raise
    except (IndexError, TypeError, AttributeError, ValueError) as error:
        raise RuleError(f"{shown}: wrong attributes") from error
    return Term(op, args, tuple(attrs), found)


def _checked(type: Type, where: str) -> Type:
    for group in (type.dims, type.devices):
        if not all(isinstance(d, Dim) for d in group):
            raise RuleError(f"{where}: a dimension has a name")
        if twice := next((d for i, d in enumerate(group) if d in group[:i]), None):
            raise RuleError(f"{where}: dimension {twice} appears twice")
    return type


# Types of results. Each function takes the types of the operands and the attributes.

Types = tuple[Type, ...]
Attrs = tuple[Dim | int, ...]


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise RuleError(message)


def _place(x: Type, dim: Dim | int) -> int:
    _need(dim in x.dims, f"{x} has no dimension {dim}")
    return x.dims.index(dim)  # type: ignore[arg-type]


def _replaced(x: Type, dim: Dim, by: Sequence[Dim]) -> Type:
    at = _place(x, dim)
    dims = (*x.dims[:at], *by, *x.dims[at + 1 :])
    _need(len(set(dims)) == len(dims), f"{x} has {', '.join(map(str, by))} already")
    return dataclasses.replace(x, dims=dims)


def _values(*types: Type) -> None:
    for x in types:
        _need(x.ids is None, f"{x} holds row numbers, which no arithmetic is for")


def _pointwise(types: Types, attrs: Attrs) -> Type:
    """The dimensions of all operands; each is repeated along those that it lacks."""
    _values(*types)
    return Type(tuple(dict.fromkeys(d for x in types for d in x.dims)), types[0].devices)


def _dot(types: Types, attrs: Attrs) -> Type:
    _values(*types)
    x, y = types
    for k in attrs:
        _place(x, k), _place(y, k)
    batch = [d for d in x.dims if d in y.dims and d not in attrs]
    free = [d for t in types for d in t.dims if d not in attrs and d not in batch]
    return Type((*batch, *free), x.devices)


def _conv(types: Types, attrs: Attrs) -> Type:
    """`conv(x, w; c, h, r)`: features `c` contracted, windows of `r` at every place of `h`, zeros around."""
    _values(*types)
    (x, w), (c, h, r) = types, attrs
    _place(x, h), _place(w, r), _place(x, c), _place(w, c)
    _need(h not in w.dims and r not in x.dims, f"{h} belongs to the image and {r} to the window")
    free = [d for d in w.dims if d not in (c, r) and d not in x.dims]
    return Type((*(d for d in x.dims if d != c), *free), x.devices)


def _window(types: Types, attrs: Attrs) -> Type:
    """`window(x; h, r)`: what a window of `r` sees at each place of `h`, zeros around."""
    _values(*types)
    (x,), (h, r) = types, attrs
    return _replaced(x, h, [h, r])  # type: ignore[arg-type,list-item]


def _constant(types: Types, attrs: Attrs) -> Type:
    return Type(attrs)  # type: ignore[arg-type]


def _reduction(types: Types, attrs: Attrs) -> Type:
    (x,) = types
    _values(x)
    _need(bool(attrs), "no dimension to reduce")
    for k in attrs:
        _place(x, k)
    return Type(tuple(d for d in x.dims if d not in attrs), x.devices)


def _broadcast(types: Types, attrs: Attrs) -> Type:
    return dataclasses.replace(types[0], dims=(*types[0].dims, *attrs))  # type: ignore[arg-type]


def _transpose(types: Types, attrs: Attrs) -> Type:
    (x,) = types
    _need(set(attrs) == set(x.dims), f"not an order of the dimensions of {x}")
    return dataclasses.replace(x, dims=attrs)  # type: ignore[arg-type]


def _sum_of(attrs: Attrs) -> tuple[Dim, tuple[Dim, ...]]:
    whole = attrs[0]
    _need(isinstance(whole, Dim) and whole.name == "+", f"{whole} is not a sum")
    return whole, whole.parts  # type: ignore[union-attr,return-value]


def _concat(types: Types, attrs: Attrs) -> Type:
    whole, parts = _sum_of(attrs)
    _need(len(parts) == len(types), f"{len(types)} operands for {whole}")
    _need(not any(whole in x.dims for x in types), f"an operand already has {whole}")
    found = {_replaced(x, part, [whole]) for x, part in zip(types, parts, strict=True)}
    _need(len({(frozenset(t.dims), t.ids) for t in found}) == 1, "operands differ in other dimensions")
    return _replaced(types[0], parts[0], [whole])


def _slice(types: Types, attrs: Attrs) -> Type:
    whole, parts = _sum_of(attrs)
    return _replaced(types[0], whole, [parts[attrs[1]]])  # type: ignore[index]


def _pad(types: Types, attrs: Attrs) -> Type:
    """The operand as one part of a sum, zeros in the others."""
    _values(*types)
    whole, parts = _sum_of(attrs)
    return _replaced(types[0], parts[attrs[1]], [whole])  # type: ignore[index]


def _stack(types: Types, attrs: Attrs) -> Type:
    """Operands of one type along a new first dimension, whose size is their number."""
    _need(not attrs[0].parts, f"{attrs[0]} is not a name")  # type: ignore[union-attr]
    _need(len({(frozenset(t.dims), t.ids) for t in types}) == 1, "operands differ in their types")
    return dataclasses.replace(types[0], dims=(attrs[0], *types[0].dims))  # type: ignore[arg-type]


def _unstack(types: Types, attrs: Attrs) -> Type:
    _need(isinstance(attrs[1], int) and not attrs[0].parts, "takes a name and a number")  # type: ignore[union-attr]
    return _replaced(types[0], attrs[0], [])  # type: ignore[arg-type]


def _multiple(attrs: Attrs) -> tuple[Dim, Dim, Dim]:
    whole = attrs[0]
    _need(isinstance(whole, Dim) and whole.name == "*", f"{whole} is not a multiple")
    return (whole, *whole.parts)  # type: ignore[union-attr,return-value]


def _split(types: Types, attrs: Attrs) -> Type:
    whole, p, n = _multiple(attrs)
    return _replaced(types[0], whole, [p, n])


def _merge(types: Types, attrs: Attrs) -> Type:
    whole, p, n = _multiple(attrs)
    _place(types[0], p)
    x = _replaced(types[0], n, [whole])
    return _replaced(x, p, [])


def _take(types: Types, attrs: Attrs) -> Type:
    """`take(x, i)`: rows of `x` by number; dimensions that both have are a batch."""
    x, i = types
    _need(i.ids is not None and i.ids not in i.dims, f"{i} holds no numbers of rows elsewhere")
    return _replaced(x, i.ids, [d for d in i.dims if d not in x.dims])  # type: ignore[arg-type]


def _onehot(types: Types, attrs: Attrs) -> Type:
    """One at each row number, zero elsewhere."""
    (i,) = types
    _need(i.ids is not None and i.ids not in i.dims, f"{i} holds no numbers of rows elsewhere")
    return Type((*i.dims, i.ids), i.devices)  # type: ignore[arg-type]


def _put(types: Types, attrs: Attrs) -> Type:
    """`put(u, i; p)`: the rows `p` of `u` added up at their numbers, zeros elsewhere; other dimensions of `i` are a
    batch."""
    u, i = types
    _values(u)
    _need(i.ids is not None and i.ids not in i.dims, f"{i} holds no numbers of rows elsewhere")
    _need(bool(attrs) and set(attrs) <= set(i.dims) <= set(u.dims), f"rows of {u} by the numbers {i}")
    return Type((*(d for d in u.dims if d not in attrs), i.ids), u.devices)  # type: ignore[arg-type]


def _scatter(types: Types, attrs: Attrs) -> Type:
    """`scatter(t, u, i; p)`: `add(t, put(u, i; p))`."""
    t, u, i = types
    _need(set(_put((u, i), attrs).dims) == set(t.dims), f"{t} does not take rows of {u}")
    return t


def _partition(types: Types, attrs: Attrs) -> Type:
    """`p*n` cut into blocks, one per device of `p`; a plain `p` gives each device one element."""
    if attrs[0] in types[0].dims and not attrs[0].parts:  # type: ignore[union-attr]
        return _on(_replaced(types[0], attrs[0], []), attrs[0])  # type: ignore[arg-type]
    whole, p, n = _multiple(attrs)
    return _on(_replaced(types[0], whole, [n]), p)


def _combine(types: Types, attrs: Attrs) -> Type:
    """The inverse of partition: an all-gather."""
    whole, p, n = _multiple(attrs)
    return _replaced(_off(types[0], p), n, [whole])


def _replicate(types: Types, attrs: Attrs) -> Type:
    return _on(types[0], attrs[0])


def _reduce(types: Types, attrs: Attrs) -> Type:
    """The sum over the devices of `p`."""
    _values(types[0])
    return _off(types[0], attrs[0])


def _on(x: Type, p: Dim | int) -> Type:
    _need(isinstance(p, Dim), f"{p} is not a device axis")
    return dataclasses.replace(x, devices=(*x.devices, p))  # type: ignore[arg-type]


def _off(x: Type, p: Dim | int) -> Type:
    _need(p in x.devices, f"{x} does not lie on {p}")
    return dataclasses.replace(x, devices=tuple(d for d in x.devices if d != p))


OPS: dict[str, tuple[Callable[[Types, Attrs], Type], int | None]] = {
    "dot": (_dot, 2),
    "conv": (_conv, 2),
    "window": (_window, 1),
    "zeros": (_constant, 0),
    "ones": (_constant, 0),
    "add": (_pointwise, 2),
    "sub": (_pointwise, 2),
    "mul": (_pointwise, 2),
    "neg": (_pointwise, 1),
    "f": (_pointwise, 1),
    "g": (_pointwise, 1),
    "h": (_pointwise, 2),
    "convert": (_pointwise, 1),
    "sum": (_reduction, 1),
    "fold": (_reduction, 1),
    "broadcast": (_broadcast, 1),
    "transpose": (_transpose, 1),
    "concat": (_concat, None),
    "slice": (_slice, 1),
    "pad": (_pad, 1),
    "stack": (_stack, None),
    "unstack": (_unstack, 1),
    "split": (_split, 1),
    "merge": (_merge, 1),
    "take": (_take, 2),
    "onehot": (_onehot, 1),
    "put": (_put, 2),
    "scatter": (_scatter, 3),
    "partition": (_partition, 1),
    "combine": (_combine, 1),
    "replicate": (_replicate, 1),
    "reduce": (_reduce, 1),
}
"""Every op: the type of its result, and how many operands it takes. `f`, `g` (unary) and `h` (binary) are pointwise
functions of which nothing is known, `convert` one that keeps zero, such as a change of precision, `fold` a reduction of
which nothing is known but that order does not matter, such as a maximum."""

PARALLEL = frozenset("partition combine replicate reduce".split())
