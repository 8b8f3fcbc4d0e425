"""The chips we know and the networks they come in. Every number has its public source beside it.

These are peak numbers as published, not measured ones: right about orders and ratios. Names and topologies of TPUs are
those of JAX's ahead-of-time topologies: `v5e:2x4` has 2 chips along x and 4 along y.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from unity_jax.machine.contention import A100, L4, Contention
from unity_jax.machine.device import Device
from unity_jax.machine.network import Level

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Chip:
    """A kind of device and how many of them are wired together.

    `grammar` says which topologies it takes, `ranks` how many sizes those have, and `levels` makes the network from
    them. `kind` is the regular expression that its JAX `device_kind` matches in lower case; `cores`, where not 1, how
    many JAX devices one chip is.
    """

    grammar: str
    ranks: tuple[int, ...]
    kind: str
    device: Device
    levels: Callable[[Sizes], tuple[Level, ...]]
    cores: int = 1


def _peaks(**rates: float) -> tuple[tuple[str, float], ...]:
    return tuple(rates.items())


def _tpu(
    kind: str, matmul: float, vector: float, memory: float, memory_bandwidth: float, host: float, **measured: Any
) -> Device:
    """A TPU core with its memory, in GiB that programs may use; `measured` as in `Device`.

    XLA:TPU keeps some for itself. Ahead of time it says what is left where a program needs more ("exceeds available HBM
    (15.75G)"; libtpu of jax 0.10.2): those are the numbers here, for a v4 chip twice that of a core.

    A float32 matmul runs at the bf16 rate by default (https://docs.jax.dev/en/latest/_autosummary/jax.lax.Precision.html).
    Collectives and host copies are DMAs, which take no compute unit; what they take of the memory bandwidth is small
    and not published, so there is no contention. float64 is emulated with pairs of float32 on the vector unit, about 20
    operations each: assumed. Arrays lie in tiles of 8 x 128 (https://openxla.org/xla/tiled_layout). XLA:TPU hides
    all-gathers behind matmuls and permutations behind anything; of the other collectives it started none apart in any
    plan of `experiments/validation/compiled.py` (libtpu 0.0.42, its default flags).
    """
    peaks = _peaks(bfloat16=matmul, float16=matmul, float32=matmul, float64=vector / 20, vector=vector)
    measured = {"matmul_tile": (8, 128, 128), **measured}
    compiled: dict[str, Any] = {"compiler": "tpu", "layout_tile": (8, 128), "asynchronous": ("all_gather", "permute")}
    return Device(kind, peaks, memory * 2.0**30, memory_bandwidth, host, **compiled, **measured)


# What kernels get out of a TPU, from the cycles that XLA:TPU estimates for single matmuls and elementwise kernels
# (`experiments/validation/cycles.py`, libtpu 0.0.42). The chips without numbers of their own take those of v5p.
# `chip_bytes` is the memory on the chip (128 MiB on v5e and v6e, 64 MiB on v5p:
# `jax.experimental.pallas.tpu.get_tpu_info`) less the 16 MiB that XLA leaves to kernels
# (`xla_tpu_scoped_vmem_limit_kib`).
_V4 = {
    "matmul_efficiency": 0.91,
    "memory_efficiency": 0.79,
    "results_per_second": 7.8e10,
    "unfused_per_second": 2.65e11,
    "gathered_rows_per_second": 2.5e8,
    "scattered_rows_per_second": 4.8e7,
    "kernel_overhead": 6e-7,
}
_V4_CHIP = {**_V4, "results_per_second": 2 * 7.8e10, "unfused_per_second": 2 * 2.65e11}
_V5E = {
    "matmul_efficiency": 0.97,
    "memory_efficiency": 0.81,
    "results_per_second": 1.1e11,
    "unfused_per_second": 1.24e11,
    "gathered_rows_per_second": 2.8e8,
    "scattered_rows_per_second": 8.3e7,
    "fast_bytes": 4e7,
    "fast_bandwidth": 1e12,
    "chip_bytes": 112 * 2.0**20,
    "fast_results_per_second": 1.5e11,
    "kernel_overhead": 1.2e-6,
}
_V5P = {
    "matmul_efficiency": 0.965,
    "memory_efficiency": 0.71,
    "results_per_second": 3.3e11,
    "unfused_per_second": 2.5e11,
    "gathered_rows_per_second": 6.5e8,
    "scattered_rows_per_second": 9.7e7,
    "kernel_overhead": 1.2e-6,
    "fast_bytes": 4e7,
    "fast_bandwidth": 3e12,
    "chip_bytes": 48 * 2.0**20,
}
_V6E = {
    "matmul_efficiency": 0.86,
    "memory_efficiency": 0.81,
    "results_per_second": 2.4e11,
    "unfused_per_second": 1.24e11,
    "gathered_rows_per_second": 3.5e8,
    "scattered_rows_per_second": 1e8,
    "kernel_overhead": 1.2e-6,
    "fast_bytes": 4e7,
    "fast_bandwidth": 2.2e12,
    "chip_bytes": 112 * 2.0**20,
    "fast_results_per_second": 1.16e12,
    "matmul_tile": (8, 256, 256),
}


def _switched(*levels: tuple[str, float, float]) -> Callable[[Sizes], tuple[Level, ...]]:
    """Switches inside switches: (name, bandwidth, latency) per level, outermost first; with fewer sizes, the inner
    ones."""
    return lambda sizes: tuple(
        Level(name, n, bandwidth, latency, "nccl")
        for n, (name, bandwidth, latency) in zip(sizes, levels[-len(sizes) :], strict=True)
    )


HOP = 1e-6
"""Seconds from one TPU chip to the next, about: https://jax-ml.github.io/scaling-book/sharding/"""


def _square(bandwidth: float) -> Callable[[Sizes], tuple[Level, ...]]:
    """A 2D torus with links of so many bytes per second in each direction, which wrap around only along a full side of
    16: https://jax-ml.github.io/scaling-book/tpus/"""
    return lambda sizes: tuple(
        Level(name, n, bandwidth, HOP, "ring" if n == 16 else "line") for name, n in zip("xy", sizes, strict=True)
    )


def _cubes(bandwidth: float, between_cores: float = 0.0) -> Callable[[Sizes], tuple[Level, ...]]:
    """A 3D torus of cubes of 4 x 4 x 4 chips, joined by optical switches, which also wrap around: every axis of whole
    cubes is a ring, and none of less than a cube (https://arxiv.org/abs/2304.01433, section 2).

    Where the cores of a chip are devices (a fourth size), they share the links of the chip.
    """

    def levels(sizes: Sizes) -> tuple[Level, ...]:
        chips, cores = sizes[:3], sizes[3:]
        whole = all(n % 4 == 0 for n in chips)
        share = bandwidth / (cores[0] if cores else 1)
        torus = [Level(a, n, share, HOP, "ring" if whole else "line") for a, n in zip("xyz", chips, strict=True)]
        return (*torus, *(Level("core", n, between_cores, HOP) for n in cores))

    return levels


# Latency of NVLink and of InfiniBand per step of a ring (LL128): hwLat in
# https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc . Kernel overhead of a GPU, when launches are queued or
# captured in a graph: 0.5 to 0.9 us were measured on a V100 (https://developer.nvidia.com/blog/cuda-graphs/), and
# XLA:GPU estimates 1 us (kKernelLaunchOverhead in xla/service/gpu/model/gpu_performance_model_base.h).
NVLINK_LATENCY, INFINIBAND_LATENCY, LAUNCH = 1.9e-6, 4.0e-6, 1e-6
# What NCCL expects of one NVLink in each direction, of 25 GB/s: SM70_NVLINK_BW, SM80_NVLINK_BW and SM90_NVLINK_BW in
# https://github.com/NVIDIA/nccl/blob/v2.28.7-1/src/graph/topo.h
V100_NVLINK, A100_NVLINK, HOPPER_NVLINK = 2.0e10, 2.0e10, 2.06e10

_A100: dict[str, Any] = {
    # https://www.nvidia.com/en-us/data-center/a100/ (SXM; without sparsity): 312 TFLOP/s bf16 and f16, 156 TF32 (what
    # XLA uses for float32 matmuls by default), 19.5 float64 (tensor cores) and float32 vector; PCIe 4 x16, 64 GB/s in
    # both directions together.
    "peak_flops": _peaks(bfloat16=3.12e14, float16=3.12e14, float32=1.56e14, float64=1.95e13, vector=1.95e13),
    "host_bandwidth": 3.2e10,
    "kernel_overhead": LAUNCH,
    "contention": A100,
}
# Twelve NVLinks (600 GB/s in both directions together, as above); across nodes one 200 Gb/s port per GPU:
# https://docs.nvidia.com/dgx/dgxa100-user-guide/introduction-to-dgxa100.html
_A100_NODES = _switched(("node", 2.5e10, INFINIBAND_LATENCY), ("gpu", 12 * A100_NVLINK, NVLINK_LATENCY))

_HOPPER: dict[str, Any] = {
    # https://www.nvidia.com/en-us/data-center/h100/ (SXM; half of the rates quoted with sparsity): 989 TFLOP/s bf16 and
    # f16, 495 TF32 (what XLA uses for float32 matmuls by default), 67 float64 (tensor cores) and 67 float32 vector;
    # PCIe 5 x16, 128 GB/s in both directions together. The H200 computes as the H100 does:
    # https://www.nvidia.com/en-us/data-center/h200/
    #
    # What large kernels reach of it, one H200 measured by `experiments.validation.on_gpu` (its rows are
    # `experiments/results/calibration.csv`): 685 TFLOP/s bf16, 669 f16 and 370 float32 in matmuls, 26 in arithmetic
    # that is not fused multiply-add, 3.4 of 4.8 TB/s of memory, 55 GB/s to and from the host, 2.4 us for a small
    # kernel. The H100 is taken to reach the same part of its memory bandwidth.
    "peak_flops": _peaks(bfloat16=9.89e14, float16=9.89e14, float32=4.95e14, float64=6.7e13, vector=2.6e13),
    "matmul_efficiency": 0.69,
    "memory_efficiency": 0.71,
    "host_bandwidth": 5.5e10,
    "kernel_overhead": 2.4e-6,
    # As Mist measured it on eight A100 (https://github.com/Dazz993/Mist): NCCL's kernels take multiprocessors here too.
    "contention": A100,
}
# 18 NVLinks (900 GB/s in both directions together, as above); across nodes one 400 Gb/s port per GPU:
# https://docs.nvidia.com/dgx/dgxh100-user-guide/introduction-to-dgxh100.html (the DGX H200 is the same system)
_HOPPER_NODES = _switched(("node", 5e10, INFINIBAND_LATENCY), ("gpu", 18 * HOPPER_NVLINK, NVLINK_LATENCY))


def _l4_nodes(sizes: Sizes) -> tuple[Level, ...]:
    """Two, four or eight L4 share PCIe, and nodes of eight one network card: collectives take latency and (n - 1) / n
    of their bytes at these rates, an all-reduce twice of it, as Mist measured them (`gpu_gpu_comm_params` in
    https://github.com/Dazz993/Mist/blob/d69e530/benchmark/mist/configs/experiment/template-l4.yaml)."""
    rate, latency = {1: (4.5e9, 0.0), 2: (2.964e9, 1e-4), 4: (4.164e9, 4e-4)}.get(sizes[-1], (4.683e9, 3e-4))
    inner = Level("gpu", sizes[-1], rate, latency, "shared")
    return (*(Level("node", n, 4.9e8, 1.3e-3, "shared") for n in sizes[:-1]), inner)


CHIPS: dict[str, Chip] = {
    # Virtual devices of one host (`--xla_force_host_platform_device_count`). There are no published numbers: medians of
    # three runs of `unity calibrate` with eight devices on two busy cores, which they share, so that each has a quarter
    # of one. On other hosts and for other numbers of devices all of it is faster or slower together, more or less.
    "cpu": Chip(
        grammar="cpu:N",
        ranks=(1,),
        kind="cpu",
        device=Device(
            kind="cpu",
            peak_flops=_peaks(bfloat16=5.8e9, float16=9.5e9, float32=9.8e9, float64=3.5e9, vector=1.6e9),
            memory_bytes=16 * 2.0**30,  # assumed, as all of it is the host's
            memory_bandwidth=8.1e8,
            host_bandwidth=1.8e8,
            kernel_overhead=2.1e-5,
            compiler="cpu",
            asynchronous=(),  # XLA:CPU runs them as ordinary instructions, which the threads of all devices wait in
        ),
        levels=lambda sizes: (Level("device", sizes[0], 9.4e8, 1.5e-4, "shared"),),
    ),
    # TPU links and PCIe (4.5e10 or 9e10 B/s per link and direction; 1.5e10 B/s per chip, 3.2e10 on v6e):
    # https://jax-ml.github.io/scaling-book/tpus/ ; its appendix A has the vector unit of 8 x 128 lanes x 4 ALUs, at
    # 1.5 GHz on v5e, 1.75 on v5p (two cores), here also assumed for v6e and tpu7x.
    #
    # https://docs.cloud.google.com/tpu/docs/v4 : 275 TFLOP/s bf16, 32 GiB, 1200 GB/s, 3D torus. Vector unit: two cores
    # of 128 lanes x 16 ALUs at 1.05 GHz (https://arxiv.org/abs/2304.01433, table 4). One device per chip ("megacore").
    "v4": Chip(
        grammar="v4:XxYxZ",
        ranks=(3,),
        kind="tpu v4",
        device=_tpu("v4", 2.75e14, 4.3e12, 30.5, 1.2e12, 1.5e10, **_V4_CHIP),
        levels=_cubes(4.5e10),
    ),
    # The same without megacore, as in ahead-of-time topologies: two devices per chip, which share all of it. Between
    # them through the memory of the chip: read and written once, assumed.
    "v4-cores": Chip(
        grammar="v4-cores:XxYxZ or v4-cores:XxYxZxCORES",
        ranks=(3, 4),
        kind="tpu v4",
        device=_tpu("v4 core", 2.75e14 / 2, 4.3e12 / 2, 15.25, 6e11, 1.5e10 / 2, **_V4),
        levels=_cubes(4.5e10, between_cores=3e11),
        cores=2,
    ),
    # https://docs.cloud.google.com/tpu/docs/v5e : 197 TFLOP/s bf16, 16 GB, 819 GB/s, 2D torus.
    "v5e": Chip(
        grammar="v5e:XxY",
        ranks=(2,),
        kind="tpu v5( lite|e)",
        device=_tpu("v5e", 1.97e14, 6.1e12, 15.75, 8.19e11, 1.5e10, **_V5E),
        levels=_square(4.5e10),
    ),
    # https://docs.cloud.google.com/tpu/docs/v5p : 459 TFLOP/s bf16, 95 GiB, 2765 GB/s, 3D torus. One device per chip.
    "v5p": Chip(
        grammar="v5p:XxYxZ",
        ranks=(3,),
        kind="tpu v5p?",
        device=_tpu("v5p", 4.59e14, 1.4e13, 95.74, 2.765e12, 1.5e10, **_V5P),
        levels=_cubes(9e10),
    ),
    # https://docs.cloud.google.com/tpu/docs/v6e : 918 TFLOP/s bf16, 32 GB, 1638 GB/s, 2D torus.
    "v6e": Chip(
        grammar="v6e:XxY",
        ranks=(2,),
        kind="tpu v6( lite|e)",
        device=_tpu("v6e", 9.18e14, 7.2e12, 31.25, 1.638e12, 3.2e10, **_V6E),
        levels=_square(9e10),
    ),
    # https://docs.cloud.google.com/tpu/docs/tpu7x : per chip 2307 TFLOP/s bf16, 192 GiB, 7380 GB/s, 1200 GB/s over the
    # six links in both directions, as v5p; two devices per chip, joined by an interface six times as fast as a link.
    # PCIe: not published, per chip as v6e.
    "tpu7x": Chip(
        grammar="tpu7x:XxYxZ or tpu7x:XxYxZxCORES",
        ranks=(3, 4),
        kind="tpu ?7x",
        device=_tpu("tpu7x", 2.307e15 / 2, 7.2e12, 94.75, 7.38e12 / 2, 1.6e10, **_V5P),
        levels=_cubes(9e10, between_cores=6 * 9e10),
        cores=2,
    ),
    # 40 GB at 1555 GB/s:
    # https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf
    "a100-40gb": Chip(
        grammar="a100-40gb:GPUS or a100-40gb:NODESxGPUS",
        ranks=(1, 2),
        kind=".*a100.*40gb.*",
        device=Device(kind="a100-40gb", memory_bytes=40e9, memory_bandwidth=1.555e12, **_A100),
        levels=_A100_NODES,
    ),
    # 80 GB at 2039 GB/s: https://www.nvidia.com/en-us/data-center/a100/
    "a100": Chip(
        grammar="a100:GPUS or a100:NODESxGPUS",
        ranks=(1, 2),
        kind=".*a100.*",
        device=Device(kind="a100", memory_bytes=80e9, memory_bandwidth=2.039e12, **_A100),
        levels=_A100_NODES,
    ),
    # 80 GB at 3.35 TB/s: https://www.nvidia.com/en-us/data-center/h100/
    "h100": Chip(
        grammar="h100:GPUS or h100:NODESxGPUS",
        ranks=(1, 2),
        kind=r".*\bh100\b.*",
        device=Device(kind="h100", memory_bytes=80e9, memory_bandwidth=3.35e12, **_HOPPER),
        levels=_HOPPER_NODES,
    ),
    # 141 GB at 4.8 TB/s: https://www.nvidia.com/en-us/data-center/h200/
    "h200": Chip(
        grammar="h200:GPUS or h200:NODESxGPUS",
        ranks=(1, 2),
        kind=r".*\bh200\b.*",
        device=Device(kind="h200", memory_bytes=141e9, memory_bandwidth=4.8e12, **_HOPPER),
        levels=_HOPPER_NODES,
    ),
    # https://www.nvidia.com/en-us/data-center/l4/ (half of the rates quoted with sparsity): 121 TFLOP/s bf16 and f16,
    # 60 TF32 and 30.3 float32, 24 GB at 300 GB/s; float64 a 64th of float32. Of that, products of fused_dense_func.json
    # reach .45 and sums of torch.add.json .79, and the link to the host 5.75 GB/s (template-l4.yaml), in the operators
    # that Mist measured (https://github.com/Dazz993/Mist/tree/d69e530/mist/node_database/cache_NVIDIA_L4).
    "l4": Chip(
        grammar="l4:GPUS or l4:NODESxGPUS",
        ranks=(1, 2),
        kind=r".*\bl4\b.*",
        device=Device(
            kind="l4",
            peak_flops=_peaks(bfloat16=1.21e14, float16=1.21e14, float32=6e13, float64=4.7e11, vector=3.03e13),
            memory_bytes=24e9,
            memory_bandwidth=3e11,
            host_bandwidth=5.75e9,
            matmul_efficiency=0.45,
            memory_efficiency=0.79,
            kernel_overhead=LAUNCH,
            contention=L4,
        ),
        levels=_l4_nodes,
    ),
    # https://docs.olcf.ornl.gov/systems/summit_user_guide.html : nodes of six V100 (16 GB at 900 GB/s), joined in pairs
    # and to their host by two NVLink bricks of 25 GB/s per direction, 23 GB/s of InfiniBand injection per node, shared.
    # The 32 GB/s between the two sockets is left out. https://www.nvidia.com/en-us/data-center/v100/ (SXM2): 125
    # TFLOP/s f16 in tensor cores, 15.7 float32, 7.8 float64; bfloat16 runs as float32. Contention of collectives with
    # compute as Mist measured it on four V100 with NVLink; its host copies went over PCIe, Summit's go over NVLink.
    "v100-summit": Chip(
        grammar="v100-summit:GPUS or v100-summit:NODESxGPUS",
        ranks=(1, 2),
        kind=".*v100.*",
        device=Device(
            kind="v100",
            peak_flops=_peaks(bfloat16=1.57e13, float16=1.25e14, float32=1.57e13, float64=7.8e12, vector=1.57e13),
            memory_bytes=16e9,
            memory_bandwidth=9e11,
            host_bandwidth=5e10,
            kernel_overhead=LAUNCH,
            contention=Contention(compute_by_collectives=0.188),
        ),
        levels=_switched(("node", 2.3e10 / 6, INFINIBAND_LATENCY), ("gpu", 2 * V100_NVLINK, NVLINK_LATENCY)),
    ),
}


def parse(spec: str) -> tuple[Chip, Sizes]:
    """`"h100:2x8"` -> the H100 and (2, 8); a `ValueError` says what is known and how it is written."""
    name, _, topology = spec.partition(":")
    sizes = tuple(int(n) if n.isascii() and n.isdigit() else 0 for n in topology.split("x"))
    chip = CHIPS.get(name)
    if chip is None or len(sizes) not in chip.ranks or min(sizes) < 1:
        what = f"unknown machine {name!r}" if chip is None else f"malformed topology {topology!r}"
        known = "; ".join(c.grammar for c in CHIPS.values())
        raise ValueError(f"{what} in {spec!r}; write chip:topology with sizes >= 1 joined by 'x', one of: {known}")
    if chip.cores > 1 and len(sizes) == 3:
        sizes = (*sizes, chip.cores)
    return chip, sizes
