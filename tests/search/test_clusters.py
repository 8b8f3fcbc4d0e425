"""Clusters of elementwise ops, and which dimensions index examples."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from unity_jax.program import Program, trace
from unity_jax.search.assemble import RuleCache, is_free
from unity_jax.search.batch import batch_dims, batch_inputs
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


def test_batch_dimensions_are_followed_through_the_step() -> None:
    def step(w, batch):
        def loss(w):
            h = jnp.einsum("bsd,df->bfs", batch["x"], w)
            return jnp.mean(jnp.tanh(h) ** 2)

        value, g = jax.value_and_grad(loss)(w)
        return w - g, value

    program = trace(step, (f32(6, 10), {"x": f32(4, 3, 6), "y": f32(7)}), {}, donate_argnums=0)
    assert [t.name for t in batch_inputs(program)] in (["[1]['x']"], ["[1]['y']"])
    program = trace(step, (f32(6, 10), {"x": f32(4, 3, 6)}), {}, donate_argnums=0)
    found = batch_dims(program, RuleCache())
    activations = [t for op in program.graph.ops if op.name == "tanh" for t in op.outputs]
    (h,) = activations
    assert {d for t, d in found if t is h} == {h.shape.index(4)}
    gradient = program.graph.producer[program.graph.outputs[0]]
    assert not any(t is o for o in gradient.outputs for t, _ in found), "a weight has no batch dimension"
