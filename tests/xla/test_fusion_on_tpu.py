"""What XLA:TPU computes again in each kernel that reads it, and what it keeps in memory."""

import jax
import jax.numpy as jnp
import pytest

from tests.xla.kernels import f32, shown
from unity_jax.pcg.layout import Layout
from unity_jax.pcg.parallel import Move
from unity_jax.program import trace
from unity_jax.xla.fusion import kernels


@pytest.mark.parametrize(("products", "casts"), [(6, 0), (7, 1)])
def test_a_cast_that_many_matmuls_read_is_written_on_tpu(products, casts):
    def f(w, *xs):
        half = w.astype(jnp.bfloat16)
        return [x @ half for x in xs]

    xs = [jax.ShapeDtypeStruct((16, 64), jnp.bfloat16)] * products
    assert len(shown(f, f32(64, 32), *xs, compiler="tpu")) == products + casts


def written(fn, *args):
    """The types of what is in memory as an array of eight rows and eight columns."""
    made = kernels(trace(fn, args, {}).graph, "tpu")
    return [str(t.dtype) for k in made for t in k.writes if t.shape == (8, 8)]


def test_a_cast_that_a_reduction_reads_is_computed_by_all_that_read_it_on_tpu():
    def f(x):
        y = x.astype(jnp.float32)
        return jnp.tanh(y - jnp.sum(y, axis=1, keepdims=True))

    half = jax.ShapeDtypeStruct((8, 8), jnp.bfloat16)
    assert written(lambda x: f(jax.lax.sort(x)), half) == ["bfloat16", "float32"]
    assert written(lambda x, w: f(x @ w), half, half) == ["bfloat16", "float32"]
    # Whatever else reads what the matmul's kernel writes.
    beside = lambda x, w: (y := jnp.abs(x @ w), f(y), jax.lax.sort(y))[1:]  # noqa: E731
    assert written(beside, half, half) == ["bfloat16", "float32", "bfloat16"]


def test_a_cast_is_in_memory_for_a_gather_alone_on_tpu():
    """The loss of a language model: its labels are gathered from logits in float32, exponentials read bfloat16."""

    def f(x, labels):
        y = jax.lax.sort(x).astype(jnp.float32)
        return jnp.take_along_axis(y, labels, axis=1), jnp.sum(jnp.exp(y), axis=1)

    args = jax.ShapeDtypeStruct((8, 8), jnp.bfloat16), jax.ShapeDtypeStruct((8, 1), jnp.int32)
    assert written(f, *args) == ["bfloat16", "float32"]
    exponentials = [k for k in kernels(trace(f, args, {}).graph, "tpu") if any(op.name == "exp" for op in k.ops)]
    assert [[str(t.dtype) for t in k.reads if t.shape == (8, 8)] for k in exponentials] == [["bfloat16"]]


def test_windows_compute_what_they_read_on_tpu():
    def f(x, cost):
        y = cost(jax.lax.sort(x))
        return jax.lax.reduce_window(y, 0.0, jax.lax.add, (2, 2), (2, 2), "VALID")

    assert len(written(lambda x: f(x, lambda y: jnp.maximum(y, 0) * 2), f32(8, 8))) == 1
    assert len(written(lambda x: f(x, jnp.exp), f32(8, 8))) == 2  # once, not for every window


def test_numbers_of_rows_are_no_reason_to_keep_an_array_on_tpu():
    """A distance from the mean is computed by all that read it, from the array and the means."""

    def f(x):
        x = jax.lax.sort(x)
        y = x - jnp.sum(x, axis=0, keepdims=True)
        return jax.lax.sort(y * 2), jax.lax.sort(y * 3)

    def times(rows):
        return sum("sub" in k.split() for k in shown(f, f32(rows, 8), compiler="tpu"))

    assert times(64) == 2
    assert times(4) == 1  # the means are a quarter of the array


def test_a_cast_that_is_scattered_is_a_kernel_of_its_own_on_tpu():
    """The gradients of embeddings: rows for the tokens, and their sum for the positions, which casts again."""

    def f(table, ids, x):
        y = jax.lax.sort(x).astype(jnp.float32)
        return jnp.zeros_like(table).at[ids].add(y), jnp.sum(y, 0)

    args = f32(64, 16), jax.ShapeDtypeStruct((8, 4), jnp.int32), jax.ShapeDtypeStruct((8, 4, 16), jnp.bfloat16)
    found = shown(f, *args, compiler="tpu")
    assert "convert_element_type" in found
    assert "convert_element_type reduce_sum" in found


def test_activations_are_computed_again_on_tpu():
    """Of what a matmul makes, the gradient of an activation keeps that alone; the GPU keeps the activation, too."""

    def f(x, w, v):
        return jax.value_and_grad(lambda w: jnp.sum((jax.nn.silu(x @ w) @ v) ** 2))(w)

    args = (f32(8, 16), f32(16, 32), f32(32, 8))
    kept = {c: shown(f, *args, compiler=c) for c in ("tpu", "cpu")}
    assert sum(s.count("logistic") for s in kept["tpu"]) > sum(s.count("logistic") for s in kept["cpu"]) == 1


def test_a_scatter_of_rows_fills_in_zeros_on_tpu():
    def f(ids, updates):
        return jnp.zeros((100, 8)).at[ids].add(updates)

    args = (jax.ShapeDtypeStruct((4,), jnp.int32), f32(4, 8))
    last = kernels(trace(f, args, {}).graph, "tpu")[-1]
    assert [op.name for op in last.ops][-2:] == ["broadcast_in_dim", "scatter-add"]


def test_rows_of_a_batch_of_products_are_normalized_in_its_kernel_on_tpu():
    def f(q, k):
        return jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k))

    args = (f32(2, 8, 16), f32(2, 8, 16))
    (first, *_), rest = (kernels(trace(f, args, {}).graph, compiler) for compiler in ("tpu", "gpu"))
    assert {"dot_general", "reduce_max", "exp", "reduce_sum"} <= {op.name for op in first.ops}
    assert [op.name for op in rest[0].ops] == ["dot_general"]


def test_a_part_of_an_array_goes_into_a_batch_of_products_from_memory_on_tpu():
    """`neg` stands for the op by which a device takes its part."""
    whole, parts = Layout(((), (), ())), Layout((("x",), (), ()))
    for batched, expected in ((True, [["mul"], ["neg", "dot_general"]]), (False, [["mul", "neg", "dot_general"]])):
        product = "bij,bjk->bik" if batched else "bij,jk->bik"
        weight = f32(4, 8, 16) if batched else f32(8, 16)
        graph = trace(lambda x, w, p=product: jnp.einsum(p, -(x * 2), w), (f32(4, 32, 8), weight), {}).graph
        part = next(op for op in graph.ops if op.name == "neg")
        part.move = Move("partition", ("x",), 0, None, whole, parts)
        assert [[op.name for op in k.ops] for k in kernels(graph, "tpu")] == expected


def test_what_a_device_takes_its_part_of_is_in_memory_on_tpu_if_others_read_it():
    """`neg` stands for the op by which a device takes its part: of the cast, before it is doubled."""

    def f(x):
        y = jax.lax.sort(x).astype(jnp.float32)
        return jnp.tanh(y + 1), jnp.sum(jnp.exp(-(y * 2)), 1)

    graph = trace(f, (jax.ShapeDtypeStruct((8, 16), jnp.bfloat16),), {}).graph
    part = next(op for op in graph.ops if op.name == "neg")
    part.move = Move("partition", ("x",), 1, None, Layout(((), ())), Layout(((), ("x",))))
    _, whole, parts = kernels(graph, "tpu")
    assert [op.name for op in whole.ops] == ["convert_element_type", "add", "tanh"]
    assert [op.name for op in parts.ops] == ["mul", "neg", "exp", "reduce_sum"]
    assert parts.reads == [whole.ops[0].outputs[0]]


def test_equal_ops_are_one_on_tpu():
    def f(x):
        return jax.lax.sort(x.astype(jnp.float32)), jax.lax.cumsum(x.astype(jnp.float32))

    x = jax.ShapeDtypeStruct((8, 16), jnp.bfloat16)
    assert shown(f, x, compiler="tpu") == ["convert_element_type", "sort", "cumsum"]


def test_what_a_barrier_keeps_is_computed_again_by_other_matmuls_on_tpu():
    """The second weight is gathered once the activation is there, so that is in memory; the gradient of the weight
    takes the activation from what it is of."""

    def f(x, w, v):
        h = x @ w
        a = jax.lax.max(h, 0.0)
        y, v = jax.lax.optimization_barrier((a, v))
        return y @ v, a.T @ x

    made = kernels(trace(f, (f32(8, 8),) * 3, {}).graph, "tpu")
    first, *_ = made
    assert [op.name for op in first.ops] == ["dot_general", "max"]
    assert len(first.writes) == 2
    assert sorted(sum(op.name == "max" for op in k.ops) for k in made) == [0, 1, 1]


@pytest.mark.parametrize(("barrier", "times"), [(False, 2), (True, 1)])
def test_an_activation_is_in_memory_on_tpu_if_what_is_computed_of_it_is(barrier, times):
    def f(x, w, v):
        h = x @ w
        s = jax.nn.sigmoid(h)
        y, v = jax.lax.optimization_barrier((h * s, v)) if barrier else (h * s, v)
        return y @ v, (s * (1 - s)).T @ x

    made = shown(f, *(f32(8, 8),) * 3, compiler="tpu")
    assert sum("logistic" in ops for ops in made) == times


def test_a_broadcast_that_is_scattered_computes_nothing_on_tpu():
    """Four rows of a table get the same update, which is cast before."""

    def f(table, ids, update):
        each = jax.lax.broadcast_in_dim(update.astype(jnp.float32), (8, 4, 16), (0, 2))
        return jnp.zeros_like(table).at[ids].add(each), table

    args = f32(64, 16), jax.ShapeDtypeStruct((8, 4), jnp.int32), jax.ShapeDtypeStruct((8, 16), jnp.bfloat16)
    assert "convert_element_type" in shown(f, *args, compiler="tpu")
    assert "convert_element_type" not in shown(f, *args, compiler="gpu")
