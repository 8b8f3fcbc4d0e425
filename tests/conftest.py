"""Eight CPU devices stand in for a mesh; the environment is set before anything imports JAX."""

import importlib.util
import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["UNITY_JAX_PROGRESS"] = "0"

from unity_jax.aot.flags import EIGHT_DEVICES, FEW_CORES, OLDER_EMITTERS, RUN_ONCE, appended

os.environ["XLA_FLAGS"] = appended("XLA_FLAGS", EIGHT_DEVICES | RUN_ONCE | FEW_CORES | OLDER_EMITTERS)

import gc
from collections import Counter

import hypothesis
import jax
import numpy as np
import pytest
from jax.sharding import Mesh

# Programs and plans are millions of objects that live long: collected as often as by default, they take a fifth of the
# time of tests.
gc.set_threshold(100_000, 20, 10)

# Compiling takes longer than the deadline of hypothesis, and drawing a program longer, on a busy machine, than it finds
# healthy; examples are the same on every run.
hypothesis.settings.register_profile(
    "unity", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("unity")


def pytest_addoption(parser):
    parser.addoption("--one-axis", action="store_true", help="strategies of ops over one mesh axis only")
    parser.addoption("--every", type=int, default=1, metavar="K", help="of the cases of each test every K-th only")


@pytest.hookimpl(trylast=True)  # of those that markers leave
def pytest_collection_modifyitems(config, items):
    cases, kept, left = Counter(), [], []
    for item in items:
        test = item.nodeid.split("[")[0]
        (left if cases[test] % config.option.every else kept).append(item)
        cases[test] += 1
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept


EXTRAS = {"tpu-aot": "libtpu", "gpu-aot": "jax_cuda12_plugin"}
"""What an extra brings, for tests that are marked with it."""


def pytest_runtest_setup(item):
    for marker in item.iter_markers("extra"):
        (name,) = marker.args
        if importlib.util.find_spec(EXTRAS[name]) is None:
            missing = pytest.fail if item.config.option.markexpr == "extra" else pytest.skip
            missing(f"needs the extra {name}")


@pytest.fixture(scope="session")
def make_mesh():
    """`make_mesh(data=2, model=4)`: a mesh of the first CPU devices."""

    def make(**axes: int) -> Mesh:
        sizes = tuple(axes.values())
        return Mesh(np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes), tuple(axes))

    return make
