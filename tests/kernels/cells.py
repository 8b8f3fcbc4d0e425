"""Loops as kernels, interpreted: cells, their loops forward and backward, and what is drawn of them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from unity_jax.implement import batchable, batched, persistable, persisted
from unity_jax.ops.persistent import NAME, loop
from unity_jax.ops.rule import Shard
from unity_jax.ops.rules import rule_of
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.program import trace

ROOM = 2.0**26


class Size(NamedTuple):
    """Of a layer."""

    steps: int = 5
    rows: int = 24
    width: int = 40
    inputs: int = 12


SIZE = Size()


def drawn(*shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(len(shape) + shape[0]).normal(size=shape) / 4, dtype)


def lstm(weights, carry, now):
    (h, c), (x, real) = carry, now
    i, f, g, o = jnp.split((x @ weights[0] + h.astype(x.dtype) @ weights[1]).astype(jnp.float32), 4, -1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    h, c = jnp.where(real, h, 0), jnp.where(real, c, 0)
    return (h, c), h.astype(x.dtype)


def gru(weights, carry, now):
    (h, _), (x, _) = carry, now
    parts = zip(*(jnp.split(y, 4, -1) for y in (x @ weights[0], h.astype(x.dtype) @ weights[1])), strict=True)
    (r, z), (a, b) = (jax.nn.sigmoid(a + b) for a, b in [next(parts), next(parts)]), next(parts)
    h = ((1 - z) * jnp.tanh(a + r * b) + z * h).astype(jnp.float32)
    return (h, h), h.astype(x.dtype)


def clipped(weights, carry, now):
    (h, _), (x, real) = carry, now
    y, *_ = jnp.split(x @ weights[0] + h.astype(x.dtype) @ weights[1], 4, -1)
    y = jnp.clip(y, 0, 20).astype(jnp.float32)
    h = jnp.where(real, y, h)
    return (h, h), h.astype(x.dtype)


CELLS = {"lstm": lstm, "gru": gru, "clipped": clipped}


def gradients(cell, dtype, reverse, size=SIZE):
    """Of a layer, and its arguments."""

    def loss(weights, xs, real):
        start = jnp.zeros((size.rows, size.width)), jnp.zeros((size.rows, size.width))
        _, ys = jax.lax.scan(lambda c, x: CELLS[cell](weights, c, x), start, (xs, real), reverse=reverse)
        return (ys.astype(jnp.float32) ** 2).sum()

    real = jnp.asarray(np.random.default_rng(3).random((size.steps, size.rows, 1)) < 0.8)
    weights = drawn(size.inputs, 4 * size.width, dtype=dtype), drawn(size.width, 4 * size.width, dtype=dtype)
    return jax.grad(loss, (0, 1)), (weights, drawn(size.steps, size.rows, size.inputs, dtype=dtype), real)


def loops(cell, dtype, reverse=False, most=256, size=SIZE):
    """The loops of both passes as kernels on one device."""
    both = found(cell, dtype, reverse, most, size)
    assert [shard.op.backward for shard in both] == [False, True]
    return both


def found(cell, dtype, reverse, most, size=SIZE):
    """The same, of layers so small that there may be fewer."""
    fn, args = gradients(cell, dtype, reverse, size)
    graph = trace(fn, args, {}).graph
    graph = batched(graph, batchable(graph))
    bodies = {
        op: body.__class__(body.graph, body.splits, body.rows, most) for op, body in persistable(graph, ROOM).items()
    }
    every = [op for op in persisted(graph, bodies).walk() if op.name == NAME]
    return [Shard(op, rule_of(op), MeshAxes(("x",), (1,)), (-1,)) for op in every]


def operands(shard):
    rng = np.random.default_rng(0)

    def one(t):
        if t.dtype == jnp.bool_:
            return jnp.asarray(rng.random(t.shape) < 0.7)
        return jnp.asarray(rng.normal(size=t.shape) / 6, t.dtype)

    return list(map(one, shard.op.inputs))


CASES = st.fixed_dictionaries(
    {
        "cell": st.sampled_from(sorted(CELLS)),
        "dtype": st.sampled_from([np.float32, jnp.bfloat16]),
        "reverse": st.booleans(),
        "most": st.sampled_from([8, 16, 256]),
        "size": st.builds(
            Size, st.integers(2, 9), st.sampled_from([1, 5, 8, 16, 24, 40]), st.integers(1, 70), st.integers(1, 30)
        ),
    }
)


def errors(arguments):
    """By pass and result, how far a kernel is from the scan, which rounds alike, and how far it may be: eight roundings
    of the largest value, or of one. Rows that make no blocks have no kernel."""
    off = dict[str, tuple[float, float]]()
    for shard in found(**arguments):
        made, block, every = loop(shard)
        if not made.blocks:
            continue
        given = operands(shard)
        kernel = jax.jit(lambda *x: made.kernel(block, *x, interpret=True))  # noqa: B023
        results = zip(kernel(*given), made.scan(every, *given), shard.op.outputs, strict=True)
        for i, (a, b, t) in enumerate(results):
            assert (a.shape, a.dtype) == (b.shape, b.dtype) == (t.shape, t.dtype)
            a, b = (np.asarray(y, np.float32) for y in (a, b))
            most = 8 * float(jnp.finfo(arguments["dtype"]).eps) * max(1.0, float(np.max(np.abs(b), initial=0)))
            off[f"{'backward' if shard.op.backward else 'forward'} {i}"] = (
                float(np.max(np.abs(a - b), initial=0)),
                most,
            )
    return off
