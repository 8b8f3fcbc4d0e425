"""Small train steps for the tests of the interface. With `FORCED` pins or a memory limit their plans really shard."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import unity_jax as unity

AS_IT_IS = unity.Options(rewrite=False)
STATE = {"w1": P(None, "b"), "w2": P("b"), "step": P()}
"""Pins of the state below, on a mesh with an axis `b`."""
X = np.arange(64, dtype=np.float32).reshape(8, 8) / 64


def mlp_state(width=16):
    rng = np.random.default_rng(0)
    return {
        "w1": rng.normal(size=(8, width)).astype(np.float32) / 4,
        "w2": rng.normal(size=(width, 8)).astype(np.float32) / 4,
        "step": np.zeros((), np.int32),
    }


def mlp_batch(size=8):
    rng = np.random.default_rng(1)
    return {"x": rng.normal(size=(size, 8)).astype(np.float32), "y": rng.normal(size=(size, 8)).astype(np.float32)}


def mlp_loss(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["w1"])
    return jnp.mean((hidden @ params["w2"] - batch["y"]) ** 2)


def mlp_step(state, batch):
    """(state, batch) -> (state, metrics)"""
    params = {k: state[k] for k in ("w1", "w2")}
    loss, grads = jax.value_and_grad(mlp_loss)(params, batch)
    new = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    return {**new, "step": state["step"] + 1}, {
        "loss": loss,
        "norm": jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(grads))),
    }


def close(found, expected, rtol=2e-5):
    """Two trees of arrays agree."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(np.asarray(a, np.complex128), np.asarray(b, np.complex128), rtol=rtol, atol=1e-6)
