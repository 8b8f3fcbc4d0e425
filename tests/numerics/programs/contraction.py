"""Products, convolutions and pooling."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.numerics.programs.drawer import FLOAT, SIZES, Drawer, Skip, distinct, entry


@entry("dot_general")
def dot_general(d: Drawer) -> None:
    x = d.value(FLOAT, 1, 4)
    order = d.permutation(x.rank)
    batch = order[: d.rng.randint(0, min(2, x.rank))]
    contract = order[len(batch) :][: d.rng.randint(0, 2)]
    free = d.shape(0, 2)
    dims = [x.shape[i] for i in (*batch, *contract)] + list(free)
    place = d.permutation(len(dims))  # place[i]: the dimension of y that dims[i] becomes
    shape = [0] * len(dims)
    for n, at in zip(dims, place, strict=True):
        shape[at] = n
    y = d.value(FLOAT, shape=tuple(shape))
    nb, nk = len(batch), len(contract)
    numbers = ((tuple(contract), tuple(place[nb : nb + nk])), (tuple(batch), tuple(place[:nb])))
    scale = 1 / math.sqrt(max(1, math.prod(x.shape[i] for i in contract)))
    d.apply("dot_general", lambda a, b: lax.dot_general(a, b, numbers) * scale, x, y)


@entry("dot_general:empty")
def empty_product(d: Drawer) -> None:
    x = d.value(FLOAT, 1, 3)
    d.apply("empty product", lambda a: a[..., :0] @ jnp.zeros((0, 3)) + lax.cos(a).mean(-1, keepdims=True), x)


@entry("ragged_dot_general")
def ragged_dot(d: Drawer) -> None:
    m, k, n, groups = d.choice((8, 12, 16)), d.choice(SIZES), d.choice(SIZES), d.choice((2, 3, 4))
    x, y = d.value(FLOAT, shape=(m, k)), d.value(FLOAT, shape=(groups, k, n))
    sizes = np.full(groups, m // groups, np.int32)
    sizes[0] += m % groups
    sizes[0] -= 1
    sizes[-1] += 1
    if d.variant("forward", "gradient") == "forward":
        d.apply("ragged_dot", lambda a, b: lax.ragged_dot(a, b, jnp.asarray(sizes)) * k**-0.5, x, y)
    else:
        d.apply(
            "ragged_dot",
            lambda a, b: jax.grad(lambda c: jnp.sin(lax.ragged_dot(a, c, jnp.asarray(sizes))).sum())(b),
            x,
            y,
        )


def _image(d: Drawer) -> tuple[int, tuple[int, ...]]:
    spatial = d.choice((1, 1, 2))
    return spatial, tuple(d.choice((4, 6, 7, 8, 12, 16)) for _ in range(spatial))


@entry("conv_general_dilated")
def convolution(d: Drawer) -> None:
    spatial, image = _image(d)
    groups = d.choice((1, 1, 2, 4))
    batch, features, out = d.choice((2, 3, 4, 8)), groups * d.choice((1, 2, 3)), groups * d.choice((1, 2, 3, 4))
    window = tuple(d.choice((1, 2, 3, 5)) for _ in image)
    stride = tuple(d.choice((1, 1, 2, 3)) for _ in image)
    padding: Any = d.choice(("SAME", "VALID", ((1, 1),) * spatial, ((2, 1),) * spatial))
    dilations = d.choice(((1, 1), (1, 1), (2, 1), (1, 2)))
    spec = ("NHC", "HIO", "NHC") if spatial == 1 else d.choice((("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")))
    last = spec[0][-1] == "C"
    shape = (batch, *image, features) if last else (batch, features, *image)
    kernel = (*window, features // groups, out) if last else (out, features // groups, *window)
    if any((k - 1) * dilations[1] + 1 > n for k, n in zip(window, image, strict=True)):
        raise Skip  # an empty result
    x, w = d.value(FLOAT, shape=shape), d.value(FLOAT, shape=kernel)
    scale = 1 / math.sqrt(math.prod(window) * features / groups)

    def conv(a: Any, b: Any) -> Any:
        pads = padding if dilations[0] == 1 or not isinstance(padding, str) else ((1, 1),) * spatial
        return scale * lax.conv_general_dilated(
            a, b, stride, pads, lhs_dilation=(dilations[0],) * spatial, rhs_dilation=(dilations[1],) * spatial,
            dimension_numbers=spec, feature_group_count=groups,
        )  # fmt: skip

    how = d.variant("forward", "image", "kernel")
    if how == "forward":
        d.apply("conv", conv, x, w)
    else:
        d.apply(f"conv:{how}", jax.grad(lambda a, b: (conv(a, b) ** 2).mean(), how == "kernel"), x, w)


WINDOWS = {
    "reduce_window_max": (-np.inf, lax.max),
    "reduce_window_min": (np.inf, lax.min),
    "reduce_window_sum": (0.0, lax.add),
    "reduce_window": (1.0, lax.mul),
}


@entry(*WINDOWS, "select_and_scatter_add", "select_and_gather_add")
def pooling(d: Drawer) -> None:
    _, image = _image(d)
    name = d.variant(*WINDOWS, "select_and_scatter_add", "select_and_gather_add")
    window = tuple(d.choice((1, 2, 3)) for _ in image)
    stride = tuple(d.choice((1, 2, 3)) for _ in image)
    padding = d.choice(("SAME", "VALID"))
    x = d.value(FLOAT, shape=(d.choice((2, 3, 4, 8)), *image, d.choice(SIZES)))

    def pool(a: Any) -> Any:
        init, op = WINDOWS.get(name, WINDOWS["reduce_window_max"])
        y = lax.reduce_window(distinct(a), init, op, (1, *window, 1), (1, *stride, 1), padding)
        return y / math.prod(window) if op is lax.add else y

    if name == "select_and_scatter_add":
        d.apply(name, jax.grad(lambda a: jnp.sin(pool(a)).sum()), x)
    elif name == "select_and_gather_add":
        d.apply(name, lambda a: jax.jvp(pool, (a,), (lax.cos(a),))[1], x)
    else:
        d.apply(name, pool, x)
