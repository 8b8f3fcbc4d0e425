"""Every strategy of bags of rows and of their gradients, executed, and where bags are found."""

import contextlib
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.harness import arg, check_rule
from tests.ops.test_indexing import ids, mode
from unity_jax.implement import baggable, bagged
from unity_jax.ops import own_rows
from unity_jax.ops.bags import GATHER, SCATTER
from unity_jax.pcg.graph import Graph
from unity_jax.program import trace


def sums(table, ids, axis=1, **get):
    return table.at[ids].get(**get).sum(axis)


def gradient(table, ids, cotangent, axis=1, **get):
    return jax.vjp(lambda table: sums(table, ids, axis, **get), table)[1](cotangent)[0]


def with_bags(graph: Graph) -> Graph:
    return bagged(graph, [op.outputs[0] for op in baggable(graph)])


def checked(name, fn, *args) -> set[str]:
    args = [x.astype(np.float32) if x.dtype == np.float64 else x for x in args]
    return check_rule(fn, *args, mesh_sizes=((2,), (3,), (2, 2)), only=name, implemented=with_bags)[name]


@contextlib.contextmanager
def sorted_out(every: bool):
    """Whether rows are sorted out wherever a table is split, or nowhere."""
    with contextlib.ExitStack() as patches:
        for name, value in (("_LEAST", 2), ("_LEAST_ROWS", 1), ("AT_ONCE", -1 if every else 2**40)):
            patches.enter_context(mock.patch.object(own_rows, name, value))
        yield


@mode
@pytest.mark.parametrize("own", [False, True], ids=["one by one", "own"])
@pytest.mark.parametrize("axis", [1, 0, (0, 2), (1, 2)], ids=str)
def test_sums_of_rows(mode, own, axis):
    shape = (3, 4) if isinstance(axis, int) else (3, 2, 2)
    with sorted_out(own):
        kinds = checked(GATHER, lambda t, i: sums(t, i, axis, mode=mode), arg(5, 6), ids(*shape))
    assert kinds >= {"pass", "sum", "uneven", "linear"}


@mode
@pytest.mark.parametrize("own", [False, True], ids=["one by one", "own"])
@pytest.mark.parametrize("axis", [1, 0, (0, 2), (1, 2)], ids=str)
def test_gradients_of_sums(mode, own, axis):
    shape = (3, 4) if isinstance(axis, int) else (3, 2, 2)
    axes = (axis,) if isinstance(axis, int) else axis
    cotangent = arg(*(n for d, n in enumerate(shape) if d not in axes), 6)
    with sorted_out(own):
        fn = lambda t, i, c: gradient(t, i, c, axis, mode=mode)  # noqa: E731
        kinds = checked(SCATTER, fn, arg(5, 6), ids(*shape), cotangent)
    assert kinds >= {"pass", "sum", "uneven", "linear"}


@pytest.mark.parametrize("fill", [0.0, np.nan])
def test_what_is_outside_of_a_table_is_filled(fill):
    with sorted_out(True):
        checked(GATHER, lambda t, i: sums(t, i, mode="fill", fill_value=fill), arg(5, 6), ids(3, 4))


def test_parts_of_rows_that_one_device_has_all_of():
    with sorted_out(True):
        checked(GATHER, sums, arg(8, 6), np.full((40, 4), 7))
        checked(SCATTER, gradient, arg(8, 6), np.full((40, 4), 7), arg(40, 6))


def names(fn, *args) -> list[str]:
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, np.float32 if x.dtype == np.float64 else x.dtype) for x in args)
    return [op.name for op in with_bags(trace(fn, shapes, {}).graph).walk()]


def test_bags_are_found_in_loops():
    def step(table, every):
        return jax.lax.scan(lambda c, i: (c + sums(table, i), None), jnp.zeros((3, 6), jnp.float32), every)[0]

    found = names(step, arg(5, 6), ids(2, 3, 4))
    assert GATHER in found and "gather" not in found


@pytest.mark.parametrize(
    "fn",
    [
        lambda t, i: ((rows := t[i]).sum(1), rows.max(1)),
        lambda t, i: (rows := t[i]) * 2 + rows.sum(1, keepdims=True),
        lambda t, i: t[i].sum((1, 2)),
        lambda t, i: t[i].sum(2),
        lambda t, i: t.astype(jnp.bfloat16)[i].sum(1),
        lambda t, i: t[i, 2:4].sum(1),
        lambda t, i: t.T[:, i].sum(1),
        lambda t, i: t.at[i].get(mode="fill", fill_value=3.0).sum(1),
        lambda t, i: t[i[:, :1]].sum(1),
    ],
    ids=["largest", "all rows", "rows and features", "features", "bfloat16", "parts of rows", "columns", "fill", "one"],
)
def test_what_is_no_bag_of_rows_stays(fn):
    assert GATHER not in names(fn, arg(5, 6), ids(3, 4) % 5)


def test_rows_that_differ_in_a_bag_are_added_as_they_are():
    def weighted(table, ids, by, cotangent):
        return jax.vjp(lambda table: (table[ids] * by[..., None]).sum(1), table)[1](cotangent)[0]

    assert SCATTER not in names(weighted, arg(5, 6), ids(3, 4), arg(3, 4), arg(3, 6))
