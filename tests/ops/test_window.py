"""Every strategy of poolings and their gradients, executed."""

import jax
import numpy as np
import pytest
from jax import lax

from tests.ops.harness import arg, check_rule

NAMES = (
    "reduce_window_sum reduce_window_max reduce_window_min reduce_window select_and_gather_add select_and_scatter_add"
).split()


def pool(window, stride, padding, init, fn, base=1, dilation=1):
    """A pooling over the width of `NWC` images."""

    def run(x):
        pad = ((0, 0), padding, (0, 0)) if isinstance(padding, tuple) else padding
        shape, strides = (1, window, 1), (1, stride, 1)
        return lax.reduce_window(x, init, fn, shape, strides, pad, (1, base, 1), (1, dilation, 1))

    return run


def gradient(fn):
    return jax.grad(lambda x: (fn(x) ** 2).sum())


def tangent(fn):
    return lambda x: jax.jvp(fn, (x,), (x,))[1]


@pytest.mark.parametrize(
    ("name", "init", "op", "transform"),
    [
        ("reduce_window_max", -np.inf, lax.max, lambda f: f),
        ("reduce_window_min", np.inf, lax.min, lambda f: f),
        ("reduce_window_sum", 0.0, lax.add, gradient),
        ("reduce_window", 1.0, lax.mul, lambda f: f),
        ("select_and_scatter_add", -np.inf, lax.max, gradient),
        ("select_and_scatter_add", np.inf, lax.min, gradient),
        ("select_and_gather_add", -np.inf, lax.max, tangent),
    ],
)
@pytest.mark.parametrize(
    ("window", "stride", "padding", "width", "halo"),
    [
        (3, 2, "SAME", 16, True),
        (3, 2, (1, 1), 16, True),  # ResNet
        (3, 1, "SAME", 12, True),
        (5, 2, (2, 2), 24, True),
        (2, 2, "VALID", 16, False),
        (2, 3, "SAME", 12, False),  # gaps between windows
        (3, 4, "VALID", 16, False),
        (3, 2, "SAME", 15, False),  # does not divide
        (3, 1, "VALID", 12, False),
    ],
)
def test_pooling(name, init, op, transform, window, stride, padding, width, halo):
    fn = transform(pool(window, stride, padding, init, op))
    kinds = check_rule(fn, arg(2, width, 3), only=name, mesh_sizes=((2,), (4,)))[name]
    assert {"pass", "uneven", "replicated"} <= kinds
    assert ("halo" in kinds) == halo
    assert ("linear" in kinds) == (name in ("reduce_window_sum", "select_and_scatter_add", "select_and_gather_add"))


@pytest.mark.parametrize("options", [{"base": 2, "padding": (1, 2)}, {"dilation": 2, "padding": (2, 2)}])
def test_dilated(options):
    fn = pool(3, 1, init=-np.inf, fn=lax.max, **options)
    assert "halo" in check_rule(fn, arg(2, 16, 3), only=NAMES, mesh_sizes=((2,), (4,)))["reduce_window_max"]


def test_two_windowed_dimensions():
    def fn(x):
        return lax.reduce_window(x, -np.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")

    kinds = check_rule(gradient(fn), arg(2, 8, 8, 2), only=NAMES, mesh_sizes=((2, 2),))
    assert "halo" in kinds["reduce_window_max"]
    assert "halo" in kinds["select_and_scatter_add"]


def test_integers():
    fn = pool(3, 2, "SAME", np.int32(np.iinfo(np.int32).min), lax.max)
    assert "halo" in check_rule(fn, arg(2, 8, 3, dtype=np.int32), only=NAMES)["reduce_window_max"]
