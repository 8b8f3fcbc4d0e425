"""Devices of TPU slices and GPU nodes that are not there, for ahead-of-time compilation without accelerators.

    mesh = jax.sharding.Mesh(np.array(topology("v5e:2x4")).reshape(2, 4), ("data", "model"))
    compiled = jax.jit(step, in_shardings=...).lower(*shapes).compile()  # the real XLA:TPU compiler
    compiled.memory_analysis().temp_size_in_bytes, compiled_collectives(compiled.as_text(), axes)
"""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import dataclass

import jax
from jax.experimental import topologies

from unity_jax.aot.flags import OFFLINE, WITHOUT_TRITON

# Read by libtpu when it is first loaded. Without them it asks for the metadata of the TPU it runs on, and complains.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",  # any valid type: the topology's name decides
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # there is no device that two processes could want
}


@dataclass(frozen=True)
class Gpu:
    """What XLA:GPU asks about a chip it compiles for; bytes, bytes per second, gigahertz."""

    name: str
    capability: tuple[int, int]
    cores: int
    fpus_per_core: int
    clock: float
    memory: int
    bandwidth: float
    cache: int
    shared_per_core: int
    shared_per_block: int


# https://docs.nvidia.com/cuda/cuda-c-programming-guide/#features-and-technical-specifications-technical-specifications-per-compute-capability
# and the data sheets of machine/presets.py.
GPUS = {
    "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 1.98, 80 * 2**30, 3.35e12, 50 * 2**20, 233_472, 232_448),
    "h200": Gpu("NVIDIA H200", (9, 0), 132, 128, 1.98, 141 * 10**9, 4.8e12, 50 * 2**20, 233_472, 232_448),
    "a100": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 1.41, 80 * 2**30, 2.039e12, 40 * 2**20, 167_936, 166_912),
    "v100": Gpu("Tesla V100-SXM2-16GB", (7, 0), 80, 64, 1.53, 16 * 2**30, 9e11, 6 * 2**20, 98_304, 98_304),
}


def compiled_for(lowered: jax.stages.Lowered, platform: str) -> jax.stages.Compiled:
    """Compile for devices of a platform that need not be there. Raises `JaxRuntimeError` if the compiler does."""
    options = OFFLINE.get(platform, {})
    try:
        return lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        if "Couldn't find output tile sizes" not in str(error):
            raise
    return lowered.compile(compiler_options=options | WITHOUT_TRITON)


def topology(name: str) -> list[jax.Device]:
    """The devices of a machine, to compile for, not to run on.

    `"v5e:2x4"`, `"v5p:2x2x2"`, `"v6e:16x16"` need the extra `tpu-aot`; `"h100:8"`, `"a100:2x8"` (nodes x GPUs) need
    `gpu-aot`. Run with `JAX_PLATFORMS=cpu`, or JAX looks for an accelerator when it first makes an array. Raises
    `ImportError` without the extra, `ValueError` for a topology that the compiler does not know.
    """
    chip, _, sizes = name.partition(":")
    gpu = next((GPUS[kind] for kind in GPUS if chip.startswith(kind)), None)
    if gpu is None and re.fullmatch(r"(v\d|tpu).*", chip) is None:
        raise ValueError(f"nothing compiles for {name!r} ahead of time: name a TPU slice or one of {', '.join(GPUS)}")
    if gpu is None:
        return _tpu_topology(name)
    counts = [int(n) if n.isascii() and n.isdigit() else 0 for n in sizes.split("x")]
    if len(counts) > 2 or min(counts) < 1:
        raise ValueError(f"no GPU topology is called {name!r}: write {chip}:GPUS or {chip}:NODESxGPUS")
    if importlib.util.find_spec("jax_cuda12_plugin") is None and importlib.util.find_spec("jax_cuda13_plugin") is None:
        raise ImportError(f"compiling for {name!r} needs the GPU compiler: pip install 'unity_jax[gpu-aot]'")
    hosts, each = counts if len(counts) == 2 else (1, counts[0])
    wanted = {"topology": f"1x{hosts}x{each}", "target_config": _target(gpu)}
    return list(topologies.get_topology_desc(platform="cuda", topology_name="", **wanted).devices)


def _tpu_topology(name: str) -> list[jax.Device]:
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


def _target(gpu: Gpu) -> str:
    """A `GpuTargetConfigProto` as text (xla/stream_executor/device_description.proto)."""
    major, minor = gpu.capability
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.shared_per_core}
  shared_memory_per_block_optin: {gpu.shared_per_block}
  threads_per_core_limit: 2048
  core_count: {gpu.cores}
  fpus_per_core: {gpu.fpus_per_core}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {gpu.bandwidth:.0f}
  l2_cache_size: {gpu.cache}
  clock_rate_ghz: {gpu.clock}
  device_memory_size: {gpu.memory}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{gpu.name}"
"""
