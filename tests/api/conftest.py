"""Plans of these tests are kept nowhere, unless a test says where."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import unity_jax as unity
from tests.api.steps import mlp_batch, mlp_state, mlp_step
from unity_jax.search.limits import LIMITS


@pytest.fixture(autouse=True)
def no_cache(monkeypatch):
    monkeypatch.setenv("UNITY_JAX_CACHE", "")


@pytest.fixture
def no_rewrites(monkeypatch):
    """Where the network is free many are worth a try, which takes time; that they are right is tested elsewhere."""
    monkeypatch.setattr("unity_jax.search.variants.LIMITS", dataclasses.replace(LIMITS, variants=0))


@pytest.fixture(scope="module")
def auto():
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))


@pytest.fixture(scope="module")
def explicit():
    return jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)


@pytest.fixture(scope="module")
def reference():
    """One step of the MLP, unsharded."""
    return jax.device_get(jax.jit(mlp_step)(mlp_state(), mlp_batch()))


@pytest.fixture(scope="module")
def sharded(make_mesh):
    """`auto_shard` for eight devices whose network costs next to nothing, so that plans shard what they can."""
    machine = unity.Machine.preset("cpu:8")
    (level,) = machine.network
    free = dataclasses.replace(level, bandwidth=1e12, latency=1e-9)
    device = dataclasses.replace(machine.device, kernel_overhead=0.0)
    machine = dataclasses.replace(machine, name="eager", devices=(device,), network=(free,))
    return functools.partial(unity.auto_shard, mesh=make_mesh(x=8), machine=machine)
