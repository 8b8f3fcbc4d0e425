"""The rules that ship: the classics are among them, and all hold at random sizes, in values and gradients."""

import pytest

from unity_jax.rewrite.library import FILE, library, to_text
from unity_jax.rewrite.rule import make_rule
from unity_jax.rules.prune import Known, follows, is_own_inverse
from unity_jax.rules.semantics import passes
from unity_jax.rules.verify import verify

X, W, CUT = "x[m,k]", "w[k,n]", "partition(x; p*k), partition(w; p*k)"
MERGED, STACKED = "dot(x, concat(v, w; n+o); k)", "dot(stack(x, y; e), stack(v, w; e); k)"
CONV = "conv(x, concat(v, w; n+o); c, h, r)"

CLASSICS = {
    "data parallel": (["x[p*m,k]", W], ["dot(x, w; k)"], ["combine(dot(partition(x; p*m), replicate(w; p); k); p*m)"]),
    "column parallel": (
        [X, "w[k,p*n]"],
        ["dot(x, w; k)"],
        ["combine(dot(replicate(x; p), partition(w; p*n); k); p*n)"],
    ),
    "row parallel": (["x[m,p*k]", "w[p*k,n]"], ["dot(x, w; p*k)"], [f"reduce(dot({CUT}; k); p)"]),
    "reduce after dot": (["x[m,k]@p", W], ["dot(reduce(x; p), w; k)"], ["reduce(dot(x, replicate(w; p); k); p)"]),
    "reduce after neg": (["x[m]@p"], ["neg(reduce(x; p))"], ["reduce(neg(x); p)"]),
    "two reductions": (["x[m]@p", "y[m]@p"], ["add(reduce(x; p), reduce(y; p))"], ["reduce(add(x, y); p)"]),
    "siblings": (
        [X, "v[k,n]", "w[k,o]"],
        ["dot(x, v; k)", "dot(x, w; k)"],
        [f"slice({MERGED}; n+o, 0)", f"slice({MERGED}; n+o, 1)"],
    ),
    "siblings apart": (
        [X, "v[k,n]", "w[k,o]"],
        [f"slice({MERGED}; n+o, 0)", f"slice({MERGED}; n+o, 1)"],
        ["dot(x, v; k)", "dot(x, w; k)"],
    ),
    "isomorphic branches": (
        [X, "y[m,k]", "v[k,n]", "w[k,n]"],
        ["dot(x, v; k)", "dot(y, w; k)"],
        [f"unstack({STACKED}; e, 0)", f"unstack({STACKED}; e, 1)"],
    ),
    "dot over parts": (
        [X, "y[m,l]", "t[k+l,n]"],
        ["dot(concat(x, y; k+l), t; k+l)"],
        ["add(dot(x, slice(t; k+l, 0); k), dot(y, slice(t; k+l, 1); l))"],
    ),
    "sum of siblings": (
        [X, "v[k,n]", "y[m,l]", "w[l,n]"],
        ["add(dot(x, v; k), dot(y, w; l))"],
        ["dot(concat(x, y; k+l), concat(v, w; k+l); k+l)"],
    ),
    "linear left": ([X, "y[m,k]", W], ["add(dot(x, w; k), dot(y, w; k))"], ["dot(add(x, y), w; k)"]),
    "linear right": ([X, W, "v[k,n]"], ["add(dot(x, v; k), dot(x, w; k))"], ["dot(x, add(v, w); k)"]),
    "associative": ([X, W, "u[n,o]"], ["dot(dot(x, w; k), u; n)"], ["dot(x, dot(w, u; n); k)"]),
    "associative batch": (
        ["x[b,m,k]", "w[b,k,n]", "u[n,o]"],
        ["dot(dot(x, w; k), u; n)"],
        ["dot(x, dot(w, u; n); k)"],
    ),
    "selection": (["t[v,k]", "i[m]<v", W], ["dot(take(t, i), w; k)"], ["take(dot(t, w; k), i)"]),
    "slice": (["x[l+m,k]", W], ["dot(slice(x; l+m, 1), w; k)"], ["slice(dot(x, w; k); l+m, 1)"]),
    "pooling": ([X, W], ["sum(dot(x, w; k); m)"], ["dot(sum(x; m), w; k)"]),
    "sibling convolutions": (
        ["x[b,h,c]", "v[r,c,n]", "w[r,c,o]"],
        ["conv(x, v; c, h, r)", "conv(x, w; c, h, r)"],
        [f"slice({CONV}; n+o, 0)", f"slice({CONV}; n+o, 1)"],
    ),
    "rows contracted": (["u[n,d]", "i[n]<v", "s[v,o]"], ["dot(put(u, i; n), s; v)"], ["dot(u, take(s, i); n)"]),
    "sparse update": (["t[v,d]", "u[n,d]", "i[n]<v"], ["sub(t, put(u, i; n))"], ["scatter(t, neg(u), i; n)"]),
    "pad contracted": ([X, "t[k+l,n]"], ["dot(pad(x; k+l, 0), t; k+l)"], ["dot(x, slice(t; k+l, 0); k)"]),
}

DERIVED = {
    "transposed": ([X, W], ["transpose(dot(x, w; k); n, m)"], ["dot(transpose(w; n, k), transpose(x; k, m); k)"]),
    "pooling of windows": (
        ["x[p*m,k]", W],
        ["sum(split(dot(x, w; k); p*m); p)"],
        ["dot(sum(split(x; p*m); p), w; k)"],
    ),
    "scaled sparse update": (
        ["t[v,d]", "u[n,d]", "i[n]<v", "c[]"],
        ["sub(t, mul(put(u, i; n), c))"],
        ["scatter(t, neg(mul(u, c)), i; n)"],
    ),
    "rows through dot": (["u[n,d]", "i[n]<v", "w[d,o]"], ["dot(put(u, i; n), w; d)"], ["put(dot(u, w; d), i; n)"]),
    "rows through neg": (["u[n,d]", "i[n]<v"], ["neg(put(u, i; n))"], ["put(neg(u), i; n)"]),
    "rows added": (["u[n]", "w[n]", "i[n]<v"], ["add(put(u, i; n), put(w, i; n))"], ["put(add(u, w), i; n)"]),
    "rows scaled": (["u[n]", "c[]", "i[n]<v"], ["mul(put(u, i; n), c)"], ["put(mul(u, c), i; n)"]),
    "parts reduced": (
        ["x[n]@p", "y[o]@p"],
        ["concat(reduce(x; p), reduce(y; p); n+o)"],
        ["reduce(concat(x, y; n+o); p)"],
    ),
    "gathers stacked": (
        ["x[n]@p", "y[n]@p"],
        ["stack(combine(x; p*n), combine(y; p*n); e)"],
        ["combine(stack(x, y; e); p*n)"],
    ),
    "gathered operand": (
        ["x[m,k]@p", W],
        ["dot(combine(x; p*m), w; k)"],
        ["combine(dot(x, replicate(w; p); k); p*m)"],
    ),
}


def _rule(name, case):
    return make_rule(name, *case)


def _known(rules):
    known = Known()
    for rule in rules:
        known.add(rule)
    return known


@pytest.mark.parametrize("name", CLASSICS)
def test_classics_are_rules(name):
    """Some one rule makes the target of the source, or the source of the target."""
    rule = _rule(name, CLASSICS[name])
    assert any(follows(rule, _known([r]), one_way=len(rule.source) > 1) for r in library())


@pytest.mark.parametrize("name", DERIVED)
def test_rules_compose(name):
    assert follows(_rule(name, DERIVED[name]), _known(library()))


def test_the_file_is_readable_and_its_rules_have_names_of_their_own():
    assert to_text(library()) == FILE.read_text()
    assert len({rule.name for rule in library()}) == len(library())


def test_every_rule_holds_in_values_and_gradients():
    """At twenty random shapes each."""
    assert [rule.name for rule in library() if not passes(rule)] == []


def test_every_rule_is_proved():
    verdicts = [(rule, verify(rule)) for rule in library()]
    assert [
        rule.name for rule, verdict in verdicts if (verdict.verdict, verdict.reason) != ("proved", rule.proof)
    ] == []


def test_every_rule_can_be_applied():
    assert [rule.name for rule in library() if rule.unbound] == []


def test_it_is_known_which_rules_are_their_own_inverse():
    assert [rule.name for rule in library() if rule.own_inverse != is_own_inverse(rule)] == []
    assert 0 < sum(rule.own_inverse for rule in library()) < len(library())
