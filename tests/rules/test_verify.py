"""Verdicts: the classics are proved, what is wrong is rejected for the right reason, to the last one."""

import sys

import numpy as np
import pytest

from tests.rules.cases import CLASSICS, WRONG, parsed
from unity_jax.rewrite.language import RuleError
from unity_jax.rewrite.meaning import PRIME
from unity_jax.rules import prove
from unity_jax.rules.constraints import Constraints
from unity_jax.rules.semantics import canonical, evaluate, passes
from unity_jax.rules.verify import _proved, verify

pytest.importorskip("egglog")

KINDS = [(kind, name) for kind, rules in WRONG.items() for name in rules if kind != "no types"]
EXPECTED = {
    "signs": {"false"},
    "axes and parts": {"false", "conditional"},
    "algebra": {"false", "conditional"},
    "sizes": {"false", "conditional"},
    "one shard": {"false", "conditional"},
    "unbound": {"unproved"},
}


@pytest.mark.parametrize("name", CLASSICS)
def test_classics_are_proved_and_hold(name: str):
    rule = parsed(name, CLASSICS[name])
    verdict = verify(rule)
    assert verdict.holds, verdict
    assert verdict.verdict == ("conditional" if rule.when else "proved")
    assert passes(rule)
    back = parsed(name, "{}: {} => {}".format(*_reversed(name)))
    assert back.unbound or verify(back).holds, verify(back)


def _reversed(name: str) -> tuple[str, str, str]:
    given, body = CLASSICS[name].split(": ", 1)
    body, when, condition = body.partition(" when ")
    source, target = body.split(" => ")
    return given, target, source + when + condition


@pytest.mark.parametrize("kind, name", KINDS, ids=[f"{k}: {n}" for k, n in KINDS])
def test_wrong_rules_are_rejected(kind: str, name: str):
    rule = parsed(name, WRONG[kind][name])
    verdict = verify(rule)
    assert verdict.verdict in EXPECTED[kind], verdict
    assert not verdict.holds
    if kind == "unbound":
        assert verdict.reason.startswith("unbound")
        return
    found = verdict.counterexample
    values = {n: np.array(v) for n, v in found["inputs"].items()}
    before, after = (evaluate(side, found["sizes"], values)[found["result"]] for side in (rule.source, rule.target))
    a, b = rule.source[found["result"]], rule.target[found["result"]]
    x, y = canonical(a.type, before), canonical(b.type, after)
    place = tuple(found["place"].values())
    assert (x[place] - found["source"]) % PRIME == (y[place] - found["target"]) % PRIME == 0 != x[place] - y[place]


@pytest.mark.parametrize("kind, name", KINDS, ids=[f"{k}: {n}" for k, n in KINDS])
def test_no_wrong_rule_has_a_proof(kind: str, name: str):
    """The prover alone, without the test that would find the counterexample."""
    rule = parsed(name, WRONG[kind][name])
    if kind == "unbound":
        assert rule.unbound
        return
    assert not all(_proved(rule, known).found for known in Constraints.of(rule).known())


@pytest.mark.parametrize("name", WRONG["no types"])
def test_rules_without_types_are_refused(name: str):
    with pytest.raises(RuleError, match=name):
        parsed(name, WRONG["no types"][name])


def test_wrong_rules_are_many_and_distinct():
    texts = [t for rules in WRONG.values() for t in rules.values()]
    assert len(set(texts)) == len(texts) >= 50


@pytest.mark.parametrize(
    "kind, name, condition",
    [
        ("sizes", "a window of one", "r == 1"),
        ("sizes", "counts of two sizes", "m == n"),
        ("sizes", "a stack of two", "d == 2"),
        ("sizes", "one row", "v == 1"),
        ("one shard", "sum of copies", "p == 1"),
        ("one shard", "fold per shard", "p == 1"),
    ],
)
def test_missing_conditions_are_found_and_make_the_rule_hold(kind: str, name: str, condition: str):
    text = WRONG[kind][name]
    found = verify(parsed(name, text))
    assert (found.verdict, found.condition) == ("conditional", condition)
    stated = verify(parsed(name, f"{text} when {condition}"))
    assert stated.holds and stated.condition == condition


def test_conditions_that_mean_nothing_are_refused():
    text = CLASSICS["a conv of one place"].split(" when ")[0]
    for condition in ("r = 1", "q == 1", "r == 0", "r == 1000000000000", "r == -1", "r", "1 == 1"):
        verdict = verify(parsed("conv", f"{text} when {condition}"))
        assert verdict.verdict == "unproved", verdict


def test_conditions_that_cannot_hold_are_refused():
    text = CLASSICS["stacked branches"]
    verdict = verify(parsed("stacked", f"{text} when d == 3"))
    assert verdict.verdict == "unproved" and "both" in verdict.reason


def test_equal_sizes_may_not_make_two_dimensions_one():
    """Under n == o a tensor with both would have a dimension twice, so that names no longer say which is which."""
    counted = "s[] y[o]: mul(y, sum(broadcast(s; n); n)) => mul(y, sum(broadcast(s; o); o)) when n == o"
    assert verify(parsed("names apart", counted)).holds
    together = "s[] y[o]: sum(broadcast(mul(y, s); n); n) => mul(y, sum(broadcast(s; o); o)) when n == o"
    verdict = verify(parsed("names together", together))
    assert verdict.verdict == "unproved" and "coincide" in verdict.reason


def test_a_condition_that_is_not_needed_is_no_condition():
    assert verify(parsed("associativity", f"{CLASSICS['associativity']} when m == 3")).verdict == "proved"


def test_what_is_true_but_beyond_the_axioms_is_unproved():
    """That a tensor is the sum of its parts among zeros is no axiom; the reason bounds what chance could explain."""
    parts = [f"conv(pad(slice(x; n+o, {i}); n+o, {i}), w; c, n+o, r)" for i in (0, 1)]
    rule = parsed("conv in parts", f"x[n+o,c] w[c,r,q]: conv(x, w; c, n+o, r) => add({', '.join(parts)})")
    verdict = verify(rule)
    assert passes(rule)
    assert verdict.verdict == "unproved" and "by chance" in verdict.reason and "no proof" in verdict.reason


def test_without_egglog_only_the_exact_test_runs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "egglog.bindings", None)
    prove._prepared.cache_clear()
    try:
        right = verify(parsed("associativity", CLASSICS["associativity"]))
        assert right.verdict == "unproved" and "unity_jax[rules]" in right.reason
        assert verify(parsed("signs", WRONG["signs"]["sub for add"])).verdict == "false"
    finally:
        prove._prepared.cache_clear()
