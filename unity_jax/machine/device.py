"""One device: how fast it computes, how much it holds, how fast its links to its own memory and host are."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from unity_jax.machine.contention import ASYNCHRONOUS, PERFECT, Contention

COMPILERS = ("tpu", "gpu", "cpu")


@dataclass(frozen=True)
class Device:
    """An accelerator, or the part of one that JAX shows as a device.

    `peak_flops` maps dtype names to flops per second of a matmul in that dtype, with `"vector"` for everything else
    (integers, elementwise arithmetic); `memory_bytes` and `memory_bandwidth` (bytes per second) are those of its own
    memory; `host_bandwidth` is bytes per second between it and its host in one direction, while all devices of the
    host do the same; `kernel_overhead` is the seconds that any kernel takes at least.

    The rest says what compiled kernels get out of it, and defaults to all of it. `compiler`: whose kernels run, `tpu`,
    `gpu` or `cpu`; `matmul_efficiency` and `memory_efficiency`: the part of the peak rates that large kernels reach;
    `matmul_tile`: the multiples to which a matmul's rows, columns and depth are padded; `matmul_units`: how many of
    its tiles of rows and columns are computed at a time; `results_per_second`: how many elements a kernel writes at
    most (0: no limit); `unfused_per_second`: how many elements a kernel of one elementwise op handles, besides its
    traffic (0: no limit); `gathered_rows_per_second` and `scattered_rows_per_second`: how many rows a kernel reads from
    a table by index, and adds to a table of zeros, one after the other, besides their traffic (0: no limit);
    `layout_tile`: the multiples to which the last two dimensions of an array are padded in
    memory (0: none); `fast_bytes`: arrays up to this size stay in memory on the chip between kernels, which holds
    `chip_bytes`, moves `fast_bandwidth` bytes per second and takes `fast_results_per_second` elements from matmuls (0:
    as many as the other memory). `workspace_bytes`: what the compiler gives a matmul of a library besides operands and
    result; `contention`: what runs at the same time slows each other so; `asynchronous`: the kinds of collectives that
    the compiler starts and awaits apart, the others stop compute.
    """

    kind: str
    peak_flops: tuple[tuple[str, float], ...]
    memory_bytes: float
    memory_bandwidth: float
    host_bandwidth: float
    kernel_overhead: float
    compiler: str = "gpu"
    matmul_efficiency: float = 1.0
    memory_efficiency: float = 1.0
    matmul_tile: tuple[int, int, int] = (1, 1, 1)
    matmul_units: int = 1
    results_per_second: float = 0.0
    unfused_per_second: float = 0.0
    gathered_rows_per_second: float = 0.0
    scattered_rows_per_second: float = 0.0
    layout_tile: tuple[int, int] = (0, 0)
    fast_bytes: float = 0.0
    fast_bandwidth: float = 0.0
    chip_bytes: float = 0.0
    fast_results_per_second: float = 0.0
    workspace_bytes: float = 0.0
    contention: Contention = PERFECT
    asynchronous: tuple[str, ...] = ASYNCHRONOUS

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:  # a device is part of the key of many caches
        return hash(tuple(getattr(self, f.name) for f in dataclasses.fields(self)))

    def flops_per_second(self, dtype: Any) -> float:
        """The peak rate of matmuls in `dtype`; integers, booleans and the rest run at the vector rate."""
        rates = self._rates
        return rates.get(str(np.dtype(dtype)) if isinstance(dtype, type) else str(dtype), rates["vector"])

    @functools.cached_property
    def _rates(self) -> dict[str, float]:
        return dict(self.peak_flops)


def weakest(devices: Sequence[Device]) -> Device:
    """What every one of these devices can do at least: the device that paces a program of equal shards.

    An op ends when its slowest device does, and that is the roofline of the least of each rate:
    `max_d max(flops / F_d, bytes / B_d) = max(flops / min F_d, bytes / min B_d)`.
    """
    dtypes = dict.fromkeys(name for d in devices for name, _ in d.peak_flops)
    return dataclasses.replace(
        devices[0],
        kind=", ".join(dict.fromkeys(d.kind for d in devices)),
        peak_flops=tuple((name, min(d.flops_per_second(name) for d in devices)) for name in dtypes),
        memory_bytes=min(d.memory_bytes for d in devices),
        memory_bandwidth=min(d.memory_bandwidth for d in devices),
        host_bandwidth=min(d.host_bandwidth for d in devices),
        kernel_overhead=max(d.kernel_overhead for d in devices),
        matmul_efficiency=min(d.matmul_efficiency for d in devices),
        memory_efficiency=min(d.memory_efficiency for d in devices),
        fast_bytes=min(d.fast_bytes for d in devices),
        fast_bandwidth=min(d.fast_bandwidth for d in devices),
        chip_bytes=min(d.chip_bytes for d in devices),
        workspace_bytes=max(d.workspace_bytes for d in devices),
    )


def differences(devices: Sequence[Device]) -> str:
    """How devices differ and which of them pace a program of equal shards; empty if they are alike.

    >>> differences((fast, fast, slow))
    'devices differ (2 fast, 1 slow) and shards are equal: slow decides arithmetic; fast decides the memory limit'
    """
    if len(set(devices)) < 2:
        return ""
    counts = Counter(d.kind for d in devices)
    least = weakest(devices)
    rates = [(n, rate) for n, rate in least.peak_flops if any(d.flops_per_second(n) > rate for d in devices)]
    roles = {
        "arithmetic": lambda d: not rates or any(d.flops_per_second(n) == rate for n, rate in rates),
        "memory traffic": lambda d: d.memory_bandwidth == least.memory_bandwidth,
        "traffic with the host": lambda d: d.host_bandwidth == least.host_bandwidth,
        "the memory limit": lambda d: d.memory_bytes == least.memory_bytes,
    }
    named: dict[str, list[str]] = {}
    for role, has in roles.items():
        if not all(map(has, devices)):
            named.setdefault(", ".join(dict.fromkeys(d.kind for d in devices if has(d))), []).append(role)
    kinds = ", ".join(f"{n} {kind}" for kind, n in counts.items())
    parts = [f"{who} decides {', '.join(roles)}" for who, roles in named.items()]
    return f"devices differ ({kinds}) and shards are equal: {'; '.join(parts) or 'they compute alike'}"
