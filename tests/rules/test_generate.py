"""The generator finds, generalizes and prunes; it makes the same rules each time."""

import numpy as np
import pytest

from unity_jax.rewrite.library import library, to_text
from unity_jax.rewrite.rule import make_rule, parse_term, parse_variable
from unity_jax.rewrite.table import OPS
from unity_jax.rules import generate as command
from unity_jax.rules.alphabet import Alphabet
from unity_jax.rules.alphabets import ALPHABETS
from unity_jax.rules.generalize import generalized
from unity_jax.rules.generate import generate
from unity_jax.rules.match import build, matches
from unity_jax.rules.prune import Known, Programs, follows
from unity_jax.rules.search import rank
from unity_jax.rules.semantics import apply_op
from unity_jax.rules.values import Values

SMALL = [a for a in ALPHABETS if a.name in ("parts f", "parts free dot", "blocks f", "rows f", "devices f")]


def _known(*rules):
    known = Known()
    for rule in rules:
        known.add(rule)
    return known


@pytest.fixture(scope="module")
def small():
    return generate(SMALL)


def test_the_same_rules_each_time(small):
    assert generate(SMALL).rules == small.rules


def test_the_command_prints_counts_and_writes(small, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command, "generate", lambda track: small)
    assert command.run(tmp_path / "rules.json") == 0
    assert (tmp_path / "rules.json").read_text() == to_text(small.rules)
    assert command.run(check=True) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "devices f" in printed
    assert f"{len(small.rules)} left" in printed


def test_part_of_the_library_again(small):
    """Every rule found is a rule of the library, or follows from others there."""
    known = _known(*library())
    assert [r.name for r in small.rules if not follows(r, known, one_way=len(r.source) > 1)] == []
    assert len(small.rules) > 15


def test_counts_fall_from_step_to_step(small):
    for counts in small.counts.values():
        steps = [counts.pairs, counts.subgraphs, counts.renamed, counts.bound, counts.independent, counts.linear]
        assert steps == sorted(steps, reverse=True)
        assert counts.linear >= counts.true >= counts.proved > 0


def test_no_rule_that_ships_follows_from_others_no_larger():
    """Every tenth of them: but for rules of several results and of direct alphabets, whose source is the smaller side,
    and that operands of some ops may be swapped, which is built in."""
    commuting = sum("commutes" in op.traits for op in OPS.values())
    for rule in library()[commuting::10]:
        if len(rule.source) == 1 and len(list(rule.source[0].walk())) >= len(list(rule.target[0].walk())):
            others = (r for r in library() if r is not rule and rank(r)[0] <= rank(rule)[0])
            assert not follows(rule, _known(*others)), rule.name


def test_graphs_are_counted_as_trees():
    """Of one input and two unary ops: 1, 2, 4 and 8 graphs of 0 to 3 ops."""
    graph = Values(Alphabet("", "x[m]", "f g"))
    for size in (1, 2, 3):
        assert graph.grow(size, ["f", "g"]) == []
    assert sum(sum(c.values()) for c in graph.graphs) == 15


def test_graphs_that_share_are_found():
    """h(f(x), f(x)) has two ops."""
    graph = Values(Alphabet("", "x[m]", "f h"))
    for size in (1, 2):
        graph.grow(size, ["f", "h"])
    texts = {str(graph.term(v)) for v in range(len(graph.types))}
    assert {"h(f(x), f(x))", "h(h(x, x), x)", "h(h(x, x), h(x, x))", "f(f(x))"} <= texts


def test_values_are_those_of_their_graphs():
    graph = Values(Alphabet("", "x[m,n+o] y[n+o,k]", "slice dot f", sums="n+o"))
    for size in (1, 2, 3):
        graph.grow(size, ["slice", "dot", "f"])
    assert len(graph.types) > 50
    for value in range(len(graph.variables), len(graph.types)):
        term = graph.term(value)
        args = [graph.arrays[a] for a in graph.nodes[value][0].args]
        if all(a.type.dims == graph.types[n].dims for a, n in zip(term.args, graph.nodes[value][0].args, strict=True)):
            found = apply_op(term, args, graph.sizes)
            assert found.size == graph.arrays[value].size
            assert np.array_equal(np.sort(found, None), np.sort(graph.arrays[value], None))


def test_a_rule_is_generalized():
    x, y = parse_variable("x[m,p*n]"), parse_variable("y[m,p*n]")
    known = {"x": x, "y": y}
    rule = generalized("", [parse_term("f(add(x, y))", known)], [parse_term("f(add(y, x))", known)])
    assert [str(v.type) for v in rule.given] == ["[m]", "[m]"]
    cut = generalized("", [parse_term("partition(f(x); p*n)", known)], [parse_term("f(partition(x; p*n))", known)])
    assert [str(v.type) for v in cut.given] == ["[m,p*n]"]


LINEAR = make_rule(
    "",
    ["x[m,a,b,k]", "y[q,a,c,k]", "w[n,b,c,k]"],
    ["dot(add(x, y), w; k)"],
    ["add(dot(x, w; k), dot(y, w; k))"],
)
ROWS = make_rule("", ["t[v,k]", "i[m]<v", "w[k,n]"], ["dot(take(t, i), w; k)"], ["take(dot(t, w; k), i)"])
SLICE = make_rule("", ["x[n+o,k]", "w[k,m]"], ["dot(slice(x; n+o, 0), w; k)"], ["slice(dot(x, w; k); n+o, 0)"])


@pytest.mark.parametrize(
    ("rule", "given", "program", "expected"),
    [
        (LINEAR, ["a[b,c]", "d[b,c]", "e[c]"], "dot(e, add(a, d); c)", "add(dot(a, e; c), dot(d, e; c))"),
        (
            LINEAR,
            ["a[b,c,l]", "d[c,l]", "e[c,l,b]"],
            "dot(add(a, d), e; c, l)",
            "add(dot(a, e; c, l), dot(d, e; c, l))",
        ),
        (LINEAR, ["a[b,c]", "d[b,c]", "e[b,c]"], "dot(add(a, d), e; b)", "add(dot(a, e; b), dot(d, e; b))"),
        (ROWS, ["a[r,s,c]", "j[x,y]<r", "b[c,s]"], "dot(take(a, j), b; c, s)", "take(dot(a, b; c, s), j)"),
        (SLICE, ["a[s,p+q]", "b[s]"], "dot(b, slice(a; p+q, 1); s)", "slice(dot(a, b; s); p+q, 1)"),
    ],
)
def test_rules_match_by_where_dimensions_occur(rule, given, program, expected):
    known = {v.name: v for v in map(parse_variable, given)}
    graph = Programs()
    at = graph.add(parse_term(program, known))
    wanted = graph.add(parse_term(expected, known))
    made = [build(rule.target[0], m, graph) for n in graph.nodes[at] for m in matches(rule.source, [n], graph)]
    assert wanted in [graph.find(n) for n in made]


@pytest.mark.parametrize(
    ("rule", "given", "program"),
    [
        (ROWS, ["a[r,c]", "j[x]<r", "b[r,c]"], "dot(take(a, j), b; c)"),
        (ROWS, ["a[r,c]", "j[c]<r", "b[c]"], "dot(take(a, j), b; c)"),
        (LINEAR, ["a[b,c]", "d[b]", "e[c]"], "dot(add(a, d), e; c)"),
    ],
)
def test_rules_do_not_match_elsewhere(rule, given, program):
    graph = Programs()
    at = graph.add(parse_term(program, {v.name: v for v in map(parse_variable, given)}))
    made = [build(rule.target[0], m, graph) for n in graph.nodes[at] for m in matches(rule.source, [n], graph)]
    assert [graph.find(n) for n in made if n is not None and graph.find(n) is not None] == []


def test_rules_compose():
    """Both ways to multiply a sum of selected rows."""
    whole = make_rule(
        "",
        ["t[v,k]", "s[v,k]", "i[m]<v", "w[k,n]"],
        ["dot(add(take(t, i), take(s, i)), w; k)"],
        ["add(take(dot(t, w; k), i), take(dot(s, w; k), i))"],
    )
    assert follows(whole, _known(LINEAR, ROWS), one_way=True)
    assert not follows(whole, _known(LINEAR))
    assert not follows(whole, _known(ROWS))
