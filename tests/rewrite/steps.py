"""Small train steps in which the rules of the library occur, with arguments."""

import jax
import jax.numpy as jnp
import numpy as np


def normal(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape))


def gated(w1, w2, w3, x):
    return jnp.sum(((jnp.tanh(x @ w1) * (x @ w2)) @ w3) ** 2)


def attention(q, k, v, x):
    a, b, c = (jnp.einsum("btd,dhe->bthe", x, w) for w in (q, k, v))
    weights = jax.nn.softmax(jnp.einsum("bthe,bshe->bhts", a, b))
    return jnp.sum(jnp.einsum("bhts,bshe->bthe", weights, c) ** 2)


def selected(table, w, ids, positions, bias):
    y = jnp.tanh(table[ids] @ w + bias[None, :])
    picked = jnp.take_along_axis(y, positions[:, :, None], axis=1)
    return (picked**2).sum() + (y[:, 0] ** 3).sum() + y[:, 2:4].sum()


def updated(table, w, ids, positions, bias):
    g, gw = jax.grad(selected, argnums=(0, 1))(table, w, ids, positions, bias)
    return table - 0.1 * g, w - 0.1 * gw


def joined(w, a, b, c, down, up):
    y = jnp.concatenate([a, b, c], -1) @ w
    return ((y @ (down @ up)) ** 2).sum()


def convolved(v, w, x):
    def conv(w):
        return jax.lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    return (conv(v) ** 2).sum() + (conv(w) ** 3).sum()


def looped(ws, x):
    def layer(x, w):
        return jnp.tanh(x @ w["a"]) * (x @ w["b"]), None

    return (jax.lax.scan(layer, x, ws)[0] ** 2).sum()


STEPS = {
    "gated": (jax.grad(gated, (0, 1, 2)), lambda: (normal(5, 7), normal(5, 7), normal(7, 4), normal(6, 5))),
    "attention": (
        jax.grad(attention, (0, 1, 2, 3)),
        lambda: (normal(5, 4, 3), normal(5, 4, 3) * 0.3, normal(5, 4, 3) * 0.1, normal(2, 6, 5)),
    ),
    "updated": (
        updated,
        lambda: (
            normal(11, 5),
            normal(5, 7),
            jnp.array([[1, 2, 3, 4, 5, 1], [0, 3, 3, 2, 1, 10]]),
            jnp.array([[1, 2], [0, 5]]),
            normal(7),
        ),
    ),
    "joined": (
        jax.grad(joined, (0, 1, 2, 3, 4, 5)),
        lambda: (normal(9, 5), normal(6, 3), normal(6, 4), normal(6, 2), normal(5, 2), normal(2, 6)),
    ),
    "convolved": (jax.grad(convolved, (0, 1)), lambda: (normal(1, 1, 3, 4), normal(1, 1, 3, 5), normal(2, 6, 6, 3))),
    "looped": (jax.grad(looped), lambda: ({"a": normal(3, 5, 5), "b": normal(3, 5, 5) * 0.5}, normal(4, 5))),
}
