"""Rules are named by what they do."""

import pytest

from unity_jax.rewrite.library import library
from unity_jax.rewrite.rule import make_rule
from unity_jax.rules.names import name_of, named

NAMES = {
    "add-in-another-order": (["x[m]", "y[m]"], ["add(x, y)"], ["add(y, x)"]),
    "slice-of-pad-cancels": (["x[n]"], ["slice(pad(x; n+o, 0); n+o, 0)"], ["x"]),
    "neg-of-sum-to-sum-of-neg": (["x[m,k]"], ["neg(sum(x; k))"], ["sum(neg(x); k)"]),
    "concat-of-negs-to-neg-of-concat": (["x[n]", "y[o]"], ["concat(neg(x), neg(y); n+o)"], ["neg(concat(x, y; n+o))"]),
    "h-of-slice-second-to-slice-of-h": (
        ["x[]", "y[n+o]"],
        ["h(x, slice(y; n+o, 0))"],
        ["slice(h(x, y); n+o, 0)"],
    ),
    "add-of-dot-to-add-of-dot-of-neg-and-neg": (
        ["x[m,k]", "y[k]", "z[m]"],
        ["add(dot(x, y; k), z)"],
        ["add(dot(neg(x), y; k), neg(z))"],
    ),
    "take-of-neg-by-concat-to-neg-of-take-by-concat": (
        ["t[v]", "i[n]<v", "j[o]<v"],
        ["take(neg(t), concat(i, j; n+o))"],
        ["neg(take(t, concat(i, j; n+o)))"],
    ),
    "concat-conv-siblings-sharing-first": (
        ["x[b,h,c]", "v[r,c,n]", "w[r,c,o]"],
        ["conv(x, v; c, h, r)", "conv(x, w; c, h, r)"],
        [f"slice(conv(x, concat(v, w; n+o); c, h, r); n+o, {i})" for i in (0, 1)],
    ),
    "stack-take-siblings-sharing-rows": (
        ["t[v]", "s[v]", "i[n]<v"],
        ["take(t, i)", "take(s, i)"],
        [f"unstack(take(stack(t, s; e), i); e, {i})" for i in (0, 1)],
    ),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_says_what_a_rule_does(name):
    assert name_of(make_rule("", *NAMES[name])) == name


def test_rules_that_differ_in_dimensions_are_numbered():
    rules = [make_rule("", [f"x[m,{k}]"], [f"neg(sum(x; {k}))"], [f"sum(neg(x); {k})"]) for k in "kl"]
    assert [rule.name for rule in named(rules)] == ["neg-of-sum-to-sum-of-neg", "neg-of-sum-to-sum-of-neg-2"]


def test_the_library_is_named_so():
    assert [rule.name for rule in named(library())] == [rule.name for rule in library()]
    assert sum(rule.name != name_of(rule) for rule in library()) < 0.02 * len(library())
