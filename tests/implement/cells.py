"""Recurrent cells: an LSTM by hand, and random ones."""

import random

import jax
import jax.numpy as jnp
import numpy as np

STEPS, ROWS, WIDTH = 5, 3, 4
KINDS = "product product product square both nonlinear times add flip part sum narrow look".split()


def lstm(params, xs, reverse=False):
    """All that the layer gives, of the inputs of all steps."""
    w, v, b = params

    def step(carry, x):
        h, c = carry
        i, f, g, o = jnp.split(x @ w.astype(x.dtype) + h @ v.astype(x.dtype) + b.astype(x.dtype), 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zeros = jnp.zeros((xs.shape[1], v.shape[0]), xs.dtype)
    return jax.lax.scan(step, (zeros, zeros), xs, reverse=reverse)[1]


def parameters(inputs=3, width=WIDTH, dtype=np.float64, seed=0):
    rng = np.random.default_rng(seed)
    shapes = (inputs, 4 * width), (width, 4 * width), (4 * width,)
    return tuple(jnp.asarray(rng.normal(size=s) / 2, dtype) for s in shapes)


def inputs(steps=STEPS, rows=ROWS, width=3, dtype=np.float64):
    return jnp.asarray(np.random.default_rng(1).normal(size=(steps, rows, width)), dtype)


class Cell:
    """A random cell: ops on matrices of rows, some of which it carries, some it slices, and some it has in all steps.

    Its gradient is one of a random loss; it may be a checkpoint, and run either way.
    """

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.reverse, self.remat, self.unroll = draw.random() < 0.3, draw.random() < 0.2, draw.choice([1, 1, 2])
        self.carried, self.sliced = draw.randint(0, 2), draw.randint(1, 2)
        count = self.carried + self.sliced
        self.recipe = []
        for n in range(draw.randint(3, 9)):
            kind = draw.choice(KINDS)
            self.recipe.append((kind, draw.randrange(count + n), draw.randrange(count + n), draw.randrange(3)))
        total = count + len(self.recipe)
        self.next = [draw.randrange(total) for _ in range(self.carried)]
        self.stacked = [draw.randrange(total) for _ in range(draw.randint(1, 3))]
        self.added = [(draw.choice(["product", "rows", "all", "twice"]), draw.randrange(total)) for _ in range(2)]
        self.added = self.added[: draw.randint(0, 2)]

    def arguments(self, dtype=np.float64):
        rng = np.random.default_rng(0)

        def normal(*shape):
            return jnp.asarray(rng.normal(size=shape) / 2, dtype)

        weights = [normal(WIDTH, WIDTH) for _ in range(3)]
        starts = [normal(ROWS, WIDTH) for _ in range(self.carried)]
        ids = jnp.asarray(rng.integers(WIDTH, size=(STEPS, ROWS)))
        return weights, starts, [normal(STEPS, ROWS, WIDTH) for _ in range(self.sliced)], ids

    def run(self, weights, starts, xs, ids):
        """What is carried, added and stacked."""

        def step(carry, now):
            (state, added), (xs, ids) = carry, now
            values = [*state, *xs]
            for kind, i, j, k in self.recipe:
                values.append(self._op(kind, values[i], values[j], weights[k], ids))
            terms = [self._term(kind, values[i], xs[0]) for kind, i in self.added]
            added = [x - y if i % 2 else x + y for x, y, (_, i) in zip(added, terms, self.added, strict=True)]
            return ([values[i] for i in self.next], added), [values[i] for i in self.stacked]

        if self.remat:
            step = jax.checkpoint(step)
        shapes = {"product": (WIDTH, WIDTH), "rows": (WIDTH,), "all": (), "twice": (ROWS, WIDTH)}
        zeros = [jnp.full(shapes[kind], 0.5, xs[0].dtype) for kind, _ in self.added]
        return jax.lax.scan(step, (starts, zeros), (xs, ids), reverse=self.reverse, unroll=self.unroll)

    def loss(self, *args):
        leaves = jax.tree.leaves(self.run(*args))
        return sum(jnp.sin(x).sum() for x in leaves)

    def _op(self, kind, x, y, w, ids):
        return {
            "product": lambda: x @ w,
            "square": lambda: x @ (w @ y.T @ x) / 3,
            "both": lambda: jnp.tanh(x @ y.T) @ y,
            "nonlinear": lambda: jnp.tanh(x),
            "times": lambda: x * y,
            "add": lambda: x + w[0],
            "flip": lambda: (x.T.reshape(ROWS, WIDTH) - y)[::-1],
            "part": lambda: jnp.concatenate(jnp.split(x, 2, -1)[::-1], -1),
            "sum": lambda: x - y.mean(0),
            "narrow": lambda: jax.nn.softmax(x @ w),
            "look": lambda: x + w[ids],
        }[kind]()

    def _term(self, kind, x, now):
        return {
            "product": lambda: (x.T @ now).T * 2,
            "rows": lambda: x.sum(0),
            "all": lambda: (x @ x.T).sum(),
            "twice": lambda: x - 0.1 * now,
        }[kind]()
