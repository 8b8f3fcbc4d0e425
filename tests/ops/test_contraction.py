"""Every strategy of matrix products, executed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.ops.harness import arg, check_rule, ops_of
from unity_jax.ops.rules import rule_of

MESHES = ((2,), (4,), (2, 2))


@pytest.mark.parametrize(
    ("spec", "left", "right"),
    [
        ("mk,kn->mn", (8, 4), (4, 12)),
        ("mk,kn->mn", (5, 7), (7, 3)),  # nothing divides
        ("bmk,bkn->bmn", (4, 8, 5), (4, 5, 3)),
        ("bqhd,bkhd->bhqk", (2, 5, 3, 4), (2, 7, 3, 4)),
        ("mhk,nhk->mn", (3, 4, 5), (2, 4, 5)),
        ("k,k->", (9,), (9,)),
        ("m,n->mn", (3,), (4,)),
        ("bm,bn->bmn", (1, 4), (1, 3)),
    ],
)
def test_dot_general(spec, left, right):
    kinds = check_rule(
        lambda x, y: jnp.einsum(spec, x, y), arg(*left), arg(*right), only="dot_general", mesh_sizes=MESHES
    )
    assert {"replicated", "linear"} <= kinds["dot_general"]


def test_dot_general_of_integers_carries_no_partial_sums():
    x, y = arg(6, 5, dtype=np.int32), arg(5, 4, dtype=np.int32)
    kinds = check_rule(lambda x, y: x @ y, x, y, only="dot_general", mesh_sizes=MESHES)
    assert "linear" not in kinds["dot_general"]
    assert "sum" in kinds["dot_general"]


@pytest.mark.parametrize(("rows", "sizes"), [(8, (2, 1, 5)), (7, (2, 1, 4)), (8, (0, 6, 0)), (9, (9, 0, 0))])
def test_ragged_dot(rows, sizes):
    def loss(x, y, sizes):
        return jnp.sum(lax.ragged_dot(x, y, sizes) ** 2)

    args = arg(rows, 4), arg(3, 4, 5), np.array(sizes, np.int32)
    kinds = check_rule(jax.grad(loss, (0, 1)), *args, only="ragged_dot_general", mesh_sizes=((2,), (4,)))
    assert kinds["ragged_dot_general"] == {"pass", "sum", "linear", "uneven", "replicated"}


def test_ragged_dot_on_two_axes():
    args = arg(7, 4), arg(3, 4, 5), np.array([2, 1, 4], np.int32)
    check_rule(lax.ragged_dot, *args, only="ragged_dot_general", mesh_sizes=((2, 2),))


def test_flops_count_two_per_multiply_add():
    (dot,) = ops_of(lambda x, y: jnp.einsum("bmk,bkn->bmn", x, y), arg(2, 3, 4), arg(2, 4, 5))
    assert rule_of(dot).flops == 2 * 2 * 3 * 4 * 5
    *_, ragged = ops_of(lax.ragged_dot, arg(8, 4), arg(3, 4, 5), np.array([2, 2, 4], np.int32))
    assert rule_of(ragged).flops == 2 * 8 * 4 * 5
