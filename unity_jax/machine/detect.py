"""JAX devices on networks: which preset they are, and which of its positions each one has.

    spec_of(jax.devices())
    # 'h100:2x8'
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from unity_jax.machine.network import Level, Network
from unity_jax.machine.presets import CHIPS


def spec_of(devices: Sequence[Any]) -> str:
    """The preset of these devices, of a backend or of an ahead-of-time topology.

    Raises `ValueError` for no devices, mixed kinds, or a kind without a preset.
    """
    kinds = {d.device_kind.lower() for d in devices}
    cores = len({getattr(d, "core_on_chip", 0) for d in devices})
    for name, chip in CHIPS.items():
        if kinds and all(re.fullmatch(chip.kind, k) for k in kinds) and cores <= chip.cores:
            if chip.ranks[0] > 1:  # coordinates in two or three dimensions
                return f"{name}:{_torus(devices, chip.ranks[0], chip.cores)}"
            return f"{name}:{_nodes(devices, chip.ranks)}"
    raise ValueError(
        f"no machine preset for devices of kind {sorted(kinds)} (known: {', '.join(CHIPS)}); pass machine="
    )


def _torus(devices: Sequence[Any], rank: int, cores: int) -> str:
    """`2x4` of a complete slice; of a part of one as many chips in a line."""
    extents = [len({d.coords[i] for d in devices}) for i in range(rank)]
    if math.prod(extents) * cores == len(devices):
        return "x".join(map(str, extents))
    return "x".join(map(str, (len(devices), *[1] * (rank - 1 + (cores > 1)))))


def _nodes(devices: Sequence[Any], ranks: tuple[int, ...]) -> str:
    """`NODESxGPUS` of equal nodes; of unequal ones as many nodes of one, which promises no fast link that is not
    there."""
    nodes = Counter(map(_node, devices))
    if 2 not in ranks or len(nodes) == 1:
        return str(len(devices))
    equal = len(set(nodes.values())) == 1
    return f"{len(nodes)}x{len(devices) // len(nodes)}" if equal else f"{len(devices)}x1"


def _node(device: Any) -> int:
    """The node of a GPU: where JAX runs one process per GPU, its `slice_index` counts the hosts."""
    found = getattr(device, "slice_index", None)
    return device.process_index if found is None else found


_AXES = {"x": 0, "y": 1, "z": 2}


def positions(devices: Sequence[Any], network: Network) -> tuple[int, ...]:
    """The position on the network of each device of a machine.

    On a torus by coordinates, as far as the devices have them and they agree with the sizes of the network; else in
    order of node and id, as `jax.devices()` lists them.
    """
    if not isinstance(network, tuple) or not (found := _by_coordinates(devices, network)):
        ranked = sorted(range(len(devices)), key=lambda i: (_node(devices[i]), devices[i].id))
        found = [0] * len(devices)
        for position, i in enumerate(ranked):
            found[i] = position
    return tuple(found)


def _by_coordinates(devices: Sequence[Any], network: tuple[Level, ...]) -> list[int]:
    """Row-major positions by coordinates; nothing where those do not fit the levels."""
    if not all(level.name in (*_AXES, "core") for level in network) or any(
        getattr(d, "coords", None) is None for d in devices
    ):
        return []
    found = [0] * len(devices)
    for level in network:
        axis = _AXES.get(level.name)
        values = [d.core_on_chip if axis is None else d.coords[axis] for d in devices]
        low = min(values)
        if max(values) - low >= level.size:
            return []
        found = [position * level.size + value - low for position, value in zip(found, values, strict=True)]
    return found if len(set(found)) == len(found) else []
