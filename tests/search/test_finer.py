"""Finer meshes: tried where a floor lets them save much, and searched for where one of their seeds is near."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import ShapeDtypeStruct as Shape

import unity_jax as unity
from tests.numerics.harness import Case
from tests.search.planning import mesh, program
from unity_jax.machine.machine import Machine
from unity_jax.search import joint
from unity_jax.search.candidate import NO_PINS
from unity_jax.search.experts import expert_seeds, experts
from unity_jax.search.limits import LIMITS
from unity_jax.search.options import SearchOptions
from unity_jax.search.planner import Planner


def step(params, x):
    """Positions are summed up in order, which no device can do for its own alone."""

    def loss(params):
        y = x
        for up, down in params:
            y = jnp.cumsum(y @ up, axis=1) @ down
        return jnp.mean(y * y)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def planned(width, *rows):
    weights = [(Shape((width, width), jnp.bfloat16),) * 2] * 2
    options = unity.Options(cache=None, rewrite=False)
    sharded = unity.auto_shard(step, machine="h100:16x8", donate_argnums=0, options=options)
    return sharded.plan(weights, Shape((*rows, width), jnp.bfloat16))


def test_three_axes_win_where_few_rows_meet_wide_weights():
    plan = planned(8192, 16, 2048)
    assert plan.axes.sizes == (4, 4, 8)
    program = plan.bound()
    two = Planner(program, plan.priced_on).plan([mesh(128), mesh(64, 2), mesh(32, 4), mesh(16, 8), mesh(4, 32)])
    assert plan.predicted.step_seconds < (1 - LIMITS.mesh_saves) * two.seconds
    assert {"x=8, y=2, z=8", "x=4, y=4, z=8"} <= {*plan.searched.meshes} & {*plan.searched.inexact}
    assert "searched     7 meshes, 2 of them not exactly" in str(plan)


def test_three_axes_are_not_tried_where_a_step_is_arithmetic():
    plan = planned(8192, 16_384, 2048)
    assert plan.axes.sizes == (128,)
    assert {"x=8, y=2, z=8", "x=4, y=4, z=8"} <= {*plan.searched.skipped}


def test_two_axes_win_where_images_of_one_device_are_cut_into_strips():
    """Little waits for communication, and no arithmetic is uneven: XLA:TPU takes longer for four images of U-Net than
    for half of eight."""
    of, machine = program("unet", "full", batch_size=32), Machine.preset("v5e:2x4")
    meshes = [mesh(8), mesh(4, 2)]
    (enough,) = Planner(of, machine).sketch(meshes)
    found = joint.plan(of, machine, None, NO_PINS, meshes, (), SearchOptions(rewrite=False))
    assert found.mesh == mesh(4, 2)
    assert found.seconds < (1 - LIMITS.mesh_saves) * enough.seconds


def test_of_finer_meshes_no_plans_are_made_that_would_have_to_hide_most_of_their_times(monkeypatch):
    planner, fine = Planner(program("bert", batch_size=32), Machine.preset("v5e:2x4")), mesh(4, 2)
    (before,), made, finish = planner.sketch([mesh(8)]), list[str](), planner._finish
    monkeypatch.setattr(planner, "_finish", lambda *args: made.append(args[-1]) or finish(*args))
    chosen, built = planner.plan([fine], [before.noting()], seeded=True), planner.problem(fine)
    left = {name: seed for name, seed in planner._expert_seeds(fine).items() if name not in made}
    assert any(planner.floor(built, seed) < chosen.seconds for seed in left.values())
    assert all(finish(built, seed, True, name).seconds > chosen.seconds for name, seed in left.items())


def test_hybrid_sharding_keeps_weights_once_in_each_part():
    found = {e.name: e for e in experts(mesh(2, 2, 2))}
    assert found["fsdp(y) of dp(x,y) x tp(z)"].over == ("y",)
    assert not any(e.over for e in experts(mesh(4, 2)))


HYBRID = "fsdp(y) of dp(x,y) x tp(z)", "fsdp(z) of dp(x,y,z)", "fsdp(x) of dp(x,y) x tp(z)"


@pytest.mark.parametrize("style", HYBRID)
def test_hybrid_plans_compute_the_same(style):
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        weights = [(rng.normal(size=(16, 16)), rng.normal(size=(16, 16)))]
        case = Case.of(step, (weights, rng.normal(size=(8, 4, 16))), donate=(0,))
        planner, axes = Planner(case.program, Machine.preset("cpu:8")), mesh(2, 2, 2)
        built = planner._builder(axes).build(True)
        seed = expert_seeds(case.program, built, axes, planner.rules)[style]
        plan = case.planned(axes, built.decisions(seed, True))
        assert all(style[5] in t.layout.axis_dim for t in plan.graph.inputs[:2])
        assert not case.differences(case.run(plan))
