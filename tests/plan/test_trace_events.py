"""Traces of a timeline, as Perfetto and chrome://tracing read them."""

import itertools
import json

import jax
import jax.numpy as jnp
import pytest

import unity_jax as unity


def step(w, v, x):
    return (jnp.tanh(x @ w) @ v).sum()


@pytest.fixture(scope="module")
def plan():
    f32 = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4096, 4096), (4096, 4096), (64, 4096))]
    return unity.plan(step, *f32, machine="v5e:2x4", options=unity.Options(cache=None))


def test_a_saved_trace_shows_the_predicted_step(plan, tmp_path):
    path = tmp_path / "step.json"
    plan.save_trace(path)
    events = json.loads(path.read_text())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = [e for e in events if e["ph"] == "X"]
    assert max(e["ts"] + e["dur"] for e in slices) == pytest.approx(plan.predicted.step_seconds * 1e6)
    assert {rows[e["tid"]].split()[0] for e in slices} == {"compute", "collectives"}
    for row in rows:
        times = sorted((e["ts"], e["ts"] + e["dur"]) for e in slices if e["tid"] == row)
        assert all(a[1] <= b[0] + 1e-6 for a, b in itertools.pairwise(times)), "a stream does one thing"
    (dot, *_) = [e for e in slices if e["name"].endswith("dot_general")]
    assert "test_trace_events.py" in dot["args"]["source"]
    sent = [e for e in slices if rows[e["tid"]].startswith("collectives")]
    assert {(e["args"]["bytes"], e["args"]["axes"]) for e in sent} == {
        (c.bytes, ",".join(c.axes)) for c in plan.predicted.collectives
    }


def test_the_timeline_is_what_was_predicted(plan):
    timeline, predicted = plan.timeline(), plan.predicted
    assert timeline.step_seconds == predicted.step_seconds
    assert timeline.exposed_communication_seconds == predicted.exposed_communication_seconds
    assert predicted.step_seconds == pytest.approx(predicted.compute_seconds + predicted.exposed_communication_seconds)
    assert 0 < predicted.lower_bound_seconds <= predicted.step_seconds


def test_a_loaded_plan_has_no_timeline_yet(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    with pytest.raises(unity.PlanError, match="does not know its function"):
        unity.Plan.load(tmp_path / "plan.json").save_trace(tmp_path / "step.json")
