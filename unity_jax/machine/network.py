"""Networks as planning sees them: nested named levels, like nodes of GPUs or the axes of a torus, or a matrix of
links."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Level:
    """One level of a network: `size` members, each a device or the whole next level inside it.

    `name` is that of the physical axis (`"x"` of a torus, `"node"`). `bandwidth` is in bytes per second, in one
    direction: what one device sends through a `"switch"` while all others do the same, or what one link carries to the
    next member of a `"ring"` or `"line"` (both have links in both directions; only the ring wraps around, from the last
    member back to the first). `latency` is in seconds per hop. In `"shared"` memory members meet once for each
    collective, whatever its kind, and then read what the others wrote: `latency` is that of the meeting. `"nccl"` is a
    switch of GPUs or of their nodes, whose collectives are those of NCCL: `latency` is that of its protocol LL128.
    """

    name: str
    size: int
    bandwidth: float
    latency: float
    links: Literal["switch", "ring", "line", "shared", "nccl"] = "switch"


@dataclass(frozen=True)
class Matrix:
    """A network without structure: row `i`, column `j` is the link that carries data from device `i` to device `j`.

    `latency` in seconds, `bandwidth` in bytes per second, of each pair while all others communicate as well. The
    diagonals mean nothing.
    """

    latency: tuple[tuple[float, ...], ...]
    bandwidth: tuple[tuple[float, ...], ...]

    @property
    def size(self) -> int:
        """Devices."""
        return len(self.bandwidth)


Network = tuple[Level, ...] | Matrix
"""Levels, outermost first: device `i` sits at the row-major position `i` of their sizes. Or a matrix."""


def num_devices(network: Network) -> int:
    """How many devices a network joins."""
    return network.size if isinstance(network, Matrix) else math.prod(level.size for level in network)


def slowest(network: Network) -> float:
    """Bytes per second of the slowest link."""
    if isinstance(network, Matrix):
        links = ((i, j) for i in range(network.size) for j in range(network.size) if i != j)
        return min((network.bandwidth[i][j] for i, j in links), default=math.inf)
    return min((level.bandwidth for level in network if level.size > 1), default=math.inf)
