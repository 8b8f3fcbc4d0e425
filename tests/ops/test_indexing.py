"""Every strategy of gathers and scatters, executed, with indices outside of the table as well."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.ops.harness import arg, check_rule, ops_of
from unity_jax.ops import own_rows
from unity_jax.ops.rule import Shard
from unity_jax.ops.rules import rule_of
from unity_jax.ops.strategies import strategies
from unity_jax.pcg.mesh import MeshAxes

MESHES = ((2,), (3,), (2, 2))
MODES = ("clip", "fill", "promise_in_bounds")
SCATTERS = ("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-max", "scatter-min")
mode = pytest.mark.parametrize("mode", MODES)


def ids(*shape, dtype=np.int32, seed=0):
    """Indices, some of them outside of a table of 5 or 7 rows."""
    low = -9 if np.dtype(dtype).kind == "i" else 0
    return arg(*shape, dtype=dtype, low=low, high=9, seed=seed)


def gathered(fn, *args):
    return check_rule(fn, *args, only="gather", mesh_sizes=MESHES)["gather"]


# Gather


@mode
@pytest.mark.parametrize("dtype", [np.float64, np.int32, np.complex128, np.bool_])
def test_row_sharded_lookup(mode, dtype):
    kinds = gathered(lambda t, i: t.at[i].get(mode=mode), arg(5, 6, dtype=dtype), ids(3, 4))
    assert {"pass", "uneven", "max" if dtype == np.bool_ else "sum"} <= kinds
    assert ("linear" in kinds) == (dtype in (np.float64, np.complex128))


@mode
@pytest.mark.parametrize(("dtype", "rows"), [(np.uint8, 300), (np.uint32, 7), (np.int64, 7)])
def test_index_types(mode, dtype, rows):
    i = ids(9, dtype=dtype)
    i[:2] = np.iinfo(dtype).max, np.iinfo(dtype).max - 1
    gathered(lambda t, i: t.at[i].get(mode=mode), arg(rows, 2), i)


@mode
@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (lambda t, i, mode: t.at[i].get(mode=mode, fill_value=3.0), (arg(7, 2), ids(4))),
        (lambda t, i, j, mode: t.at[i, :, j].get(mode=mode), (arg(5, 3, 7), ids(4), ids(4, seed=1))),
        (lambda t, i, mode: jnp.take_along_axis(t, i, 1, mode=mode), (arg(4, 7), ids(4, 3))),
        (lambda t, i, mode: jax.vmap(lambda t, i: t.at[i].get(mode=mode))(t, i), (arg(4, 5, 3), ids(4, 2))),
        (
            lambda t, i, mode: lax.gather(t, i, lax.GatherDimensionNumbers((0, 2), (), (0, 1)), (2, 6), mode=mode),
            (arg(5, 6), ids(4, 2)),
        ),
        (
            lambda t, i, mode: lax.gather(t, i, lax.GatherDimensionNumbers((1, 2), (), (0,)), (1, 6), mode=mode),
            (arg(5, 6), ids(4, 1)),
        ),
    ],
    ids=["fill value", "two dimensions", "along an axis", "batched", "slices", "kept row"],
)
def test_forms_of_gather(mode, fn, args):
    assert "pass" in gathered(lambda *a: fn(*a, mode=mode), *args)


def test_fill_values_are_no_terms_of_a_sum():
    i = np.array([1, 8, 3, -9])
    for fill, kind in ((3.0, False), (0.0, True), (np.nan, True)):
        fn = lambda t, i, fill=fill: t.at[i].get(mode="fill", fill_value=fill)  # noqa: E731
        assert ("linear" in gathered(fn, arg(7, 2), i)) == kind


def test_keys_are_gathered_whole():
    kinds = gathered(lambda k, i: k[i], jax.random.split(jax.random.key(0), 5), ids(3, 4) % 5)
    assert kinds == {"pass", "uneven", "replicated"}


def test_rows_that_are_not_numbers_stay_where_they_are():
    table = arg(6, 3)
    table[4] = np.nan, np.inf, -np.inf
    check_rule(lambda t, i: t[i], table, np.array([1, 4, 5, 0]), only="gather", mesh_sizes=MESHES)


# Scatter


@mode
@pytest.mark.parametrize("method", ["set", "add", "subtract", "multiply", "max", "min"])
@pytest.mark.parametrize("dtype", [np.float64, np.int32])
def test_scatters_into_rows(mode, method, dtype):
    # Equal updates, so that the order of `set`s does not matter.
    updates = np.broadcast_to(arg(6, dtype=dtype), (7, 6))
    fn = lambda t, i, u: getattr(t.at[i], method)(u, mode=mode)  # noqa: E731
    (name,) = {op.name for op in ops_of(fn, arg(5, 6), ids(7), updates)} & set(SCATTERS)
    kinds = check_rule(fn, arg(5, 6, dtype=dtype), ids(7), updates, only=name, mesh_sizes=MESHES)[name]
    assert {"pass", "uneven"} <= kinds
    reduction = {"add": "sum", "subtract": "sum", "max": "max", "min": "min"}.get(method)
    assert kinds & {"sum", "max", "min"} == ({reduction} if reduction else set())
    assert ("linear" in kinds) == (reduction == "sum" and dtype == np.float64)


@mode
@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (lambda t, i, u, mode: t.at[i].add(u, mode=mode), (arg(5, 6), ids(3, 4), arg(3, 4, 6))),
        (
            lambda t, i, j, u, mode: t.at[i, :, j].add(u, mode=mode),
            (arg(5, 3, 7), ids(4), ids(4, seed=1), arg(4, 3)),
        ),
        (
            lambda t, i, u, mode: jax.vmap(lambda t, i, u: t.at[i].add(u, mode=mode))(t, i, u),
            (arg(4, 5, 3), ids(4, 2), arg(4, 2, 3)),
        ),
        (
            lambda t, i, u, mode: lax.scatter_add(t, i, u, lax.ScatterDimensionNumbers((0, 2), (), (0, 1)), mode=mode),
            (arg(5, 6), ids(4, 2), arg(2, 4, 6)),
        ),
    ],
    ids=["two batch dimensions", "two dimensions", "batched", "slices"],
)
def test_forms_of_scatter(mode, fn, args):
    kinds = check_rule(lambda *a: fn(*a, mode=mode), *args, only="scatter-add", mesh_sizes=MESHES)["scatter-add"]
    assert {"pass", "sum", "linear"} <= kinds


@pytest.mark.parametrize("method", ["set", "add"])
def test_promises_about_indices(method):
    promises = {"unique_indices": True, "indices_are_sorted": True}
    fn = lambda t, i, u: getattr(t.at[i], method)(u, **promises)  # noqa: E731
    i, names = np.array([1, 2, 5], np.int32), ("scatter", "scatter-add")
    (kinds,) = check_rule(fn, arg(7, 6), i, arg(3, 6), only=names, mesh_sizes=MESHES).values()
    assert "linear" in kinds
    fn = lambda t, i: t.at[i].get(**promises)  # noqa: E731
    check_rule(fn, arg(7, 6), i, only="gather", mesh_sizes=MESHES)


def test_gradient_of_an_embedding_needs_no_communication():
    def loss(table, i):
        return (table[i] ** 2).sum()

    op = next(op for op in ops_of(jax.grad(loss), arg(10, 6), ids(3, 4)) if op.name == "scatter-add")
    assert str(rule_of(op)) == "([i,j], [k,l,1], [k,l,j]) -> ([i,j]) sum={k,l}"
    check_rule(jax.grad(loss), arg(10, 6), ids(3, 4) % 10, only=("gather", "scatter-add"), mesh_sizes=MESHES)


@pytest.fixture
def on_tpu(monkeypatch):
    """Local programs as they are on TPUs, whatever the number of rows. **Returns:** which were."""
    taken = []

    def tpu(*xs, tpu, default):
        taken.append(tpu)
        return tpu(*xs)

    monkeypatch.setattr(lax, "platform_dependent", tpu)
    for name, least in (("_LEAST", 2), ("_LEAST_ROWS", 1), ("AT_ONCE", 0)):
        monkeypatch.setattr(own_rows, name, least)
    return taken


def added(table, i, updates, mode):
    fn = lambda t, i, u: t.at[i].add(u, mode=mode)  # noqa: E731
    return check_rule(fn, table, i, updates, only="scatter-add", mesh_sizes=MESHES)["scatter-add"]


@mode
@pytest.mark.parametrize(  # few rows at once, and in one go
    ("dtype", "shape", "spread"), [(np.float32, (3, 4), 0.1), (np.int32, (11,), 1.25)]
)
def test_rows_of_its_own(mode, dtype, shape, spread, on_tpu, monkeypatch):
    monkeypatch.setattr(own_rows, "SPREAD", spread)
    table, updates = arg(7, 3, 2, dtype=dtype), arg(*shape, 3, 2, dtype=dtype, seed=1)
    for into in (table, np.zeros_like(table)):
        assert {"sum", "uneven"} <= added(into, ids(*shape), updates, mode)
    assert on_tpu


def test_rows_of_several_tables_are_those_of_all(on_tpu):
    add = jax.vmap(lambda t, i, u: t.at[i].add(u, mode="clip"))
    tables, updates = arg(2, 7, 3, dtype=np.float32), arg(2, 5, 3, dtype=np.float32)
    check_rule(add, tables, ids(2, 5), updates, only="scatter-add", mesh_sizes=MESHES)
    assert not on_tpu


def test_cost_is_that_of_the_rows_touched():
    def bytes_of(fn, *args):
        (op,) = (op for op in ops_of(fn, *args) if op.name in ("gather", "scatter-add"))
        rule, mesh = rule_of(op), MeshAxes(("x",), (2,))
        return [rule.bytes(Shard(op, rule, mesh, s)) for s in strategies(rule, mesh)]

    table, i, rows = arg(1000, 4), ids(2, 2) % 7, arg(2, 2, 4)
    assert max(bytes_of(lambda t, i: t[i], table, i)) < table.nbytes / 10
    whole, *_ = bytes_of(lambda t, i, u: t.at[i].add(u), table, i, rows)
    assert whole < table.nbytes / 10
