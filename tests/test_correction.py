"""The compiler has the last word on memory: what it needs beyond the prediction is left free for it."""

import math
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import unity_jax as unity
from tests.residuals import steps
from unity_jax import correction
from unity_jax.aot import finalists
from unity_jax.aot.compiled import peak_of, used
from unity_jax.correction import corrected, reserving
from unity_jax.lower.compile import arguments
from unity_jax.residuals.record import Keep, Recompute, Spill
from unity_jax.runner import Runner


@pytest.fixture(autouse=True)
def no_cache(monkeypatch):
    monkeypatch.setenv("UNITY_JAX_CACHE", "")


@pytest.mark.parametrize(
    ("plans", "chosen", "margin"),
    [
        ([(90, 95)], 0, 0),  # beyond the prediction, and within the limit
        ([(90, 120), (65, 80)], 1, 30),
        ([(90, 101), (88, 103), (70, 99)], 2, 30),  # what was to save memory did not: twice as much
        ([(90, 120), (65, 110), (50, 100)], 2, 50),  # needs too much by prediction, and does not as compiled
        ([(95, 104), (88, 103), (70, 102), (60, 101)], 3, 41),  # it is within no limit: the plan says so
        ([(90, 120), (85, 99)], 1, 14),  # needs too much by prediction, and does not as compiled
        ([(90, 120), (85, 110), (60, 70)], 1, 25),  # no plan fits, and this one does not either
        ([(90, math.inf), (75, 85)], 1, 20),  # the compiler does not say how much
    ],
)
def test_what_the_compiler_needs_is_left_free(plans, chosen, margin, monkeypatch):
    told, asked = [], []
    monkeypatch.setattr(correction.progress, "tell", told.append)
    later = iter(plans[1:])

    def again(margin):
        asked.append(margin)
        return next(later)

    found = corrected("step", plans[0], 100, lambda p: p[1], lambda p: p[0], again)
    assert found == (plans[chosen], margin)
    assert len(told) == len(asked) == chosen
    assert (found[0][0] + margin <= 100) == (found[0][1] <= 100)


@pytest.mark.parametrize(
    ("kinds", "times"), [((), 1), ((Keep,), 1), ((Keep, Spill), 1), ((Spill,), 2), ((Recompute, Keep), 2)], ids=str
)
def test_a_plan_that_saves_memory_is_made_again_to_leave_some(kinds, times):
    """What is kept in place of computing it again has been chosen so."""
    asked = []
    program = SimpleNamespace(savings=tuple(object.__new__(kind) for kind in kinds))

    def search(margin, spare):
        asked.append((margin, spare))
        peak = 100 - margin
        return SimpleNamespace(
            program=program, seconds=1.0, memory=SimpleNamespace(peak_bytes=peak), fits=lambda limit: peak <= limit
        )

    found = reserving(100.0, search)
    assert asked == [(0, 15), (15, 0)][:times]
    assert found.memory.peak_bytes == (100 if times == 1 else 85)


@pytest.mark.parametrize(
    ("seconds", "left"), [((1.0, 1.09), 30), ((1.0, 1.2, 1.09), 15), ((1.0, 1.2, 1.2), 0)], ids=str
)
def test_less_is_left_where_more_costs_too_much_time(seconds, left):
    """These are the seconds of the plan that leaves nothing, and of those that leave ever less."""
    program, later = SimpleNamespace(savings=(object.__new__(Recompute),)), iter(seconds)

    def search(margin, spare):
        memory = SimpleNamespace(peak_bytes=200 - margin)
        return SimpleNamespace(
            program=program, seconds=next(later), memory=memory, fits=lambda limit: memory.peak_bytes <= limit
        )

    assert 200 - reserving(200.0, search).memory.peak_bytes == left
    assert list(later) == []


def test_what_a_compiler_says_of_a_program_that_is_too_large():
    tpu = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 21.50G of 15.75G hbm. Exceeded by 5.75G."
    assert used(ValueError(tpu)) == 21.5 * 2**30
    assert used(ValueError("RESOURCE_EXHAUSTED")) == math.inf


@pytest.fixture(scope="module")
def step():
    """A step, its arguments, and its plan without a limit."""
    args = steps.parameters(4, 32, 128), steps.batch(512, 32)
    free = unity.auto_shard(steps.sgd(steps.mlp), options=unity.Options(cache=None))
    free(*args)
    return free, args, free.plan(*args)


def test_a_step_whose_program_needs_more_than_the_limit_is_planned_again(step, monkeypatch, capfd, tmp_path):
    free, args, plan = step
    monkeypatch.setenv("UNITY_JAX_PROGRESS", "1")
    limit = 1.05 * plan.predicted.peak_bytes
    beyond = int(0.1 * limit)  # what the compiler is said to add

    def compiled(runner):
        shapes, named = arguments(runner.stored, runner.plan.pcg, runner.mesh, unpacked=not runner.forms)
        return peak_of(runner.jitted.lower(*shapes, **named).compile)

    def peak(self):
        assert compiled(self)
        return self.plan.predicted.peak_bytes + beyond

    monkeypatch.setattr(Runner, "peak", property(peak))
    limited = unity.auto_shard(steps.sgd(steps.mlp), memory_limit=limit, options=unity.Options(cache=tmp_path))
    found, expected = limited(*args), free(*args)
    for a, b in zip((*found[0][0], found[1]), (*expected[0][0], expected[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    chosen = limited.plan(*args)
    assert chosen.margin == beyond and chosen.fits and chosen.predicted.peak_bytes + beyond <= limit
    assert "planned again within" in capfd.readouterr().err
    assert "kept for what the compiler adds" in str(chosen)

    chosen.save(tmp_path / "plan.json")
    assert unity.Plan.load(tmp_path / "plan.json").margin == beyond
    later = unity.auto_shard(steps.sgd(steps.mlp), memory_limit=limit, options=unity.Options(cache=tmp_path))
    assert later.plan(*args) == chosen  # kept with the plan on disk
    later(*args)
    assert "planned again" not in capfd.readouterr().err


def test_a_plan_that_was_given_is_run_as_it_is(step, monkeypatch):
    _, args, plan = step
    monkeypatch.setattr(Runner, "peak", property(lambda self: math.inf))
    given = unity.auto_shard(steps.sgd(steps.mlp), plan=plan)
    given(*args)
    assert given.plan(*args).record == plan.record


def test_candidates_that_are_compiled_are_corrected(step, monkeypatch):
    _, args, plan = step
    trials = []

    def trial(candidate, lowered, *rest, real=finalists.trial):
        trials.append(replace(real(candidate, lowered, *rest), peak=1.2 * candidate.memory.peak_bytes))
        return trials[-1]

    monkeypatch.setattr(finalists, "trial", trial)
    options, need = unity.Options(cache=None, compile_candidates=1), plan.predicted.peak_bytes
    same = unity.auto_shard(steps.sgd(steps.mlp), memory_limit=10 * need, options=options).plan(*args)
    assert same.record == plan.record and not same.margin and same.searched.compiled == len(trials) == 1
    limit = 1.1 * need
    other = unity.auto_shard(steps.sgd(steps.mlp), memory_limit=limit, options=options).plan(*args)
    assert other.margin and other.fits == (trials[-1].peak <= limit)


def test_a_device_that_runs_out_of_memory_all_the_same(step, monkeypatch):
    _, args, plan = step

    def full(*args, **kwargs):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 GiB.")

    monkeypatch.setattr(Runner, "jitted", property(lambda self: full))
    given = unity.auto_shard(steps.sgd(steps.mlp), plan=plan)
    with pytest.raises(unity.MemoryLimitError, match=r"ran out of memory: RESOURCE.*\n.*largest tensors") as said:
        given(*args)
    assert "smaller memory_limit=" in str(said.value)
