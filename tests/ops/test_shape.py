"""Every strategy of ops that only move elements, executed."""

import math

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.ops.harness import arg, check_rule, ops_of
from unity_jax.ops.rules import rule_of
from unity_jax.ops.shape import reshape_factors

MESHES = ((2,), (3,), (2, 2))
MOVES = [
    ("broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (5, 4, 3, 6), (1, 3)), (4, 6)),
    ("broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (4, 7, 5), (0, 1, 2)), (4, 1, 5)),
    ("squeeze", lambda x: lax.squeeze(x, (1,)), (4, 1, 5)),
    ("transpose", lambda x: lax.transpose(x, (2, 0, 1)), (4, 5, 6)),
    ("rev", lambda x: lax.rev(x, (0,)), (4, 5)),
    ("slice", lambda x: x[1:3], (5, 7)),
    ("slice", lambda x: x[:, 1::2], (5, 7)),
    ("pad", lambda x: lax.pad(x, np.zeros((), x.dtype), ((1, 2, 1), (0, 0, 0))), (5, 7)),
    ("pad", lambda x: lax.pad(x, np.ones((), x.dtype), ((1, -1, 0), (0, 0, 0))), (5, 7)),
    ("concatenate", lambda x: lax.concatenate([x, 2 * x, x], 1), (4, 5)),
    ("split", lambda x: lax.split(x, (2, 1, 3), 1), (5, 6)),
    ("unstack", lambda x: jnp.unstack(x, axis=1), (5, 3)),
    ("stack", lambda x: jnp.stack([x, 2 * x], 1), (4, 5)),
    ("tile", lambda x: jnp.tile(x, (2, 1, 5)), (4, 5, 1)),
]


@pytest.mark.parametrize(("name", "fn", "shape"), MOVES)
def test_moves(name, fn, shape):
    kinds = check_rule(fn, arg(*shape), only=name, mesh_sizes=MESHES)[name]
    assert kinds == {"pass", "uneven", "linear", "replicated"}
    integers = check_rule(fn, arg(*shape, dtype=np.int32), only=name, mesh_sizes=((2,),))[name]
    assert "linear" not in integers


def test_padding_with_a_value_is_linear_in_both_operands():
    def linear(fn, *args):
        return rule_of(ops_of(fn, *args)[-1]).linear

    edges = ((1, 0, 0),)
    assert linear(lambda x: lax.pad(x, np.float64(0), edges), arg(4)) == (frozenset({0}),)
    assert linear(lambda x: lax.pad(x, np.float64(1), edges), arg(4)) == (frozenset({0, 1}),)
    assert "linear" in check_rule(lambda x, v: lax.pad(x, v, edges), arg(4), arg())["pad"]


@pytest.mark.parametrize(
    ("source", "target", "text"),
    [
        ((5, 24), (5, 6, 4), "([i,jk]) -> ([i,j,k])"),
        ((5, 6, 4), (5, 24), "([i,j,k]) -> ([i,jk])"),
        ((4, 3, 5), (12, 5), "([i,j,k]) -> ([ij,k])"),
        ((20, 6), (4, 1, 5, 1, 2, 3), "([ij,kl]) -> ([i,1,j,1,k,l])"),
        ((3, 4), (12,), "([i,j]) -> ([ij])"),
        ((5, 1, 7), (5, 7, 1), "([i,1,j]) -> ([i,j,1])"),
        ((8, 2), (4, 4), "([ij,k]) -> ([i,jk])"),
        ((4, 6), (6, 4), "([ij,k]) -> ([il,m]) replicate={j,k,l,m}"),
        ((1,), (), "([1]) -> ([])"),
        ((0, 3), (3, 0), "([i,j]) -> ([k,l]) replicate={i,j,k,l}"),
    ],
)
def test_reshape(source, target, text):
    (op,) = ops_of(lambda x: lax.reshape(x, target), arg(*source))
    assert str(rule_of(op)) == text
    if 0 not in source:
        check_rule(lambda x: lax.reshape(x, target), arg(*source), mesh_sizes=MESHES)


def factored_shapes():
    """Two shapes of the same size."""
    primes = st.lists(st.sampled_from((1, 2, 2, 3, 5)), min_size=1, max_size=5)

    def grouped(values, draw):
        cuts = sorted(draw(st.lists(st.integers(0, len(values)), max_size=3)))
        return tuple(math.prod(values[a:b]) for a, b in zip([0, *cuts], [*cuts, len(values)], strict=True))

    @st.composite
    def shapes(draw):
        values = draw(primes)
        return grouped(values, draw), grouped(draw(st.permutations(values)), draw)

    return shapes()


@hypothesis.given(factored_shapes())
def test_reshape_factors_multiply_to_the_shapes(shapes):
    *sides, sizes = reshape_factors(*shapes)
    for shape, dims in zip(shapes, sides, strict=True):
        assert tuple(math.prod(sizes[f] for f in dim) for dim in dims) == shape


@hypothesis.settings(max_examples=25)
@hypothesis.given(factored_shapes())
def test_any_reshape(shapes):
    hypothesis.assume(shapes[0] != shapes[1])
    check_rule(lambda x: lax.reshape(x, shapes[1]), arg(*shapes[0]), mesh_sizes=((2,), (4,)))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int8, np.uint8, np.uint32, np.int64, jnp.bfloat16])
def test_iota(dtype):
    for d in (0, 1):
        kinds = check_rule(lambda d=d: lax.broadcasted_iota(dtype, (300, 7), d), mesh_sizes=MESHES, exact=True)
        assert kinds["iota"] == {"pass", "uneven", "replicated"}


@pytest.mark.parametrize("start", [-3, 0, 2, 9])
def test_dynamic_slices(start):
    i = np.int32(start)
    name = "dynamic_slice"
    kinds = check_rule(lambda x, i: lax.dynamic_slice(x, (i, i), (2, 7)), arg(5, 7), i, only=name, mesh_sizes=MESHES)
    assert kinds[name] == {"pass", "uneven", "linear", "replicated"}
    name = "dynamic_update_slice"
    fn = lambda x, u, i: lax.dynamic_update_slice(x, u, (i, i, i))  # noqa: E731
    kinds = check_rule(fn, arg(5, 7, 3), arg(2, 3, 3), i, only=name, mesh_sizes=MESHES)
    assert kinds[name] == {"pass", "uneven", "linear", "replicated"}


@pytest.mark.parametrize(
    ("shape", "dtype", "to"),
    [
        ((5, 6), np.float32, np.uint16),
        ((5, 6, 2), np.uint16, np.float32),
        ((5, 6), np.float32, np.uint32),
    ],
)
def test_bitcast(shape, dtype, to):
    kinds = check_rule(lambda x: lax.bitcast_convert_type(x, to), arg(*shape, dtype=dtype), mesh_sizes=MESHES)
    assert kinds["bitcast_convert_type"] == {"pass", "uneven", "replicated"}
