"""The random bits of `jax.random`, of single elements: a kernel draws where it needs them what the whole array has.

    jax.random.bits(key, shape)[index] == threefry(key, index)     # index in row-major order

What JAX draws of a Threefry key depends on the element's index alone (`jax_threefry_partitionable`, which is the
default; Salmon et al., SC 2011, https://doi.org/10.1145/2063384.2063405).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA
MANTISSA = 23
"""Bits of a random float32 in [0, 1)."""


def threefry(key: tuple[jax.Array, jax.Array], high: jax.Array, low: jax.Array) -> jax.Array:
    """32 random bits for each index of 64 bits.

    **Arguments:** `key`: its two words; `high`, `low`: those of the indices, of any shape. All are uint32.
    """
    keys = (*key, key[0] ^ key[1] ^ jnp.uint32(PARITY))
    x, y = high + keys[0], low + keys[1]
    for i in range(5):
        for by in ROTATIONS[i % 2]:
            x = x + y
            y = (y << jnp.uint32(by) | lax.shift_right_logical(y, jnp.uint32(32 - by))) ^ x
        x, y = x + keys[(i + 1) % 3], y + keys[(i + 2) % 3] + jnp.uint32(i + 1)
    return x ^ y


def product(a: jax.Array, b: int) -> tuple[jax.Array, jax.Array]:
    """The upper and the lower word of the product of uint32 numbers, each of less than 32 bits."""
    high, low, half = a >> 16, a & 0xFFFF, jnp.uint32(16)
    over = high * jnp.uint32(b & 0xFFFF) + (low * jnp.uint32(b & 0xFFFF) >> half)
    more = low * jnp.uint32(b >> 16) + (over & 0xFFFF)
    return high * jnp.uint32(b >> 16) + (over >> half) + (more >> half), a * jnp.uint32(b)


def is_kept(bits: jax.Array, keep: float) -> jax.Array:
    """`jax.random.bernoulli(key, keep)` of these bits: a float32 of their upper ones is below `keep`."""
    drawn = lax.shift_right_logical(bits, jnp.uint32(32 - MANTISSA)).astype(jnp.int32)
    return drawn < math.ceil(float(np.float32(keep)) * 2**MANTISSA)
