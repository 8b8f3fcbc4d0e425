"""Terms in the few ops that the axioms speak of: contractions are sums of products, devices are one more dimension.

A device axis is a dimension that compute ops treat as a batch: partition is `split`, combine is `merge`, replicate is
`broadcast` and reduce is `sum`. The ops that are left: add, neg, mul, zeros, ones, the unknown functions, sum, fold,
broadcast, transpose, concat, slice, stack, unstack, split, merge, take, onehot, window.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unity_jax.rewrite.language import Dim, RuleError, Term, Type, apply, variable


def core(term: Term, known: dict[Term, Term]) -> Term:
    """The same value in core ops. `known` remembers what was translated.

    **Raises:** `RuleError` where a tensor lies on a device axis that also is one of its dimensions.
    """
    if term not in known:
        args = [core(a, known) for a in term.args]
        known[term] = _translated(term, args) if term.op else _on_no_devices(term)
    return known[term]


def _on_no_devices(v: Term) -> Term:
    return variable(v.name, Type((*v.type.devices, *v.type.dims), ids=v.type.ids))


def _translated(term: Term, args: Sequence[Term]) -> Term:
    if term.op in _DEFINITIONS:
        return _DEFINITIONS[term.op](term, *args)
    if term.op == "transpose":
        return args[0]
    return apply(term.op, *args, attrs=term.attrs)


def _wide(x: Term, dims: Mapping[Dim, None]) -> Term:
    more = [d for d in dims if d not in x.type.dims]
    return apply("broadcast", x, attrs=more) if more else x


def _product(x: Term, y: Term) -> Term:
    every = dict.fromkeys((*x.type.dims, *y.type.dims))
    return apply("mul", _wide(x, every), _wide(y, every))


def _dot(t: Term, x: Term, y: Term) -> Term:
    return apply("sum", _product(x, y), attrs=t.attrs) if t.attrs else _product(x, y)


def _conv(t: Term, x: Term, w: Term) -> Term:
    c, h, r = t.attrs
    return apply("sum", _product(apply("window", x, attrs=(h, r)), w), attrs=(c, r))


def _sub(t: Term, x: Term, y: Term) -> Term:
    return apply("add", x, apply("neg", y))


def _put(t: Term, u: Term, i: Term) -> Term:
    return apply("sum", _product(u, apply("onehot", i)), attrs=t.attrs)


def _scatter(t: Term, x: Term, u: Term, i: Term) -> Term:
    return apply("add", x, _put(t, u, i))


def _pad(t: Term, x: Term) -> Term:
    whole, at = t.attrs
    assert isinstance(whole, Dim)
    around = [
        x if i == at else apply("zeros", attrs=[part if d == whole.parts[at] else d for d in x.type.dims])
        for i, part in enumerate(whole.parts)
    ]
    return apply("concat", *around, attrs=[whole])


_DEFINITIONS: dict[str, Callable[..., Term]] = {
    "dot": _dot,
    "conv": _conv,
    "sub": _sub,
    "put": _put,
    "scatter": _scatter,
    "pad": _pad,
    "partition": lambda t, x: apply("split", x, attrs=t.attrs) if t.attrs[0].parts else x,
    "combine": lambda t, x: apply("merge", x, attrs=t.attrs),
    "replicate": lambda t, x: _wide(x, {t.attrs[0]: None}),
    "reduce": lambda t, x: apply("sum", x, attrs=t.attrs),
}


def pieces(term: Term, counts: Mapping[str, int]) -> list[Term]:
    """What determines a term: its parts along dimensions that are sums, multiples, or of a known count."""
    for d in sorted(term.type.dims, key=str):
        try:
            return [p for piece in _along(term, d, counts) for p in pieces(piece, counts)]
        except _Whole:
            continue
    return [term]


class _Whole(Exception):
    """Nothing divides it."""


def _along(term: Term, d: Dim, counts: Mapping[str, int]) -> list[Term]:
    ways: list[tuple[str, list[list[Any]]]] = [
        ("slice", [[d, i] for i in range(len(d.parts))] if d.name == "+" else []),
        ("split", [[d]] if d.name == "*" else []),
        ("unstack", [[d, i] for i in range(counts.get(str(d), 0))]),
    ]
    for op, attrs in ways:
        try:
            if attrs:
                return [apply(op, term, attrs=a) for a in attrs]
        except RuleError:  # a part is already one of its dimensions
            pass
    raise _Whole
