"""Machines of one kind and many sizes: `machine_of("v5e", 32)` is the preset `v5e:4x8`.

A family is the name of a chip (`v5e`, `h100`, `v100-summit`, ...) or a machine file, whose first devices are taken.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

from unity_jax.machine.machine import Machine
from unity_jax.machine.network import Level, Matrix
from unity_jax.machine.presets import CHIPS

GPUS_PER_NODE = {"v100-summit": 6}
"""Of the others eight, as in https://docs.nvidia.com/dgx/dgxh100-user-guide/introduction-to-dgxh100.html"""

LONGEST_SIDE = {2: 16}
"""Chips along a torus axis, by dimensions: a slice of v5e or v6e has at most 16 x 16
(https://docs.cloud.google.com/tpu/docs/v5e)."""


def machine_of(family: str, devices: int) -> Machine:
    """A machine of so many devices. Raises `ValueError` where the family has none."""
    if family.endswith(".json"):
        return first_devices(Machine.load(family), devices)
    return Machine.preset(spec(family, devices))


def spec(family: str, devices: int) -> str:
    """The preset of so many devices: whole nodes of GPUs; a torus slice as near to a cube as it can be."""
    if family not in CHIPS:
        raise ValueError(f"unknown machine {family!r}; there are {', '.join(CHIPS)}, or a machine file (.json)")
    chip, node = CHIPS[family], GPUS_PER_NODE.get(family, 8)
    if 1 in chip.ranks:
        if 2 not in chip.ranks or devices <= node:
            return f"{family}:{devices}"
        if devices % node:
            raise ValueError(f"{devices} devices of {family} are no whole number of nodes of {node}")
        return f"{family}:{devices // node}x{node}"
    chips, rest = divmod(devices, chip.cores)
    sides = None if rest else cube(chips, chip.ranks[0], LONGEST_SIDE.get(chip.ranks[0], chips))
    if sides is None:
        raise ValueError(f"no slice of {family} has {devices} devices")
    return f"{family}:{'x'.join(map(str, sides))}"


def cube(n: int, rank: int, longest: int) -> tuple[int, ...] | None:
    """The sides, in ascending order, of the block of `n` that is nearest to a cube; None if a side would be too long.

    >>> cube(32, 2, 16), cube(128, 3, 64)
    ((4, 8), (4, 4, 8))
    """
    sides = [k for k in range(1, longest + 1) if n % k == 0]
    found = [s for s in itertools.combinations_with_replacement(sides, rank) if math.prod(s) == n]
    return min(found, key=lambda s: s[-1] / s[0], default=None)


def first_devices(machine: Machine, devices: int) -> Machine:
    """A part of a machine: its first devices, level by level from the innermost."""
    if devices > machine.num_devices:
        raise ValueError(f"{machine.name} has {machine.num_devices} devices, not {devices}")
    kinds = machine.devices if len(machine.devices) == 1 else machine.devices[:devices]
    network, left = machine.network, devices
    if isinstance(network, Matrix):
        rows = (tuple(tuple(row[:devices]) for row in m[:devices]) for m in (network.latency, network.bandwidth))
        return Machine(f"{machine.name}, {devices} devices", kinds, Matrix(*rows))
    levels: list[Level] = []
    for level in reversed(network):
        size = min(left, level.size)
        if left % size:
            raise ValueError(f"{devices} devices are no whole number of the {level.name} level of {machine.name}")
        levels.insert(0, replace(level, size=size))
        left //= size
    return Machine(f"{machine.name}, {devices} devices", kinds, tuple(levels))
