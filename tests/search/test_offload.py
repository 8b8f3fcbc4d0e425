"""State on the host: offered where memory is short, computed the same, told, saved, inherited, copied as planned."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import unity_jax as unity
from tests.residuals import steps
from unity_jax.aot.host import copies_difference, stablehlo_copies
from unity_jax.lower.compile import arguments, jitted
from unity_jax.lower.host import KIND, sharding
from unity_jax.pcg.layout import Layout
from unity_jax.plan.memory import STATE
from unity_jax.program import trace
from unity_jax.residuals.record import Offload
from unity_jax.residuals.slices import by_layer
from unity_jax.search.in_turn import AT_ONCE
from unity_jax.text import size

OPTIONS = unity.Options(cache=None, rewrite=False)
LAYERS, WIDTH, ROWS = 4, 64, 32


def adam(layers=LAYERS, width=WIDTH):
    """A step whose optimizer keeps two arrays for each weight, and little else is in memory."""
    optimizer, params = optax.adam(1e-2, eps=1e-3), steps.parameters(layers, width, width)

    def step(state, x):
        params, kept = state
        loss, gradients = jax.value_and_grad(steps.mlp)(params, x)
        updates, kept = optimizer.update(gradients, kept)
        return (optax.apply_updates(params, updates), kept), loss

    return step, lambda: (params, optimizer.init(params)), steps.batch(ROWS, width)


def sharded(step, part, args, devices=1, **settings):
    """The step under a part of the memory that it needs, on CPU devices."""
    given = {"mesh": jax.devices()[:devices], "options": OPTIONS, "donate_argnums": 0, **settings}
    free = unity.auto_shard(step, **given).plan(*args)
    assert not free.saving
    return unity.auto_shard(step, memory_limit=part * free.predicted.peak_bytes, **given)


def planned(step, part, args, machine):
    given = {"machine": machine, "options": OPTIONS, "donate_argnums": 0}
    free = unity.plan(step, *args, **given)
    return free, unity.plan(step, *args, memory_limit=part * free.predicted.peak_bytes, **given)


@pytest.fixture(scope="module")
def tight():
    step, make, x = adam()
    return step, make, x, sharded(step, 0.7, (make(), x))


def kinds(tree):
    return [x.sharding.memory_kind for x in jax.tree.leaves(tree)]


def test_state_is_on_the_host_where_only_that_fits(tight):
    _, make, x, run = tight
    plan = run.plan(make(), x)
    (how,) = plan.saving
    assert plan.fits and isinstance(how, Offload)
    hosted = [leaf for leaf in plan.inputs if leaf.on_host]
    assert how.count == len(hosted) and how.bytes == sum(leaf.bytes for leaf in hosted)
    assert {leaf.path.split(".")[1][:2] for leaf in hosted} == {"mu", "nu"}
    assert [leaf.path for leaf in plan.outputs if leaf.on_host] == [f"[0]{leaf.path[3:]}" for leaf in hosted]
    (inputs, _), _ = plan.in_shardings, plan.out_shardings
    for leaf, at in zip(plan.inputs, jax.tree.leaves(inputs), strict=False):
        assert (at.memory_kind == KIND) == leaf.on_host


def test_it_computes_the_same_and_results_stay_on_the_host(tight):
    step, make, x, run = tight
    want, got = make(), jax.tree.map(jnp.copy, make())
    for _ in range(3):
        want, value = jax.jit(step)(want, x)
        got, found = run(got, x)
        np.testing.assert_allclose(found, value, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-4)
    hosted = {leaf.path for leaf in run.plan(make(), x).outputs if leaf.on_host}
    assert kinds(got).count(KIND) == len(hosted) > 0


def test_init_and_other_functions_find_the_state_on_the_host(tight):
    _, make, x, run = tight
    plan = run.plan(make(), x)
    where = [leaf.on_host for leaf in plan.inputs[:-1]]
    state = run.init(make)
    assert [kind == KIND for kind in kinds(state)] == where
    state, _ = run(state, x)
    shorter = run.plan(state, x[: ROWS // 2])
    assert [leaf.on_host for leaf in shorter.inputs[:-1]] == where

    def evaluated(state, x):
        return steps.mlp(state[0], x)

    like = unity.auto_shard(evaluated, like=run)
    assert [leaf.on_host for leaf in like.plan(state, x).inputs[:-1]] == where
    np.testing.assert_allclose(like(state, x), steps.mlp(state[0], x), rtol=1e-6)


def test_it_is_told(tight):
    _, make, x, run = tight
    plan = run.plan(make(), x)
    (how,) = plan.saving
    text = f"keeps {how.count} leaves of the state ("
    assert f"saves memory {text}" in str(plan) and "on the host, " in str(plan) and " exposed" in str(plan)
    assert f"saves memory: {text}" in plan.explain("on the host")
    assert "f32[64,64] on the host" in str(plan)
    assert "from_host[from_host [.,.]]" in str(plan.pcg) and "f32[64,64] on the host = to_host" in str(plan.pcg)
    found = plan.memory()
    assert found.on_host == how.bytes and f"; {size(how.bytes)} on the host" in str(found)
    assert sum(found.kinds.values()) == plan.predicted.peak_bytes and found.kinds.get(STATE, 0) < 2 * how.bytes


def test_a_saved_plan_has_the_same_state_on_the_host(tight, tmp_path):
    step, make, x, run = tight
    plan = run.plan(make(), x)
    plan.save(tmp_path / "plan.json")
    loaded = unity.Plan.load(tmp_path / "plan.json")
    assert loaded.saving == plan.saving and [leaf.on_host for leaf in loaded.inputs] == [
        leaf.on_host for leaf in plan.inputs
    ]
    again = unity.auto_shard(step, plan=loaded, donate_argnums=0).plan(make(), x)
    assert str(again.pcg) == str(plan.pcg) and again.predicted == plan.predicted and again.saving == plan.saving


def test_every_layer_of_a_deep_program_is_on_the_host():
    """It is planned folded."""
    step, make, x = adam(12)
    run = sharded(step, 0.45, (make(), x), devices=2)
    plan = run.plan(make(), x)
    assert plan.fits and sum(how.count for how in plan.saving) == sum(leaf.on_host for leaf in plan.inputs) >= 12
    (state, loss), (want, value) = run(make(), x), jax.jit(step)(make(), x)
    np.testing.assert_allclose(loss, value, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("machine", ["h100:1", "v5e:2x2"])
def test_copies_take_what_the_link_gives(machine):
    step, make, x = adam(width=1024)
    free, plan = planned(step, 0.7, (make(), x), machine)
    link = plan.priced_on.device.host_bandwidth
    nbytes, (how,) = sum(leaf.bytes for leaf in plan.inputs if leaf.on_host), plan.saving
    timeline = plan.timeline()
    assert how.seconds == pytest.approx(2 * nbytes / link) and 0.9 < timeline.copy_seconds / how.seconds <= 1.001
    assert how.exposed <= how.seconds
    assert plan.predicted.step_seconds >= max(nbytes / link, plan.predicted.compute_seconds)
    assert free.predicted.step_seconds + how.seconds >= 0.9 * plan.predicted.step_seconds


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_copies_of_the_program_are_those_of_the_plan(tight, platform):
    step, make, x, _ = tight
    plan = sharded(step, 0.45, (make(), x), devices=2).plan(make(), x)
    args, kwargs = arguments(plan.stored, plan.pcg, plan.mesh)
    lowered = jitted(plan.stored, plan.pcg, plan.mesh).trace(*args, **kwargs).lower(lowering_platforms=(platform,))
    program = lowered.compiler_ir("stablehlo")
    assert copies_difference(plan.pcg, program, plan.axes) == []
    assert stablehlo_copies(program).total() == 2 * sum(leaf.on_host for leaf in plan.inputs) > 0


@pytest.mark.parametrize("on", ["h100:1", "v5e:1x1"])
def test_copies_come_in_turn(on):
    """No copy from the host begins before all of the second turn before it are back."""
    step, make, x = adam(width=512)
    _, plan = planned(step, 0.6, (make(), x), unity.Machine.preset(on))
    graph = plan.pcg
    barriers = [op for op in graph.ops if op.name == "optimization_barrier" and op.inputs[0].on_host]
    sent = [[t for t in op.inputs if t.on_host and graph.producer.get(t) is not None] for op in barriers]
    assert [bool(ts) for ts in sent] == [False] * AT_ONCE + [True] * (2 * LAYERS - AT_ONCE)
    assert all(graph.producer[t].name == "to_host" for ts in sent for t in ts)
    place = {op: i for i, op in enumerate(graph.ops)}
    assert all(place[graph.producer[t]] < place[op] for op in graph.ops for t in op.inputs if t in graph.producer)


def test_a_machine_without_a_link_to_its_host_keeps_state_on_its_devices():
    step, make, x = adam(width=512)
    machine = unity.Machine.preset("h100:1")
    alone = dataclasses.replace(machine, devices=(dataclasses.replace(machine.device, host_bandwidth=0.0),))
    _, plan = planned(step, 0.7, (make(), x), alone)
    assert not plan.fits and not any(leaf.on_host for leaf in plan.inputs)
    _, plan = planned(step, 0.7, (make(), x), machine)
    assert plan.fits and any(leaf.on_host for leaf in plan.inputs)


def test_devices_that_cannot_reach_the_host_are_refused(monkeypatch):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    assert sharding(mesh, Layout.replicated(1), True).memory_kind == KIND
    memories = [m for m in jax.devices()[0].addressable_memories() if m.kind == "device"]
    monkeypatch.setattr(type(jax.devices()[0]), "addressable_memories", lambda _: memories)
    with pytest.raises(unity.PlanError, match=r"state in the memory of the host .* has no access to"):
        sharding(mesh, Layout.replicated(1), True)


# State that holds all layers


ADAM = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, eps=1e-3))
"""With weight decay and clipped gradients."""


def scanned(layers=8, width=WIDTH, optimizer=ADAM):
    """A scan over layers, trained by Adam or another optimizer."""

    def step(state, x):
        def loss(params):
            h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w[0] + w[1]), None), x, params)
            return (h**2).mean()

        params, kept = state
        value, gradients = jax.value_and_grad(loss)(params)
        updates, kept = optimizer.update(gradients, kept, params)
        return (optax.apply_updates(params, updates), kept), value

    def make():
        w = jax.random.normal(jax.random.key(0), (layers, width, width)) / width**0.5
        params = (w, jnp.zeros((layers, width)))
        return params, optimizer.init(params)

    return step, make, steps.batch(8, width)


@pytest.fixture(scope="module")
def stacked():
    step, make, x = scanned()
    return step, make, x, sharded(step, 0.7, (make(), x))


def test_stacked_state_is_updated_layer_by_layer(stacked):
    step, make, x, run = stacked
    plan = run.plan(make(), x)
    assert plan.fits and "on the host, updated layer by layer, " in str(plan)
    updates = (op for op in plan.pcg.ops if op.name == "scan" and any(t.on_host for t in op.inputs))
    (loop,) = (op for op in updates if any(t.on_host for t in op.outputs))  # activations only come, or only go
    assert sum(t.on_host for t in loop.inputs) == sum(t.on_host for t in loop.outputs) == 2
    assert [op.name for op in loop.bodies[0].ops if op.move is not None] == ["from_host"] * 2 + ["to_host"] * 2
    want, got = make(), jax.tree.map(jnp.copy, make())
    for _ in range(3):
        (want, value), (got, found) = jax.jit(step)(want, x), run(got, x)
        np.testing.assert_allclose(found, value, rtol=1e-6)
    assert kinds(got).count(KIND) == 2
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-5)


def test_a_saved_plan_updates_the_same_state_layer_by_layer(stacked, tmp_path):
    step, make, x, run = stacked
    plan = run.plan(make(), x)
    plan.save(tmp_path / "plan.json")
    again = unity.auto_shard(step, plan=unity.Plan.load(tmp_path / "plan.json"), donate_argnums=0).plan(make(), x)
    assert str(again.pcg) == str(plan.pcg) and again.predicted == plan.predicted and again.saving == plan.saving


def test_copies_inside_a_loop_are_those_of_the_plan():
    (step, make, _), x = scanned(16), steps.batch(2, WIDTH)
    run = sharded(step, 0.6, (make(), x), devices=2)  # it does not fit even so
    plan = run.plan(make(), x)
    assert any(how.by_layer for how in plan.saving)
    args, kwargs = arguments(plan.stored, plan.pcg, plan.mesh)
    lowered = jitted(plan.stored, plan.pcg, plan.mesh).trace(*args, **kwargs).lower(lowering_platforms=("tpu",))
    assert copies_difference(plan.pcg, lowered.compiler_ir("stablehlo"), plan.axes) == []
    compiled = run.lower(make(), x).compile()
    (state, loss), (want, value) = compiled(*jax.device_put((make(), x), plan.in_shardings)), jax.jit(step)(make(), x)
    np.testing.assert_allclose(loss, value, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-5)


def test_an_update_that_needs_a_norm_is_no_loop():
    """That of LAMB: the trust ratio of a weight is of all its elements."""
    step, make, x = scanned(optimizer=optax.lamb(1e-2))
    program = trace(step, (make(), x), {}, donate_argnums=0)
    assert by_layer(program.graph, sorted(set(program.ties.values()))).graph is program.graph
    step, make, x = scanned()
    program = trace(step, (make(), x), {}, donate_argnums=0)
    moments = [i for i, path in enumerate(program.input_names) if ".mu" in path or ".nu" in path]
    changed = by_layer(program.graph, moments)
    assert sum(op.name == "scan" for op in changed.graph.ops) == 2 + sum(op.name == "scan" for op in program.graph.ops)
