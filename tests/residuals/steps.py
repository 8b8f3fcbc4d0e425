"""Small train steps with much to keep between the passes, and how a graph is run by itself."""

import jax
import jax.numpy as jnp
import numpy as np

from unity_jax.lower.compile import spmd
from unity_jax.machine.machine import Machine
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.program import trace
from unity_jax.search.identity import identity

ONE = Machine.preset("cpu:1")


def mlp(params, x):
    """Layers of two products, without a bias."""
    for v, w in params:
        x = x + jnp.tanh(jax.nn.gelu(x @ v) @ w)
    return (x**2).mean()


def dropped(params, x, key):
    """The same with dropout."""
    for i, (v, w) in enumerate(params):
        y = jax.nn.gelu(x @ v)
        kept = jax.random.bernoulli(jax.random.fold_in(key, i), 0.8, y.shape)
        x = x + jnp.tanh(jnp.where(kept, y / 0.8, 0.0) @ w)
    return (x**2).mean()


def centred(params, x):
    """Layers of which each needs the whole batch: its mean and variance."""
    for v, w in params:
        x = x + jnp.tanh(jax.nn.gelu(x @ v) @ w)
        x = (x - x.mean(0)) / x.std(0)
    return (x**3).mean()


def sgd(loss):
    def step(params, *rest):
        value, gradients = jax.value_and_grad(loss)(params, *rest)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    return step


def parameters(layers=3, width=8, inner=32, dtype=np.float32):
    rng = np.random.default_rng(0)
    return [
        tuple(rng.normal(size=s).astype(dtype) / 4 for s in ((width, inner), (inner, width))) for _ in range(layers)
    ]


def batch(rows=16, width=8, dtype=np.float32):
    return np.random.default_rng(1).normal(size=(rows, width)).astype(dtype)


def program(fn, *args):
    return trace(fn, args, {}, donate_argnums=0)


def planned(of):
    """The graph of a program on one device."""
    return identity(of, ONE, MeshAxes(("x",), (1,))).graph


def alone(of):
    """The program as one device runs it, jitted, over its flat inputs."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    return jax.jit(spmd(planned(of), mesh))


def flat(of, *args):
    return [*of.constants, *jax.tree.leaves(args)]


def same(changed, of, args, tolerance=2e-6):
    """Both programs compute the same on one device."""
    inputs = flat(of, *args)
    for a, b in zip(alone(changed)(inputs), alone(of)(inputs), strict=True):
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = map(jax.random.key_data, (a, b))
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance)


def classifier(params, x, labels, weights):
    """A weighted cross entropy over many classes, of a hidden layer."""
    v, w = params
    logits = jnp.tanh(x @ v) @ w
    picked = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    losses = jax.nn.logsumexp(logits, -1) - picked
    return (losses * weights).sum() / weights.sum()


def examples(*rows, width=8, inner=16, classes=100):
    rng = np.random.default_rng(2)
    params = tuple(rng.normal(size=s).astype(np.float32) / 4 for s in ((width, inner), (inner, classes)))
    x = rng.normal(size=(*rows, width)).astype(np.float32)
    return params, x, rng.integers(classes, size=rows), (rng.random(rows) < 0.7).astype(np.float32)
