"""A small train step: two or three tanh layers trained by SGD, weights donated."""

import jax
import jax.numpy as jnp

import unity_jax as unity

WEIGHT, BATCH = jax.ShapeDtypeStruct((512, 512), jnp.float32), jax.ShapeDtypeStruct((64, 512), jnp.float32)


def step(weights, x):
    def loss(weights):
        h = x
        for w in weights:
            h = jnp.tanh(h @ w)
        return (h**2).mean()

    value, grads = jax.value_and_grad(loss)(weights)
    return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], value


def planned(machine, layers=2, **options):
    settings = unity.Options(cache=None, **options)
    return unity.plan(step, [WEIGHT] * layers, BATCH, machine=machine, donate_argnums=0, options=settings)
