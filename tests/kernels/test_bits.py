"""Random bits of single elements: those that JAX draws for the whole array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unity_jax.kernels.bits import is_kept, product, threefry


@pytest.mark.parametrize("shape", [(1,), (3, 5, 7), (2, 4, 33, 17)])
def test_bits_are_those_of_the_whole_array(shape):
    key = jax.random.key(3)
    words = jax.random.key_data(key)
    index = jnp.arange(np.prod(shape), dtype=jnp.uint32)
    found = threefry((words[0], words[1]), jnp.zeros_like(index), index).reshape(shape)
    np.testing.assert_array_equal(found, jax.random.bits(key, shape))


@pytest.mark.parametrize("keep", [0.5, 0.9, 0.1, 1 / 3, 0.999])
def test_what_is_kept_is_what_bernoulli_says(keep):
    key = jax.random.key(1)
    np.testing.assert_array_equal(
        is_kept(jax.random.bits(key, (4096,)), keep), jax.random.bernoulli(key, keep, (4096,))
    )


def test_products_have_64_bits():
    numbers = np.random.default_rng(0).integers(0, 2**32, (50, 2), dtype=np.uint64)
    for a, b in [*numbers.tolist(), [2**32 - 1, 2**32 - 1], [0, 7]]:
        high, low = product(jnp.asarray([a], jnp.uint32), b)
        assert (int(high[0]) << 32) + int(low[0]) == a * b
