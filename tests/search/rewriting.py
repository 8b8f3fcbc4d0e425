"""What tests of rewrites share: plans of train steps, and what is in them."""

import jax
import jax.numpy as jnp
import optax

import unity_jax as unity
from unity_jax.search.planner import Planner

BF16, F32 = jnp.bfloat16, jnp.float32


def sgd(loss):
    """A train step: every parameter a hundredth of its gradient further down."""

    def step(params, batch):
        gradients = jax.grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.01 * g.astype(p.dtype), params, gradients)

    return step


def plan(loss, params, batch, machine="h100:8"):
    return unity.plan(sgd(loss), params, batch, machine=machine, donate_argnums=0)


def unrewritten(found):
    """Predicted seconds of the best plan of the program as it was written, for the same mesh."""
    planner = Planner(found.bound().traced, found.priced_on)
    return min(c.seconds for c in planner.candidates(found.axes))


def ops(found, name):
    return [op for op in found.pcg.walk() if op.name == name]


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(F32), labels).mean()
