"""Clusters of elementwise ops."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from unity_jax.program import Program, trace
from unity_jax.search.clusters import Cluster, clusters


def f32(*dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def clusters_of(program: Program) -> list[Cluster]:
    ends = {*program.graph.inputs, *program.graph.outputs}
    return list(dict.fromkeys(clusters(program.graph, ends).values()))


def test_a_chain_is_one_cluster() -> None:
    program = trace(lambda x: jnp.tanh(jnp.exp(x)) + x, (f32(4, 4),), {})
    (cluster,) = clusters_of(program)
    assert [op.name for op in cluster.ops] == ["exp", "tanh", "add"]
    assert not cluster.linear


def test_sums_of_gradients_may_stay_partial() -> None:
    """What is linear comes before what is not, in a cluster of its own."""
    program = trace(lambda a, b, c: jnp.tanh((a @ b + b @ c + c @ a) * 0.5), (f32(4, 4), f32(4, 4), f32(4, 4)), {})
    linear, rest = clusters_of(program)
    assert linear.linear
    assert [op.name for op in linear.ops] == ["add", "add", "mul"]
    assert [op.name for op in rest.ops] == ["tanh"]


def test_adding_a_constant_is_not_linear() -> None:
    program = trace(lambda a: a + 1.0, (f32(4),), {})
    (cluster,) = clusters_of(program)
    assert not cluster.linear


def test_what_reduces_a_single_sum_is_part_of_what_needs_it_reduced() -> None:
    """Before it is scaled or behind that, it is as large."""
    program = trace(lambda a, b: jnp.tanh((a @ b) * 0.5), (f32(4, 4), f32(4, 4)), {})
    (cluster,) = clusters_of(program)
    assert [op.name for op in cluster.ops] == ["mul", "tanh"] and not cluster.linear


def test_what_a_loop_carries_may_stay_partial() -> None:
    """A weight's gradient is added up over the iterations, and reduced behind the loop."""

    def gradients(w: jax.Array, xs: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda sum, x: (sum + x.T @ x, None), w, xs)[0]

    (scan,) = trace(gradients, (f32(8, 8), f32(3, 4, 8)), {}).graph.ops
    assert [c.linear for c in dict.fromkeys(clusters(scan.bodies[0], set()).values())] == [True]


def test_an_update_is_one_cluster() -> None:
    """What only one other cluster reads is part of that, whatever else the program returns of it."""

    def step(p: jax.Array, m: jax.Array, v: jax.Array, x: jax.Array) -> tuple[jax.Array, ...]:
        g = x.T @ x
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g**2
        return p - 0.1 * m / (jnp.sqrt(v) + 1e-8), m, v

    (cluster,) = clusters_of(trace(step, (f32(8, 8), f32(8, 8), f32(8, 8), f32(4, 8)), {}))
    assert {op.outputs[0].shape for op in cluster.ops} == {(8, 8)}
