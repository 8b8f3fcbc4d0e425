"""Eight CPU devices stand in for a mesh; the environment is set before anything imports JAX."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
FLAGS = (
    "--xla_force_host_platform_device_count=8",
    # With this scheduler, one compiled step of T5 under its chosen plan is right in two runs of six, and otherwise not.
    "--xla_cpu_enable_concurrency_optimized_scheduler=false",
)
os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *FLAGS))

import hypothesis
import jax
import numpy as np
import pytest
from jax.sharding import Mesh

# Compiling takes longer than hypothesis's deadline; examples are the same on every run.
hypothesis.settings.register_profile("unity", deadline=None, derandomize=True)
hypothesis.settings.load_profile("unity")


@pytest.fixture(scope="session")
def make_mesh():
    """`make_mesh(data=2, model=4)`: a mesh of the first CPU devices."""

    def make(**axes: int) -> Mesh:
        sizes = tuple(axes.values())
        return Mesh(np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes), tuple(axes))

    return make
