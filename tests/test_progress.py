"""What planning says of itself: to whom, when, and about what; on a clock and a terminal of the tests' own."""

import io
import threading

import jax.numpy as jnp
import numpy as np
import pytest

import unity_jax as unity
from unity_jax import progress
from unity_jax.progress import Reporter, shown, stage


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def heard(monkeypatch):
    """Every title and every stage that is shown, without waiting for anything to take long."""
    said = []

    class Heard(Reporter):
        def __init__(self, title, stream):
            said.append(title)
            super().__init__(title, stream, Clock())

        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if name == "now" and value[0]:
                said.append(self._text())

    monkeypatch.setattr(progress, "Reporter", Heard)
    monkeypatch.delenv("UNITY_JAX_PROGRESS")
    monkeypatch.setenv("UNITY_JAX_CACHE", "")
    return said


def test_a_log_gets_a_line_every_ten_seconds():
    stream, clock = io.StringIO(), Clock()
    reporter = Reporter("planning step", stream, clock)
    for now in np.arange(100.0, 125.0, 0.5):
        clock.now = now
        reporter.now = ("tracing", 0, None) if now < 105 else ("rewritten programs", 3, 32)
        reporter.tick()
    reporter.close()
    assert stream.getvalue().splitlines() == [
        "unity_jax: planning step, 10 s: rewritten programs, 3 of 32",
        "unity_jax: planning step, 20 s: rewritten programs, 3 of 32",
    ]


def test_a_terminal_gets_a_bar_after_a_second_that_goes_away():
    stream, clock = io.StringIO(), Clock()
    reporter = Reporter("planning [red]step[/red]", stream, clock, terminal=True)
    reporter.now = ("mesh (x=8)", 0, None)
    clock.now += 0.9
    reporter.tick()
    reporter.close()
    assert stream.getvalue() == ""
    clock.now += 6.2
    reporter.tick()
    drawn = stream.getvalue()
    assert "planning [red]step[/red]" in drawn  # names are not markup
    assert "0:00:07" in drawn and "mesh (x=8)" in drawn
    reporter.now = ("rewritten programs", 3, 32)
    reporter.tick()
    reporter.close()
    assert "rewritten programs, 3 of 32" in stream.getvalue()
    assert stream.getvalue().endswith("\x1b[2K")  # the line is erased


def test_planning_names_its_stages_and_why_it_plans_again(heard):
    @unity.auto_shard(static_argnums=1)
    def step(batch, scale):
        return {"y": batch["x"] @ batch["w"] * scale}

    def batch(rows, dtype=jnp.float32):
        return {"x": jnp.ones((rows, 16), dtype), "w": jnp.ones((16, 16), dtype)}

    step.plan(batch(64), 2.0)
    assert heard[:2] == ["planning step", "tracing"]
    assert any(said.startswith("mesh (x=8)") for said in heard)
    heard.clear()
    step.plan(batch(64), 2.0)
    assert heard == []
    step.plan(batch(24), 2.0)
    assert heard[0] == "planning step again: [0]['x'] is float32[24,16], was float32[64,16]"
    heard.clear()
    step.plan(batch(24), 3.0)
    assert heard[0] == "planning step again: static argument 1 is 3.0"
    heard.clear()
    step.plan(batch(24, jnp.bfloat16), 3.0)
    title = "planning step again: [0]['w'] is bfloat16[16,16], was float32[16,16], and 1 more arguments changed"
    assert heard[0] == title
    heard.clear()
    step.plan({**batch(24), "more": 1.0}, 3.0)
    assert heard[0] == "planning step again: the arguments have another structure"


def test_a_plan_is_the_same_whoever_looks_on(monkeypatch, heard, capfd):
    def step(x, w):
        return jnp.tanh(x @ w).sum()

    arguments = jnp.ones((64, 32)), jnp.ones((32, 16))
    first = unity.plan(step, *arguments, machine="cpu:8")
    assert heard
    heard.clear()
    monkeypatch.setenv("UNITY_JAX_PROGRESS", "0")
    second = unity.plan(step, *arguments, machine="cpu:8")
    assert heard == []
    assert str(first) == str(second) and str(first.pcg) == str(second.pcg)
    assert capfd.readouterr() == ("", "")  # neither took long


@pytest.mark.parametrize(("initialized", "process", "wanted"), [(False, 1, True), (True, 0, True), (True, 1, False)])
def test_only_the_first_process_says_anything(monkeypatch, initialized, process, wanted):
    monkeypatch.delenv("UNITY_JAX_PROGRESS")
    monkeypatch.setattr("jax.distributed.is_initialized", lambda: initialized)
    monkeypatch.setattr("jax.process_index", lambda: process)
    assert progress._is_wanted() == wanted


def test_one_plan_at_a_time_is_shown_and_nothing_stays_behind(heard):
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError), shown("outer"):
        assert threading.active_count() == before + 1
        with shown("inner"):
            stage("a stage")
        stage("another", 1, 2)
        raise ZeroDivisionError
    stage("nobody listens")
    assert heard == ["outer", "a stage", "another, 1 of 2"]
    assert threading.active_count() == before


def test_a_closed_stream_costs_no_plan(monkeypatch):
    monkeypatch.delenv("UNITY_JAX_PROGRESS")
    monkeypatch.setattr(progress, "TICK", 0.0)
    monkeypatch.setattr(progress, "LINE_EVERY", 0.0)
    closed = io.StringIO()
    monkeypatch.setattr("sys.stderr", closed)
    with shown("planning"):
        closed.close()
        (thread,) = (t for t in threading.enumerate() if t.name == "unity_jax progress")
        thread.join(60)
        assert not thread.is_alive()
