"""Every strategy of decompositions, solves and Fourier transforms, executed; and what they are said to cost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.ops.harness import arg, check_rule, ops_of
from unity_jax.ops.rules import rule_of

MESHES = ((2,), (3,), (2, 2))


def definite(*shape):
    x = arg(*shape)
    return x @ np.swapaxes(x, -1, -2) + shape[-1] * np.eye(shape[-1])


def triangular(*shape):
    return np.tril(definite(*shape))


PIVOTS = np.tile(np.int32([3, 2, 5]), (5, 1))
SQUARE, TALL, WIDE = definite(4, 3, 3), arg(5, 6, 3), arg(4, 2, 5)
COMPLEX = arg(4, 5, 3, dtype=np.complex128)

DECOMPOSITIONS = [
    ("cholesky", lax.linalg.cholesky, (SQUARE,)),
    ("lu", lax.linalg.lu, (TALL,)),
    ("lu", lax.linalg.lu, (definite(5, 4, 4),)),
    ("lu_pivots_to_permutation", lambda p: lax.linalg.lu_pivots_to_permutation(p, 6), (PIVOTS,)),
    ("qr", lambda x: lax.linalg.qr(x, full_matrices=False), (TALL,)),
    ("qr", lambda x: lax.linalg.qr(x, full_matrices=True), (WIDE,)),
    ("qr", lambda x: lax.linalg.qr(x, full_matrices=False, pivoting=True), (TALL,)),
    ("householder_product", lax.linalg.householder_product, (TALL, arg(5, 3))),
    ("geqrf", jax.scipy.linalg.qr_multiply, (TALL, arg(5, 2, 6))),
    ("ormqr", jax.scipy.linalg.qr_multiply, (TALL, arg(5, 2, 6))),
    ("geqp3", lambda x, c: jax.scipy.linalg.qr_multiply(x, c, mode="left", pivoting=True), (TALL, arg(5, 3, 2))),
    ("svd", lambda x: lax.linalg.svd(x, full_matrices=False), (TALL,)),
    ("svd", lambda x: lax.linalg.svd(x, full_matrices=True), (WIDE,)),
    ("svd", lambda x: lax.linalg.svd(x, compute_uv=False), (COMPLEX,)),
    ("eigh", lax.linalg.eigh, (definite(5, 3, 3),)),
    ("eig", lambda x: lax.linalg.eig(x)[0], (SQUARE + arg(4, 3, 3),)),
    ("schur", lax.linalg.schur, (arg(5, 3, 3),)),
    ("hessenberg", lax.linalg.hessenberg, (arg(4, 5, 5),)),
    ("tridiagonal", lax.linalg.tridiagonal, (definite(5, 4, 4),)),
    ("symmetric_product", lambda a, c: lax.linalg.symmetric_product(a, c, beta=0.5), (WIDE, definite(4, 2, 2))),
]


@pytest.mark.parametrize(("name", "fn", "args"), DECOMPOSITIONS, ids=[d[0] for d in DECOMPOSITIONS])
def test_a_batch_is_split_and_a_matrix_is_whole(name, fn, args):
    kinds = check_rule(fn, *args, only=name, mesh_sizes=MESHES)[name]
    assert kinds == {"pass", "uneven", "replicated"}


def test_single_matrices_are_whole():
    kinds = check_rule(lambda x, w: lax.linalg.cholesky_update(jnp.linalg.cholesky(x).T, w), definite(4, 4), arg(4))
    assert kinds["cholesky"] == kinds["cholesky_update"] == {"replicated"}


@pytest.mark.parametrize("left", [True, False])
def test_triangular_solve_splits_the_columns_and_passes_sums(left):
    a, b = triangular(4, 3, 3), arg(4, 3, 5) if left else arg(4, 5, 3)
    solve = lambda a, b: lax.linalg.triangular_solve(a, b, left_side=left, lower=True)  # noqa: E731
    kinds = check_rule(solve, a, b, mesh_sizes=MESHES)["triangular_solve"]
    assert kinds == {"pass", "uneven", "linear", "replicated"}
    one = check_rule(solve, a[0], b[0], mesh_sizes=MESHES)["triangular_solve"]
    assert {"pass", "linear"} <= one


def test_tridiagonal_solve():
    low, middle, high = arg(4, 5), arg(4, 5) + 8, arg(4, 5, seed=1)
    low[:, 0] = high[:, -1] = 0
    kinds = check_rule(lax.linalg.tridiagonal_solve, low, middle, high, arg(4, 5, 3), mesh_sizes=MESHES)
    assert kinds["tridiagonal_solve"] == {"pass", "uneven", "linear", "replicated"}


@pytest.mark.parametrize(
    ("fn", "x"),
    [
        (jnp.fft.fft, arg(5, 4, dtype=np.complex128)),
        (lambda x: jnp.fft.ifft(x, axis=0), arg(5, 4, dtype=np.complex128)),
        (jnp.fft.rfft2, arg(3, 4, 6)),
        (jnp.fft.irfft, arg(5, 4, dtype=np.complex128)),
    ],
)
def test_fft_splits_the_other_dimensions_and_passes_sums(fn, x):
    assert check_rule(fn, x, only="fft", mesh_sizes=MESHES)["fft"] == {"pass", "uneven", "linear", "replicated"}


def test_total_order():
    fn = lambda x, y: (lax.lt_to_p.bind(x, y), lax.le_to_p.bind(x, y))  # noqa: E731
    kinds = check_rule(fn, arg(5, 4), arg(5, 4, seed=1), mesh_sizes=MESHES)
    assert kinds["lt_to"] == kinds["le_to"] == {"pass", "uneven", "replicated"}


@pytest.mark.parametrize(
    ("fn", "args", "flops"),
    [
        (jax.scipy.linalg.cholesky, (s := definite(12, 12),), 12**3 / 3),
        (lax.linalg.lu, (s,), 2 / 3 * 12**3),
        (lambda x: lax.linalg.qr(x, full_matrices=False), (arg(7, 24, 12),), 7 * 4 * 12**2 * (24 - 4)),
        (lambda x: lax.linalg.svd(x, compute_uv=False), (arg(24, 12),), 4 * 24 * 12**2 - 4 / 3 * 12**3),
        (lambda x: lax.linalg.svd(x, full_matrices=False), (arg(12, 24),), 14 * 24 * 12**2 + 8 * 12**3),
        (lax.linalg.eigh, (s + 0j,), 4 * 9 * 12**3),
        (lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True), (s, arg(12, 5)), 12 * 12 * 5),
        (jnp.fft.fft, (arg(3, 16, dtype=np.complex128),), 3 * 5 * 16 * 4),
    ],
)
def test_operations_are_those_of_the_textbook(fn, args, flops):
    (op,) = [op for op in ops_of(fn, *args) if op.name in "cholesky lu qr svd eigh triangular_solve fft".split()]
    assert rule_of(op).flops == pytest.approx(flops)
