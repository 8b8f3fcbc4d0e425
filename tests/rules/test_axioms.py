"""What proofs rest on: every axiom, and every translation to the ops that axioms speak of, holds numerically."""

import numpy as np
import pytest

from unity_jax.rewrite.language import Dim
from unity_jax.rewrite.meaning import shape
from unity_jax.rewrite.rule import Rule, make_rule
from unity_jax.rewrite.table import OPS
from unity_jax.rules.axioms import Axiom, axioms
from unity_jax.rules.core import core
from unity_jax.rules.semantics import draw, evaluate, passes, random_sizes

AXIOMS = axioms()


@pytest.mark.parametrize("axiom", AXIOMS, ids=[a.name for a in AXIOMS])
def test_axioms_hold(axiom: Axiom):
    """With a dimension that every tensor has, every dependence that is not ruled out, and dimensions that coincide."""
    instances = list(axiom.instances())
    assert all(passes(rule) for rule in instances)


def test_axioms_know_what_they_need():
    """Types rule out what would be wrong: a sum may not capture what a factor depends on."""
    needs = {a.name: ({f"{v} lacks {d}" for v, d in a.free}, {f"{d} != {e}" for d, e in a.distinct}) for a in AXIOMS}
    assert needs["mul-commutes"] == (set(), set())
    assert needs["sum-mul"] == ({"x lacks k"}, set())
    assert needs["slice-0-sum"] == ({"x lacks n"}, {"n+o != k", "n != k"})
    assert needs["window-mul-constant"][0] == {"x lacks r", "y lacks h", "y lacks r"}


WRONG_AXIOMS = {
    "selections pass functions, windows do not": ("x[h]", "window(f(x); h, r)", "f(window(x; h, r))"),
    "a function of a sum": ("x[k]", "f(sum(x; k))", "sum(f(x); k)"),
    "pads do not pass functions": ("x[n] y[o]", "f(pad(x; n+o, 0))", "pad(f(x); n+o, 0)"),
    "products of sums": ("x[k] y[k]", "sum(mul(x, y); k)", "mul(sum(x; k), sum(y; k))"),
}


@pytest.mark.parametrize("given, left, right", WRONG_AXIOMS.values(), ids=WRONG_AXIOMS)
def test_wrong_axioms_are_found(given: str, left: str, right: str):
    assert not passes(make_rule("wrong", given.split(), [left], [right]))


BROADCASTS = {
    "add": "x[m] y[m]: broadcast(add(x, y); b) = add(broadcast(x; b), broadcast(y; b))",
    "dot": "x[m,k] y[k,n]: broadcast(dot(x, y; k); b) = dot(broadcast(x; b), broadcast(y; b); k)",
    "dot, one side": "x[m,k] y[k,n]: dot(x, y; k) = dot(broadcast(x; n), y; k)",
    "mul, one side": "x[m] y[m,n]: mul(x, y) = mul(broadcast(x; n), y)",
    "f": "x[m]: broadcast(f(x); b) = f(broadcast(x; b))",
    "fold": "x[m,k]: broadcast(fold(x; k); b) = fold(broadcast(x; b); k)",
    "sum": "x[m,k]: broadcast(sum(x; k); b) = sum(broadcast(x; b); k)",
    "concat": "x[n] y[o]: broadcast(concat(x, y; n+o); b) = concat(broadcast(x; b), broadcast(y; b); n+o)",
    "slice": "x[n+o]: broadcast(slice(x; n+o, 1); b) = slice(broadcast(x; b); n+o, 1)",
    "split": "x[p*n]: broadcast(split(x; p*n); b) = split(broadcast(x; b); p*n)",
    "merge": "x[p,n]: broadcast(merge(x; p*n); b) = merge(broadcast(x; b); p*n)",
    "stack": "x[m] y[m]: broadcast(stack(x, y; d); b) = stack(broadcast(x; b), broadcast(y; b); d)",
    "unstack": "x[d,m]: broadcast(unstack(x; d, 1); b) = unstack(broadcast(x; b); d, 1)",
    "take": "x[v,m] i[n]<v: broadcast(take(x, i); b) = take(broadcast(x; b), i)",
    "take by constant numbers": "x[v,b] i[n]<v: take(x, i) = take(x, broadcast(i; b))",
    "onehot": "i[n]<v: broadcast(onehot(i); b) = onehot(broadcast(i; b))",
    "window": "x[h]: broadcast(window(x; h, r); b) = window(broadcast(x; b); h, r)",
}


@pytest.mark.parametrize("text", BROADCASTS.values(), ids=BROADCASTS)
def test_a_broadcast_passes_every_op(text: str):
    """So that it may be left out of proofs."""
    given, equation = text.split(": ", 1)
    left, right = equation.split(" = ")
    assert passes(make_rule("broadcast", given.split(), [left], [right]))


DEFINITIONS = {
    "dot": "x[b,m,k] y[b,k,n]: dot(x, y; k)",
    "outer": "x[m] y[n]: dot(x, y)",
    "two contracted": "x[m,k,l] y[k,l,n]: dot(x, y; k, l)",
    "conv": "x[b,h,c] w[c,r,o]: conv(x, w; c, h, r)",
    "conv in groups": "x[b,g,h,c] w[g,c,r,o]: conv(x, w; c, h, r)",
    "sub": "x[m] y[m]: sub(x, y)",
    "sub of fewer dimensions": "x[m,n] y[m]: sub(y, x)",
    "put": "u[b,n,m] i[n]<v: put(u, i; n)",
    "put, a batch": "u[b,n,m] i[b,n]<v: put(u, i; n)",
    "scatter": "t[m,v] u[n,m] i[n]<v: scatter(t, u, i; n)",
    "pad": "x[m,o]: pad(x; n+o+p, 1)",
    "partition": "x[m,p*n]: partition(x; p*n)",
    "partition, an element each": "x[m,p]: partition(x; p)",
    "combine": "x[m,n]@p: combine(x; p*n)",
    "replicate": "x[m]: replicate(x; p)",
    "reduce": "x[m]@p@q: reduce(x; p)",
    "dot on devices": "x[m,k]@p@q y[k,n]@q@p: dot(x, y; k)",
    "conv on devices": "x[b,h,c]@p w[c,r,o]@p: conv(x, w; c, h, r)",
    "fold on devices": "x[m,k]@p: fold(x; k)",
    "concat on devices": "x[m,n]@p y[o,m]@p: concat(x, y; n+o)",
    "take on devices": "x[v,m]@p i[n]@p<v: take(x, i)",
    "put on devices": "u[n,m]@p i[n]@p<v: put(u, i; n)",
    "scatter on devices": "t[v,m]@p u[n,m]@p i[n]@p<v: scatter(t, u, i; n)",
    "transpose": "x[m,n]: transpose(x; n, m)",
}


@pytest.mark.parametrize("text", DEFINITIONS.values(), ids=DEFINITIONS)
def test_translations_keep_the_value(text: str):
    """Device axes of a value become its first dimensions."""
    given, term = text.split(": ", 1)
    rule = make_rule("definition", given.split(), [term], [term])
    translated = core(rule.source[0], {})
    assert not translated.type.devices
    rng = np.random.default_rng(0)
    for _ in range(20):
        sizes = random_sizes(rule, rng)
        values = draw(rule.given, sizes, rng)
        (before,), (after,) = evaluate(rule.source, sizes, values), evaluate([translated], sizes, values)
        before = before.reshape(shape(rule.source[0].type, sizes))
        axes = (*rule.source[0].type.devices, *rule.source[0].type.dims)
        assert (before == after.transpose([translated.type.dims.index(d) for d in axes])).all()


def test_no_op_is_left_out():
    """Each is in an axiom, is made of such ops, or is the identity of values in proofs."""
    texts = " ".join((*DEFINITIONS.values(), *BROADCASTS.values()))
    ops = {t.op for a in AXIOMS for r in (*a.rule.source, *a.rule.target) for t in r.walk()}
    assert {op for op in OPS if f"{op}(" not in texts} <= ops | {"g", "convert"}  # unknown, like f


def test_dimensions_of_a_frame_are_new():
    """An instance with a frame says something of every tensor of the axiom."""
    framed = next(iter(next(a for a in AXIOMS if a.name == "distributes").instances()))
    assert isinstance(framed, Rule) and all(Dim("frame") in v.type.dims for v in framed.given)
