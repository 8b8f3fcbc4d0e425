"""Residuals of layers: under a limit those of a scan are computed again, and where memory is left what the user's
`jax.checkpoint` would compute again is kept."""

import math

import jax
import numpy as np
import pytest

import unity_jax as unity
from tests.residuals import steps
from tests.residuals.test_keep import scanned, unrolled
from tests.residuals.test_pair import mlp, stack
from unity_jax.machine.machine import Machine
from unity_jax.plan.verify import verify_on
from unity_jax.residuals import Keep, Microbatch, Recompute
from unity_jax.search import joint
from unity_jax.search.candidate import NO_PINS
from unity_jax.search.limits import LIMITS
from unity_jax.search.options import SearchOptions
from unity_jax.search.placement import mesh_candidates
from unity_jax.search.planner import Planner

LAYERS, ROWS, INNER = 6, 4096, 512
OPTIONS = unity.Options(cache=None)


def arguments(layers=LAYERS):
    return steps.parameters(layers, 64, INNER), steps.batch(ROWS, 64)


def programs():
    params, x = arguments()
    return {
        "scan": (steps.sgd(mlp), stack(params), x),
        "scanned checkpoints": (steps.sgd(scanned), stack(params), x),
        "unrolled checkpoints": (steps.sgd(unrolled), params, x),
    }


def planned(step, *args, limit=None, machine="cpu:8", options=OPTIONS):
    return unity.plan(step, *args, machine=machine, memory_limit=limit, donate_argnums=0, options=options)


def kinds(plan):
    return {type(how) for how in plan.saving}


def close(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=1e-5)


@pytest.fixture
def in_one(monkeypatch):
    """Neither by microbatches nor by chunks."""
    monkeypatch.setattr("unity_jax.search.saving._batch", lambda *_: None)
    monkeypatch.setattr("unity_jax.search.chunking._chunked", lambda *_: ())


@pytest.mark.usefixtures("in_one")
def test_what_layers_of_a_scan_stack_is_computed_again_within_a_limit():
    step, *args = programs()["scan"]
    free = planned(step, *args)
    limit = 0.6 * free.predicted.peak_bytes
    plan = planned(step, *args, limit=limit)
    assert not free.saving and plan.fits and kinds(plan) == {Recompute}
    found = verify_on(plan, "cpu:8", jax.devices())
    assert found.lowered and not found.differences


@pytest.mark.usefixtures("in_one")
def test_the_compiled_program_needs_as_much_less():
    step, *args = programs()["scan"]
    free = unity.auto_shard(step, options=OPTIONS)
    limit = 0.6 * free.plan(*args).predicted.peak_bytes
    tight = unity.auto_shard(step, options=OPTIONS, memory_limit=limit)
    found = [run.lower(*args).compile().memory_analysis().temp_size_in_bytes for run in (free, tight)]
    predicted = [run.plan(*args).predicted.peak_bytes for run in (free, tight)]
    assert kinds(tight.plan(*args)) == {Recompute}
    assert found[0] - found[1] > 0.8 * (predicted[0] - predicted[1])
    close(tight(*args), jax.jit(step)(*args))


@pytest.mark.parametrize("name", ["scanned checkpoints", "unrolled checkpoints"])
def test_what_checkpoints_would_compute_again_is_kept_where_memory_is_left(name):
    step, *args = programs()[name]
    plan = planned(step, *args)
    obeyed = planned(step, *args, options=unity.Options(cache=None, checkpoint="keep"))
    assert kinds(plan) == {Keep} and not obeyed.saving
    assert plan.predicted.step_seconds < obeyed.predicted.step_seconds
    divides_more = (obeyed.label, plan.label) == ("zero1(x)", "fsdp(x)")  # its weights, too
    assert divides_more != (plan.predicted.peak_bytes > obeyed.predicted.peak_bytes)
    assert "  uses memory  keeps " in str(plan) and "that jax.checkpoint would recompute" in str(plan)
    found = verify_on(plan, "cpu:8", jax.devices())
    assert found.lowered and not found.differences


@pytest.mark.parametrize("on", ["h100:8", "v5e:2x4"])
def test_no_expert_who_keeps_as_much_is_faster(on):
    """Other layouts may be best for what is kept than for what is computed again."""
    step, *args = programs()["unrolled checkpoints"]
    machine = Machine.preset(on)
    meshes = mesh_candidates(8, machine)[:1]
    found = joint.plan(steps.program(step, *args), machine, None, NO_PINS, meshes, [], SearchOptions(rewrite=False))
    assert {type(how) for how in found.program.savings} == {Keep}
    planner = Planner(found.program, machine)
    assert found.lower_bound == planner.problem(found.mesh).least_seconds <= found.seconds  # of what is left to do
    for expert in planner.experts([found.mesh], math.inf):
        assert found.seconds <= (1 + LIMITS.saves) * expert.seconds, expert.label


def test_as_much_is_kept_as_there_is_memory_for():
    step, *args = programs()["scanned checkpoints"]
    free = planned(step, *args)
    written = planned(step, *args, options=unity.Options(cache=None, checkpoint="keep"))
    limit = 0.5 * (written.predicted.peak_bytes + free.predicted.peak_bytes)
    plan = planned(step, *args, limit=limit)
    assert plan.fits and kinds(plan) == {Keep}
    assert written.predicted.step_seconds > plan.predicted.step_seconds >= free.predicted.step_seconds


def test_what_checkpoints_would_compute_again_is_chosen_anew_within_a_limit():
    """As if there were none: what microbatches leave memory for is not known before."""
    step, *args = programs()["scanned checkpoints"]
    as_written = {"machine": "cpu:1", "options": unity.Options(cache=None, checkpoint="keep")}
    limit = 0.6 * planned(step, *args, **as_written).predicted.peak_bytes
    obeyed = planned(step, *args, limit=limit, **as_written)
    run = unity.auto_shard(step, mesh=jax.devices()[:1], memory_limit=limit, options=OPTIONS)
    plan = run.plan(*args)
    assert plan.fits and obeyed.fits and {Keep, Microbatch} <= kinds(plan) and Keep not in kinds(obeyed)
    assert plan.predicted.step_seconds < 0.9 * obeyed.predicted.step_seconds
    close(run(*args), jax.jit(step)(*args))


@pytest.mark.parametrize("name", ["scanned checkpoints", "unrolled checkpoints"])
def test_it_computes_the_same_and_is_read_back_from_a_file(name, tmp_path):
    step, *args = programs()[name]
    run = unity.auto_shard(step, options=OPTIONS)
    plan = run.plan(*args)
    plan.save(tmp_path / "plan.json")
    again = unity.auto_shard(step, plan=unity.Plan.load(tmp_path / "plan.json"))
    assert kinds(plan) == {Keep} and str(again.plan(*args).pcg) == str(plan.pcg)
    want = jax.jit(step)(*args)
    close(run(*args), want)
    close(again(*args), want)


def test_every_layer_of_a_deep_program_keeps_what_checkpoints_would_not():
    """It is planned folded; what that keeps in its three layers, all do."""
    step, args = steps.sgd(unrolled), arguments(16)
    run = unity.auto_shard(step, options=OPTIONS)
    (kept,) = run.plan(*args).saving
    assert kept.count >= 16
    again = [op for op in run.plan(*args).bound().graph.ops if "rematted_computation" in op.scope]
    assert not [op for op in again if op.name == "dot_general"]
    close(run(*args), jax.jit(step)(*args))


def test_one_device_keeps_too():
    step, *args = programs()["scanned checkpoints"]
    assert kinds(planned(step, *args, machine="cpu:1")) == {Keep}


def test_an_unknown_way_with_checkpoints_is_refused():
    with pytest.raises(ValueError, match="checkpoint= takes"):
        unity.Options(checkpoint="drop")
