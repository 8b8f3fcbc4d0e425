"""Which arrays lie row by row, on programs small enough to say by hand."""

import jax
import jax.numpy as jnp

from unity_jax.program import trace
from unity_jax.xla.layout_constraints import THIN, rows


def f32(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)


IDS = jax.ShapeDtypeStruct((50,), jnp.int32)


def found(fn, *args):
    """By name of op, how operands and results lie."""
    return {op.name: lie for op, lie in rows(trace(fn, args, {}).graph).items()}


def test_a_table_that_is_looked_up_lies_row_by_row():
    lie = found(lambda table, ids: jnp.tanh(table.at[ids].get(mode="clip")).sum(), f32(1000, 16), IDS)
    assert lie["gather"] == (2, 0, 1), "the argument is turned, its rows come out as they are"
    assert lie["tanh"] == (1, 1)
    assert lie["reduce_sum"] == (1, 0)


def test_what_is_added_to_the_gradient_of_a_table_lies_as_it():
    def update(table, state, ids, updates):
        return table, state * 2 + jnp.zeros_like(table).at[ids].add(updates)

    lie = found(update, f32(1000, 16), f32(1000, 16), IDS, f32(50, 16))
    assert lie["mul"] == (2, 0, 1)
    assert lie["scatter-add"] == (1, 0, 2, 1)
    assert lie["add"] == (1, 1, 2), "the result is turned back"


def test_elements_have_no_rows():
    assert not found(lambda x, ids: jnp.take_along_axis(x, ids[:, None], 1), f32(50, 16), IDS)
    assert not found(lambda x: jnp.tanh(x), f32(50, 16))


def routed(hot, slots):
    """Of tokens [T] that take k of e experts, which are one-hot, the place c in each."""
    return jnp.einsum("tke,tkc->tec", jnp.tanh(hot), slots)


def test_operands_of_thin_products_lie_row_by_row_with_all_that_they_are_computed_from():
    lie = found(routed, f32(50, 2, 8), f32(50, 2, 32))
    assert lie["tanh"] == (THIN, THIN)
    assert lie["dot_general"][:2] == (THIN, THIN)
    assert not found(routed, f32(50, 16, 8), f32(50, 16, 32)), "as deep as a tile"
