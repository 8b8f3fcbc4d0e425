"""What every device computes in full is said, with the reason."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import unity_jax as unity
from unity_jax.plan.whole import INDIVISIBLE, LEAST, NO_RULE, SLOWER, WHOLE


def s(*shape, dtype=np.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def said(fn, *args, devices=8, machine="h100"):
    return unity.plan(fn, *args, machine=f"{machine}:{devices}").replicated


KEY = jax.eval_shape(lambda: jax.random.key(0))


@pytest.mark.parametrize(
    ("name", "fn", "args", "reason"),
    [
        ("sort", jax.random.permutation, (KEY, s(100_000)), WHOLE),
        ("sort", lambda k, x: jax.random.choice(k, x, (64,), replace=False), (KEY, s(100_000)), WHOLE),
        ("sort", lambda x: jnp.unique(x, size=64), (s(100_000),), WHOLE),
        ("random_gamma", lambda k: jax.random.gamma(k, 2.0, (5000,)), (KEY,), WHOLE),
        ("svd", lambda x: jnp.linalg.svd(x)[1], (s(64, 64),), WHOLE),
        ("rev", lambda x: lax.rev(x, (0,)), (s(100_000),), WHOLE),
        ("dot_general", lambda x, w: x @ w, (s(101, 103), s(103, 107)), SLOWER),
        ("eigh", jnp.linalg.eigvalsh, (s(3, 64, 64),), INDIVISIBLE),
        ("pure_callback", lambda x: jax.pure_callback(np.sort, x, x), (s(16),), NO_RULE),
    ],
)
def test_large_ops_in_full_are_said(name, fn, args, reason):
    found = [line for line in said(fn, *args) if line.startswith(name)]
    assert len(found) == 1
    assert found[0].endswith(f": {reason}")
    assert "test_whole.py" in found[0] or name in ("eigh", "sort")


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (jnp.cumsum, (s(500_000_000),)),
        (lambda x: lax.cummax(x, reverse=True), (s(500_000_000),)),
        (jnp.linalg.cholesky, (s(64, 32, 32),)),
        (jnp.linalg.solve, (s(64, 32, 32), s(64, 32, 4))),
        (lambda x: jnp.linalg.svd(x)[1], (s(64, 32, 32),)),
        (lambda x: jnp.abs(jnp.fft.fft(x)), (s(512, 1024),)),
        (lambda a, v: jnp.searchsorted(a, v), (s(1000), s(200_000))),
        (lambda x, w: x @ w, (s(10007, 10009), s(10009, 10037))),
    ],
    ids=["cumsum", "cummax", "cholesky", "solve", "svd", "fft", "searchsorted", "primes"],
)
def test_large_ops_that_can_be_split_are(fn, args):
    assert said(fn, *args) == ()


def test_what_takes_long_is_said_beside_much_arithmetic():
    """A sort has few operations, and takes the time of its bytes."""
    large = s(8192, 8192)
    assert [line.split()[0] for line in said(lambda x, w: (jnp.sort(x), w @ w), s(10_000_000), large)] == ["sort"]
    assert said(lambda x, w: (jnp.sort(x), w @ w), s(100_000), large) == ()


def test_small_ops_are_not_worth_a_word():
    assert said(lambda x: jnp.sort(x) + x.sum(), s(LEAST // 64)) == ()
    assert said(lambda x: jnp.tanh(x), s(64)) == ()


def test_one_device_computes_everything():
    assert said(jnp.sort, s(1_000_000), devices=1) == ()


def test_what_the_search_leaves_whole_is_said_together():
    (line,) = said(lambda x, w: jnp.tanh(x @ w) * 2, s(101, 103), s(103, 107))
    assert line.startswith("dot_general f32[101, 107] at ")
    assert line.endswith(f" and 2 others, 100% of the arithmetic: {SLOWER}")
