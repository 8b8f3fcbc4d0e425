"""Clusters of elementwise ops."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from unity_jax.program import Program, trace
from unity_jax.search.assemble import is_free
from unity_jax.search.clusters import Cluster, clusters


def f32(*dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def clusters_of(program: Program) -> list[Cluster]:
    uniform = {t for op in program.graph.ops if is_free(op) for t in op.outputs}
    return list(dict.fromkeys(clusters(program.graph, uniform).values()))


def test_a_chain_is_one_cluster() -> None:
    program = trace(lambda x: jnp.tanh(jnp.exp(x)) + x, (f32(4, 4),), {})
    (cluster,) = clusters_of(program)
    assert [op.name for op in cluster.ops] == ["exp", "tanh", "add"]
    assert not cluster.linear


def test_sums_of_gradients_may_stay_partial() -> None:
    """What is linear comes before what is not, in a cluster of its own."""
    program = trace(lambda a, b, c: jnp.tanh((a + b + c) * 0.5), (f32(4), f32(4), f32(4)), {})
    linear, rest = clusters_of(program)
    assert linear.linear
    assert [op.name for op in linear.ops] == ["add", "add", "mul"]
    assert [op.name for op in rest.ops] == ["tanh"]


def test_adding_a_constant_is_not_linear() -> None:
    program = trace(lambda a: a + 1.0, (f32(4),), {})
    (cluster,) = clusters_of(program)
    assert not cluster.linear
