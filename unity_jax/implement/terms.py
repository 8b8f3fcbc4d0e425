"""Polynomials in what attention computes of its scores, with which any way to write its gradient is compared.

    p * (a - sum(p * a))        {P A: 1, P D: -1}        A = cotangent @ v.T,  D = sum over keys of P A
    e / total                   {P: 1}                   e = P T, T = the sum of e
"""

from __future__ import annotations

from typing import NamedTuple

NEAR = 1e-4
"""How far equal factors may differ, relative to them: constants are rounded to float32."""


class Term(NamedTuple):
    """Powers of: the probabilities `p`, the sums of exponentials `total`, which probabilities dropout keeps `kept`
    (0 or 1), the cotangents of the probabilities `a`, and the sums of what was kept of p * a `delta`."""

    p: int = 0
    total: int = 0
    kept: int = 0
    a: int = 0
    delta: int = 0

    def times(self, other: Term) -> Term:
        found = Term(*map(sum, zip(self, other, strict=True)))
        return found._replace(kept=min(found.kept, 1))

    @property
    def is_row(self) -> bool:
        """Whether it is the same for all keys."""
        return not (self.p or self.kept or self.a)


ONE = Term()
Terms = dict[Term, float]
"""The sum of terms, each with its factor."""


def scaled(x: Terms, by: float) -> Terms:
    return {term: by * factor for term, factor in x.items()} if by else {}


def added(x: Terms, y: Terms) -> Terms:
    found = dict(x)
    for term, factor in y.items():
        found[term] = found.get(term, 0.0) + factor
    return found


def product(x: Terms, y: Terms) -> Terms:
    found: Terms = {}
    for a, f in x.items():
        found = added(found, {a.times(b): f * g for b, g in y.items()})
    return found


def power(x: Terms, n: int) -> Terms | None:
    """Of a single term that may be divided by; None of others."""
    if len(x) != 1:
        return None
    ((term, factor),) = x.items()
    if n < 0 and (not factor or term.kept or term.a or term.delta):
        return None
    return {Term(*(n * k for k in term))._replace(kept=term.kept): factor**n}


def over_keys(x: Terms, count: int, drops: bool) -> Terms | None:
    """The sums over so many keys; None where they are of something else."""
    found: Terms = {}
    for term, factor in x.items():
        if term.is_row:
            made, factor = term, factor * count
        elif (term.p, term.kept, term.a) == (1, 0, 0):
            made = term._replace(p=0)
        elif (term.p, term.kept, term.a) == (1, int(drops), 1):
            made = term._replace(p=0, kept=0, a=0, delta=term.delta + 1)
        else:
            return None
        found = added(found, {made: factor})
    return found


def factor_of(x: Terms, of: Terms) -> float | None:
    """By how much a polynomial is another one; None where it is not."""
    x = {term: factor for term, factor in x.items() if factor}
    if x.keys() != of.keys():
        return None
    ratios = [factor / of[term] for term, factor in x.items()]
    same = all(abs(r - ratios[0]) <= NEAR * abs(ratios[0]) for r in ratios)
    return ratios[0] if same else None
