"""Less memory for more time: a limit that the plan of the program as it is does not keep is kept, and nothing else
changes."""

import jax
import numpy as np
import pytest

import unity_jax as unity
from tests.residuals import steps
from unity_jax import planning

LAYERS, ROWS, INNER = 6, 4096, 512


@pytest.fixture(autouse=True)
def no_cache(monkeypatch):
    monkeypatch.setenv("UNITY_JAX_CACHE", "")


def arguments(layers=LAYERS):
    return steps.parameters(layers, 64, INNER), steps.batch(ROWS, 64)


def planned(step, *args, limit=None, machine="h100:8", **settings):
    return unity.plan(step, *args, machine=machine, memory_limit=limit, donate_argnums=0, **settings)


@pytest.fixture(scope="module")
def free():
    return planned(steps.sgd(steps.mlp), *arguments(), options=unity.Options(cache=None))


def test_a_limit_that_the_plan_of_the_program_as_it_is_does_not_keep_is_kept(free):
    limit = 0.6 * free.predicted.peak_bytes
    plan = planned(steps.sgd(steps.mlp), *arguments(), limit=limit)
    assert not free.saving and free.fits
    assert plan.saving and plan.fits and plan.predicted.step_seconds < 1.5 * free.predicted.step_seconds
    assert "saves memory recomputes " in str(plan) and "residuals/steps.py:" in str(plan)


def test_a_limit_that_is_not_in_the_way_changes_nothing(free, monkeypatch):
    monkeypatch.setattr("unity_jax.search.joint.fitting", None)
    plan = planned(steps.sgd(steps.mlp), *arguments(), limit=1.01 * free.predicted.peak_bytes)
    assert plan.record == free.record and plan.rewrites == free.rewrites and not plan.saving


def test_the_plan_of_one_device_saves_memory_too():
    step, args = steps.sgd(steps.mlp), arguments(3)
    free = planned(step, *args, machine="h100:1")
    plan = planned(step, *args, machine="h100:1", limit=0.7 * free.predicted.peak_bytes)
    assert plan.saving and plan.fits and not free.saving


@pytest.fixture(scope="module")
def tight():
    """A step on eight CPU devices under a limit, with dropout."""
    args = (*arguments(LAYERS), jax.random.key(2))
    step = steps.sgd(steps.dropped)
    free = unity.auto_shard(step, options=unity.Options(cache=None)).plan(*args)
    limit = 0.6 * free.predicted.peak_bytes
    return step, args, limit, unity.auto_shard(step, memory_limit=limit, options=unity.Options(cache=None))


def test_it_computes_the_same(tight):
    step, args, _, planned = tight
    assert planned.plan(*args).saving
    want, got = jax.jit(step)(*args), planned(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=1e-7)


def test_a_saved_plan_saves_the_same_memory(tight, tmp_path):
    step, args, _, planned = tight
    plan = planned.plan(*args)
    plan.save(tmp_path / "plan.json")
    loaded = unity.Plan.load(tmp_path / "plan.json")
    assert loaded.saving == plan.saving
    again = unity.auto_shard(step, plan=loaded).plan(*args)
    assert str(again.pcg) == str(plan.pcg) and again.predicted == plan.predicted and again.saving == plan.saving


def test_a_plan_that_is_kept_on_disk_saves_the_same_memory(tight, tmp_path, monkeypatch):
    step, args, limit, _ = tight
    options = unity.Options(cache=tmp_path)
    first = unity.auto_shard(step, memory_limit=limit, options=options).plan(*args)
    monkeypatch.setattr(planning.joint, "plan", None)
    again = unity.auto_shard(step, memory_limit=limit, options=options).plan(*args)
    assert first.saving and str(again.pcg) == str(first.pcg)


def test_explain_says_what_it_takes(tight):
    _, args, _, planned = tight
    assert "saves memory: recomputes" in planned.plan(*args).explain("steps.py")
