"""What terms mean, and whether both sides of a rule mean the same, in exact arithmetic and by value and gradient."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from unity_jax.rewrite.language import Dim, Term, Type
from unity_jax.rewrite.meaning import FIELD, NUMBERS, STEP, Applied, Arithmetic, Array, Operand, Sizes, shape, size
from unity_jax.rewrite.rule import Rule, parse_dim
from unity_jax.rewrite.table import OPS, naming

Values = Mapping[str, Array]


def evaluate(
    terms: Sequence[Term],
    sizes: Sizes,
    values: Values,
    numbers: Arithmetic = FIELD,
    known: dict[Term, Array] | None = None,
) -> list[Array]:
    """The value of each term for given sizes of the names and values of the variables. `known` remembers values of
    terms from call to call."""
    known = {} if known is None else known
    for t in terms:
        for s in t.walk() if t not in known else ():
            if s not in known:
                known[s] = values[s.name] if not s.op else apply_op(s, [known[a] for a in s.args], sizes, numbers)
    return [known[t] for t in terms]


def apply_op(t: Term, args: Sequence[Array], sizes: Sizes, numbers: Arithmetic = FIELD) -> Array:
    """The value of an op, given those of its operands."""
    operands = [Operand(a.type, v) for a, v in zip(t.args, args, strict=True)]
    return OPS[t.op].meaning(Applied(t, sizes, numbers), *operands)


def draw(variables: Sequence[Term], sizes: Sizes, rng: np.random.Generator, numbers: Arithmetic = FIELD) -> Values:
    """A random value of each variable; row numbers below the size they count in."""
    made = {}
    for v in variables:
        where = shape(v.type, sizes)
        ids = v.type.ids
        made[v.name] = numbers.draw(rng, where) if ids is None else rng.integers(size(ids, sizes), size=where)
    return made


# Rules


def random_sizes(rule: Rule, rng: np.random.Generator, most: int = 4) -> dict[str, int]:
    """Sizes from 1 to `most` that satisfy the rule: its conditions, and the sizes of stacked dimensions."""
    terms = {t: None for r in (*rule.source, *rule.target) for t in r.walk()}
    every = sorted({n for t in terms for d in _dims_of(t) for n in d.names()})
    fixed = {t.attrs[0].name: len(t.args) for t in terms if naming(t) == "count"}  # type: ignore[union-attr]
    least: Counter[str] = Counter()
    for t in terms:
        if naming(t) == "counted":
            least |= Counter({t.attrs[0].name: t.attrs[1]})  # type: ignore[union-attr,dict-item]
    for _ in range(10_000):
        sizes = {n: int(rng.integers(1 + least[n], 1 + max(most, 1 + least[n]))) for n in every} | fixed
        if all(_holds(c, sizes) for c in rule.when):
            return sizes
    raise ValueError(f"{rule.name}: no small sizes satisfy {', '.join(rule.when)}")


def _dims_of(t: Term) -> Iterator[Dim]:
    yield from (*t.type.dims, *t.type.devices, *(a for a in t.attrs if isinstance(a, Dim)))
    if t.type.ids:
        yield t.type.ids


def _holds(condition: str, sizes: Sizes) -> bool:
    """`n == o`, `n == 2`."""
    left, right = (side.strip() for side in condition.split("=="))
    value = {s: int(s) if s.isdigit() else size(parse_dim(s), sizes) for s in (left, right)}
    return value[left] == value[right]


def agrees(rule: Rule, sizes: Sizes, rng: np.random.Generator, numbers: Arithmetic = FIELD) -> bool:
    """Whether both sides have the same results, at random values of the variables; with `NUMBERS`, the same values
    and derivatives along a random direction."""
    known: dict[Term, Array] = {}
    values = draw(rule.given, sizes, rng, numbers)
    before, after = (evaluate(side, sizes, values, numbers, known) for side in (rule.source, rule.target))
    pairs = zip(rule.source, rule.target, before, after, strict=True)
    return all(_same(canonical(a.type, x), canonical(b.type, y)) for a, b, x, y in pairs)


def passes(rule: Rule, times: int = 20, seed: int = 0) -> bool:
    """Whether both sides agree at random sizes, exactly and in values and gradients."""
    rng = np.random.default_rng(seed)
    return all(agrees(rule, random_sizes(rule, rng), rng, n) for _ in range(times) for n in (FIELD, NUMBERS))


def canonical(type: Type, value: Array) -> Array:
    """Axes in the order of their names: results are compared up to the order of dimensions."""
    order = sorted(range(value.ndim), key=lambda i: (i >= len(type.devices), str((*type.devices, *type.dims)[i])))
    return value.transpose(order)


def _same(x: Array, y: Array) -> bool:
    if x.dtype.kind != "c":
        return bool(np.array_equal(x, y))
    return _close(x.real, y.real, 1) and _close(x.imag, y.imag, STEP)


def _close(x: Array, y: Array, least: float) -> bool:
    """Up to rounding, relative to the largest element."""
    return bool(np.abs(x - y).max(initial=0) <= 1e-9 * max(np.abs(x).max(initial=0), least))
