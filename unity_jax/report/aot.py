"""Devices of TPU slices that are not there, for ahead-of-time compilation on a machine without accelerators.

>>> mesh = jax.sharding.Mesh(np.array(tpu_topology("v5e:2x4")).reshape(2, 4), ("data", "model"))
>>> compiled = jax.jit(step, in_shardings=...).lower(*shapes).compile()  # the real XLA:TPU compiler
>>> compiled.memory_analysis().temp_size_in_bytes, compiled_collectives(compiled.as_text(), axes)
"""

from __future__ import annotations

import importlib.util
import os

import jax
from jax.experimental import topologies

# Read by libtpu when it is first loaded. Without them it asks for the metadata of the TPU it runs on, and complains.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",  # any valid type: the topology's name decides
    "TPU_WORKER_HOSTNAMES": "localhost",
}


def tpu_topology(name: str) -> list[jax.Device]:
    """The devices of a named TPU topology (`"v5e:2x4"`, `"v5p:2x2x2"`, `"v6e:16x16"`), to compile for, not to run on.

    Needs the extra `tpu-aot`. Run with `JAX_PLATFORMS=cpu`, or JAX itself looks for a TPU when it first makes an array.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise ImportError(f"compiling for {name!r} needs the TPU compiler: pip install 'unity_jax[tpu-aot]'")
    absent = [variable for variable in _ENVIRONMENT if variable not in os.environ]
    os.environ.update({variable: _ENVIRONMENT[variable] for variable in absent})
    try:
        return list(topologies.get_topology_desc(topology_name=name, platform="tpu").devices)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"no TPU topology is called {name!r}: {error}") from error
    finally:
        for variable in absent:
            del os.environ[variable]
