"""Transposes of products become products: the same values, and nothing left to move."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.numerics.harness import Case
from unity_jax.program import trace


def names(program):
    return [op.name for op in program.graph.walk()]


def plain(program, *args):
    """The results of a traced program on one device."""
    case = Case(program, list(args), [])
    return case.run(case.sample((1,), seed=0))


def test_gradients_of_weights_are_products_without_transposes():
    def step(w, x):
        return jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)

    program = trace(step, (jnp.ones((4, 3)), jnp.ones((5, 4))), {})
    assert names(program).count("dot_general") == 2
    assert "transpose" not in names(program)


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("permutation", list(itertools.permutations(range(3))))
def test_any_transpose_of_a_product_keeps_its_value(batched, permutation):
    rng = np.random.default_rng(0)
    shapes = ((6, 2, 4), (6, 4, 3)) if batched else ((2, 5, 4), (4, 3))
    x, y = (rng.normal(size=s) for s in shapes)

    def f(x, y):
        product = jax.lax.dot_general(x, y, (((2,), (1,)), ((0,), (0,))) if batched else (((2,), (0,)), ((), ())))
        return jax.lax.transpose(product, permutation)

    program = trace(f, (x, y), {})
    folds = permutation in ((0, 2, 1) if batched else (2, 0, 1),)
    stays = not folds and permutation != (0, 1, 2)
    assert names(program) == ["dot_general", "transpose"][: 1 + stays]
    np.testing.assert_allclose(plain(program, x, y)[0], f(x, y), rtol=1e-5, atol=1e-6)


def test_a_product_with_another_reader_stays():
    def f(x, y):
        product = x @ y
        return product.T, product

    assert names(trace(f, (jnp.ones((2, 3)), jnp.ones((3, 4))), {})) == ["dot_general", "transpose"]


def test_a_loop_body_is_simplified_too():
    def f(w, xs):
        return jax.lax.scan(lambda c, x: (c + jnp.transpose(x @ w), None), jnp.zeros((4, 2)), xs)[0]

    assert "transpose" not in names(trace(f, (jnp.ones((3, 4)), jnp.ones((5, 2, 3))), {}))


def test_a_loop_takes_in_masks_before_they_are_broadcast():
    def step(w, x):
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((4, 4), bool)), (2, 4, 4))

        def outer(h, _):
            def inner(h, _):
                scores = jnp.einsum("hqd,hkd->hqk", h @ w, h)
                return h + jnp.where(mask, scores, jnp.full((2, 4, 4), -9.0)) @ h, None

            return jax.lax.scan(inner, h, None, length=2)[0], None

        return jnp.sum(jax.lax.scan(outer, x, None, length=2)[0])

    w, x = np.eye(5) / 9, np.random.default_rng(0).normal(size=(2, 4, 5)) / 9
    program = trace(step, (w, x), {})
    loops = [op for op in program.graph.walk() if op.name == "scan"]
    assert len(loops) == 2
    assert {t.shape for op in loops for t in op.inputs} == {(4, 4), (5, 5), (2, 4, 5)}
    np.testing.assert_allclose(plain(program, w, x)[0], step(w, x), rtol=1e-5)
