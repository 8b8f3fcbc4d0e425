"""`unity rules check`: verdicts on a file, as a table and as JSON, and exit codes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.rules.cases import CLASSICS, WRONG, parsed
from tests.rules.test_flexflow import RIGHT as FLEXFLOW
from unity_jax.cli import main

pytest.importorskip("egglog")

PROVED = parsed("associativity", CLASSICS["associativity"]).to_json()
STATED = parsed("a conv of one place", CLASSICS["a conv of one place"]).to_json()
UNSTATED = parsed("a window of one", WRONG["sizes"]["a window of one"]).to_json()
FALSE = parsed("sub for add", WRONG["signs"]["sub for add"]).to_json()
UNBOUND = parsed("a new factor", WRONG["unbound"]["a new factor"]).to_json()


@pytest.fixture
def write(tmp_path: Path):
    def file(data: Any) -> str:
        path = tmp_path / "rules.json"
        path.write_text(data if isinstance(data, str) else json.dumps(data))
        return str(path)

    return file


def test_all_proved(write: Any, capsys: pytest.CaptureFixture[str]):
    assert main(["rules", "check", write({"rules": [PROVED, STATED]})]) == 0
    out = capsys.readouterr().out
    assert "associativity" in out and "mul-associates" in out
    assert "2 rules: 1 proved, 1 conditional" in out


def test_verdicts_as_json(write: Any, capsys: pytest.CaptureFixture[str]):
    wrong = {**PROVED, "name": "no such op", "source": ["dott(x, y; k)"]}
    rules = [PROVED, STATED, UNSTATED, FALSE, UNBOUND, wrong, {**PROVED, "when": [7]}, 5, {"given": []}]
    assert main(["rules", "check", write({"rules": rules}), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [v["verdict"] for v in found] == ["proved", "conditional", "conditional", "false"] + ["unproved"] * 5
    assert [v["name"] for v in found[:6]] == [r["name"] for r in rules[:6]]
    assert found[1]["condition"] == found[2]["condition"] == "r == 1"
    assert set(found[0]) == {"name", "verdict", "reason"}
    counterexample = found[3]["counterexample"]
    assert counterexample["sizes"] == {"m": 1} and set(counterexample["inputs"]) == {"x", "y"}
    assert counterexample["source"] != counterexample["target"]
    assert "unbound" in found[4]["reason"] and "unknown op 'dott'" in found[5]["reason"]
    assert all("lists of text" in v["reason"] for v in found[6:])


@pytest.mark.parametrize("rules", [[UNSTATED], [FALSE], [UNBOUND], [PROVED, FALSE]])
def test_exit_code_of_what_does_not_hold(write: Any, rules: list[Any]):
    assert main(["rules", "check", write({"rules": rules})]) == 1


def test_flexflow_form(write: Any, capsys: pytest.CaptureFixture[str]):
    assert main(["rules", "check", write({"rule": FLEXFLOW}), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [v["name"] for v in found] == [r["name"] for r in FLEXFLOW]
    unknown = {**FLEXFLOW[0], "name": "taso_rule_7", "srcOp": [{"type": "OP_CONV2D", "input": [], "para": []}]}
    assert main(["rules", "check", write({"rule": [unknown, FLEXFLOW[1], {}]}), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [v["verdict"] for v in found] == ["unproved", "proved", "unproved"]
    assert found[0]["name"] == "taso_rule_7"


@pytest.mark.parametrize(
    "data, why",
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ([], "holds no rules"),
        ({"rules": 3}, "holds no rules"),
        ({"plan": []}, "holds no rules"),
        ("null", "holds no rules"),
    ],
)
def test_files_that_hold_no_rules(write: Any, data: Any, why: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit:
        main(["rules", "check", write(data)])
    assert exit.value.code == 2
    error = capsys.readouterr().err
    assert why in error and error.count("\n") == 1


def test_files_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    for name in ("missing.json", "", "binary.json"):
        with pytest.raises(SystemExit) as exit:
            main(["rules", "check", str(tmp_path / name)])
        assert exit.value.code == 2
    assert capsys.readouterr().err.count("\n") == 3


def test_deep_terms_are_a_verdict(write: Any, capsys: pytest.CaptureFixture[str]):
    deep = "neg(" * 5000 + "x" + ")" * 5000
    rule = {"name": "deep", "given": ["x[m]"], "source": [deep], "target": ["x"]}
    assert main(["rules", "check", write({"rules": [rule, PROVED]}), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [v["verdict"] for v in found] == ["unproved", "proved"] and "deep" in found[0]["reason"]


def test_as_a_module(write: Any):
    done = subprocess.run(
        [sys.executable, "-m", "unity_jax", "rules", "check", write({"rules": [PROVED]})],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "1 proved" in done.stdout, done.stderr
