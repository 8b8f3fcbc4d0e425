"""Attention kernels, interpreted: forward and backward against plain JAX operations, and those against autodiff."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from jax.sharding import AbstractDevice

from tests.kernels.attentions import BLOCKS, CASES, case, differentiated, errors, unpacked
from unity_jax.kernels import cudnn, flash, primitive, xla
from unity_jax.kernels.grid import Blocks, Sizes
from unity_jax.kernels.spec import Operands, Spec

_NEWEST = jax.__version_info__ >= (0, 12)  # XLA:CPU takes three times as long there


@given(CASES)
@settings(max_examples=3 if _NEWEST else 8, deadline=None, derandomize=True, phases=[Phase.generate])
def test_kernels_are_as_exact_as_plain_operations(arguments):
    assert {name: (error, most) for name, (error, most) in errors(arguments).items() if not error <= most} == {}


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_a_bias_and_a_mask_of_one_key_and_one_query_are_padded_as_keys_are(dtype):
    sizes = {"batch": 1, "groups": 1, "heads": 2, "queries": 1, "keys": 1, "features": 8}
    more = {"seed": 713, "causal": False, "bias": (0, 0, 1), "mask": (1, 1, 1), "keep": 0.5, "dtype": dtype}
    found = errors(sizes | more)
    assert all(error <= most for error, most in found.values()), found


@pytest.mark.parametrize(("platform", "kind"), [("cuda", "NVIDIA H100 80GB HBM3"), ("tpu", "TPU v5 lite")])
@given(arguments=CASES)
@settings(max_examples=15, deadline=None, derandomize=True, phases=[Phase.generate])
def test_kernels_are_lowered_for_machines_that_are_not_there(platform, kind, arguments):
    """Triton and Mosaic take less than what is interpreted."""
    spec, x, cotangent = case(**arguments)

    def both(x, cotangent):
        found = primitive.forward(spec, x)
        return found, primitive.backward(spec, x, found, cotangent)

    device = AbstractDevice(device_kind=kind, num_cores=None, platform="gpu" if platform == "cuda" else platform)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)):
        lowered = jax.jit(both).trace(x, cotangent).lower(lowering_platforms=(platform,))
    least = 2 if platform == "cuda" and cudnn.takes(spec, x) else 3  # forward, and backward by queries and by keys
    assert lowered.as_text().count("custom_call") >= least


@pytest.mark.parametrize(
    ("platform", "keep", "blocks"),
    [("tpu", 1.0, (197, 200)), ("tpu", 0.9, (256, 256)), ("gpu", 1.0, (256, 256))],
)
def test_what_is_shorter_than_a_block_is_not_padded(platform, keep, blocks):
    """But to whole words of what dropout keeps, and for Triton."""
    x = Operands(*(jnp.zeros((1, 2, n, 64), jnp.bfloat16) for n in (197, 200, 200)))
    spec = Spec(0.125, keep=keep)
    sizes = Sizes.of(spec, x, platform, Blocks(512, 512))
    assert sizes.blocks == blocks and (sizes.whole("q"), sizes.whole("k")) == blocks


@pytest.mark.parametrize("causal", [False, True])
def test_plain_operations_in_float64_are_the_definition(causal):
    with jax.enable_x64(True):
        spec, x, cotangent = case(0, 2, 2, 2, 9, 11, 8, causal, (1, 1, 1), (1, 0, 0), 0.8, np.float64)
        found = xla.forward(spec, x)
        exact = differentiated(spec, x, unpacked(found.kept, 11), cotangent)
        bias = xla.of_bias(spec, x, found, cotangent)
        for a, b in zip((found.output, *xla.backward(spec, x, found, cotangent), bias), exact, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-12)


def test_blocks_do_not_change_what_is_dropped():
    spec, x, _ = case(1, 1, 1, 2, 300, 384, 8, False, None, None, 0.5, np.float32)
    found = [flash.forward(spec, x, "cpu", blocks) for blocks in (BLOCKS, Blocks(256, 128), Blocks(384, 384))]
    for other in found[1:]:
        np.testing.assert_array_equal(other.kept, found[0].kept)
        np.testing.assert_allclose(other.output, found[0].output, atol=1e-6)
