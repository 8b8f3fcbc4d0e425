"""Plans from files that are damaged, or of something else: an error that says which and what to do."""

import json

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import unity_jax as unity
from tests.api.failing import X, double, fails, plan
from tests.api.steps import close, mlp_batch, mlp_state, mlp_step


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))


@pytest.fixture
def saved(tmp_path, mesh):
    path = tmp_path / "plan.json"
    plan(mlp_step, mlp_state(), mlp_batch(), mesh=mesh).save(path)
    return path


def changed(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return path


def test_plan_file_missing_truncated_or_something_else(saved, tmp_path):
    load = unity.Plan.load
    fails(unity.PlanError, "there is no plan file '.*nothing.json'", load, tmp_path / "nothing.json")
    text = saved.read_text()
    saved.write_text(text[: len(text) // 2])
    fails(unity.PlanError, "is not a plan file: .*Save the plan again", load, saved)
    saved.write_bytes(b"\xff\xfe\x00")
    fails(unity.PlanError, "is not a plan file", load, saved)
    saved.write_text("[1, 2]")
    fails(unity.PlanError, "no format 'unity_jax plan'", load, saved)
    fails(unity.PlanError, "is not a plan file", load, tmp_path)


DAMAGES = [
    ({"version": 99}, "plan version 99, this unity_jax reads version"),
    ({"inputs": None}, "damaged"),
    ({"decisions": {}}, "damaged: KeyError"),
    ({"mesh": {"names": ["a"], "sizes": ["x"]}}, "damaged"),
    ({"inputs": 0, "layout": [[["q"], []], []]}, r"the layout of .*\['w1'\], .*q.* names axes that the mesh"),
    ({"inputs": 0, "layout": [[["a"], ["a"]], []]}, r"the layout of .*\['w1'\], .* names an axis twice"),
    ({"inputs": 0, "layout": [[["b", "a"], []], []]}, "axes in another order than the mesh"),
    ({"inputs": 0, "layout": [[[], []], [["a", "sum"]]]}, "is not summed"),
    ({"inputs": 0, "shape": [7, 16], "layout": [[["a"], []], []]}, r"does not divide \[7, 16\]"),
    ({"inputs": 0, "layout": [[[]], []]}, r"1 dimensions, the array \[8, 16\] has 2"),
    ({"inputs": 0, "bytes": float("inf")}, "damaged: OverflowError"),
    ({"predicted": {"collectives": [], "step_seconds": "soon"}}, "damaged"),
    ({"saving": [{"kind": "zip"}]}, "damaged: KeyError: 'zip'"),
    ({"saving": [{"kind": "chunk", "seeds": [[0]]}]}, "damaged"),
    ({"saving": 3}, "damaged: TypeError"),
    ({"saving": [{"kind": "microbatch", "arguments": [[3, -1]], "parts": 2, "rows": 8}]}, "damaged: .* no positions"),
]


@pytest.mark.parametrize(("values", "match"), DAMAGES)
def test_plan_file_of_another_version_or_damaged(saved, values, match):
    if values.get("inputs") == 0:
        inputs = json.loads(saved.read_text())["inputs"]
        assert inputs[1]["path"] == "[0]['w1']"
        inputs[1] |= {k: v for k, v in values.items() if k != "inputs"}
        values = {"inputs": inputs}
    fails(unity.PlanError, match, unity.Plan.load, changed(saved, **values))


AGAIN = {"kind": "recompute", "compiler": "cpu", "where": "", "count": 1, "bytes": 1, "seconds": 0.0}
BY_ROWS = {"kind": "microbatch", "rows": 8, "parts": 2}
CHUNK = {"kind": "chunk", "dim": 0, "parts": 8, "where": "a.py:1", "bytes": 1}
SAVINGS = [
    ({**AGAIN, "values": [[10**6, 0]]}, "the plan does not fit mlp_step .IndexError.*plan again"),
    ({**AGAIN, "values": [], "compiler": "gcc"}, "the plan does not fit mlp_step .KeyError.*plan again"),
    ({**CHUNK, "seeds": [[0, 0]], "dim": 7}, "there are no rows to be chunked at a.py:1.*plan again"),
    ({**CHUNK, "seeds": [[0, 0]]}, "there are no rows to be chunked at a.py:1.*plan again"),
    ({**CHUNK, "seeds": [[0, 0]], "parts": 0}, "there are no rows to be chunked at a.py:1.*plan again"),
    ({**CHUNK, "seeds": [[0, 0]], "dim": -1}, "there are no rows to be chunked at a.py:1.*plan again"),
    ({**BY_ROWS, "arguments": [[3, 0], [4, 0]], "parts": 3}, "the plan does not fit mlp_step .*plan again"),
    ({**BY_ROWS, "arguments": [[3, 0], [4, 0]], "parts": 0}, "the plan does not fit mlp_step .*plan again"),
    ({**BY_ROWS, "arguments": []}, "the plan does not fit mlp_step .*plan again"),
    ({**BY_ROWS, "arguments": [[99, 0]]}, "the plan does not fit mlp_step .IndexError.*plan again"),
    ({**BY_ROWS, "arguments": [[3, 7]]}, "the plan does not fit mlp_step .IndexError.*plan again"),
    ({**BY_ROWS, "arguments": [[1, 0], [3, 0]]}, r"not fit mlp_step .NeedsWholeBatchError: \S*steps.py:\d+"),
]


@pytest.mark.parametrize(("saving", "match"), SAVINGS)
def test_plan_file_that_saves_memory_where_it_cannot_be(saved, saving, match):
    loaded = unity.Plan.load(changed(saved, saving=[saving]))
    fails(unity.PlanError, match, unity.auto_shard(mlp_step, plan=loaded), mlp_state(), mlp_batch())


def test_plan_file_from_before_plans_saved_memory(saved):
    data = json.loads(saved.read_text())
    del data["saving"]
    saved.write_text(json.dumps({**data, "version": 5}))
    loaded = unity.Plan.load(saved)
    assert loaded.saving == ()
    close(unity.auto_shard(mlp_step, plan=loaded)(mlp_state(), mlp_batch()), mlp_step(mlp_state(), mlp_batch()))


DECISIONS = [
    ("strategies", -2, [0], r"strategy \d+ of the plan, \(0,\), is none of \w+ \(.*test_?\w*|steps.py:\d+.*mesh"),
    ("strategies", -2, [99, -1], r"strategy \d+ of the plan, \(99, -1\), is none of"),
    ("strategies", -2, None, r"strategy \d+ of the plan, None, is none of"),
    ("strategies", None, [], r"the plan has 0 ops, this program has \d+: plan again"),
    ("layouts", 0, None, "layout 0 of the plan, .*, is missing"),
    ("layouts", 1, [[["q"], []], []], r"layout 1 of the plan, of \[0\]\['w1'\].* names axes that the mesh"),
    ("outputs", 0, [[["a", "b", "a"]], []], "the layout of result 0 in the plan"),
    ("outputs", None, [], "the plan has 0 results"),
    ("rings", None, [[10**6, 0]], r"a ring at op 1000000, the program \d+ ops"),
]


def edited(path, field, place, value):
    """A plan file with one decision changed, or all of a field; `place` counts the decisions that are there."""
    data = json.loads(path.read_text())
    if place is None:
        data["decisions"][field] = value
    else:
        there = [i for i, x in enumerate(data["decisions"][field]) if x is not None]
        data["decisions"][field][there[place]] = value
    path.write_text(json.dumps(data))


@pytest.mark.parametrize(("field", "place", "value", "match"), DECISIONS)
def test_plan_file_with_decisions_that_cannot_be(saved, field, place, value, match):
    edited(saved, field, place, value)
    step = unity.auto_shard(mlp_step, plan=unity.Plan.load(saved))
    fails(unity.PlanError, match, step, mlp_state(), mlp_batch())


@pytest.mark.parametrize(("field", "place", "value", "match"), DECISIONS)
def test_damaged_entry_of_the_cache_is_replaced(tmp_path, mesh, field, place, value, match):
    settings = {"mesh": mesh, "options": unity.Options(cache=tmp_path)}
    made = plan(mlp_step, mlp_state(), mlp_batch(), **settings)
    (entry,) = (tmp_path / "plans").iterdir()
    edited(entry, field, place, value)
    assert plan(mlp_step, mlp_state(), mlp_batch(), **settings) == made
    assert unity.Plan.load(entry) == made


def test_plan_file_whose_rules_have_other_names_now(saved):
    step = {"graph": [], "rule": "dot-2", "spots": [[0, 0, 0]]}
    done = {"rule": "dot-2", "where": "", "count": 1, "saved": 0.0, "proof": "", "steps": [step]}
    loaded = unity.Plan.load(changed(saved, version=4, rewrites=[done]))
    match = "by rules that are not there any more: plan again"
    fails(unity.PlanError, match, unity.auto_shard(mlp_step, plan=loaded), mlp_state(), mlp_batch())


def test_plan_for_another_signature(saved):
    loaded = unity.Plan.load(saved)
    match = (
        r"another signature of mlp_step: argument \[1\]\['x'\] is float32\[4, 8\] here and float32\[8, 8\] in the plan"
    )
    fails(unity.PlanError, match, unity.auto_shard(mlp_step, plan=loaded), mlp_state(), mlp_batch(4))
    fails(unity.PlanError, r"argument \[0\]\['step'\] is missing here", unity.auto_shard(double, plan=loaded), X)


def test_plan_for_another_program(saved):
    def mlp_step_changed(state, batch):
        state, metrics = mlp_step(state, batch)
        return {**state, "w1": state["w1"] * 2}, metrics

    changed = unity.auto_shard(mlp_step_changed, plan=unity.Plan.load(saved))
    fails(
        unity.PlanError,
        "made for another version of mlp_step: its program differs; plan again",
        changed,
        mlp_state(),
        mlp_batch(),
    )


def test_plan_for_another_mesh_or_machine(saved):
    loaded = unity.Plan.load(saved)
    other = unity.auto_shard(mlp_step, plan=loaded, mesh=Mesh(np.array(jax.devices()), ("a",)))
    fails(unity.PlanError, r"the plan is for the mesh \(a=2, b=4\), mesh= is \(a=8\)", other, mlp_state(), mlp_batch())
    fewer = unity.auto_shard(mlp_step, plan=loaded, mesh=jax.devices()[:4])
    fails((unity.PlanError, ValueError), "devices", fewer, mlp_state(), mlp_batch())
    odd = unity.Plan.load(changed(saved, machine="my cluster"))
    step = unity.auto_shard(mlp_step, plan=odd)
    fails(unity.PlanError, "machine 'my cluster', which is no preset: pass machine=", step, mlp_state(), mlp_batch())


def test_loaded_plan_asked_for_what_it_cannot_know(saved):
    loaded = unity.Plan.load(saved)
    assert "[0]['w1']" in loaded.in_shardings
    fails(unity.PlanError, "auto_shard\\(step, plan=plan\\)", lambda: loaded.pcg)
    fails(unity.PlanError, "does not know its function", loaded.abstract_state)
    fails(unity.PlanError, "does not know its function", loaded.explain, "w1")
