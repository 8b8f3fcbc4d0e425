"""What tests of fusion share: the kernels of a program by the names of their ops."""

import jax
import jax.numpy as jnp

from unity_jax.program import trace
from unity_jax.xla.fusion import kernels


def f32(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def shown(fn, *args, compiler="gpu"):
    """The names of the ops of every kernel."""
    return [" ".join(op.name for op in k.ops) for k in kernels(trace(fn, args, {}).graph, compiler)]
