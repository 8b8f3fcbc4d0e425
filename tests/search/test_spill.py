"""Activations on the host: computed the same, copied as planned, told, saved, chosen where that is fastest."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import unity_jax as unity
from tests.residuals import steps
from unity_jax.aot.host import copies_difference
from unity_jax.lower.compile import arguments, jitted
from unity_jax.pcg.loops import prefetched
from unity_jax.pcg.parallel import SPILLED
from unity_jax.plan.memory import KEPT
from unity_jax.program import trace
from unity_jax.residuals.record import Recompute, Spill
from unity_jax.search import saving

OPTIONS = unity.Options(cache=None, rewrite=False)
LAYERS, WIDTH, ROWS = 8, 32, 512


def step(w, x):
    """Layers that stack five arrays each."""

    def loss(w):
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w) * jnp.sin(h), None), x, w)
        return (h**2).mean()

    value, gradient = jax.value_and_grad(loss)(w)
    return w - 1e-2 * gradient, value


def given(rows=ROWS, width=WIDTH):
    w = jax.random.normal(jax.random.key(0), (LAYERS, width, width)) / width**0.5
    return w, steps.batch(rows, width)


def sharded(part, args, **settings):
    """The step under a part of the memory that it needs, on two CPU devices."""
    settings = {"mesh": jax.devices()[:2], "options": OPTIONS, **settings}
    free = unity.auto_shard(step, **settings).plan(*args)
    assert not free.saving
    return unity.auto_shard(step, memory_limit=part * free.predicted.peak_bytes, **settings)


@pytest.fixture
def alone(monkeypatch):
    """Nothing else saves memory."""
    for name in ("hostable", "stacks", "recomputable"):
        monkeypatch.setattr(saving, name, lambda _: [])
    monkeypatch.setattr(saving._Ways, "by_chunks", lambda self, start, known: iter([start]))
    monkeypatch.setattr(saving._Ways, "_accumulating", lambda *_: iter(()))


def test_it_computes_the_same_in_as_much_memory_as_there_is(alone):
    run = sharded(0.6, given())
    plan = run.plan(*given())
    (how,) = plan.saving
    assert plan.fits and isinstance(how, Spill)
    assert how.count == 4 * LAYERS and how.bytes == how.count * ROWS * WIDTH * 4 / 2
    for a, b in zip(run(*given()), jax.jit(step)(*given()), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_it_is_told(alone):
    plan = sharded(0.6, given()).plan(*given())
    (how,) = plan.saving
    text = "keeps 32 activations (1 MiB), as of "
    assert f"saves memory {text}" in str(plan) and "on the host for the backward pass, " in str(plan)
    assert f"saves memory: {text}" in plan.explain("activations")
    forward, backward = (op for op in plan.pcg.ops if op.name == "scan")
    assert sum(t.on_host for t in forward.outputs) == sum(t.on_host for t in backward.inputs) == 4
    found = plan.memory()
    assert found.on_host == how.bytes and "1 MiB on the host" in str(found)
    assert sum(found.kinds.values()) == plan.predicted.peak_bytes
    assert 0 < found.kinds[KEPT] < 5 / 4 * how.bytes


def test_a_saved_plan_does_so_again(alone, tmp_path):
    plan = sharded(0.6, given()).plan(*given())
    plan.save(tmp_path / "plan.json")
    loaded = unity.Plan.load(tmp_path / "plan.json")
    again = unity.auto_shard(step, plan=loaded).plan(*given())
    assert loaded.saving == again.saving == plan.saving and str(again.pcg) == str(plan.pcg)


def test_of_no_more_layers_than_it_takes(alone):
    """Here copies take longer than there is to compute."""
    run = sharded(0.65, given())
    plan = run.plan(*given())
    (how,) = plan.saving
    assert plan.fits and 1 < how.layers.first < LAYERS - 1 and f"more in {how.layers}" in str(how)
    first, rest = (op for op in plan.pcg.ops if op.name == "scan" and not op.backward)
    assert sum(t.on_host for t in first.outputs) > sum(t.on_host for t in rest.outputs)
    for a, b in zip(run(*given()), jax.jit(step)(*given()), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize(("platform", "on"), [("cuda", "h100:2"), ("tpu", "v5e:1x2")])
def test_copies_of_the_program_are_those_of_the_plan(alone, platform, on):
    """On GPUs parts come an iteration ahead, the first before the loop; XLA:TPU sees to that."""
    args = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in jax.eval_shape(lambda: given(2**14, 256))]
    plan = sharded(0.6, args, machine=unity.Machine.preset(on)).plan(*args)
    args, kwargs = arguments(plan.stored, plan.pcg, plan.mesh)
    lowered = jitted(plan.stored, plan.pcg, plan.mesh).trace(*args, **kwargs).lower(lowering_platforms=(platform,))
    assert copies_difference(plan.pcg, lowered.compiler_ir("stablehlo"), plan.axes) == []
    (loop,) = (op for op in plan.pcg.ops if prefetched(op))
    assert {copy.params[SPILLED] for copy in prefetched(loop)} == {platform == "cuda"}


@pytest.mark.parametrize("on", ["h100:2", "v5e:1x2"])
def test_copies_take_what_the_link_gives(alone, on):
    args = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in jax.eval_shape(lambda: given(2**15, 1024))]
    free = unity.plan(step, *args, machine=on, options=OPTIONS)
    plan = unity.plan(step, *args, machine=on, options=OPTIONS, memory_limit=0.6 * free.predicted.peak_bytes)
    (how,) = plan.saving
    assert how.seconds == pytest.approx(2 * how.bytes / plan.priced_on.device.host_bandwidth)
    copied = plan.timeline().copy_seconds  # one part more comes than is read
    assert how.seconds < copied < (1 + 1 / LAYERS) * how.seconds
    assert how.exposed <= copied
    assert plan.predicted.step_seconds - free.predicted.step_seconds < how.exposed + 1e-4


def test_it_is_chosen_where_copies_hide_behind_arithmetic(monkeypatch):
    """Wide layers take a TPU longer to compute than their inputs to copy: these go, and the rest is computed again."""
    monkeypatch.setattr(saving._Ways, "_accumulating", lambda *_: iter(()))

    def deep(w, x):
        def loss(w):
            h, _ = jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w[0]) @ w[1], None), x, w)
            return (h.astype(jnp.float32) ** 2).mean()

        return jax.grad(loss)(w)

    w, x = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((16, 8192, 8192), (2**18, 8192)))
    plan = unity.plan(deep, (w, w), x, machine="v5e:2x4", options=OPTIONS, memory_limit=9 * 2**30)
    assert plan.fits
    assert {type(how) for how in plan.saving} == {Recompute, Spill}


def offloading(w, x):
    """A step whose layers keep one array, on the host, by a policy of `jax.checkpoint`."""
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["y"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def loss(w):
        def layer(h, w):
            return jnp.sin(checkpoint_name(jnp.tanh(h @ w), "y")), None

        h, _ = jax.lax.scan(jax.checkpoint(layer, policy=policy), x, w)
        return (h**2).mean()

    value, gradient = jax.value_and_grad(loss)(w)
    return w - 1e-2 * gradient, value


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("checkpoint", ["keep", "choose"])
def test_what_the_user_offloads_is_kept_where_the_plan_says(checkpoint, devices):
    """On the host if `jax.checkpoint` is kept as written; else, as there is memory, on the device."""
    options = unity.Options(cache=None, checkpoint=checkpoint)
    run = unity.auto_shard(offloading, mesh=jax.devices()[:devices], options=options)
    plan = run.plan(*given())
    spilled = [how for how in plan.saving if isinstance(how, Spill)]
    assert [how.count for how in spilled] == [LAYERS] * (checkpoint == "keep")
    (forward,) = (op for op in plan.pcg.ops if op.name == "scan" and not op.backward)
    assert sum(t.on_host for t in forward.outputs) == len(spilled)
    assert not any(op.name == "device_put" for op in plan.pcg.walk())
    for a, b in zip(run(*given()), jax.jit(offloading)(*given()), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_programs_that_offload_something_else_are_others():
    kept = trace(offloading, given(), {})
    assert kept.offloads and dataclasses.replace(kept, offloads=frozenset()).hash != kept.hash
