"""The first hour of a user, item by item: plans that follow earlier ones, and those that were made before."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import unity_jax as unity
from tests.api.steps import close, mlp_batch, mlp_loss, mlp_state, mlp_step
from unity_jax.search.limits import LIMITS
from unity_jax.search.options import SearchOptions

SHARDED = ({"w1": P(None, "x"), "w2": P("x"), "step": P()}, {"x": P(), "y": P()})
DATA = ({"w1": P("x"), "w2": P("x"), "step": P()}, P("x"))


@pytest.fixture(scope="module")
def mesh():
    return jax.sharding.Mesh(np.array(jax.devices()), ("x",))


# Later signatures


def test_short_last_batch_inherits_the_state_layout(mesh):
    step = unity.auto_shard(mlp_step, mesh=mesh, in_shardings=SHARDED)
    state, _ = step(mlp_state(), mlp_batch(8))
    layouts = jax.tree.map(lambda x: x.sharding, state)
    free = unity.auto_shard(mlp_step, like=step)
    for planned in (step, free):
        new, metrics = planned(state, mlp_batch(3))
        assert jax.tree.map(lambda x: x.sharding, new) == layouts
        close((new, metrics), jax.jit(mlp_step)(jax.device_get(state), mlp_batch(3)))


def siblings(x, w1, w2):
    return jnp.tanh(x @ w1) + jnp.tanh(x @ w2)


def test_later_signatures_are_rewritten_as_the_first(mesh, monkeypatch):
    """What the search of rewrites found for one shape is done for another, and weighed against the program as it is."""

    def arguments(batch):
        x = np.sin(np.arange(batch * 1024, dtype=np.float32)).reshape(batch, 1024)
        return x, *np.cos(np.arange(2 * 1024 * 64, dtype=np.float32)).reshape(2, 1024, 64) / 32

    planned, as_it_is = (
        unity.auto_shard(siblings, machine="h100:8", options=unity.Options(cache=None, rewrite=rewrite))
        for rewrite in (None, False)
    )
    first = planned.plan(*arguments(8192))
    assert first.rewrites and first.searched.variants > 1
    monkeypatch.setattr("unity_jax.search.joint._rewritten", lambda *a: pytest.fail("searched again"))
    second = planned.plan(*arguments(32768))
    assert second.searched.variants == 1
    assert [r.steps for r in second.rewrites] == [r.steps for r in first.rewrites]
    saved = as_it_is.plan(*arguments(32768)).predicted.step_seconds - second.predicted.step_seconds
    assert sum(r.saved for r in second.rewrites) == pytest.approx(saved) and saved > 0
    close(planned(*arguments(32768)), jax.jit(siblings)(*arguments(32768)))
    few = arguments(8)
    assert planned.plan(*few).predicted.step_seconds <= as_it_is.plan(*few).predicted.step_seconds
    close(planned(*few), jax.jit(siblings)(*few))


def test_a_later_signature_of_other_ops_is_searched_for_itself():
    def chain(x, n):
        for _ in range(n):
            x = jnp.tanh(x @ x)
        return x

    planned = unity.auto_shard(chain, static_argnums=1, machine="h100:8", options=unity.Options(cache=None))
    assert [planned.plan(jnp.ones((64, 64)), n).searched.allowed > 1 for n in (1, 3)] == [True, True]


def test_eval_step_like_the_train_step(mesh):
    step = unity.auto_shard(mlp_step, mesh=mesh, in_shardings=SHARDED)
    evaluate = unity.auto_shard(lambda state, batch: {"loss": mlp_loss(state, batch)}, like=step)
    with pytest.raises(unity.PlanError, match="there is no plan yet"):
        evaluate.plan(mlp_state(), mlp_batch())
    plan = step.plan(mlp_state(), mlp_batch())
    state, _ = step(mlp_state(), mlp_batch())
    found = evaluate.plan(mlp_state(), mlp_batch())
    assert found.mesh == plan.mesh
    assert found.in_shardings[0]["w1"] == plan.in_shardings[0]["w1"] == NamedSharding(mesh, P(None, "x"))
    close(evaluate(state, mlp_batch()), {"loss": mlp_loss(jax.device_get(state), mlp_batch())})


# Plans that were made before


def test_decorating_again_keeps_what_is_not_given():
    step = unity.auto_shard(mlp_step, donate_argnums=0, machine="cpu:8", memory_limit=1e9)
    again = unity.auto_shard(step, machine="v5e:2x4")
    arguments = jax.eval_shape(mlp_state), jax.eval_shape(mlp_batch)
    plan, first = again.plan(*arguments), step.plan(*arguments)
    assert (plan.machine, first.machine) == ("v5e:2x4", "cpu:8")
    assert plan.memory_limit == first.memory_limit == 1e9
    assert plan.program.donated == first.program.donated != ()
    assert unity.plan(step, *arguments, machine="v5e:2x4").program.donated == first.program.donated


def test_saved_plan_runs(mesh, tmp_path, monkeypatch):
    made = unity.auto_shard(mlp_step, mesh=mesh, in_shardings=SHARDED)
    plan = made.plan(mlp_state(), mlp_batch())
    plan.save(tmp_path / "plan.json")
    monkeypatch.setattr("unity_jax.search.joint.plan", lambda *a: pytest.fail("planned again"))
    for saved in (plan, unity.Plan.load(tmp_path / "plan.json")):
        step = unity.auto_shard(mlp_step, plan=saved)
        assert step.plan(mlp_state(), mlp_batch()).in_shardings == plan.in_shardings
        close(step(mlp_state(), mlp_batch()), jax.jit(mlp_step)(mlp_state(), mlp_batch()))


def test_plans_are_equal_if_their_files_are(mesh, tmp_path):
    made = unity.auto_shard(mlp_step, mesh=mesh, in_shardings=SHARDED).plan(mlp_state(), mlp_batch())
    again = unity.auto_shard(mlp_step, mesh=mesh, in_shardings=SHARDED).plan(mlp_state(), mlp_batch())
    made.save(tmp_path / "plan.json")
    loaded = unity.Plan.load(tmp_path / "plan.json")
    bound = unity.auto_shard(mlp_step, plan=loaded).plan(mlp_state(), mlp_batch())
    assert made is not again and made == again == loaded == bound
    assert len({made, again, loaded, bound}) == 1
    assert made != unity.auto_shard(mlp_step, mesh=mesh, in_shardings=DATA).plan(mlp_state(), mlp_batch())
    assert made != dataclasses.replace(made, memory_limit=1.0) and made != str(made)


def test_memory_limit_of_a_saved_plan(mesh, tmp_path):
    settings = {"mesh": mesh, "in_shardings": SHARDED}
    arguments = mlp_state(), mlp_batch()
    plan = unity.auto_shard(mlp_step, memory_limit=1e9, **settings).plan(*arguments)
    plan.save(tmp_path / "plan.json")
    for saved in (plan, unity.Plan.load(tmp_path / "plan.json")):
        assert unity.auto_shard(mlp_step, plan=saved).plan(*arguments).memory_limit == 1e9
        tight = unity.auto_shard(mlp_step, plan=saved, memory_limit=100)
        assert tight.plan(*arguments).memory_limit == 100 and not tight.plan(*arguments).fits
        with pytest.raises(unity.MemoryLimitError, match="memory_limit="):
            tight(*arguments)
        elsewhere = unity.auto_shard(mlp_step, plan=saved, machine="v5e:2x4", mesh=mesh)
        assert elsewhere.plan(*arguments).memory_limit == unity.Machine.preset("v5e:2x4").device.memory_bytes


def test_lower_bound_of_a_saved_plan_is_that_of_its_machine(mesh, tmp_path):
    """A machine that computes a thousand times as fast, under the same name: what is said of the other holds no
    more."""
    arguments = mlp_state(), mlp_batch()
    slow = unity.Machine.preset("cpu:8")
    rates = tuple((name, 1e3 * rate) for name, rate in slow.device.peak_flops)
    device = dataclasses.replace(
        slow.device, peak_flops=rates, memory_bandwidth=1e3 * slow.device.memory_bandwidth, kernel_overhead=0.0
    )
    fast = dataclasses.replace(slow, devices=(device,))
    plans = {}
    for name, machine in (("slow", slow), ("fast", fast)):
        plans[name] = unity.auto_shard(mlp_step, mesh=mesh, machine=machine).plan(*arguments)
        plans[name].save(tmp_path / name)
    moved = unity.auto_shard(mlp_step, plan=unity.Plan.load(tmp_path / "slow"), machine=fast, mesh=mesh)
    elsewhere = moved.plan(*arguments)
    assert "searched" not in str(elsewhere) and not elsewhere.searched.meshes, "nothing was searched for this machine"
    assert elsewhere.label.endswith(" for cpu:8")
    found = elsewhere.predicted
    bounds = {name: plan.predicted.lower_bound_seconds for name, plan in plans.items()}
    assert 0 < bounds["fast"] < bounds["slow"]
    assert found.lower_bound_seconds == pytest.approx(bounds["fast"])
    assert found.lower_bound_seconds <= found.step_seconds
    back = unity.auto_shard(mlp_step, plan=unity.Plan.load(tmp_path / "slow"), machine=slow, mesh=mesh)
    assert back.plan(*arguments).predicted == plans["slow"].predicted


def test_saved_plan_and_a_short_last_batch(mesh):
    plan = unity.auto_shard(mlp_step, mesh=mesh, in_shardings=SHARDED).plan(mlp_state(), mlp_batch())
    step = unity.auto_shard(mlp_step, plan=plan)
    state, _ = step(mlp_state(), mlp_batch())
    state, _ = step(state, mlp_batch(3))
    assert state["w1"].sharding == NamedSharding(mesh, P(None, "x"))


def test_restart_does_not_plan_again(tmp_path, monkeypatch):
    options = unity.Options(cache=tmp_path)
    plan = unity.auto_shard(mlp_step, options=options).plan(mlp_state(), mlp_batch())
    monkeypatch.setattr("unity_jax.search.joint.plan", lambda *a: pytest.fail("planned again"))
    again = unity.auto_shard(mlp_step, options=options)
    assert again.plan(mlp_state(), mlp_batch()).in_shardings == plan.in_shardings
    assert str(again.plan(mlp_state(), mlp_batch())) == str(plan)
    close(again(mlp_state(), mlp_batch()), jax.jit(mlp_step)(mlp_state(), mlp_batch()))


def test_cache_misses_where_the_plan_would_differ(tmp_path, mesh):
    def files():
        return len(list((tmp_path / "plans").iterdir()))

    options = unity.Options(cache=tmp_path)
    unity.auto_shard(mlp_step, options=options).plan(mlp_state(), mlp_batch())
    for n, settings in enumerate(
        [{"memory_limit": 1e9}, {"mesh": mesh, "in_shardings": DATA}, {"mesh": jax.devices()[:2]}]
    ):
        unity.auto_shard(mlp_step, options=options, **settings).plan(mlp_state(), mlp_batch())
        assert files() == n + 2


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(SearchOptions)])
def test_plans_are_kept_by_every_setting_of_the_search(tmp_path, field):
    default = getattr(SearchOptions(), field)
    words = {"checkpoint": "keep", "attention": "xla", "loops": "xla", "bags": "xla"}
    other = {type(None): lambda: False, int: lambda: default + 1, str: lambda: words[field]}[type(default)]()
    for value in (default, other, default):
        options = unity.Options(cache=tmp_path, **{field: value})
        unity.auto_shard(mlp_step, options=options).plan(mlp_state(), mlp_batch())
    assert len(list((tmp_path / "plans").iterdir())) == 2


def test_plans_are_kept_by_how_far_the_search_goes(tmp_path, monkeypatch):
    for limits in (LIMITS, dataclasses.replace(LIMITS, patience=LIMITS.patience + 1), LIMITS):
        monkeypatch.setattr("unity_jax.planning.LIMITS", limits)
        unity.auto_shard(mlp_step, options=unity.Options(cache=tmp_path)).plan(mlp_state(), mlp_batch())
    assert len(list((tmp_path / "plans").iterdir())) == 2


def test_a_program_is_planned_as_it_is_if_it_may_not_be_rewritten():
    x, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4096, 1024), (1024, 128)))
    plans = [
        unity.plan(siblings, x, w, w, machine="h100:1", options=unity.Options(rewrite=rewrite))
        for rewrite in (True, False, None)
    ]
    assert plans[0].rewrites and not plans[1].rewrites and not plans[2].rewrites
    assert str(plans[1].stored.graph) == str(plans[1].program.graph) != str(plans[0].stored.graph)


def test_damaged_cache_entry_is_replaced(tmp_path):
    options = unity.Options(cache=tmp_path)
    plan = unity.auto_shard(mlp_step, options=options).plan(mlp_state(), mlp_batch())
    (file,) = (tmp_path / "plans").iterdir()
    file.write_text(file.read_text()[:100])
    assert str(unity.auto_shard(mlp_step, options=options).plan(mlp_state(), mlp_batch())) == str(plan)
    assert unity.Plan.load(file).program_hash == plan.program_hash


def test_orbax_restores_into_the_abstract_state(mesh, tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    step = unity.auto_shard(mlp_step, mesh=mesh, in_shardings=SHARDED)
    state, _ = step(mlp_state(), mlp_batch())
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        abstract = step.plan(mlp_state(), mlp_batch()).abstract_state()
        restored = checkpointer.restore(tmp_path / "state", abstract)
    close(restored, jax.device_get(state), rtol=0)
    assert jax.tree.map(lambda x: x.sharding, restored) == jax.tree.map(lambda x: x.sharding, abstract)
    step(restored, mlp_batch())
