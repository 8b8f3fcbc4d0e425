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
    seen = View(graph).seen(Value(result, tuple(map(dims.fresh, result.shape))), dims)
    assert ("convert" in [s.op for s in seen]) == keeps
