"""Limits of memory that are none, that no plan keeps, or that a step cannot be changed to keep: an error that says the
limit, what needs most of it, what stands in the way, and what helps."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import unity_jax as unity
from tests.api.failing import X, double, fails, plan
from tests.api.steps import close, mlp_batch, mlp_state, mlp_step
from tests.residuals import steps

ONE = jax.devices()[:1]

NOT_BYTES = [0, -1, float("nan"), float("inf"), True, 1j, [1e9], {"bytes": 1}, 10**400]
NOT_BYTES += ["", "forty", "16 apples", "-4GiB", "0 GiB", "nan", "1e999", "GiB", "1,5 GiB"]


@pytest.mark.parametrize("limit", NOT_BYTES, ids=lambda limit: str(limit)[:10])
def test_what_is_no_number_of_bytes(limit):
    match = "memory_limit= of a device: .* is not a positive number of bytes, as 16e9 or 14.5GiB"
    fails(ValueError, match, unity.auto_shard, double, memory_limit=limit)
    fails(ValueError, match, unity.plan, double, X, machine="cpu:8", memory_limit=limit)


@pytest.mark.parametrize(
    ("limit", "size"),
    [("40GiB", 40 * 2**30), ("80 GB", 80e9), (" 1.5 GiB ", 1.5 * 2**30), ("16e9", 16e9), ("2K", 2e3), (np.int64(7), 7)],
)
def test_how_limits_are_written(limit, size):
    assert plan(memory_limit=limit).memory_limit == size


def test_over_tight_memory_limit():
    step = unity.auto_shard(mlp_step, memory_limit=100)
    assert not step.plan(mlp_state(), mlp_batch()).fits
    error = fails(unity.MemoryLimitError, "memory_limit=", step, mlp_state(), mlp_batch())
    assert "w1" in str(error.value) or "w2" in str(error.value)


def test_a_limit_below_the_arguments_alone():
    """Nothing that is computed again, or by chunks, helps there; on one device as on several."""
    for mesh in (jax.devices()[:1], jax.devices()):
        step = unity.auto_shard(mlp_step, memory_limit=100, mesh=mesh)
        fails(unity.MemoryLimitError, "The arguments alone take .*B. The largest", step, mlp_state(), mlp_batch())


def test_a_limit_above_the_arguments_alone():
    args = mlp_state(), mlp_batch()
    given = sum(leaf.bytes for leaf in unity.auto_shard(mlp_step, mesh=jax.devices()[:1]).plan(*args).inputs)
    error = fails(
        unity.MemoryLimitError,
        "memory_limit=",
        unity.auto_shard(mlp_step, memory_limit=given + 1, mesh=jax.devices()[:1]),
        *args,
    )
    assert "alone" not in str(error.value)


# What is tried so that a step fits


def limited(loss, rows, limit, mesh=ONE, layers=3, width=32, inner=256):
    """A step that needs far more than its state, under a limit of so many times its state."""
    args = steps.parameters(layers, width, inner), steps.batch(rows, width)
    state = sum(x.nbytes for x in jax.tree.leaves(args[0]))
    options = unity.Options(cache=None)
    return unity.auto_shard(steps.sgd(loss), mesh=mesh, memory_limit=limit * state, options=options), args


def test_one_device_has_microbatches():
    step, args = limited(steps.mlp, 1024, 8)
    made = step.plan(*args)
    assert made.fits and any("microbatches" in str(how) for how in made.saving)
    close(step(*args), steps.sgd(steps.mlp)(*args), 1e-4)


def test_rows_that_only_one_by_one_divide():
    """A prime number of them: there are as many microbatches as rows, or none."""
    step, args = limited(steps.mlp, 509, 2.2)
    assert any("509 microbatches of 1 of 509 rows" in str(how) for how in step.plan(*args).saving)
    fails(unity.MemoryLimitError, r"\(memory_limit=\)\. The largest", step, *args)


def test_statistics_of_the_batch_stand_in_the_way_of_microbatches():
    step, args = limited(steps.centred, 256, 2)
    match = r"steps.py:\d+.* needs the whole batch at once, so that there are no microbatches"
    error = fails(unity.MemoryLimitError, match, step, *args)
    assert "largest tensors" in str(error.value)


def test_arguments_whose_numbers_of_rows_differ():
    def loss(params, x, y):
        return steps.mlp(params, x) + steps.mlp(params, y)

    args = steps.parameters(3, 32, 256), steps.batch(256, 32), steps.batch(192, 32)
    step = unity.auto_shard(steps.sgd(loss), mesh=ONE, memory_limit="500KiB", options=unity.Options(cache=None))
    assert not step.plan(*args).fits
    fails(unity.MemoryLimitError, "a smaller batch", step, *args)


def test_a_step_without_a_batch():
    def step(params):
        return jax.tree.map(lambda w: jnp.tanh(w @ w.T) @ w, params)

    args = steps.parameters(3, 32, 256)
    step = unity.auto_shard(step, mesh=ONE, memory_limit="400KiB", options=unity.Options(cache=None))
    fails(unity.MemoryLimitError, r"dot_general f32\[256,256\] .*test_bad_limits.py:\d+", step, args)


def test_a_saved_plan_under_a_smaller_limit(tmp_path):
    args = mlp_state(), mlp_batch()
    plan(mlp_step, *args).save(tmp_path / "plan.json")
    step = unity.auto_shard(mlp_step, plan=unity.Plan.load(tmp_path / "plan.json"), memory_limit="1 KiB")
    assert not step.plan(*args).fits
    fails(unity.MemoryLimitError, r"the limit is 1 KiB \(memory_limit=\)", step, *args)


def test_another_function_has_a_limit_of_its_own():
    train = unity.auto_shard(mlp_step, donate_argnums=0)
    args = mlp_state(), mlp_batch()
    train.plan(*args)
    evaluate = unity.auto_shard(lambda state, batch: batch["x"] @ state["w1"], like=train, memory_limit="512B")
    assert train.plan(*args).fits and not evaluate.plan(*args).fits
    fails(unity.MemoryLimitError, "the limit is 512 B", evaluate, *args)


def test_a_machine_of_little_memory():
    """The limit is the machine's where none is given."""
    machine = unity.Machine.preset("cpu:8")
    small = dataclasses.replace(machine, devices=(dataclasses.replace(machine.device, memory_bytes=100),))
    step = unity.auto_shard(mlp_step, machine=small, mesh=jax.devices())
    fails(unity.MemoryLimitError, r"the limit is 100 B \(memory_limit=\)", step, mlp_state(), mlp_batch())
