"""The machine a plan is made for: how fast its devices compute, how much they hold, how they are connected.

    >>> Machine.preset("h100:2x8").num_devices
    16
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from unity_jax.machine.contention import ASYNCHRONOUS, PERFECT, Contention
from unity_jax.machine.network import Level
from unity_jax.machine.presets import CHIPS, parse


@dataclass(frozen=True)
class Machine:
    """Equal devices on a nested network.

    `peak_flops` maps dtype names to flops per second, with `"vector"` for every other dtype; `memory_bytes` and
    `memory_bandwidth` (bytes per second) are per device; `kernel_overhead` is the seconds that any kernel takes at
    least. `network` lists the levels, outermost first: device `i` sits at the row-major position `i` of their sizes.
    `contention`: what runs at the same time slows each other so; `asynchronous`: the kinds of collectives that the
    compiler starts and awaits apart, the others stop compute.
    """

    name: str
    peak_flops: tuple[tuple[str, float], ...]
    memory_bytes: float
    memory_bandwidth: float
    kernel_overhead: float
    network: tuple[Level, ...]
    contention: Contention = PERFECT
    asynchronous: frozenset[str] = ASYNCHRONOUS

    @property
    def num_devices(self) -> int:
        return math.prod(level.size for level in self.network)

    def flops_per_second(self, dtype: Any) -> float:
        """The peak rate of matmuls in `dtype`; integers, booleans and the rest run at the vector rate."""
        rates = self._rates
        return rates.get(str(np.dtype(dtype)) if isinstance(dtype, type) else str(dtype), rates["vector"])

    @functools.cached_property
    def _rates(self) -> dict[str, float]:
        return dict(self.peak_flops)

    @staticmethod
    def preset(spec: str) -> Machine:
        """A known machine: `"cpu:8"`, `"v5e:4x4"`, `"h100:8"`, `"h100:2x8"` (nodes x GPUs), `"v100-summit:4x6"`.

        Raises `ValueError`, listing the known ones, for any other.
        """
        chip, sizes = parse(spec)
        return Machine(
            spec,
            chip.peak_flops,
            chip.memory_bytes,
            chip.memory_bandwidth,
            chip.kernel_overhead,
            chip.levels(sizes),
            chip.contention,
            chip.asynchronous,
        )

    @staticmethod
    def detect(devices: Sequence[Any]) -> Machine:
        """The preset of these JAX devices (of a backend or of an ahead-of-time topology).

        On a torus the network lists the slowest varying coordinate of `jax.devices()` first, so a TPU slice with
        coordinates x < 2 and y < 4 is `v5e:4x2`. Raises `ValueError` for mixed kinds or one without a preset.
        """
        kinds = {f"{d.platform} {d.device_kind}".lower() for d in devices}
        names = [name for name, chip in CHIPS.items() if all(any(part in k for part in chip.kinds) for k in kinds)]
        if not devices or not names:
            known = ", ".join(CHIPS)
            raise ValueError(f"no machine preset for devices of kind {sorted(kinds)} (known: {known}); pass machine=")
        return Machine.preset(f"{names[0]}:{_topology(devices, CHIPS[names[0]].ranks)}")


def _topology(devices: Sequence[Any], ranks: tuple[int, ...]) -> str:
    """`4x2` of a complete torus slice, `NODESxGPUS` of equal processes, else the number of devices in one level."""
    if ranks == (2,):
        x, y = (max(d.coords[i] for d in devices) - min(d.coords[i] for d in devices) + 1 for i in (0, 1))
        return f"{y}x{x}" if x * y == len(devices) else f"{len(devices)}x1"
    nodes = len({d.process_index for d in devices})
    if 2 in ranks and nodes > 1 and len(devices) % nodes == 0:
        return f"{nodes}x{len(devices) // nodes}"
    return str(len(devices))
