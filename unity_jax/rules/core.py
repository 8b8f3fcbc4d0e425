"""Terms in the few ops that the axioms speak of: contractions are sums of products, devices are one more dimension.

A device axis is a dimension that compute ops treat as a batch: partition is `split`, combine is `merge`, replicate is
`broadcast` and reduce is `sum`. The ops that are left are those of which `RuleOp.core` is None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unity_jax.rewrite.language import Dim, RuleError, Term, Type, variable
from unity_jax.rewrite.ops.parts import SLICE
from unity_jax.rewrite.ops.shape import SPLIT
from unity_jax.rewrite.ops.stacks import UNSTACK
from unity_jax.rewrite.table import OPS, apply


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
    made = OPS[term.op].core
    return apply(term.op, *args, attrs=term.attrs) if made is None else made(term, *args)


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
        (SLICE, [[d, i] for i in range(len(d.parts))] if d.name == "+" else []),
        (SPLIT, [[d]] if d.name == "*" else []),
        (UNSTACK, [[d, i] for i in range(counts.get(str(d), 0))]),
    ]
    for op, attrs in ways:
        try:
            if attrs:
                return [apply(op, term, attrs=a) for a in attrs]
        except RuleError:  # a part is already one of its dimensions
            pass
    raise _Whole
