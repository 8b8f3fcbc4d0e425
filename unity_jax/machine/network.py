"""Networks as planning sees them: nested levels, like nodes of GPUs or rows of a torus."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Level:
    """One level of a network: `size` members, each a device or the whole next level inside it.

    `bandwidth` is in bytes per second, in one direction: what one device sends through a `"switch"` while all others do
    the same, or what one link carries to the next member of a `"ring"` or `"line"` (both have links in both directions;
    only the ring has one from the last member back to the first). `latency` is in seconds per hop.
    """

    size: int
    bandwidth: float
    latency: float
    links: Literal["switch", "ring", "line"] = "switch"
