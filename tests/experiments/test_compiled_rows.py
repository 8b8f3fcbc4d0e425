"""A row of each table about compiled programs is what this version makes: one cheap program, lowered again.

It is compiled again only if its text has changed; then its rows are stale.
"""

import shutil

import pytest

from experiments.rows import Rows
from experiments.validation import against_jit, agreement, confirmed, kept, ranking
from experiments.validation.compiled import COMPILED, plain, planned, plans, step_of
from unity_jax.aot.topologies import topology
from unity_jax.machine.machine import Machine

MODEL, ON = "convnet_nnx", "h100:8"


@pytest.fixture
def table(tmp_path, monkeypatch):
    """The table of compiled programs, of which nothing is changed."""
    shutil.copy(kept.KEPT.path, tmp_path / "programs.csv")
    monkeypatch.setattr(kept, "KEPT", Rows(tmp_path / "programs.csv", ("program",), kept.judged_as))
    monkeypatch.setattr(kept, "STORE", tmp_path)


def row(script, **settings):
    """The row of a table about the program."""
    settings = {"model": MODEL, "topology": ON} | settings
    found = Rows(script.RESULTS, script.SETTINGS).get(settings)
    assert found is not None, f"{script.__name__} has no row about {settings}"
    return found


@pytest.mark.extra("gpu-aot")
def test_rows_about_compiled_programs(table):
    devices, machine = topology(ON), Machine.preset(ON)
    options = COMPILED.flags(MODEL, "gpu")
    ((label, plan),) = plans(COMPILED.program(MODEL, ON), machine, ("dp",), 0)
    facts = {
        who: kept.compiled(lowered, devices, ON, options)
        for who, lowered in (("our", planned(plan, devices)), ("plain", plain(step_of(MODEL), plan, devices)))
    }
    made = row(agreement, plan=label)
    assert int(made["predicted bytes"]) == plan.predicted.peak_bytes
    assert int(made["compiled bytes"]) == facts["our"]["bytes"]
    beside = row(against_jit, plan=label)
    for who, said in facts.items():
        assert int(beside[f"{who} bytes"]) == said["bytes"]
        assert float(beside[f"{who} seconds"]) == pytest.approx(said["judged"], rel=1e-5)
    gain = row(confirmed, against="data parallel")
    assert float(gain["other predicted"]) == pytest.approx(plan.predicted.step_seconds, rel=1e-5)
    assert float(gain["other judged"]) == pytest.approx(facts["our"]["judged"], rel=1e-5)
    ranked = row(ranking)
    of = (float(gain[f"other {how}"]) / float(gain[f"chosen {how}"]) for how in ("predicted", "judged"))
    assert [float(ranked[f"dp / chosen {how}"]) for how in ("predicted", "judged")] == pytest.approx([*of], rel=1e-4)
