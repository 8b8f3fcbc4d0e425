"""Sites joined by a slow link, and devices of unequal speed: what the planner makes of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

import unity_jax as unity
from tests.api.steps import close, mlp_step
from tests.network.test_matrix import sites
from tests.search.planning import mesh, program
from tests.search.test_placement import groups, scrambled
from unity_jax.machine.device import Device
from unity_jax.machine.machine import Machine
from unity_jax.search.candidate import best
from unity_jax.search.placement import mesh_candidates
from unity_jax.search.planner import Planner
from unity_jax.text import size

RNG = np.random.default_rng(0)
STATE = {
    "w1": RNG.normal(size=(128, 512)).astype(np.float32) / 16,
    "w2": RNG.normal(size=(512, 128)).astype(np.float32) / 16,
    "step": np.zeros((), np.int32),
}
BATCH = {name: RNG.normal(size=(2048, 128)).astype(np.float32) for name in ("x", "y")}
ORDER = np.random.default_rng(3).permutation(8)
SITES = {frozenset(i for i in range(8) if ORDER[i] // 4 == site) for site in range(2)}


def slowed(machine: Machine, factor: float) -> Machine:
    """Devices so slow that tiny models are worth sharding."""
    return dataclasses.replace(machine, devices=tuple(slow(device, factor) for device in machine.devices))


def slow(device: Device, factor: float, **changes: Any) -> Device:
    rates = tuple((name, rate / factor) for name, rate in device.peak_flops)
    return dataclasses.replace(device, peak_flops=rates, memory_bandwidth=device.memory_bandwidth / factor, **changes)


@pytest.fixture(scope="module", autouse=True)
def no_cache():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNITY_JAX_CACHE", "")
        yield


@pytest.fixture(scope="module")
def two_sites() -> Machine:
    """Two sites of four, NVLink inside and 1 Gb/s between, with the devices of both numbered at random."""
    wide = sites(4, 4, inside=(5e-6, 5e10), across=(1e-3, 1.25e8))
    return dataclasses.replace(slowed(scrambled(wide, ORDER), 1e4), name="two sites")


@pytest.fixture(scope="module")
def plan(two_sites: Machine) -> unity.Plan:
    return unity.plan(mlp_step, STATE, BATCH, machine=two_sites, donate_argnums=0)


def test_inner_axes_stay_inside_a_site(plan: unity.Plan) -> None:
    assert plan.axes.sizes == (2, 4)
    assert groups(plan.axes) == SITES
    assert [d.id for d in plan.mesh.devices.flat] == list(plan.order)


def test_only_gradients_and_metrics_cross(plan: unity.Plan) -> None:
    """Data parallelism between the sites: of weights and the sums of their gradients each device's quarter crosses, and
    the loss; activations and everything else move inside."""
    outer, inner = plan.axes.names
    across = [c for c in plan.predicted.collectives if outer in c.axes]
    inside = [c for c in plan.predicted.collectives if c.axes == (inner,)]
    assert {c.kind for c in across} <= {"all_reduce", "reduce_scatter", "all_gather"}
    moved = [sum(c.count * c.trips * c.bytes for c in cs) for cs in (across, inside)]
    assert moved[0] <= 2 * (STATE["w1"].nbytes + STATE["w2"].nbytes) / 4 + 8
    assert moved[0] < 0.25 * moved[1]


def test_the_found_order_beats_the_given_one(plan: unity.Plan, two_sites: Machine) -> None:
    devices = np.array(jax.devices()[:8]).reshape(plan.axes.sizes)
    as_given = jax.sharding.Mesh(devices, plan.axes.names)
    given = unity.plan(mlp_step, STATE, BATCH, machine=two_sites, mesh=as_given, donate_argnums=0)
    assert given.order == ()
    assert plan.predicted.step_seconds < 0.9 * given.predicted.step_seconds


def test_a_users_order_is_priced_as_placed(plan: unity.Plan, two_sites: Machine) -> None:
    theirs = jax.sharding.Mesh(plan.mesh.devices, plan.axes.names)
    same = unity.plan(mlp_step, STATE, BATCH, machine=two_sites, mesh=theirs, donate_argnums=0)
    assert same.order == plan.order
    assert same.predicted == plan.predicted


def test_runs_prints_and_survives_a_file(plan: unity.Plan, two_sites: Machine, tmp_path) -> None:
    plan.save(tmp_path / "plan.json")
    loaded = unity.Plan.load(tmp_path / "plan.json")
    assert loaded.axes == plan.axes
    for text in (str(plan), str(loaded)):
        assert f"  placement    {','.join(map(str, plan.order[:4]))} | " in text.replace("..", ",")
    step = unity.auto_shard(mlp_step, plan=loaded, machine=two_sites, donate_argnums=0)
    again = step.plan(STATE, BATCH)
    assert (again.order, again.predicted) == (plan.order, plan.predicted)
    assert list(again.mesh.devices.flat) == list(plan.mesh.devices.flat)
    close(step(STATE, BATCH), mlp_step(STATE, BATCH))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "bert"])
def test_a_transformer_keeps_its_inner_axis_inside(name: str) -> None:
    """With 5 ms between the sites."""
    wide = scrambled(sites(4, 4, inside=(5e-6, 5e10), across=(5e-3, 1.25e8)), ORDER)
    planner = Planner(program(name, layers=1), slowed(wide, 1e5))
    chosen = planner.plan(mesh_candidates(8, planner.machine))
    assert chosen.mesh.sizes == (2, 4)
    assert groups(chosen.mesh) == SITES


# Devices of unequal speed


@pytest.fixture(scope="module")
def uneven() -> Machine:
    """Eight devices, two of which are half as fast and have a quarter of the memory."""
    fast = Machine.preset("h100:8")
    d = fast.device
    half = slow(d, 2, kind="slow h100", memory_bytes=d.memory_bytes / 4)
    return Machine("uneven", (d,) * 3 + (half,) * 2 + (d,) * 3, fast.network)


def test_compute_follows_the_slowest(uneven: Machine) -> None:
    all_slow = dataclasses.replace(uneven, devices=uneven.devices[3:4])
    of = program("mlp")
    seconds = {}
    for name, machine in (("uneven", uneven), ("slow", all_slow), ("fast", Machine.preset("h100:8"))):
        planner = Planner(of, slowed(machine, 1e5))
        seconds[name] = best(planner.candidates(mesh(8)), planner.limit).timeline.compute_seconds
    assert seconds["uneven"] == seconds["slow"] > seconds["fast"]


def test_the_plan_says_who_paces_it(uneven: Machine, tmp_path) -> None:
    made = unity.plan(mlp_step, STATE, BATCH, machine=uneven)
    assert made.memory_limit == uneven.devices[3].memory_bytes
    made.save(tmp_path / "plan.json")
    for text in (str(made), str(unity.Plan.load(tmp_path / "plan.json"))):
        assert "devices differ (6 h100, 2 slow h100) and shards are equal" in text
        assert "slow h100 decides arithmetic, memory traffic, the memory limit" in text
        assert f"of {size(made.memory_limit)} per device" in text
    alike = unity.plan(mlp_step, STATE, BATCH, machine="h100:8")
    assert "devices differ" not in str(alike)
