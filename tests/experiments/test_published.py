"""What papers state of kernels stands beside ours with its baseline, and ratios are of what they are said to be."""

import math
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from experiments import one_device, published
from experiments.made_by import ROOT
from experiments.tables import ecornn, hidet, kernels, tuning
from unity_jax.aot import tune
from unity_jax.kernels.grid import Blocks
from unity_jax.machine.machine import Machine
from unity_jax.program import trace
from unity_jax.search.identity import identity
from unity_jax.search.joint import one_device as alone_on


def cells(table):
    return {str(column.header): list(column.cells) for column in table.columns}


@pytest.mark.parametrize("paper", ["EcoRNN", "Hidet", "AutoTVM", "Ansor"])
def test_every_figure_has_a_source(paper):
    found = published.figures(paper)
    assert found and all(float(row["value"]) > 0 and row["source"] for row in found)


def recurrent_row(on, **milliseconds):
    return {"topology": on, "part": "layers", "dtype": "float32", **{k: str(v) for k, v in milliseconds.items()}}


def test_ours_is_the_last_form_that_a_device_has():
    tpu = {"written ms": 8, "divided ms": 4, "kernels ms": 2}
    tpu |= {"written predicted ms": 9, "divided predicted ms": 6, "kernels predicted ms": 3}
    gpu = {"written predicted ms": 3, "divided predicted ms": 2}
    rows = [recurrent_row("v5e:2x4", **tpu), recurrent_row("v100-summit:1x1", **gpu)]
    assert [ecornn.over(rows[0], form) for form in ("written", "divided", "kernels")] == [4.0, 2.0, None]
    shown = cells(ecornn.table(rows))
    assert shown["written / ours"] == ["at most 3 (MXNet's default)", "4.00", ""], "a V100 is only predicted"
    assert shown["divided / ours"] == ["at most 1.5 (cuDNN)", "2.00", ""]
    assert shown["predicted"] == ["", "3.00, 2.00", "1.50"]
    assert "LSTMs 4.00 over written and 2.00 over divided" in ecornn.verdict(rows)


@pytest.mark.parametrize("on", ["v5e:2x4", "v100-summit:1x1"])
def test_the_planner_takes_the_form_that_is_called_ours(on):
    fn, shapes, donated = ecornn.layers("float32")
    program, machine = trace(fn, shapes, {}, donate_argnums=donated), alone_on(Machine.preset(on))
    seconds = [
        identity(program.rewritten(ecornn.FORMS[form](program.graph, machine.device), ()), machine, ecornn.ONE).seconds
        for form in ecornn.forms(on)
    ]
    assert seconds == sorted(seconds, reverse=True) and len(seconds) == (3 if on.startswith("v5e") else 2)
    assert hidet.joint(program, machine).seconds == pytest.approx(seconds[-1])


def test_what_no_plan_changes_is_compiled_once(monkeypatch):
    compiled = []

    def milliseconds(lowered, on):
        compiled.append(lowered)
        return 4.0 / len(compiled)

    monkeypatch.setattr(hidet, "MODELS", {"gpt": {"size": "tiny"}})
    monkeypatch.setattr(hidet, "plain", lambda *_: "the user's")
    monkeypatch.setattr(hidet, "planned", lambda *_: "the plan's")
    monkeypatch.setattr(hidet, "milliseconds", milliseconds)
    row = hidet.measure("v5e:2x4", "gpt")
    assert row["changes"] == 0 and compiled == ["the user's"] and row["ours ms"] == row["XLA ms"]
    changed = SimpleNamespace(
        program=SimpleNamespace(implementations=("a loop as one kernel",), rewrites=()), seconds=1.0
    )
    monkeypatch.setattr(hidet, "joint", lambda *_: changed)
    row = hidet.measure("v5e:2x4", "gpt")
    assert compiled[1:] == ["the user's", "the plan's"] and hidet.faster([row]) == [pytest.approx(1.5)]


MACHINE = Machine.preset("v5e:2x4")


def test_kernels_are_compared_with_the_best_other():
    script, ratio = next(iter(hidet.KERNELS.values()))
    assert script is kernels
    assert ratio({"ours ms": "2", "XLA ms": "8", "JAX's kernel ms": "3"}) == 1.5
    assert ratio({"ours ms": "2", "XLA ms": "8", "JAX's kernel ms": ""}) == 4.0
    average, most = hidet.summary([1.0, 4.0])
    assert (average, most) == ("2.00", "4.00")
    row = {"topology": "v5e:2x4", "model": "gpt", "XLA ms": "3", "ours ms": "2", "predicted ms": "2", "changes": "1"}
    shown = cells(hidet.headline([row]))
    assert shown["average"][:2] == ["1.22", "1.50"] and shown["at most"][:2] == ["1.48", "1.50"]
    assert "PyTorch" in shown["over"][0] and shown["over"][1] == "XLA:TPU"
    assert {f"{kind.what}, over {kind.over}" for kind in hidet.of_kernels()} == set(hidet.KERNELS)


def test_every_model_has_what_hidet_took():
    said = {row["what"] for row in published.figures("Hidet")}
    assert {f"{name} ms" for name in (*hidet.MODELS, "mobilenet")} <= said


def test_a_row_of_tuning_is_what_the_command_tries(monkeypatch):
    """The best of all mappings for each kernel, and the one that the table has, against blocks of 512."""
    tried = []

    def milliseconds(form, on, blocks):
        tried.append((form, on, blocks))
        return {kernel: math.hypot(blocks.queries - 256, blocks.keys - 1024) + 1 for kernel in tune.KERNELS}

    monkeypatch.setattr(tune, "milliseconds", milliseconds)
    row = tuning.measure("v5e:2x4", "all keys, dropout")
    assert len(set(tried)) == len(tried) == row["mappings"] == 9
    assert row["best ms"] == pytest.approx(3.0), "all three by 256 x 1024"
    assert row["by 512 ms"] == pytest.approx(3 * (math.hypot(256, 512) + 1))
    shipped = [tune.best(tune.Spec(1.0, False, tune.KEEP), kernel, "tpu") for kernel in tune.KERNELS]
    assert Blocks(256, 1024) in shipped
    assert row["table ms"] == pytest.approx(sum(milliseconds("", "", blocks)[tune.KERNELS[0]] for blocks in shipped))
    assert tuning.gain({name: str(value) for name, value in row.items()}, "best") == pytest.approx(row["by 512 ms"] / 3)


@pytest.mark.extra("tpu-aot")
def test_a_plan_that_changes_nothing_is_what_jit_compiles():
    """In another process: libtpu reads its flags when it is loaded."""
    program = """
import jax
from experiments.one_device import ONE, milliseconds, plain, planned
from unity_jax.aot.bundles import written
from unity_jax.machine.machine import Machine
from unity_jax.program import trace
from unity_jax.search.identity import identity
from unity_jax.search.joint import one_device

def step(w, x):
    return w - 0.1 * (x.T @ jax.numpy.tanh(x @ w)), w[:8]

shapes = [jax.ShapeDtypeStruct((1024, 1024), "float32")] * 2
plan = identity(trace(step, shapes, {}, donate_argnums=0), one_device(Machine.preset("v5e:2x4")), ONE)
with written():
    for lowered in (plain(step, shapes, "v5e:2x4", (0,)), planned(plan, "v5e:2x4")):
        print(milliseconds(lowered, "v5e:2x4"))
"""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    run = [sys.executable, "-c", program]
    said = subprocess.run(run, check=True, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    by_jit, ours = map(float, said.stdout.split())
    assert ours == by_jit and 1e3 * 4 * 1024**3 / MACHINE.device.flops_per_second("bfloat16") < ours < 1
    assert one_device.ONE.num_devices == 1
