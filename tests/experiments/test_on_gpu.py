"""The command for a machine with one GPU, on a CPU: what it measures, writes, leaves out and says."""

import argparse
import os
import re
import subprocess
import sys
import time

import pytest

import models
from experiments.rows import Rows
from experiments.sections import SECTIONS
from experiments.validation import on_gpu

MEASURED = ("predicted seconds", "calibrated seconds", "plan seconds", "plain seconds")


def test_a_small_run(tmp_path):
    """Every part of the real command: calibration, a batch that fills the memory, both ways, rows."""
    command = [sys.executable, "-m", "experiments.validation.on_gpu", "--small", "--models", "mlp", "--out", tmp_path]
    how = {"cwd": on_gpu.ROOT, "env": {**os.environ, "JAX_PLATFORMS": "cpu"}, "capture_output": True, "text": True}
    done = subprocess.run(command, **how, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "left out: nothing" in done.stdout and "cpu, of the preset's rates: matmul float32" in done.stdout
    (row,) = Rows(tmp_path / on_gpu.STEPS, ("on", "model", "size")).found
    assert (row["on"], row["model"], row["size"]) == ("cpu", "mlp", "tiny")
    assert all(float(row[name]) > 0 for name in MEASURED)
    assert 0.6 <= float(row["predicted bytes"]) / on_gpu.SMALL_MEMORY <= 0.8
    assert int(row["batch"]) > on_gpu.CASES["mlp"].small
    assert float(row["plan loss"]) == pytest.approx(float(row["plain loss"]), rel=1e-4)
    again = subprocess.run([*command, "--predict"], **how, check=False)
    assert again.returncode == 0 and "mlp: predicted" in again.stdout, again.stdout + again.stderr
    assert Rows(tmp_path / on_gpu.STEPS, ("on", "model", "size"), on_gpu.CODE).found == [row], "same code, same figures"
    assert float(row["plan compiled bytes"]) > 0 and not row["plan peak bytes"], "XLA:CPU does not tell"
    samples = Rows(tmp_path / on_gpu.CALIBRATION, ()).found
    assert {"launch", "matmul", "stream", "vector", "host_to_device", "device_to_host"} < {s["what"] for s in samples}
    assert [s["of"] for s in samples if s["what"] == "matmul"] == [
        "float32[64,64] @ [64,64]",
        "float32[16,128] @ [128,128]",
    ]
    assert sum(" and " in s["what"] and float(s["first"]) > 0 for s in samples) == 3


@pytest.fixture
def session(tmp_path):
    options = argparse.Namespace(small=True, budget=600.0, out=tmp_path / "out")
    (tmp_path / "work").mkdir()
    return on_gpu.Session(options, tmp_path / "work")


def children(session, monkeypatch, *, fails=(), kind="NVIDIA H200"):
    """Instead of processes: what they would say, and why some fail. Returns the ways that were begun."""
    begun = []

    def child(task, hear, part=1.0):
        begun.append((task["way"], task.get("model"), task.get("batch")))
        if task["way"] == "calibrate":
            hear({"on": kind, "profile": "profile.json"})
            hear({"what": "matmul", "of": "bfloat16[8,8] @ [8,8]", "bytes": 384.0, "seconds": 2e-3, "expected": 1e-3})
        elif task["way"] == "plan":
            hear({"batch": 48, "predicted seconds": 0.5, "predicted bytes": 6e10})
            if task["model"] not in fails:
                hear({"plan seconds": 1.0, "plan peak bytes": 5e10, "plan compiled bytes": 4e10, "held": 3.0})
        else:
            hear({"plain seconds": 1.25, "held": 2.0})
        return "RESOURCE_EXHAUSTED: out of memory" if task.get("model") in fails and task["way"] == "plan" else ""

    monkeypatch.setattr(session, "child", child)
    return begun


def test_plans_come_first_and_plain_steps_take_their_batch(session, monkeypatch):
    begun = children(session, monkeypatch)
    session.all(["mlp", "gpt"])
    assert begun[0][0] == "calibrate"
    assert sorted(begun[1:3]) == [("plan", "gpt", 16), ("plan", "mlp", 1024)]
    assert sorted(begun[3:]) == [("plain", "gpt", 48), ("plain", "mlp", 48)]
    assert session.left_out == []
    begun.clear()
    session.all(["mlp", "gpt"])
    assert [way for way, *_ in begun] == ["calibrate"], "rows are made once"


def test_a_failure_is_a_row_and_what_was_known_before_stays(session, monkeypatch):
    children(session, monkeypatch, fails=("mlp",))
    session.all(["mlp"])
    (row,) = session.rows.found
    assert (row["batch"], row["predicted seconds"]) == ("48", "0.5") and "plan seconds" not in row
    assert row["plan error"] == "RESOURCE_EXHAUSTED: out of memory"
    assert session.left_out == ["mlp (plan: RESOURCE_EXHAUSTED: out of memory)"]
    children(session, monkeypatch)
    session.all(["mlp"])
    (row,) = session.rows.found
    assert row["plan seconds"] == "1" and not row.get("plan error")


def test_what_does_not_fit_the_budget_is_left_out_and_named(session, monkeypatch):
    begun = children(session, monkeypatch)
    session.deadline = time.monotonic() + 30
    session.held = [31.0]
    session.all(["mlp", "gpt"])
    assert [way for way, *_ in begun] == ["calibrate"]
    assert set(session.left_out) == {"mlp (plan: no time)", "gpt (plan: no time)"} | {
        "mlp (plain: no plan)",
        "gpt (plain: no plan)",
    }


def test_a_process_that_fails_or_takes_too_long(session):
    heard = []
    wrong = {"way": "plan", "model": "nothing", "size": "tiny", "changes": {}, "batch": 1}
    wrong |= {"memory": 1, "part": 1.0, "profile": ""}
    assert "no model 'nothing'" in session.child({**wrong, "ready": "", "lock": ""}, heard.append)
    session.deadline = time.monotonic()
    assert session.child({**wrong, "ready": "", "lock": ""}, heard.append) == "the time was up"
    assert heard == []


ROW = {"on": "NVIDIA H200", "model": "gpt", "size": "full", "changes": "layers=4", "batch": "8"}


def test_tables_cope_with_what_is_missing():
    whole = ROW | {"predicted seconds": "0.5", "calibrated seconds": "0.9", "plan seconds": "1.0"}
    whole |= {"plain seconds": "1.25", "predicted bytes": "6e10", "plan peak bytes": "5e10"}
    failed = ROW | {"model": "mlp", "plan error": "RESOURCE_EXHAUSTED", "predicted seconds": "0.5"}
    assert on_gpu.verdict([]) == on_gpu.best([]) == "" and on_gpu.tables([]) == on_gpu.reached([]) == []
    assert on_gpu.verdict([failed]) == "NVIDIA H200, predicted over measured: nothing measured yet"
    said = on_gpu.verdict([whole, failed])
    assert "seconds by the preset median 0.50, 0.50 to 0.50 of 1 models; seconds calibrated median 0.90" in said
    assert "peak memory median 1.20" in said and said.endswith("over plain jit's 0.80")
    (shown,) = on_gpu.tables([whole, failed])
    assert shown.row_count == 2
    sample = {"on": "cpu", "what": "matmul", "of": "bfloat16[8,8] @ [8,8]", "bytes": "384", "seconds": "2"}
    sample |= {"expected": "1"}
    other = {**sample, "of": "bfloat16[64,64] @ [64,64]", "seconds": "1.25"}
    assert on_gpu.best([sample, other]) == "cpu, of the preset's rates: matmul bfloat16 0.80"
    assert on_gpu.reached([sample, other])[0].row_count == 2


def test_both_tables_are_among_the_results():
    mine = [s for s in SECTIONS if s.script is on_gpu]
    assert [s.file for s in mine] == [on_gpu.STEPS, on_gpu.CALIBRATION]
    assert {s.command for s in mine} == {"python -m experiments.validation.on_gpu"}


def test_every_case_is_a_model_of_the_zoo_and_eight_there_are():
    assert len(on_gpu.CASES) >= 8
    for name, case in on_gpu.CASES.items():
        config = models.get(name, case.size, **case.changes, batch_size=case.batch).config
        assert config.batch_size == case.batch and re.fullmatch(r"\S+", name)
