"""One device: how fast it computes, how much it holds, how fast its links to its own memory and host are."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from unity_jax.machine.contention import ASYNCHRONOUS, PERFECT, Contention

COMPILERS = ("tpu", "gpu", "cpu")
Rates = tuple[tuple[str, float], ...]
"""Flops per second by dtype name."""


def _all_kinds(kinds: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(kinds))


def _least_rates(rates: Sequence[Rates]) -> Rates:
    """Every dtype that any device has a rate for; the others compute in it at their vector rate."""
    by_name = [dict(r) for r in rates]
    names = dict.fromkeys(name for r in by_name for name in r)
    return tuple((name, min(r.get(name, r["vector"]) for r in by_name)) for name in names)


def _least_limit(limits: Sequence[float]) -> float:
    """The lowest of some rates, of which 0 is none."""
    return min((x for x in limits if x), default=0.0)


def _largest_tile(tiles: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(map(max, *tiles))


def _most_contention(found: Sequence[Contention]) -> Contention:
    return Contention(*map(max, *map(dataclasses.astuple, found)))


def _common(kinds: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(kind for kind in kinds[0] if all(kind in other for other in kinds))


def _the_compiler(names: Sequence[str]) -> str:
    if len(set(names)) > 1:
        raise ValueError(f"one program runs on all devices, which differ in compiler: {', '.join(sorted(set(names)))}")
    return names[0]


# What every one of several devices has of a field, from their different values: `field(metadata=...)` of each.
_LEAST, _MOST = {"weakest": min}, {"weakest": max}
_KINDS, _RATES, _COMPILER = {"weakest": _all_kinds}, {"weakest": _least_rates}, {"weakest": _the_compiler}
_LIMIT, _TILE = {"weakest": _least_limit}, {"weakest": _largest_tile}
_CONTENTION, _COMMON = {"weakest": _most_contention}, {"weakest": _common}


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
    as many as the other memory). `contention`: what runs at the same time slows each other so; `asynchronous`: the
    kinds of collectives that the compiler starts and awaits apart, the others stop compute.
    """

    kind: str = field(metadata=_KINDS)
    peak_flops: Rates = field(metadata=_RATES)
    memory_bytes: float = field(metadata=_LEAST)
    memory_bandwidth: float = field(metadata=_LEAST)
    host_bandwidth: float = field(metadata=_LEAST)
    kernel_overhead: float = field(metadata=_MOST)
    compiler: str = field(default="gpu", metadata=_COMPILER)
    matmul_efficiency: float = field(default=1.0, metadata=_LEAST)
    memory_efficiency: float = field(default=1.0, metadata=_LEAST)
    matmul_tile: tuple[int, int, int] = field(default=(1, 1, 1), metadata=_TILE)
    matmul_units: int = field(default=1, metadata=_MOST)  # more of them stay idle beside the last tiles
    results_per_second: float = field(default=0.0, metadata=_LIMIT)
    unfused_per_second: float = field(default=0.0, metadata=_LIMIT)
    gathered_rows_per_second: float = field(default=0.0, metadata=_LIMIT)
    scattered_rows_per_second: float = field(default=0.0, metadata=_LIMIT)
    layout_tile: tuple[int, int] = field(default=(0, 0), metadata=_TILE)
    fast_bytes: float = field(default=0.0, metadata=_LEAST)
    fast_bandwidth: float = field(default=0.0, metadata=_LIMIT)
    chip_bytes: float = field(default=0.0, metadata=_LEAST)
    fast_results_per_second: float = field(default=0.0, metadata=_LEAST)  # 0 is the rate of the other, slower memory
    contention: Contention = field(default=PERFECT, metadata=_CONTENTION)
    asynchronous: tuple[str, ...] = field(default=ASYNCHRONOUS, metadata=_COMMON)

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:  # a device is part of the key of many caches
        return hash(tuple(getattr(self, f.name) for f in dataclasses.fields(self)))

    def flops_per_second(self, dtype: Any) -> float:
        """The peak rate of matmuls in `dtype`; integers, booleans and the rest run at the vector rate. Where there is
        none for floats of less than 16 bits, they are multiplied as bfloat16."""
        rates, name = self._rates, str(np.dtype(dtype)) if isinstance(dtype, type) else str(dtype)
        if name.startswith(("float8", "float6", "float4")):
            return rates.get(name, rates.get("bfloat16", rates["vector"]))
        return rates.get(name, rates["vector"])

    @functools.cached_property
    def _rates(self) -> dict[str, float]:
        return dict(self.peak_flops)


def weakest(devices: Sequence[Device]) -> Device:
    """What every one of these devices can do at least: the device that paces a program of equal shards.

    An op ends when its slowest device does, and that is the roofline of the least of each rate:
    `max_d max(flops / F_d, bytes / B_d) = max(flops / min F_d, bytes / min B_d)`. Each field says beside it what that
    is. Raises `ValueError` for devices of different compilers.
    """
    different = [f for f in dataclasses.fields(Device) if len({getattr(d, f.name) for d in devices}) > 1]
    values = {f.name: f.metadata["weakest"]([getattr(d, f.name) for d in devices]) for f in different}
    return dataclasses.replace(devices[0], **values)


def differences(devices: Sequence[Device]) -> str:
    """How devices differ and which of them pace a program of equal shards; empty if they are alike.

        differences((fast, fast, slow))
        # 'devices differ (2 fast, 1 slow) and shards are equal: slow decides arithmetic; fast decides the memory limit'
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
