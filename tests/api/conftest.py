"""Plans of these tests are kept nowhere, unless a test says where."""

import dataclasses
import functools

import pytest

import unity_jax as unity
from unity_jax.search.limits import LIMITS


@pytest.fixture(autouse=True)
def no_cache(monkeypatch):
    monkeypatch.setenv("UNITY_JAX_CACHE", "")


@pytest.fixture
def no_rewrites(monkeypatch):
    """Where the network is free many are worth a try, which takes time; that they are right is tested elsewhere."""
    monkeypatch.setattr("unity_jax.search.variants.LIMITS", dataclasses.replace(LIMITS, variants=0))


@pytest.fixture(scope="module")
def sharded(make_mesh):
    """`auto_shard` for eight devices whose network costs next to nothing, so that plans shard what they can."""
    machine = unity.Machine.preset("cpu:8")
    (level,) = machine.network
    free = dataclasses.replace(level, bandwidth=1e12, latency=1e-9)
    device = dataclasses.replace(machine.device, kernel_overhead=0.0)
    machine = dataclasses.replace(machine, name="eager", devices=(device,), network=(free,))
    return functools.partial(unity.auto_shard, mesh=make_mesh(x=8), machine=machine)
