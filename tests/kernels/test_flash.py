"""Attention kernels, interpreted: forward and backward against plain JAX operations, and those against autodiff."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractDevice

from unity_jax.kernels import flash, primitive, xla
from unity_jax.kernels.grid import Blocks, Sizes
from unity_jax.kernels.spec import Operands, Spec

BLOCKS = Blocks(128, 128)


def drawn(rng, shape, dtype=np.float64):
    return jnp.asarray(rng.normal(size=shape), dtype)


def case(seed, batch, groups, heads, queries, keys, features, causal, bias, mask, keep, dtype):
    """A specification and its operands. `bias`, `mask`: which of batch, heads and queries they have, or None."""
    rng = np.random.default_rng(seed)
    shape = batch, groups * heads, queries
    more = [
        None if has is None else (*(n if h else 1 for n, h in zip(shape, has, strict=True)), keys)
        for has in (bias, mask)
    ]
    seeds = jnp.asarray(rng.integers(0, 2**32, (*shape[:2], 4)), jnp.uint32) if keep < 1 else None
    x = Operands(
        drawn(rng, (*shape, features), dtype),
        drawn(rng, (batch, groups, keys, features), dtype),
        drawn(rng, (batch, groups, keys, features + 8), dtype),
        None if more[0] is None else drawn(rng, more[0], dtype),
        None if more[1] is None else jnp.asarray(rng.random(more[1]) < 0.7),
        seeds,
    )
    return Spec(features**-0.5, causal, keep), x, drawn(rng, (*shape, features + 8), dtype)


def differentiated(spec, x, kept, cotangent):
    """Attention by its definition, and the cotangents of its operands and its bias, by JAX."""
    def wide(t):
        return t.astype(jnp.float64) if jnp.issubdtype(t.dtype, jnp.floating) else t

    x, cotangent = jax.tree.map(wide, (x, cotangent))

    def fn(q, k, v, bias):
        k, v = (jnp.repeat(t, q.shape[1] // k.shape[1], axis=1) for t in (k, v))
        s = jnp.einsum("bhqf,bhkf->bhqk", q, k) * spec.scale + (0 if bias is None else bias)
        s = s if x.mask is None else jnp.where(x.mask, s, spec.fill)
        s = jnp.where(jnp.tril(jnp.ones(s.shape[2:], bool)), s, -jnp.inf) if spec.causal else s
        p = jax.nn.softmax(s, axis=-1)
        p = p if kept is None else jnp.where(kept, p / spec.keep, 0)
        return jnp.einsum("bhqk,bhkf->bhqf", p, v)

    output, pull = jax.vjp(fn, *x[:4])
    return output, *pull(cotangent)


axes = st.one_of(st.none(), st.tuples(st.booleans(), st.booleans(), st.booleans()))
cases = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**16),
        "batch": st.integers(1, 2),
        "groups": st.integers(1, 2),
        "heads": st.integers(1, 3),
        "queries": st.sampled_from([1, 7, 128, 197, 256, 300]),
        "keys": st.sampled_from([1, 33, 128, 200, 256, 384]),
        "features": st.sampled_from([8, 16, 40]),
        "causal": st.booleans(),
        "bias": axes,
        "mask": axes,
        "keep": st.sampled_from([1.0, 0.9, 0.5]),
        "dtype": st.sampled_from([np.float32, jnp.bfloat16]),
    }
)


def error(found, exact):
    return float(jnp.max(jnp.abs(found.astype(jnp.float64) - exact), initial=0))


@given(cases)
@settings(max_examples=8, deadline=None, derandomize=True, phases=[Phase.generate])
def test_kernels_are_as_exact_as_plain_operations(arguments):
    spec, x, cotangent = case(**arguments)
    plain = xla.forward(spec, x)
    found = flash.forward(spec, x, "cpu", BLOCKS)
    if plain.kept is not None:
        kept, ours = (unpacked(t, x.k.shape[2]) for t in (plain.kept, found.kept))
        seen = np.tril(np.ones(kept.shape[2:], bool)) if spec.causal else np.ones(kept.shape[2:], bool)
        np.testing.assert_array_equal(ours[..., seen], kept[..., seen])  # others are not drawn
    with jax.enable_x64(True):
        exact = differentiated(spec, x, None if plain.kept is None else kept, cotangent)
    theirs = plain.output, *xla.backward(spec, x, plain, cotangent)
    ours = found.output, *flash.backward(spec, x, found, cotangent, "cpu", BLOCKS)
    with jax.enable_x64(True):
        least = float(jnp.finfo(x.q.dtype).eps) * max(error(t, 0) for t in exact[:4])
        for name, a, b, t in zip(("output", "dq", "dk", "dv"), ours, theirs, exact, strict=False):
            assert error(a, t) <= 2 * error(b, t) + least, (name, error(a, t), error(b, t))


@pytest.mark.parametrize(("platform", "kind"), [("cuda", "NVIDIA H100 80GB HBM3"), ("tpu", "TPU v5 lite")])
@given(arguments=cases)
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
    assert lowered.as_text().count("custom_call") >= 3  # forward, and backward by queries and by keys


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


def unpacked(kept, keys):
    """Which probabilities the bits say are kept, [batch, heads, queries, keys]."""
    kept = np.asarray(kept)
    bits = kept[:, :, :, None] >> np.arange(32, dtype=np.uint32)[:, None] & 1
    return np.swapaxes(bits.reshape(*kept.shape[:2], -1, kept.shape[-1])[:, :, :keys], 2, 3).astype(bool)


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
