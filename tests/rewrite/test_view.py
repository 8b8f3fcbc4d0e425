"""Ops of a traced program as ops of the language of rules."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

from unity_jax.program import trace
from unity_jax.rewrite.dims import Dims, Value
from unity_jax.rewrite.estimate import Seconds
from unity_jax.rewrite.library import applicable
from unity_jax.rewrite.sites import Finder
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


@pytest.mark.parametrize("shape, has", [((2, 3, 4), True), ((3, 2, 4), True), ((6, 4), False), ((3, 4), False)])
def test_copies_are_stacked_where_an_operand_lacks_a_dimension_of_their_number(shape, has):
    """Nothing is left out that would be found without this look."""

    def power(a):
        wide = a[:, None] if shape[0] == 3 and len(shape) == 3 else jnp.tile(a, (2, 1)) if shape[0] == 6 else a
        return jnp.power(jnp.broadcast_to(wide, shape), jnp.ones(shape).at[0].set(2.0))

    graph = trace(power, (jax.ShapeDtypeStruct((3, 4), jnp.float32),), {}).graph
    view, rules = View(graph), [r for r in applicable() if r.repeats]
    (result,) = graph.outputs
    assert rules and view.has_repeated(result, 2) == has
    for rule in rules:
        every = dataclasses.replace(rule)
        every.__dict__["repeats"] = 0
        found = [len(list(Finder(graph, lambda g: Seconds(1.0)).places([r]))) for r in (rule, every)]
        assert found[0] == found[1]
