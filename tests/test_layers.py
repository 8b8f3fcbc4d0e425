"""Layers that keep less: their gradients beside exact ones, and what they keep."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import unity_jax as unity
from unity_jax.layers import gelu

ERRORS = {"float32": (2e-4, 2e-6), "bfloat16": (2e-2, 3e-3), "float16": (1e-2, 1e-3)}
"""At most, and the root mean square over a normal distribution."""


def slopes(of, x, **how):
    return jax.grad(lambda v: of(v, **how).astype(jnp.float32).sum())(x)


def exact(x, approximate):
    with jax.enable_x64(True):
        return np.asarray(jax.grad(lambda v: jax.nn.gelu(v, approximate).sum())(jnp.asarray(x, jnp.float64)))


@pytest.mark.parametrize("approximate", [True, False])
@pytest.mark.parametrize("dtype", ERRORS)
def test_the_gradient_follows_from_the_output(dtype, approximate):
    most, usual = ERRORS[dtype]
    for x in (np.linspace(-15, 15, 20_001), np.random.default_rng(0).normal(size=20_000)):
        x = jnp.asarray(x, dtype)
        error = np.asarray(slopes(gelu, x, approximate=approximate), np.float64) - exact(x, approximate)
        assert np.abs(error).max() <= most
        assert np.sqrt((error**2).mean()) <= usual
        expected = np.asarray(jax.nn.gelu(x.astype(jnp.float32), approximate).astype(dtype))
        np.testing.assert_array_equal(np.asarray(gelu(x, approximate)), expected)


@pytest.mark.parametrize("approximate", [True, False])
def test_the_fit_is_right_to_3e_7(approximate):
    x = np.linspace(-15, 15, 20_001)
    with jax.enable_x64(True):
        found = np.asarray(slopes(gelu, jnp.asarray(x, jnp.float64), approximate=approximate))
    assert np.abs(found - exact(x, approximate)).max() <= 3e-7


def test_far_away_it_is_one_or_zero():
    x = jnp.array([jnp.inf, 100.0, -100.0, jnp.nan, 0.0])
    np.testing.assert_allclose(slopes(gelu, x), [1, 1, 0, jnp.nan, 0.5], rtol=1e-6)


@pytest.mark.parametrize("approximate", [True, False])
def test_from_the_input_it_is_that_of_jax(approximate):
    x = jnp.asarray(np.random.default_rng(0).normal(size=1000), jnp.bfloat16)
    np.testing.assert_array_equal(
        slopes(gelu, x, approximate=approximate, residual="input"), slopes(jax.nn.gelu, x, approximate=approximate)
    )
    np.testing.assert_array_equal(gelu(x, approximate, residual="input"), jax.nn.gelu(x, approximate))


@pytest.mark.parametrize(("residual", "bytes_each"), [("output", 5), ("input", 4)])
def test_what_is_kept(residual, bytes_each):
    x = jnp.ones((8, 16))
    _, back = jax.vjp(lambda v: gelu(v, residual=residual), x)
    assert sum(t.nbytes for t in jax.tree.leaves(back)) == bytes_each * x.size


def test_bad_arguments_get_a_sentence():
    with pytest.raises(TypeError, match="floating-point type, not of int32"):
        gelu(jnp.arange(3))
    with pytest.raises(ValueError, match="residual='both': one of 'output', 'input'"):
        gelu(jnp.ones(3), residual="both")


def train_step(activation):
    def step(params, x):
        def loss(params):
            def layer(x, weights):
                return activation(x @ weights[0]) @ weights[1], None

            return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    return step


def test_a_planned_step_keeps_less_and_computes_the_same(make_mesh):
    shapes = (jax.ShapeDtypeStruct((8, 256, 1024), jnp.bfloat16), jax.ShapeDtypeStruct((8, 1024, 256), jnp.bfloat16))
    x = jax.ShapeDtypeStruct((65_536, 256), jnp.bfloat16)
    plain, ours = (
        unity.plan(train_step(of), shapes, x, machine="h100:8", options=unity.Options(cache=None, rewrite=False))
        for of in (jax.nn.gelu, gelu)
    )
    element = 8 * 65_536 * 1024 / 8  # of eight layers, on one of eight devices
    assert plain.predicted.peak_bytes - ours.predicted.peak_bytes >= 2.9 * element
    keys = jax.random.split(jax.random.key(0), 3)
    params = jax.random.normal(keys[0], (2, 16, 32)) / 4, jax.random.normal(keys[1], (2, 32, 16)) / 4
    batch = jax.random.normal(keys[2], (8, 16))
    step = train_step(gelu)
    expected = jax.jit(step)(params, batch)
    found = unity.auto_shard(step, mesh=make_mesh(x=8), options=unity.Options(cache=None, rewrite=False))(params, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)
