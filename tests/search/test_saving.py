"""Less memory for more time: a limit that the plan of the program as it is does not keep is kept, and nothing else
changes."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

import unity_jax as unity
from tests.residuals import steps
from unity_jax import planning
from unity_jax.plan.verify import verify_on
from unity_jax.runner import memory_error
from unity_jax.search import saving

LAYERS, ROWS, INNER = 6, 4096, 512


@pytest.fixture(autouse=True)
def no_cache(monkeypatch):
    monkeypatch.setenv("UNITY_JAX_CACHE", "")


@pytest.fixture
def whole_batch(monkeypatch):
    """Without microbatches, which take less time here."""
    monkeypatch.setattr("unity_jax.search.saving._batch", lambda *_: None)


@pytest.fixture
def in_one(monkeypatch):
    """Without chunks, which take less time here."""
    monkeypatch.setattr("unity_jax.search.chunking._chunked", lambda *_: ())


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


def test_where_nothing_fits_the_plan_needs_little(free):
    """As little as where a higher limit is kept: what would not be enough is done all the same."""
    step, args = steps.sgd(steps.mlp), arguments()
    high = planned(step, *args, limit=0.6 * free.predicted.peak_bytes)
    none = planned(step, *args, limit=0.01 * free.predicted.peak_bytes)
    assert not none.fits and none.saving
    assert none.predicted.peak_bytes <= high.predicted.peak_bytes


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


def made_again(step, args, plan, folder):
    """A plan from its file is the same, and so is what it makes of the function."""
    plan.save(folder / "plan.json")
    loaded = unity.Plan.load(folder / "plan.json")
    assert loaded.saving == plan.saving
    again = unity.auto_shard(step, plan=loaded).plan(*args)
    assert str(again.pcg) == str(plan.pcg) and again.predicted == plan.predicted and again.saving == plan.saving


def test_a_saved_plan_saves_the_same_memory(tight, tmp_path):
    step, args, _, planned = tight
    plan = planned.plan(*args)
    made_again(step, args, plan, tmp_path)


def test_a_plan_that_is_kept_on_disk_saves_the_same_memory(tight, tmp_path, monkeypatch):
    step, args, limit, _ = tight
    options = unity.Options(cache=tmp_path)
    first = unity.auto_shard(step, memory_limit=limit, options=options).plan(*args)
    monkeypatch.setattr(planning.joint, "plan", None)
    again = unity.auto_shard(step, memory_limit=limit, options=options).plan(*args)
    assert first.saving and str(again.pcg) == str(first.pcg)


@pytest.mark.parametrize("name", ["tight", "classes"])
def test_its_collectives_are_those_of_the_plan(name, request):
    """Those of a mesh of GPUs, whose plans split more: in a loop too."""
    step, args, *_ = request.getfixturevalue(name)
    free = planned(step, *args)
    plan = planned(step, *args, limit=0.6 * free.predicted.peak_bytes)
    found = verify_on(plan, "cpu:8", jax.devices())
    assert plan.saving and found.lowered and not found.differences


@pytest.mark.usefixtures("whole_batch")
def test_explain_says_what_it_takes(tight):
    step, args, limit, _ = tight
    run = unity.auto_shard(step, memory_limit=limit, options=unity.Options(cache=None))
    assert "saves memory: recomputes" in run.plan(*args).explain("steps.py")


def close(got, want, tolerance=2e-5):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance / 2)


def deep(part=0.4):
    """A program of 16 layers within a part of what it needs: how it is planned, and its arguments."""
    weights, x = arguments(16)
    args = jax.tree.map(lambda w: w / 4, weights), x, jax.random.key(1)  # larger ones make much of any rounding
    step, options = steps.sgd(steps.dropped), unity.Options(cache=None)
    free = unity.auto_shard(step, options=options).plan(*args)
    return step, unity.auto_shard(step, memory_limit=part * free.predicted.peak_bytes, options=options), args


@pytest.mark.usefixtures("whole_batch")
def test_every_layer_of_a_deep_program_runs_by_chunks(monkeypatch):
    """It is planned folded; what that does in its three layers, all do, forward and backward."""
    monkeypatch.setattr("unity_jax.search.saving.recomputable", lambda _: [])  # which takes less time here
    step, run, args = deep()
    plan = run.plan(*args)
    assert plan.fits and "saves memory 8 chunks of residuals/steps.py:" in str(plan)
    loops = [op.backward for op in plan.bound().graph.ops if op.name == "scan"]
    assert (loops.count(False), loops.count(True)) == (15, 15)  # in both passes all layers but one
    close(run(*args), jax.jit(step)(*args))


@pytest.mark.usefixtures("whole_batch", "in_one")
def test_every_layer_of_a_deep_program_saves_memory():
    """It is planned folded; what that saves in its three layers, all do."""
    step, run, args = deep(0.35)
    plan = run.plan(*args)
    barriers = [op for op in plan.bound().graph.ops if op.name == "optimization_barrier"]
    assert plan.fits and 15 <= len(barriers) <= 16  # the last layer may keep what it needs at once
    close(run(*args), jax.jit(step)(*args))


@pytest.fixture(scope="module")
def classes():
    args = steps.examples(512, 4, width=16, inner=64, classes=4000)
    step, options = steps.sgd(steps.classifier), unity.Options(cache=None)
    free = unity.auto_shard(step, options=options).plan(*args)
    return step, args, unity.auto_shard(step, memory_limit=0.5 * free.predicted.peak_bytes, options=options)


@pytest.mark.usefixtures("whole_batch")
def test_a_loss_over_many_classes_is_chunked(classes):
    step, args, run = classes
    plan = run.plan(*args)
    assert plan.fits and " chunks of residuals/steps.py:" in str(plan)
    close(run(*args), jax.jit(step)(*args))


@pytest.mark.usefixtures("whole_batch")
def test_a_saved_plan_chunks_the_same_loss(classes, tmp_path):
    step, args, run = classes
    plan = run.plan(*args)
    made_again(step, args, plan, tmp_path)


@pytest.mark.usefixtures("whole_batch")
def test_gradients_of_chunks_are_reduced_after_the_last(classes):
    step, args, _ = classes
    free = planned(step, *args)
    plan = planned(step, *args, limit=0.5 * free.predicted.peak_bytes)
    (loop,) = (op for op in plan.pcg.ops if op.name == "scan")
    assert not any(op.move is not None and op.move.collective for op in loop.bodies[0].ops)
    assert any(t.layout.partial for t in loop.outputs)


# Microbatches


@pytest.fixture(scope="module")
def small():
    """A step whose parameters are small beside what its batch needs, with dropout, on eight CPU devices."""
    args = (*arguments(2), jax.random.key(2))
    step = steps.sgd(steps.dropped)
    free = unity.auto_shard(step, options=unity.Options(cache=None)).plan(*args)
    return step, args, unity.auto_shard(
        step, memory_limit=0.2 * free.predicted.peak_bytes, options=unity.Options(cache=None)
    )


def test_a_limit_is_kept_by_microbatches(small):
    step, args, run = small
    plan = run.plan(*args)
    assert plan.fits and "saves memory" in str(plan)
    assert "microbatches of " in str(plan) and f"of {ROWS} rows, gradients accumulated" in str(plan)
    (loop,) = (op for op in plan.pcg.ops if op.name == "scan")
    assert any(t.layout.partial for t in loop.outputs), "gradients are reduced once, behind the last"
    close(run(*args), jax.jit(step)(*args))


def test_microbatches_are_explained_saved_and_made_again(small, tmp_path):
    step, args, run = small
    plan = run.plan(*args)
    made_again(step, args, plan, tmp_path)
    assert "microbatches of" in plan.explain("microbatches")


def test_the_collectives_of_microbatches_are_those_of_the_plan(small):
    step, args, _ = small
    free = planned(step, *args)
    plan = planned(step, *args, limit=0.2 * free.predicted.peak_bytes)
    found = verify_on(plan, "cpu:8", jax.devices())
    assert "microbatches" in str(plan) and found.lowered and not found.differences


def test_a_deep_program_is_planned_folded_and_runs_by_microbatches(monkeypatch):
    monkeypatch.setattr("unity_jax.search.saving.recomputable", lambda *_: ())
    step, args, options = steps.sgd(steps.mlp), arguments(16), unity.Options(cache=None)
    free = unity.auto_shard(step, options=options).plan(*args)
    run = unity.auto_shard(step, memory_limit=0.3 * free.predicted.peak_bytes, options=options)
    plan = run.plan(*args)
    assert plan.fits and "microbatches" in str(plan)
    close(run(*args), jax.jit(step)(*args))


def test_the_line_is_told_that_needs_the_whole_batch():
    plan = planned(steps.sgd(steps.centred), *arguments(2), limit=2e5)
    assert not plan.fits and "microbatches none: the whole batch is needed at once at residuals/steps.py:" in str(plan)
    assert "(centred) needs the whole batch at once" in str(memory_error(plan))


# Beyond the first that fits


def outlined(needs, seconds):
    """What a search asks of a plan of a program that saves memory."""
    memory, program = SimpleNamespace(peak_bytes=needs), SimpleNamespace(savings=("some",))
    return SimpleNamespace(seconds=seconds, memory=memory, fits=lambda limit: needs <= limit, program=program)


def test_where_what_fits_is_far_behind_more_is_saved_besides_what_is_not(monkeypatch):
    ways, asked = saving._Ways(60, None), []
    found = {"again": outlined(70, 1.1), "stacks": outlined(55, 1.14)}
    names = {id(ways._again): "again", id(saving.stacks): "stacks", id(ways._spills): "spills"}

    def more(start, how, now):
        asked.append((start, names[id(how)], now))
        return [found[names[id(how)]]]

    monkeypatch.setattr(ways, "_more", more)
    quick, small, near, slow = outlined(90, 1.04), outlined(80, 1.05), outlined(61, 1.9), outlined(50, 2.0)
    assert ways.beyond([quick, small, near, slow]) == [found["again"], found["stacks"]]
    assert asked == [(small, "again", slow), (found["again"], "stacks", slow)]  # then nothing is far faster
    assert not ways.beyond([quick, small, outlined(50, 1.09)])
    assert not ways.beyond([quick, small, near])  # nothing fits: other ways were tried
