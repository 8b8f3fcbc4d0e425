"""What saturation derives is true: every term it adds to a class has the value of the class, for real sizes.

Terms of egglog are evaluated as what they stand for, functions of an assignment of places to all dimensions at once,
so that a captured name, a dependence that was lost or a condition that was forgotten shows.
"""

import functools
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from unity_jax.rewrite.language import RuleError, Term
from unity_jax.rewrite.meaning import FIELD, PRIME
from unity_jax.rewrite.rule import parse_dim, parse_variable
from unity_jax.rewrite.table import apply
from unity_jax.rules.core import core
from unity_jax.rules.prove import Sizes, _Encoder, _prepared, _run, _text

pytest.importorskip("egglog")

GIVEN = "x[n+o,k] y[n+o] z[p*n,k] w[n,k] t[v,k] u[v,n+o] a[h,k] b[k,r] c[d,n] e[n,o]".split()
GIVEN += "i[n]<v j[k]<v l[n+o]<v q[v]<k s[p]<n".split()
ATTRIBUTES: dict[str, list[list[Any]]] = {
    "add": [[]],
    "mul": [[]],
    "neg": [[]],
    "f": [[]],
    "h": [[]],
    "dot": [[], ["n"], ["k"], ["n+o"]],
    "sum": [["n"], ["k"], ["n+o"], ["p*n"], ["p"], ["v"], ["o"], ["d"], ["h"]],
    "fold": [["k"], ["n+o"], ["p*n"]],
    "broadcast": [["n"], ["k"], ["n+o"], ["v"], ["p"], ["p*n"], ["d"]],
    "concat": [["n+o"]],
    "slice": [["n+o", 0], ["n+o", 1]],
    "pad": [["n+o", 0], ["n+o", 1]],
    "stack": [["d"]],
    "unstack": [["d", 0], ["d", 1]],
    "split": [["p*n"]],
    "merge": [["p*n"]],
    "take": [[]],
    "put": [["n"], ["k"], ["n+o"]],
    "onehot": [[]],
    "ones": [["n"], ["k", "p"]],
    "window": [["h", "r"], ["n+o", "r"]],
}
NAMES = {"n": 2, "o": 3, "k": 2, "p": 2, "v": 3, "h": 3, "r": 2, "d": 2}
ROUNDS, NODES = 3, 1500


def random_terms(rng: np.random.Generator, count: int) -> list[Term]:
    """Terms of core ops, by applying random ops to what there is, where they fit."""
    pool = [parse_variable(v) for v in GIVEN]
    while len(pool) < len(GIVEN) + count:
        op = str(rng.choice(list(ATTRIBUTES)))
        arity = 2 if op in ("add", "mul", "h", "dot", "concat", "stack", "take", "put") else 0 if op == "ones" else 1
        recent = pool[::-1][: len(GIVEN) + 6]
        args = [recent[rng.integers(len(recent))] for _ in range(arity)]
        choices = ATTRIBUTES[op]
        attrs = [parse_dim(a) if isinstance(a, str) else a for a in choices[rng.integers(len(choices))]]
        try:
            pool.append(core(apply(op, *args, attrs=attrs), {}))
        except RuleError:
            continue
    return pool[len(GIVEN) :]


# Terms of egglog, read back


def read(text: str) -> Any:
    """`(Sum (Variable "x") (Name "k"))` as nested tuples."""
    stack: list[list[Any]] = [[]]
    for token in re.findall(r'[()]|"[^"]*"|[^\s()]+', text):
        if token == "(":
            stack.append([])
        elif token == ")":
            done = tuple(stack.pop())
            stack[-1].append(done)
        else:
            stack[-1].append(token.strip('"') if not token.lstrip("-").isdigit() else int(token))
    return stack[0][0]


class Space:
    """All places of all dimensions: a value is an array with one axis for each."""

    def __init__(self, dims: list[Any], rng: np.random.Generator) -> None:
        self.dims, self.rng = dims, rng
        self.shape = tuple(map(self.size, dims))
        self.grid = dict(zip(dims, np.indices(self.shape), strict=True))
        self.variables: dict[str, np.ndarray] = {}
        self.value = functools.cache(self._value)

    def size(self, d: Any) -> int:
        match d:
            case ("One",):
                return 1
            case ("Name", name):
                return NAMES[name]
            case ("Plus", _, a, b):
                return self.size(a) + self.size(b)
            case ("Times", a, b):
                return self.size(a) * self.size(b)
        raise AssertionError(d)

    def at(self, d: Any) -> Any:
        return 0 if d == ("One",) else self.grid[d]

    def moved(self, x: np.ndarray, places: dict[Any, Any]) -> np.ndarray:
        """The value elsewhere along some dimensions."""
        where = (places.get(d, self.grid[d]) for d in self.dims)
        return x[tuple(np.clip(w, 0, s - 1) for w, s in zip(where, self.shape, strict=True))]

    def draw(self, name: str, dims: list[Any], below: int) -> None:
        shape = [s if d in dims else 1 for d, s in zip(self.dims, self.shape, strict=True)]
        self.variables[name] = np.broadcast_to(self.rng.integers(below, size=shape), self.shape)

    def _value(self, t: Any) -> np.ndarray:
        v = self.value
        match t:
            case ("Variable", name):
                return self.variables[name]
            case ("Zeros",):
                return np.zeros(self.shape, np.int64)
            case ("Ones",):
                return np.ones(self.shape, np.int64)
            case ("Add", x, y):
                return (v(x) + v(y)) % PRIME
            case ("Mul", x, y):
                return v(x) * v(y) % PRIME
            case ("Neg", x):
                return -v(x) % PRIME
            case ("Apply", name, x):
                return FIELD.unary[0]((v(x) + len(name)) % PRIME)
            case ("Apply2", _, x, y):
                return FIELD.binary(v(x), v(y))
            case ("Sum", x, ("One",)):
                return v(x)
            case ("Sum", x, k):
                return np.broadcast_to(v(x).sum(self.dims.index(k), keepdims=True) % PRIME, self.shape)
            case ("Slice", x, ("Plus", _, a, b) as whole, index):
                return self.moved(v(x), {whole: self.at(b) + self.size(a) if index else self.at(a)})
            case ("Concat", ("Plus", _, a, b) as whole, x, y):
                place, first = self.at(whole), self.size(a)
                return np.where(place < first, self.moved(v(x), {a: place}), self.moved(v(y), {b: place - first}))
            case ("Split", x, ("Times", p, n) as whole):
                return self.moved(v(x), {whole: self.at(p) * self.size(n) + self.at(n)})
            case ("Merge", x, ("Times", p, n) as whole):
                return self.moved(v(x), {p: self.at(whole) // self.size(n), n: self.at(whole) % self.size(n)})
            case ("Take", x, i, rows):
                return self.moved(v(x), {rows: v(i)})
            case ("OneHot", i, rows):
                return (v(i) == self.at(rows)).astype(np.int64)
            case ("Window", x, h, r):
                place = self.at(h) + self.at(r) - (self.size(r) - 1) // 2
                return np.where((place >= 0) & (place < self.size(h)), self.moved(v(x), {h: place}), 0)
        raise AssertionError(t)


def lines(graph: Any, function: str) -> Iterator[tuple[Any, Any]]:
    """The nodes of a constructor and the terms that stand for their classes."""
    for line in str(_run(graph, f"(print-function {function} 100000)")[0]).splitlines():
        if " -> " in line:
            left, right = line.strip().split(" -> ")
            yield read(left), read(right)


def parts(d: Any) -> Iterator[Any]:
    """A dimension and what it is made of, but for ones."""
    if d != ("One",):
        yield d
        for part in (p for p in d if isinstance(p, tuple)):
            yield from parts(part)


CONSTRUCTORS = "Zeros Ones Add Mul Neg Apply Apply2 Sum Slice Concat Split Merge Take OneHot Window".split()
KNOWN = {
    "two to a stack": Sizes(number={"d": 2}),
    "one feature": Sizes(number={"d": 2, "k": 1}),
    "halves": Sizes(number={"d": 2}, same={"o": "n"}),
    "a window of one": Sizes(number={"d": 2, "r": 1}),
}


@pytest.mark.parametrize("known", KNOWN.values(), ids=KNOWN)
@pytest.mark.parametrize("seed", range(8))
def test_what_is_derived_is_true(seed: int, known: Sizes):
    rng = np.random.default_rng(seed)
    encode = _Encoder(known)
    terms = random_terms(rng, 60)
    for t in terms:
        try:
            encode(t)
        except RuleError:  # two of its dimensions are one
            continue
    dims = [e for t in encode.known for d in t.type.dims for e in parts(read(_text(known.dim(d))))]
    space = Space(list(dict.fromkeys(dims)), rng)
    for t in encode.known:
        if not t.op:
            mine = [read(_text(known.dim(d))) for d in t.type.dims]
            rows = t.type.ids
            space.draw(t.name, mine, PRIME if rows is None else space.size(read(_text(known.dim(rows)))))
    graph = _prepared()
    _run(graph, "(push)")
    try:
        _run(graph, "\n".join(encode.lines))
        for _ in range(ROUNDS):
            _run(graph, "(run-schedule (saturate (run dependence)) (run axioms) (saturate (run dependence)))")
            if sum(n for _, n in _run(graph, "(print-size)")[0].sizes) > NODES:
                break
        nodes = [pair for c in CONSTRUCTORS for pair in lines(graph, c)]
        free = list(lines(graph, "free"))
    finally:
        _run(graph, "(pop)")
    assert nodes and free
    for node, representative in nodes:
        assert (space.value(node) == space.value(representative)).all(), (node, representative)
    for (_, term), (_, *depends) in free:
        others = tuple(i for i, d in enumerate(space.dims) if d not in depends)
        value = space.value(term)
        assert (value == value[tuple(slice(1) if i in others else slice(None) for i in range(value.ndim))]).all(), term
