"""The most general rule that an equality of two graphs is an instance of.

Dimensions that every op treats alike become one name, sums and multiples that no op cuts or joins become a name, and
device axes that all inputs have and no op mentions are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from unity_jax.rewrite.language import Dim, Term, Type, variable
from unity_jax.rewrite.rule import Rule
from unity_jax.rewrite.table import apply, naming

LETTERS = "mknoabcdeqrst"


def generalized(name: str, source: Sequence[Term], target: Sequence[Term]) -> Rule:
    terms = list(dict.fromkeys(t for r in (*source, *target) for t in r.walk()))
    inputs = [t for t in terms if not t.op]
    kept = {part for t in terms for d in _fixed(t) for part in _parts(d)}
    used = {n for d in kept for n in d.names()}
    places: dict[Dim, list[int]] = {}
    for i, t in enumerate(terms):
        for d in t.type.dims if not t.op else t.attrs if naming(t) == "dims" else ():
            places.setdefault(d, []).append(i)  # type: ignore[arg-type]
    becomes: dict[Dim, tuple[Dim, ...]] = {}
    seen: set[tuple[int, ...]] = set()
    for d in sorted((d for d in places if d not in kept), key=lambda d: (bool(d.parts), str(d))):
        if tuple(places[d]) in seen:
            becomes[d] = ()
            continue
        seen.add(tuple(places[d]))
        names = [d.name] if not d.parts else []
        letter = next(n for n in [*names, *(m for m in d.names() if m != "p"), *LETTERS] if n not in used)
        used.add(letter)
        becomes[d] = (Dim(letter),)
    for t in inputs:
        if t.type.ids and t.type.ids.parts and t.type.ids not in kept:
            kept.add(t.type.ids)
    common = set.intersection(*(set(t.type.devices) for t in inputs)) - kept
    made = {t: variable(t.name, _typed(t.type, becomes, common)) for t in inputs}
    for t in terms:
        if t.op:
            made[t] = apply(t.op, *(made[a] for a in t.args), attrs=list(_replaced(t.attrs, becomes)))
    return Rule(name, tuple(made[t] for t in inputs), tuple(made[t] for t in source), tuple(made[t] for t in target))


def _fixed(t: Term) -> Iterator[Dim]:
    """Dimensions that an op cuts, joins, makes or counts in."""
    if naming(t) != "dims":
        yield from (a for a in t.attrs if isinstance(a, Dim))
    if not t.op and t.type.ids:
        yield t.type.ids


def _parts(d: Dim) -> Iterator[Dim]:
    yield d
    for part in d.parts:
        yield from _parts(part)


def _replaced(attrs: Sequence[Dim | int], becomes: Mapping[Dim, tuple[Dim, ...]]) -> Iterator[Dim | int]:
    for a in attrs:
        yield from becomes.get(a, (a,)) if isinstance(a, Dim) else (a,)


def _typed(t: Type, becomes: Mapping[Dim, tuple[Dim, ...]], common: set[Dim]) -> Type:
    dims = tuple(_replaced(t.dims, becomes))
    return Type(dims, tuple(p for p in t.devices if p not in common), t.ids)  # type: ignore[arg-type]
