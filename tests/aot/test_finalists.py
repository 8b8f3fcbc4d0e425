"""The compiler's own estimates decide between the best candidates."""

import pytest

import unity_jax as unity
from tests.plan.tanh_layers import planned
from unity_jax.aot import finalists
from unity_jax.aot.finalists import Trial, best_compiled


@pytest.mark.parametrize(
    ("trials", "chosen"),
    [
        ([Trial(10, 2.0), Trial(10, 1.0)], 1),
        ([Trial(10, 1.0), Trial(10, 1.0)], 0),  # the better one by prediction
        ([Trial(30, 1.0), Trial(10, 2.0)], 1),  # the first does not fit
        ([Trial(40, 1.0), Trial(30, 2.0)], 1),  # neither fits
        ([Trial(float("inf"), 1.0), Trial(30, 2.0)], 1),  # the compiler ran out of memory
    ],
)
def test_the_fastest_that_fits(monkeypatch, trials, chosen):
    monkeypatch.setattr(finalists, "trial", lambda candidate, *_: trials[candidate])
    assert best_compiled(range(len(trials)), lambda c: c, "tpu", 1e9, limit=20) == (trials[chosen], chosen)


def test_a_plan_says_that_it_was_compiled(tmp_path):
    plan = planned("cpu:8", compile_candidates=2)
    assert plan.searched.compiled == 2
    assert "the best of 2 as compiled" in str(plan)
    assert planned("cpu:8").searched.compiled == 0
    plan.save(tmp_path / "plan.json")
    assert unity.Plan.load(tmp_path / "plan.json").searched == plan.searched


def test_a_machine_that_nothing_compiles_for():
    with pytest.raises(unity.PlanError, match=r"compile_candidates=2: nothing compiles for 'v100-summit:1x6'|gpu-aot"):
        planned("v100-summit:1x6", compile_candidates=2)
    with pytest.raises(ValueError, match="0 or more, not -1"):
        unity.Options(compile_candidates=-1)


@pytest.mark.extra("tpu-aot")
def test_candidates_are_compiled_for_a_slice_that_is_not_there(monkeypatch):
    tried = []

    def trial(candidate, lowered, platform, clock, real=finalists.trial):
        tried.append(real(candidate, lowered, platform, clock))
        return tried[-1]

    monkeypatch.setattr(finalists, "trial", trial)
    plan = planned("v5e:2x2", compile_candidates=2)
    assert len(tried) == plan.searched.compiled == 2
    assert all(t.seconds > 0 and t.peak > 0 for t in tried)
