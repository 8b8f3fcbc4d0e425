"""The chips we know and the networks they come in. Every number has its public source beside it.

These are peak numbers as published, not measured ones: right about orders and ratios.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from unity_jax.machine.contention import A100, ASYNCHRONOUS, PERFECT, Contention
from unity_jax.machine.network import Level

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Chip:
    """A kind of device and how many of them are wired together.

    `grammar` says which topologies it takes, `ranks` how many sizes those have, and `levels` makes the network from
    them. `kinds` are parts of a JAX platform or `device_kind` that identify it. `peak_flops` maps dtype names to flops
    per second of a matmul in that dtype, and `"vector"` to the rate of everything else (integers, elementwise
    arithmetic). Bytes, bytes per second and seconds otherwise. `contention` and `asynchronous` as of a `Machine`.
    """

    grammar: str
    ranks: tuple[int, ...]
    kinds: tuple[str, ...]
    peak_flops: tuple[tuple[str, float], ...]
    memory_bytes: float
    memory_bandwidth: float
    kernel_overhead: float
    levels: Callable[[Sizes], tuple[Level, ...]]
    contention: Contention = PERFECT
    asynchronous: frozenset[str] = ASYNCHRONOUS


def _peaks(**rates: float) -> tuple[tuple[str, float], ...]:
    return tuple(rates.items())


def _switched(*levels: tuple[float, float]) -> Callable[[Sizes], tuple[Level, ...]]:
    """Switches inside switches: (bandwidth, latency) per level, outermost first; with fewer sizes, the inner ones."""
    return lambda sizes: tuple(Level(n, *level) for n, level in zip(sizes, levels[-len(sizes) :], strict=True))


def _v5e_torus(sizes: Sizes) -> tuple[Level, ...]:
    # 4.5e10 B/s per link and direction, about 1 us per hop, and links that wrap around only along a full side of 16:
    # https://jax-ml.github.io/scaling-book/tpus/ and https://jax-ml.github.io/scaling-book/sharding/
    return tuple(Level(n, 4.5e10, 1e-6, "ring" if n == 16 else "line") for n in sizes)


CHIPS: dict[str, Chip] = {
    # Virtual devices of one host (`--xla_force_host_platform_device_count`). There are no published numbers. Assumed,
    # in the ratios of a small host: memory traffic, arithmetic, collectives (a rendezvous of threads, then copies).
    # XLA:CPU runs collectives as ordinary instructions, which the threads of all devices wait in.
    "cpu": Chip(
        grammar="cpu:N",
        ranks=(1,),
        kinds=("cpu",),
        peak_flops=_peaks(bfloat16=2e10, float16=2e10, float32=5e10, float64=2.5e10, vector=5e9),
        memory_bytes=16 * 2.0**30,
        memory_bandwidth=1e10,
        kernel_overhead=5e-6,
        levels=_switched((2e9, 2e-5)),
        asynchronous=frozenset(),
    ),
    # https://docs.cloud.google.com/tpu/docs/v5e : 197 TFLOP/s bf16, 16 GB, 819 GB/s, 2D torus. A float32 matmul runs at
    # the bf16 rate by default (https://docs.jax.dev/en/latest/_autosummary/jax.lax.Precision.html). Vector unit: 8 x
    # 128 lanes x 4 ALUs at 1.5 GHz (https://jax-ml.github.io/scaling-book/tpus/, appendix A). float64 is emulated with
    # pairs of float32 on the vector unit, about 20 operations each: assumed. Overhead, assumed: a TPU program is one
    # sequence of instructions, launched once. No contention: collectives and host copies are DMAs, which take no
    # compute unit; what they take of the memory bandwidth is small and not published.
    "v5e": Chip(
        grammar="v5e:XxY",
        ranks=(2,),
        kinds=("v5 lite", "v5e"),
        peak_flops=_peaks(bfloat16=1.97e14, float16=1.97e14, float32=1.97e14, float64=3e11, vector=6.1e12),
        memory_bytes=16e9,
        memory_bandwidth=8.19e11,
        kernel_overhead=1e-6,
        levels=_v5e_torus,
    ),
    # https://www.nvidia.com/en-us/data-center/h100/ (SXM; half of the rates quoted with sparsity): 989 TFLOP/s bf16 and
    # f16, 495 TF32 (what XLA uses for float32 matmuls by default), 67 float64 (tensor cores) and 67 float32 vector,
    # 80 GB, 3.35 TB/s, NVLink 900 GB/s in both directions together. Across nodes one 400 Gb/s port per GPU:
    # https://docs.nvidia.com/dgx/dgxh100-user-guide/introduction-to-dgxh100.html . Latency per ring step (LL128): hwLat
    # in https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc . Kernel overhead: a launch, assumed. Contention
    # as Mist measured it on eight A100 (https://github.com/Dazz993/Mist): NCCL's kernels take multiprocessors here too.
    "h100": Chip(
        grammar="h100:GPUS or h100:NODESxGPUS",
        ranks=(1, 2),
        kinds=("h100",),
        peak_flops=_peaks(bfloat16=9.89e14, float16=9.89e14, float32=4.95e14, float64=6.7e13, vector=6.7e13),
        memory_bytes=80e9,
        memory_bandwidth=3.35e12,
        kernel_overhead=4e-6,
        levels=_switched((5e10, 4.0e-6), (4.5e11, 1.9e-6)),
        contention=A100,
    ),
    # https://docs.olcf.ornl.gov/systems/summit_user_guide.html : nodes of six V100 (16 GB at 900 GB/s), pairs joined by
    # two NVLink bricks of 25 GB/s per direction, 23 GB/s of InfiniBand injection per node, shared. The 32 GB/s between
    # the two sockets is left out. https://www.nvidia.com/en-us/data-center/v100/ (SXM2): 125 TFLOP/s f16 in tensor
    # cores, 15.7 float32, 7.8 float64; bfloat16 runs as float32. Latencies as for h100. Contention of collectives with
    # compute as Mist measured it on four V100 with NVLink; its host copies went over PCIe, Summit's go over NVLink.
    "v100-summit": Chip(
        grammar="v100-summit:GPUS or v100-summit:NODESxGPUS",
        ranks=(1, 2),
        kinds=("v100",),
        peak_flops=_peaks(bfloat16=1.57e13, float16=1.25e14, float32=1.57e13, float64=7.8e12, vector=1.57e13),
        memory_bytes=16e9,
        memory_bandwidth=9e11,
        kernel_overhead=6e-6,
        levels=_switched((2.3e10 / 6, 4.0e-6), (5e10, 1.9e-6)),
        contention=Contention(compute_by_collectives=0.188),
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
    return chip, sizes
