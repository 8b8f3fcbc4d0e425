"""Dense linear algebra and Fourier transforms: each matrix (each signal) is whole on one device, a batch is split.

    svd [b,m,n] -> [b,k], [b,m,k], [b,k,n]:  ([i,j,k]) -> ([i,l], [i,m,n], [i,o,p]) replicate={j,k,l,...}

Operations are counted in full (Golub and Van Loan, Matrix Computations, 4th edition, sections 3.2, 4.2, 5.2, 7.5, 8.3
and 8.6); one on complex numbers is four on real ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from unity_jax import _compat
from unity_jax.ops.rule import Label, Rule, Shard, make_rule, register
from unity_jax.pcg.graph import Op, Tensor

Flops = Callable[[Op, int, int], float]
"""Operations on one matrix of so many rows and columns: the last two dimensions of the first operand."""


def _cube(factor: float) -> Flops:
    return lambda op, m, n: factor * n**3


def _orthogonal(m: int, n: int, k: int) -> float:
    """The first `n` columns of the product of `k` reflections of `m` elements."""
    return 4 * m * n * k - 2 * (m + n) * k**2 + 4 / 3 * k**3


def _lu(op: Op, m: int, n: int) -> float:
    k = min(m, n)
    return 2 * m * n * k - (m + n) * k**2 + 2 / 3 * k**3


def _reflections(op: Op, m: int, n: int) -> float:
    """The R of a QR decomposition."""
    k = min(m, n)
    return 2 * k**2 * (max(m, n) - k / 3)


def _qr(op: Op, m: int, n: int) -> float:
    return _reflections(op, m, n) + _orthogonal(m, op.outputs[0].shape[-1], min(m, n))


def _svd(op: Op, m: int, n: int) -> float:
    """Golub and Reinsch; U and V whole or as many of their columns as there are singular values."""
    m, n = max(m, n), min(m, n)
    if not op.params["compute_uv"]:
        return 4 * m * n**2 - 4 / 3 * n**3
    if op.params["full_matrices"]:
        return 4 * m**2 * n + 8 * m * n**2 + 9 * n**3
    return 14 * m * n**2 + 8 * n**3


def _eig(op: Op, m: int, n: int) -> float:
    """The QR algorithm; with vectors, of a Schur form that is accumulated."""
    return (25 if len(op.outputs) > 1 else 10) * n**3


def _householder(op: Op, m: int, n: int) -> float:
    return _orthogonal(m, n, op.inputs[1].shape[-1])


def _apply_reflections(op: Op, m: int, n: int) -> float:
    rows, columns = op.outputs[0].shape[-2:]
    long, wide = (rows, columns) if op.params["left"] else (columns, rows)
    k = op.inputs[1].shape[-1]
    return 4 * long * wide * k - 2 * wide * k**2


def _symmetric_product(op: Op, m: int, n: int) -> float:
    return m**2 * n + 2 * m**2


FLOPS: dict[str, Flops] = {
    "cholesky": _cube(1 / 3),
    "cholesky_update": lambda op, m, n: 4 * n**2,
    "lu": _lu,
    "qr": _qr,
    "geqrf": _reflections,
    "geqp3": _reflections,
    "householder_product": _householder,
    "ormqr": _apply_reflections,
    "svd": _svd,
    "eigh": _cube(9),
    "eig": _eig,
    "schur": _eig,
    "hessenberg": _cube(10 / 3),
    "tridiagonal": _cube(4 / 3),
    "symmetric_product": _symmetric_product,
}
"""Of each decomposition: they share leading batch dimensions, and every other dimension is part of a matrix."""


@register(*FLOPS)
def decomposition(op: Op) -> Rule:
    batch = op.inputs[0].rank - 2
    *_, m, n = op.inputs[0].shape
    matrices = math.prod(op.inputs[0].shape[:batch])
    return make_rule(
        op,
        [_labels(t, batch) for t in op.inputs],
        [_labels(t, batch) for t in op.outputs],
        local=_of_numbers,
        flops=_weight(op) * matrices * FLOPS[op.name](op, m, n),
    )


@register("triangular_solve")
def triangular_solve(op: Op) -> Rule:
    """`([b,m,m], [b,m,n]) -> ([b,m,n]) replicate={m}`: each column of the right-hand side is solved by itself."""
    a, b = op.inputs
    batch = range(a.rank - 2)
    columns: list[Label] = [*batch, None, "n"] if op.params["left_side"] else [*batch, "n", None]
    linear = [{1}] if _compat.is_float(b.dtype) else []
    flops = _weight(op) * math.prod(b.shape) * a.shape[-1]
    return make_rule(op, [[*batch, None, None], columns], [columns], linear=linear, local=_of_numbers, flops=flops)


@register("tridiagonal_solve")
def tridiagonal_solve(op: Op) -> Rule:
    """`([b,m], [b,m], [b,m], [b,m,n]) -> ([b,m,n]) replicate={m}`."""
    b = op.inputs[-1]
    batch = b.rank - 2
    labels: list[Label] = [*range(batch), None, "n"]
    return make_rule(
        op,
        [*(_labels(t, batch) for t in op.inputs[:-1]), labels],
        [labels],
        linear=[{3}] if _compat.is_float(b.dtype) else [],
        local=_of_numbers,
        flops=_weight(op) * 8 * math.prod(b.shape),
    )


@register("lu_pivots_to_permutation")
def lu_pivots_to_permutation(op: Op) -> Rule:
    batch = op.inputs[0].rank - 1
    return make_rule(op, [_labels(op.inputs[0], batch)], [_labels(op.outputs[0], batch)], local=_of_numbers)


@register("fft")
def fft(op: Op) -> Rule:
    """Along the last dimensions, `5 n log2 n` operations for `n` complex numbers, half as many for real ones."""
    lengths = op.params["fft_lengths"]
    (x,), (y,) = op.inputs, op.outputs
    batch, n = x.rank - len(lengths), math.prod(lengths)
    real = not all(jnp.issubdtype(t.dtype, jnp.complexfloating) for t in (x, y))
    return make_rule(
        op,
        [_labels(x, batch)],
        [_labels(y, batch)],
        linear=[{0}],
        flops=(2.5 if real else 5) * math.prod(x.shape[:batch]) * n * math.log2(max(n, 2)),
    )


def _labels(t: Tensor, batch: int) -> list[Label]:
    """A label for each batch dimension, none for what belongs to one matrix."""
    return [*range(batch), *[None] * (t.rank - batch)]


def _weight(op: Op) -> int:
    return 4 if jnp.issubdtype(op.inputs[0].dtype, jnp.complexfloating) else 1


def _of_numbers(shard: Shard, *operands: Any) -> list[Any]:
    """The primitive, with zeros for padding: an iteration need not end on what is no number."""
    found = []
    for x, dims in zip(operands, shard.rule.operands, strict=True):
        for d, factors in enumerate(dims):
            if factors and shard.is_padded(factors[0]):
                x = jnp.where(shard.valid(factors[0], x, d), x, jnp.zeros_like(x))
        found.append(x)
    return _compat.bind(shard.op.eqn, found, shard.op.params)
