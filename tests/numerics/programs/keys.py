"""Random numbers and keys."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p

from tests.numerics.programs.drawer import FLOAT, INT, KEY, Drawer, entry, positive


@entry("random_bits")
def dropout(d: Drawer) -> None:
    x, key = d.value(FLOAT, 1, 3), d.value(KEY, 0, 0)
    d.apply("dropout", lambda k, a: jnp.where(jax.random.bernoulli(k, 0.8, a.shape), a / 0.8, 0.0), key, x)


@entry("random_split", "random_fold_in", "random_clone")
def keys(d: Drawer) -> None:
    key, n = d.value(KEY, 0, 0), d.choice((2, 3, 4, 8))
    how = d.variant("split", "fold", "clone")
    fns = {
        "split": lambda k: jax.vmap(lambda s: jax.random.normal(s, (6,)))(jax.random.split(k, n)),
        "fold": lambda k: jax.vmap(lambda s: jax.random.uniform(jax.random.fold_in(s, n), (4,)))(
            jax.random.split(k, 6)
        ),
        "clone": lambda k: (jax.random.clone(jax.random.split(k, 6)), jax.random.bits(k, (n,), "uint32") >> 3),
    }
    d.apply(how, fns[how], key)


@entry("random_wrap", "random_unwrap", "random_seed", "threefry2x32")
def words(d: Drawer) -> None:
    how = d.variant("wrap", "seed", "threefry")
    if how == "wrap":
        d.apply(how, lambda k: jax.random.key_data(jax.random.split(k, 4)), d.value(KEY, 0, 0))
        d.apply(how, lambda w: jax.random.normal(jax.random.wrap_key_data(w), (5,)), d.new("word", (2,)) if not d.closed
                else d.value("word", shape=(2,)))  # fmt: skip
    elif how == "seed":
        d.apply(how, lambda s: jax.vmap(lambda i: jax.random.uniform(jax.random.key(i), (3,)))(s), d.value(INT, 1, 1))
    else:
        key = np.uint32(7), np.uint32(9)
        fn = lambda x: threefry2x32_p.bind(*key, x.astype(np.uint32), x.astype(np.uint32))  # noqa: E731
        d.apply(how, fn, d.value(INT, 1, 3))


@entry("random_gamma")
def gamma(d: Drawer) -> None:
    n = d.choice((2, 3, 4, 8))
    d.apply("gamma", lambda k, a: jax.vmap(jax.random.gamma)(jax.random.split(k, n), a), d.value(KEY, 0, 0),
            d.apply("positive", positive, d.value(FLOAT, shape=(n, 3)))[0])  # fmt: skip
