"""Bytes of arrays as they lie in memory, and what it takes to turn them."""

from __future__ import annotations

import functools
import math

from unity_jax.machine.device import Device

WIDTH = 4
"""Bytes of an element in vector registers."""


@functools.lru_cache(maxsize=65536)
def stored_bytes(
    device: Device,
    shape: tuple[int, ...],
    itemsize: int,
    minor: tuple[int, ...] | None = None,
    fewer: tuple[int, ...] = (1, 2, 4),
) -> float:
    """Bytes of an array in memory, padded to tiles in the order of dimensions that pads least.

    **Arguments:** `minor`: the dimensions that may come last and second last (all of them by default; for a single
    one they keep their order); `fewer`: tiles of fewer rows, which XLA:TPU has in memory and not in registers.
    """
    n = math.prod(shape)
    sublanes, lanes = device.layout_tile
    if not lanes or not shape or not n:
        return float(n * itemsize)
    last = range(len(shape)) if minor is None or not minor else minor
    rows = {d: _padded_rows(shape[d], sublanes, fewer) / shape[d] for d in range(len(shape))}
    second = {d: [e for e in last if e != d] or ([d - 1] if d else []) for d in last}
    padding = min(
        -(-shape[d] // lanes) * lanes / shape[d] * min((rows[e] for e in second[d]), default=1.0) for d in last
    )
    return n * itemsize * padding


def _padded_rows(n: int, sublanes: int, fewer: tuple[int, ...]) -> int:
    return next((k for k in fewer if n <= k), -(-n // sublanes) * sublanes)


def turning_bytes(device: Device, itemsize: int, least: float, other: float) -> float:
    """Bytes that go through memory to turn an array of so many bytes into another order of dimensions: both, and, as in
    a pass over elements (`cost.compute`), float32 values where they are wider and do not stay on the chip."""
    return pass_bytes(device, itemsize, least, other) if other > least else 0.0


def pass_bytes(device: Device, itemsize: int, least: float, other: float) -> float:
    return least + other + (other / itemsize * WIDTH if itemsize < WIDTH and other > device.fast_bytes else 0.0)


def exchanging_bytes(device: Device, shape: tuple[int, ...], dim: int, parts: int, itemsize: int) -> float:
    """Bytes that go through the memory of a TPU around an all-to-all of an array that is cut into parts of a dimension:
    XLA:TPU turns it so that the parts lie apart, and turns what has come: three passes in programs compiled for v5e."""
    if not device.layout_tile[1]:
        return 0.0
    pieces = (parts, *(n if d != dim else -(-n // parts) for d, n in enumerate(shape)))
    least, apart = stored_bytes(device, shape, itemsize), stored_bytes(device, pieces, itemsize, (len(shape),))
    return 3 * pass_bytes(device, itemsize, least, apart)
