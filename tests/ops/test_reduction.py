"""Every strategy of reductions and cumulative operations, executed."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.ops.harness import arg, check_rule

MESHES = ((2,), (4,), (2, 2))
SHAPES = [(8, 4), (5, 7), (1, 6)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("name", "fn", "kind"),
    [
        ("reduce_sum", lambda x: (x.sum(0), x.sum(1), x.sum()), "sum"),
        ("reduce_max", lambda x: (x.max(0), x.max()), "max"),
        ("reduce_min", lambda x: (x.min(1), x.min()), "min"),
        ("reduce_or", lambda x: (x > 1).any(1), "max"),
        ("reduce_and", lambda x: (x > -1).all(1), "min"),
    ],
)
def test_reductions_that_finish_with_a_collective(name, fn, kind, shape):
    kinds = check_rule(fn, arg(*shape), only=name, mesh_sizes=MESHES)[name]
    assert {kind, "replicated"} <= kinds
    assert ("linear" in kinds) == (name == "reduce_sum")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("name", "fn"),
    [
        ("reduce_prod", lambda x: lax.reduce_prod_p.bind(x, axes=(1,))),
        ("argmax", lambda x: lax.argmax(x, 1, np.int32)),
        ("argmin", lambda x: lax.argmin(x, 0, np.int32)),
        ("reduce", lambda x: lax.reduce(x, 0.0, jnp.hypot, (0,))),
        ("reduce", lambda x: lax.reduce((x, x), (0.0, 1.0), lambda a, b: (a[0] + b[0], a[1] * b[1]), (1,))),
    ],
)
def test_whole_dimension(name, fn, shape):
    assert check_rule(fn, arg(*shape), only=name, mesh_sizes=MESHES)[name] <= {"pass", "uneven", "replicated"}


@pytest.mark.parametrize("shape", [*SHAPES, (9,)])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", ["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"])
def test_each_device_goes_on_from_the_totals_of_those_before_it(name, reverse, shape):
    axis = len(shape) - 1
    kinds = check_rule(
        lambda x: getattr(lax, name)(x, axis, reverse=reverse), arg(*shape), only=name, mesh_sizes=MESHES
    )[name]
    assert kinds <= {"pass", "uneven", "replicated", "linear"}
    assert {"pass", "uneven", "replicated"} <= kinds or shape == (8, 4)
    assert ("linear" in kinds) == (name == "cumsum")


def test_cumulative_operations_of_integers_are_exact():
    x = arg(13, dtype=np.int32, low=-3, high=4)
    fn = lambda x: (lax.cumsum(x), lax.cumprod(x), lax.cummax(x), lax.cummin(x, reverse=True))  # noqa: E731
    check_rule(fn, x, mesh_sizes=MESHES, exact=True)


@pytest.mark.parametrize("dtype", [np.int32, np.uint8])
def test_integers(dtype):
    def fn(x):
        zero = np.zeros((), dtype)
        return x.max(0), x.min(0), lax.reduce(x, zero, lax.bitwise_or, (0,)), lax.reduce(x, zero, lax.bitwise_xor, (1,))

    kinds = check_rule(fn, arg(5, 6, dtype=dtype), mesh_sizes=MESHES)
    assert "max" in kinds["reduce_max"]
    assert kinds["reduce_or"] <= {"pass", "uneven", "replicated"}  # the greatest of two integers is not their or
    assert kinds["reduce_xor"] <= {"pass", "uneven", "replicated"}
    sums = check_rule(lambda x: lax.reduce(x, np.int32(0), lax.add, (0,)), arg(5, 6, dtype=np.int32))["reduce_sum"]
    assert "sum" in sums
    assert "linear" not in sums


def test_infinities_survive():
    x = np.array([[-np.inf, -np.inf, -np.inf], [np.inf, 1.0, -np.inf]])
    check_rule(lambda x: (x.max(1), x.min(1), x.max(0)), x, mesh_sizes=MESHES)
