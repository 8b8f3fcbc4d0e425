"""What planning knows of the tiles of kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

LANES = 128
"""What blocks are multiples of."""

SUBLANES = 8
"""Rows of a tile of 32 bits on a TPU, twice as many of 16 bits."""

POSITIONS = 64
"""How many queries and keys a block of a GPU's kernel has; those of TPUs are tuned."""

NARROWEST = 16
"""The fewest features of a product that Triton computes."""

VMEM = 2**25
"""Bytes on the chip that a TPU's kernel may take in any case, for what its steps compute."""


def padded(features: int, platform: str) -> int:
    """How many features kernels compute with: Triton with powers of two."""
    return max(NARROWEST, 1 << (features - 1).bit_length()) if platform == "gpu" else features


def whole(n: int, block: int) -> int:
    """As many in whole blocks."""
    return -(-n // block) * block


def nbytes(shape: Sequence[int], dtype: np.dtype) -> int:
    """Bytes of an array on the chip of a TPU, in whole tiles; a truth value has a byte."""
    *major, minor = shape or (1,)
    if major:
        major[-1] = whole(major[-1], SUBLANES * 4 // dtype.itemsize)
    return math.prod(major) * whole(minor, LANES) * dtype.itemsize
