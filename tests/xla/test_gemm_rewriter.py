"""Which sums a matmul computes, on programs small enough to say by hand."""

import jax
import jax.numpy as jnp
import pytest

from tests.xla.kernels import f32, shown


def test_a_matmul_adds_to_an_argument():
    assert shown(lambda x, w, y: x @ w + y, *[f32(8, 8)] * 3) == ["dot_general add"]


def test_not_where_its_products_are_read_elsewhere():
    def f(x, w, y):
        z = x @ w
        return z + y, z

    assert shown(f, *[f32(8, 8)] * 3) == ["dot_general", "add"]


def test_not_to_what_is_computed():
    """Nor to another matmul's products: both are read by the sum, and what follows it."""
    assert shown(lambda x, w, y: jnp.tanh(x @ w + jnp.exp(y)), *[f32(8, 8)] * 3) == ["dot_general", "exp add tanh"]
    assert shown(lambda x, w, v: x @ w + x @ v, *[f32(8, 8)] * 3) == ["dot_general", "dot_general", "add"]


@pytest.mark.parametrize("other", [f32(8), f32()])
def test_a_row_is_no_array(other):
    assert shown(lambda x, w, b: x @ w + b, f32(8, 8), f32(8, 8), other)[0] == "dot_general"


def test_another_type_is_cast_first():
    half = jax.ShapeDtypeStruct((8, 8), jnp.bfloat16)
    assert shown(lambda x, w, y: (x @ w).astype(jnp.float32) + y, half, half, f32(8, 8)) == [
        "dot_general",
        "convert_element_type add",
    ]
