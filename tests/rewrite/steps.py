"""Small train steps in which the rules of the library occur, with arguments."""

import jax
import jax.numpy as jnp
import numpy as np


def normal(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape))


def gated(w1, w2, w3, x):
    return jnp.sum(((jnp.tanh(x @ w1) * (x @ w2)) @ w3) ** 2)


def grouped(q, k, v, x):
    """Two query heads for each of three key and value heads."""
    a, b, c = jnp.einsum("btd,dkgw->btkgw", x, q), jnp.einsum("btd,dkw->btkw", x, k), jnp.einsum("btd,dkw->btkw", x, v)
    weights = jax.nn.softmax(jnp.einsum("btkgw,bskw->bkgts", a, b))
    return jnp.sum(jnp.einsum("bkgts,bskw->btkgw", weights, c) ** 2) + jnp.sum(x**3)


@jax.custom_vjp
def scores(a, b):
    return jnp.einsum("thw,shw->hts", a, b)


scores.defvjp(
    lambda a, b: (scores(a, b), (a, b)),
    lambda kept, g: (jnp.einsum("hts,shw->thw", g, kept[1]), jnp.einsum("hts,thw->shw", g, kept[0])),
)


def flat(w, bias, x):
    """Heads out of products of two dimensions, each of tokens in a row of their own; more query heads than keys."""

    def project(name):
        y = x.reshape(-1, x.shape[-1]) @ w[name] + bias[name]
        return y.reshape(*x.shape[:2], -1, 3)

    weights = jax.vmap(scores)(project("q"), project("k").repeat(2, axis=2))
    return jnp.sum(jnp.tanh(weights) ** 2)


def selected(table, w, ids, positions, bias):
    y = jnp.tanh(table[ids] @ w + bias[None, :])
    picked = jnp.take_along_axis(y, positions[:, :, None], axis=1)
    return (picked**2).sum() + (y[:, 0] ** 3).sum() + y[:, 2:4].sum()


def updated(table, w, ids, positions, bias):
    g, gw = jax.grad(selected, argnums=(0, 1))(table, w, ids, positions, bias)
    return table - 0.1 * g, w - 0.1 * gw


def bags(table, w, ids):
    return (jnp.tanh(table[ids].sum(1) @ w) ** 2).sum()


def updated_bags(table, w, ids):
    return table - 0.1 * jax.grad(bags)(table, w, ids)


def stacked(x, y):
    """Two arrays of pairs, of which one sum is over what stacks them, and one over the pairs."""
    both = jnp.stack([x, y])
    return both.sum(0), both.sum(2)


def ends(x):
    """The first of two positions, and none of those behind."""
    y = jnp.tanh(x)
    return y[:, 0].sum() + (y[:, 2:4] ** 2).sum() + (y**3).sum()


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
    "ends": (jax.grad(ends), lambda: (normal(3, 2),)),
    "stacked": (stacked, lambda: (normal(3, 2, 4), normal(3, 2, 4) ** 2)),
    "gated": (jax.grad(gated, (0, 1, 2)), lambda: (normal(5, 7), normal(5, 7), normal(7, 4), normal(6, 5))),
    "grouped": (
        jax.grad(grouped, (0, 1, 2, 3)),
        lambda: (normal(5, 3, 2, 4), normal(5, 3, 4) * 0.3, normal(5, 3, 4) * 0.1, normal(2, 6, 5)),
    ),
    "flat": (
        jax.grad(flat, (0, 1)),
        lambda: (
            {"q": normal(5, 12), "k": normal(5, 6)},
            {"q": normal(12), "k": normal(6)},
            normal(2, 4, 5),
        ),
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
    "bags": (updated_bags, lambda: (normal(11, 5), normal(5, 7), jnp.array([[1, 2, 2], [0, 3, 10]]))),
    "joined": (
        jax.grad(joined, (0, 1, 2, 3, 4, 5)),
        lambda: (normal(9, 5), normal(6, 3), normal(6, 4), normal(6, 2), normal(5, 2), normal(2, 6)),
    ),
    "convolved": (jax.grad(convolved, (0, 1)), lambda: (normal(1, 1, 3, 4), normal(1, 1, 3, 5), normal(2, 6, 6, 3))),
    "looped": (jax.grad(looped), lambda: ({"a": normal(3, 5, 5), "b": normal(3, 5, 5) * 0.5}, normal(4, 5))),
}
