"""Ops of a traced program as ops of the language of rules."""

import math

import jax
import jax.numpy as jnp
import pytest

from unity_jax.program import trace
from unity_jax.rewrite.dims import Dims, Value
from unity_jax.rewrite.view import View


@pytest.mark.parametrize(("divisor", "keeps"), [(2.0, True), (math.inf, True), (0.0, False), (math.nan, False)])
def test_division_by_a_constant_keeps_zero_as_a_cast_does(divisor, keeps):
    graph = trace(lambda x: x / divisor, (jax.ShapeDtypeStruct((4, 8), jnp.float32),), {}).graph
    (result,), dims = graph.outputs, Dims()
    seen = View(graph).seen(Value(result, tuple(map(dims.fresh, result.shape))), dims, "convert")
    assert bool(list(seen)) == keeps


@pytest.mark.parametrize("value, is_seen", [(0, True), (0.0, True), (1, False)])
def test_padding_is_seen_though_its_zero_is_cast(value, is_seen):
    x = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    graph = trace(lambda x: jnp.pad(x, ((0, 0), (0, 2)), constant_values=value), (x,), {}).graph
    (result,), dims = graph.outputs, Dims()
    seen = View(graph).seen(Value(result, tuple(map(dims.fresh, result.shape))), dims, "pad")
    assert bool(list(seen)) == is_seen


def test_rows_of_two_arrays_have_the_same_numbers():
    x, i = jax.ShapeDtypeStruct((4, 8), jnp.float32), jax.ShapeDtypeStruct((3,), jnp.int32)
    graph = trace(lambda x, y, i, j: (x[i], y[i], y[j]), (x, x, i, i), {}).graph
    view = View(graph)
    numbers = [view.same[view.maker[t].inputs[1]] for t in graph.outputs]
    assert numbers[0] is numbers[1] is not numbers[2]


def test_what_a_barrier_keeps_apart_is_not_the_same():
    def barred(x):
        a, b = jnp.tanh(x), jax.lax.optimization_barrier(x)
        return a, jnp.tanh(b), jnp.tanh(jax.lax.optimization_barrier(x))

    graph = trace(barred, (jax.ShapeDtypeStruct((4,), jnp.float32),), {}).graph
    assert len({View(graph).same[t] for t in graph.outputs}) == 3
