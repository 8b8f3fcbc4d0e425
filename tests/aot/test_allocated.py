"""What XLA:TPU allocates for a program, and what its other accounts say."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from unity_jax.aot.allocated import allocated
from unity_jax.aot.topologies import topology


@pytest.mark.extra("tpu-aot")
def test_what_lies_on_the_chip_is_not_in_a_devices_memory():
    """Two matrices of 64 MiB are arguments; their product of as much never leaves the chip."""
    (device, *_) = topology("v5e:2x2")
    matrix = jax.ShapeDtypeStruct((4096, 4096), jnp.float32, sharding=SingleDeviceSharding(device))
    lowered = jax.jit(lambda x, y: (jnp.tanh(x @ y) @ y).sum()).lower(matrix, matrix)
    made, taken = allocated(lowered, {}, device.platform)
    arguments = made.memory_analysis().argument_size_in_bytes
    assert arguments == 2 * 4 * 4096**2
    assert arguments <= taken < 1.01 * arguments < made.memory_analysis().peak_memory_in_bytes


def test_elsewhere_arguments_results_and_temporaries_are_what_is_allocated():
    matrix = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    made, taken = allocated(jax.jit(lambda x: x @ x).lower(matrix), {}, "cpu")
    assert taken >= 2 * 4 * 64**2 and made(jnp.eye(64)).shape == (64, 64)
