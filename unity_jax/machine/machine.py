"""The machine a plan is made for: how fast its devices compute, how much they hold, how they are connected.

>>> Machine.preset("h100:2x8").num_devices
16
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unity_jax.machine import files
from unity_jax.machine.detect import spec_of
from unity_jax.machine.device import Device, weakest
from unity_jax.machine.network import Matrix, Network, num_devices
from unity_jax.machine.presets import parse


@dataclass(frozen=True)
class Machine:
    """Devices on a network.

    `devices` has one entry for each position of the network, or a single one where all are alike. In one SPMD program
    all shards are equal, so the slowest device paces every op and the smallest memory is the limit of all: `device` is
    what can be counted on from every one. JAX devices take their positions by coordinates on a torus, else by node and
    id, as `jax.devices()` lists them.
    """

    name: str
    devices: tuple[Device, ...]
    network: Network

    def __post_init__(self) -> None:
        if len(self.devices) not in (1, self.num_devices):
            raise ValueError(
                f"machine {self.name!r} has {len(self.devices)} devices on a network of {self.num_devices}: give one "
                f"for each, or a single one if all are alike"
            )
        if len(set(self.devices)) == 1:
            object.__setattr__(self, "devices", self.devices[:1])
        try:
            weakest(self.devices)
        except ValueError as error:
            raise ValueError(f"machine {self.name!r}: {error}") from None

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:  # machines are keys of caches that are asked thousands of times
        return hash((self.name, self.devices, self.network))

    @functools.cached_property
    def hash(self) -> str:
        """Of all its fields, the same in any process."""
        return hashlib.sha256(repr((self.name, self.devices, self.network)).encode()).hexdigest()[:16]

    @functools.cached_property
    def num_devices(self) -> int:
        """Positions of the network."""
        return num_devices(self.network)

    @property
    def num_levels(self) -> int:
        """Parts of the network that carry collectives at the same time."""
        return 1 if isinstance(self.network, Matrix) else len(self.network)

    @functools.cached_property
    def device(self) -> Device:
        """What every device can do at least."""
        return weakest(self.devices)

    def save(self, path: str | Path) -> None:
        """Write the machine as versioned JSON."""
        devices = self.devices * self.num_devices if len(self.devices) == 1 else self.devices
        files.write(path, self.name, devices, self.network)

    @staticmethod
    def load(path: str | Path) -> Machine:
        """Read a machine. Raises `ValueError` that names the field and what it should be."""
        return Machine(*files.read(path))

    @staticmethod
    def preset(spec: str) -> Machine:
        """A known machine: `"cpu:8"`, `"v5e:4x4"`, `"h100:8"`, `"h100:2x8"` (nodes x GPUs), `"v100-summit:4x6"`.

        Raises `ValueError`, listing the known ones, for any other.
        """
        chip, sizes = parse(spec)
        return Machine(spec, (chip.device,), chip.levels(sizes))

    @staticmethod
    def detect(devices: Sequence[Any]) -> Machine:
        """The preset of these JAX devices (of a backend or of an ahead-of-time topology).

        A TPU slice with coordinates x < 2 and y < 4 is `v5e:2x4`. Raises `ValueError` for mixed kinds or one without a
        preset.
        """
        return Machine.preset(spec_of(devices))
