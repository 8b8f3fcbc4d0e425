"""Rules in FlexFlow's form: what is right is proved, what is wrong or malformed is refused by name."""

import copy
from typing import Any

import pytest

from unity_jax.rewrite.language import RuleError
from unity_jax.rules.flexflow import imported, judged
from unity_jax.rules.semantics import passes

pytest.importorskip("egglog")

X, Y, Z = -1, -2, -3  # external inputs


def op(type: str, *inputs: int | tuple[int, int], **para: int) -> dict[str, Any]:
    ids = [i if isinstance(i, tuple) else (i, 0) for i in inputs]
    return {
        "type": f"OP_{type}",
        "input": [{"opId": i, "tsId": t} for i, t in ids],
        "para": [{"key": f"PM_{k}", "value": v} for k, v in para.items()],
    }


def rule(name: str, source: list[Any], target: list[Any], *outputs: tuple[int, int, int, int]) -> dict[str, Any]:
    """By default the last op of one side becomes the last of the other."""
    pairs = outputs or [(len(source) - 1, 0, len(target) - 1, 0)]
    keys = ("srcOpId", "srcTsId", "dstOpId", "dstTsId")
    mapped = [dict(zip(keys, p, strict=True)) for p in pairs]
    return {"name": name, "srcOp": source, "dstOp": target, "mappedOutput": mapped}


def partition(x: int, dim: int, degree: int = 2) -> dict[str, Any]:
    return op("PARTITION", x, PARALLEL_DIM=dim, PARALLEL_DEGREE=degree)


def combine(x: int, dim: int, degree: int = 2) -> dict[str, Any]:
    return op("COMBINE", x, PARALLEL_DIM=dim, PARALLEL_DEGREE=degree)


def replicate(x: int, dim: int = 0) -> dict[str, Any]:
    return op("REPLICATE", x, PARALLEL_DIM=dim, PARALLEL_DEGREE=2)


def reduce(x: int) -> dict[str, Any]:
    return op("REDUCE", x, PARALLEL_DIM=0, PARALLEL_DEGREE=2)


def linear(x: int, w: int, activation: int = 0) -> dict[str, Any]:
    return op("LINEAR", x, w, ACTI=activation)


def add(x: int, y: int) -> dict[str, Any]:
    return op("EW_ADD", x, y)


def mul(x: int, y: int) -> dict[str, Any]:
    return op("EW_MUL", x, y)


def relu(x: int) -> dict[str, Any]:
    return op("RELU", x)


def concat(axis: int, *inputs: int) -> dict[str, Any]:
    return op("CONCAT", *inputs, AXIS=axis, NUMDIM=3, NUM_INPUTS=len(inputs))


def split(x: int, axis: int) -> dict[str, Any]:
    return op("SPLIT", x, AXIS=axis, NUMDIM=3, NUM_OUTPUTS=2)


BOTH = (0, 0, 2, 0), (1, 0, 2, 1)  # two results are the parts of a split

RIGHT = [
    rule("data parallel linear", [partition(X, 1), replicate(Y), linear(0, 1)], [linear(X, Y), partition(0, 1)]),
    rule("column parallel linear", [replicate(X), partition(Y, 1), linear(0, 1)], [linear(X, Y), partition(0, 2)]),
    rule("row parallel linear", [linear(X, Y)], [partition(X, 2), partition(Y, 2), linear(0, 1), reduce(2)]),
    rule("with relu", [partition(X, 1), replicate(Y), linear(0, 1, 2)], [linear(X, Y, 2), partition(0, 1)]),
    rule("reduce below linear", [reduce(X), linear(0, Y)], [replicate(Y), linear(X, 0), reduce(1)]),
    rule("two reductions", [reduce(X), reduce(Y), add(0, 1)], [add(X, Y), reduce(0)]),
    rule("add as reduction", [add(X, Y)], [concat(0, X, Y), reduce(0)]),
    rule("relu on blocks", [relu(X)], [partition(X, 1), relu(0), combine(1, 1)]),
    rule("relu passes partition", [relu(X), partition(0, 1)], [partition(X, 1), relu(0)]),
    rule("relu passes combine", [combine(X, 2), relu(0)], [relu(X), combine(0, 2)]),
    rule("relu passes copies", [replicate(X), relu(0)], [relu(X), replicate(0)]),
    rule("relu fused", [linear(X, Y), relu(0)], [linear(X, Y, 2)]),
    rule(
        "siblings",
        [linear(X, Y), linear(X, Z)],
        [concat(1, Y, Z), linear(X, 0), split(1, 2)],
        (0, 0, 2, 0),
        (1, 0, 2, 1),
    ),
    rule(
        "batches",
        [linear(X, Y), linear(Z, Y)],
        [concat(1, X, Z), linear(0, Y), split(1, 1)],
        (0, 0, 2, 0),
        (1, 0, 2, 1),
    ),
    rule("linear", [linear(X, Y), linear(Z, Y), add(0, 1)], [add(X, Z), linear(0, Y)]),
    rule("distributive", [mul(X, Y), mul(X, Z), add(0, 1)], [add(Y, Z), mul(X, 0)]),
    rule("cut and combined", [partition(X, 1), combine(0, 1)], [partition(X, 2), combine(0, 2)]),
    rule("two cuts", [partition(X, 1), partition(0, 2)], [partition(X, 2), partition(0, 1)]),
    rule(
        "concat beside a cut", [partition(X, 1), partition(Y, 1), concat(2, 0, 1)], [concat(2, X, Y), partition(0, 1)]
    ),
    rule("copies of a product", [replicate(X), replicate(Y), linear(0, 1)], [linear(X, Y), replicate(0)]),
    rule("rows again", [replicate(X, 1), combine(0, 1), linear(1, Y)], [linear(X, Y), replicate(0, 1), combine(1, 1)]),
    rule("columns from copies", [replicate(X), replicate(Y, 1), linear(0, 1)], [linear(X, Y), replicate(0, 2)]),
    rule("a reduction among others", [add(X, Y), linear(0, Z), relu(1)], [concat(0, X, Y), reduce(0), linear(1, Z, 2)]),
    rule("split, then concat", [split(X, 1), concat(1, 0, (0, 1)), relu(1)], [relu(X)]),
]

WRONG = {
    "unbound": [
        rule("another input", [linear(X, Y)], [linear(X, Y), add(0, Z)]),
        rule("another weight beside", [linear(X, Y)], [concat(0, Y, Z), linear(X, 0)]),
    ],
    "no types fit": [
        rule("weight not copied", [partition(X, 1), linear(0, Y)], [linear(X, Y), partition(0, 1)]),
        rule("partial sums left", [linear(X, Y)], [partition(X, 2), partition(Y, 2), linear(0, 1)]),
        rule("reduced, not copied", [reduce(X), linear(0, Y)], [linear(X, Y), reduce(0)]),
        rule("of each shard", [partition(X, 1), partition(Y, 1), concat(1, 0, 1)], [concat(1, X, Y), partition(0, 1)]),
        rule("blocks interleaved", [combine(X, 1), combine(Y, 1), concat(1, 0, 1)], [concat(1, X, Y), combine(0, 1)]),
        rule("copies put in a row", [concat(1, X, Y)], [concat(0, X, Y), combine(0, 1)]),
    ],
    "": [
        rule("relu of partial sums", [reduce(X), relu(0)], [relu(X), reduce(0)]),
        rule("relu within the sum", [reduce(X), linear(0, Y, 2)], [replicate(Y), linear(X, 0, 2), reduce(1)]),
        rule("product of sums", [reduce(X), reduce(Y), mul(0, 1)], [mul(X, Y), reduce(0)]),
        rule("product as reduction", [mul(X, Y)], [concat(0, X, Y), reduce(0)]),
        rule("copies added up", [replicate(X), reduce(0)], [partition(X, 1), combine(0, 1)]),
        rule("siblings swapped", [linear(X, Y), linear(X, Z)], [concat(1, Y, Z), linear(X, 0), split(1, 2)],
             (0, 0, 2, 1), (1, 0, 2, 0)),
        rule("relu lost", [linear(X, Y, 2)], [linear(X, Y)]),
        rule("relu of a sum", [add(X, Y), relu(0)], [relu(X), relu(Y), add(0, 1)]),
    ],
}  # fmt: skip


@pytest.mark.parametrize("data", RIGHT, ids=lambda r: r["name"])
def test_right_rules_are_proved(data: dict[str, Any]):
    verdict = judged(data)
    assert verdict.verdict == "proved", verdict
    assert passes(imported(data).rule)


@pytest.mark.parametrize("data", [r for kind in WRONG.values() for r in kind], ids=lambda r: r["name"])
def test_wrong_rules_are_not(data: dict[str, Any]):
    kind = next(k for k, rules in WRONG.items() if data in rules)
    if kind:
        with pytest.raises(RuleError, match=f"{data['name']}: .*{kind}"):
            imported(data)
        return
    verdict = judged(data)
    assert not verdict.holds and verdict.counterexample


def test_types_are_inferred_from_both_sides():
    """A combined input is a block of each device, and what is cut is a multiple."""
    combined = imported(rule("combined", [combine(X, 2), relu(0)], [relu(X), combine(0, 2)])).rule
    assert [str(v.type) for v in combined.given] == ["[l,m,n]@p"]
    cut = imported(RIGHT[0]).rule
    assert [str(v.type) for v in cut.given] == ["[l,p*m,n]", "[l,k,n]"]
    assert str(cut.source[0]) == "dot(partition(x1; p*m), replicate(x2; p); n)"


def test_what_holds_for_the_degree_it_states_is_conditional():
    """Two copies add up to twice the input, and so does adding it twice."""
    source, target = [replicate(X), reduce(0), add(Y, 1)], [concat(0, X, Y), reduce(0), add(X, 1)]
    verdict = judged(rule("twice", source, target))
    assert (verdict.verdict, verdict.condition) == ("conditional", "p == 2 and q == 2") and verdict.holds


def test_sizes_that_only_the_target_makes_equal_are_a_condition():
    """Two functions of their own inputs may have any shapes; put side by side they need the same columns."""
    data = rule("batched", [relu(X), relu(Y)], [concat(1, X, Y), relu(0), split(1, 1)], *BOTH)
    verdict = judged(data)
    assert verdict.verdict == "conditional" and not verdict.holds
    assert verdict.condition == "replicas of x1 == replicas of x2 and columns of x1 == columns of x2"
    shared = rule("of a sum", [add(X, Y), relu(X), relu(Y)], data["dstOp"], (1, 0, 2, 0), (2, 0, 2, 1))
    assert judged(shared).verdict == "proved"  # their sum is in the pattern, so the shapes are equal where it applies


def test_degrees_are_not_mixed():
    with pytest.raises(RuleError, match="an axis of 4 devices and one of 2"):
        imported(rule("degrees", [partition(X, 1, 4), combine(0, 1, 2)], [relu(X)]))


def _broken() -> dict[str, dict[str, Any]]:
    """Variations of a rule, each malformed in one way."""
    good = RIGHT[0]

    def made(change: Any) -> dict[str, Any]:
        data = copy.deepcopy(good)
        change(data)
        return data

    return {
        "no source": made(lambda d: d.pop("srcOp")),
        "no results": made(lambda d: d["mappedOutput"].clear()),
        "results are text": made(lambda d: d.update(mappedOutput="all")),
        "an op is a number": made(lambda d: d["srcOp"].__setitem__(0, 7)),
        "an unknown op": made(lambda d: d["srcOp"][0].update(type="OP_CONV2D")),
        "a type that is no text": made(lambda d: d["srcOp"][0].update(type=3)),
        "no inputs": made(lambda d: d["srcOp"][2].update(input=[])),
        "an input that is missing": made(lambda d: d["srcOp"][2]["input"][0].update(opId=9)),
        "an op that needs itself": made(lambda d: d["srcOp"][2]["input"][0].update(opId=2)),
        "a tensor that is missing": made(lambda d: d["srcOp"][2]["input"][0].update(tsId=1)),
        "a negative tensor": made(lambda d: d["srcOp"][2]["input"][0].update(tsId=-1)),
        "no degree": made(lambda d: d["srcOp"][0].update(para=[{"key": "PM_PARALLEL_DIM", "value": 1}])),
        "a dimension beyond": made(lambda d: d["srcOp"][0]["para"][0].update(value=7)),
        "a replica dimension cut": made(lambda d: d["srcOp"][0]["para"][0].update(value=0)),
        "an unknown activation": made(lambda d: d["srcOp"][2]["para"][0].update(value=77)),
        "a value that is text": made(lambda d: d["srcOp"][2]["para"][0].update(value="two")),
        "three inputs": made(lambda d: d["srcOp"][2]["input"].append({"opId": -3, "tsId": 0})),
        "a result that is missing": made(lambda d: d["mappedOutput"][0].update(srcOpId=17)),
    }


@pytest.mark.parametrize("data", _broken().values(), ids=_broken())
def test_malformed_rules_are_named(data: dict[str, Any]):
    with pytest.raises(RuleError, match="data parallel linear: "):
        imported(data)


@pytest.mark.parametrize("data", [None, 3, [], "rule", {}])
def test_what_is_no_rule_is_refused(data: Any):
    with pytest.raises(RuleError, match="rule without a name"):
        imported(data)
