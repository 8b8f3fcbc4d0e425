"""What planning knows of the tiles of kernels."""

from __future__ import annotations

LANES = 128
"""What blocks are multiples of."""

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
