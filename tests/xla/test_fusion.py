"""What becomes one kernel, and what goes through memory, on programs small enough to say by hand."""

import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest

from tests.numerics import programs
from tests.xla.kernels import f32, shown
from unity_jax.pcg.layout import Layout
from unity_jax.pcg.parallel import Move
from unity_jax.program import trace
from unity_jax.xla.fusion import kernels
from unity_jax.xla.traffic import Traffic


def test_a_chain_of_elementwise_ops_is_one_kernel():
    assert shown(lambda x: jnp.tanh(x) * 2 + 1, f32(8, 8)) == ["tanh mul add"]


def test_a_reduction_takes_in_what_it_reduces():
    assert shown(lambda x: jnp.sum(jnp.exp(x)), f32(8, 8)) == ["exp reduce_sum"]


def test_a_value_with_two_readers_in_one_pass_is_read_once():
    def f(x):
        y = jnp.exp(x)
        return y * 2, y + 1

    (kernel,) = kernels(trace(f, (f32(8, 8),), {}).graph, "gpu")
    assert (len(kernel.reads), len(kernel.writes)) == (1, 2)


@pytest.mark.parametrize(
    ("compiler", "expected"),
    [("gpu", ["dot_general", "max"]), ("tpu", ["dot_general max"])],
)
def test_only_tpu_fuses_what_follows_a_matmul(compiler, expected):
    assert shown(lambda x, w: jax.lax.max(x @ w, 0.0), f32(8, 8), f32(8, 8), compiler=compiler) == expected


def test_a_cast_of_a_weight_is_part_of_both_matmuls_on_tpu_only():
    def f(w, x, y):
        h = w.astype(jnp.bfloat16)
        return x @ h, h @ y

    half = jax.ShapeDtypeStruct((8, 8), jnp.bfloat16)
    assert shown(f, f32(8, 8), half, half, compiler="tpu") == ["convert_element_type dot_general"] * 2
    assert shown(f, f32(8, 8), half, half, compiler="gpu") == ["convert_element_type", "dot_general", "dot_general"]


def test_a_softmax_computes_its_exponential_twice_on_gpu_only():
    def f(x):
        y = jnp.exp(x)
        return y / jnp.sum(y, axis=1, keepdims=True)

    assert [s.count("exp") for s in shown(f, f32(8, 8))] == [1, 1]
    assert sum(s.count("exp") for s in shown(f, f32(8, 8), compiler="cpu")) == 1


def test_what_passes_a_barrier_is_in_memory():
    def f(x):
        return jax.lax.optimization_barrier(x * 2) + 1

    assert len(shown(f, f32(8, 8))) == 2


def test_costly_ops_are_not_computed_twice():
    def f(x, w):
        y = jnp.exp(x)
        return y @ w, jnp.sum(y, 0)

    traffic = Traffic.of(trace(f, (f32(8, 8), f32(8, 8)), {}).graph, "tpu")
    assert sum("exp" in [op.name for op in k.ops] for ks in traffic.kernels.values() for k in ks) == 1


def test_random_bits_are_drawn_where_they_are_used_on_tpu_only():
    def f(key, x, w):
        kept = jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x, 0)
        return kept + 1, kept @ w

    args = (jax.eval_shape(lambda: jax.random.key(0)), f32(8, 8), f32(8, 8))
    tpu, gpu = (kernels(trace(f, args, {}).graph, compiler) for compiler in ("tpu", "gpu"))
    assert all(t.dtype != jnp.uint32 for k in tpu for t in k.writes)
    assert [t.shape for k in gpu for t in k.writes if t.dtype == jnp.uint32] == [(8, 8)]


def picked(logits, ids):
    return jnp.take_along_axis(logits, ids[:, None], 1).sum()


def test_a_scatter_of_one_element_per_row_is_a_comparison_on_tpu_only():
    ids = jax.ShapeDtypeStruct((8,), jnp.int32)

    def f(logits, ids):
        return jax.grad(picked)(logits, ids) * 2 + logits

    tpu, gpu = (kernels(trace(f, (f32(8, 100), ids), {}).graph, compiler) for compiler in ("tpu", "gpu"))
    assert sum(t.shape == (8, 100) for k in tpu for t in k.writes) == 1, "only the result"
    assert sum(t.shape == (8, 100) for k in gpu for t in k.writes) == 3, "zeros, the gradient, the result"


def test_dots_take_in_what_several_of_them_read():
    def f(x, y, w):
        z = jnp.where(x > 0, y, 0)
        return z @ w, jax.lax.dot_general(z, x, (((0,), (0,)), ((), ())))

    args = (f32(8, 8), f32(8, 8), f32(8, 8))
    assert sum("select_n" in names for names in shown(f, *args, compiler="tpu")) == 2
    assert sum("select_n" in names for names in shown(f, *args, compiler="gpu")) == 1


def drawn(rng):
    """The graph of a random program."""
    with jax.enable_x64(True):
        program = programs.draw(rng, most=8)
        hypothesis.assume(program.steps)
        return trace(program.fn, program.args, {}).graph


def keeps_elements(op):
    """Whether it is a broadcast that only adds dimensions of size 1, which equals a reshape of the same operand."""
    return op.name == "broadcast_in_dim" and math.prod(op.inputs[0].shape) == math.prod(op.outputs[0].shape)


@hypothesis.settings(max_examples=60)
@hypothesis.given(st.randoms(use_true_random=False), st.sampled_from(["tpu", "gpu"]))
def test_kernels_can_run_in_their_order_and_cover_the_program(rng, compiler):
    graph = drawn(rng)
    made, found = set(graph.inputs), kernels(graph, compiler)
    for kernel in found:
        assert all(t in made or t.literal is not None for t in kernel.reads)
        made.update(kernel.writes)
    names = {op for k in found for op in k.ops}
    made_once = {op.signature for op in names}  # equal constants are one array on GPU, equal elementwise ops one on TPU
    needed = set(graph.outputs)  # not what only ops read that equal others
    for op in reversed(graph.ops):
        if op in names or (op.signature not in made_once and needed.intersection(op.outputs)):
            needed.update(op.inputs)
    left = (op for op in graph.ops if op not in names and needed.intersection(op.outputs))
    aliases = {op for op in left if op.signature not in made_once and not keeps_elements(op)}
    assert {op.name for op in aliases} <= set("reshape squeeze expand_dims copy optimization_barrier".split())


@hypothesis.settings(max_examples=40)
@hypothesis.given(st.randoms(use_true_random=False), st.sampled_from(["tpu", "gpu"]))
def test_traffic_of_ops_adds_up_to_that_of_kernels(rng, compiler):
    traffic = Traffic.of(drawn(rng), compiler)
    for graph, found in traffic.kernels.items():
        moved = sum(len(k.reads) + len(k.writes) for k in found)
        assert sum(sum(traffic.uses[op].counts) for op in graph.ops) == moved
        assert sum(traffic.uses[op].launches for op in graph.ops) == len(found)


def test_a_scatter_into_zeros_goes_into_what_it_is_added_to():
    """The gradient of a softmax and of the logits that are picked: two kernels were three, and one array two."""

    def f(x, rows, updates):
        return jnp.zeros_like(x).at[rows].add(updates) + jnp.tanh(x), x * 2

    ids = jax.ShapeDtypeStruct((4,), jnp.int32)
    graph = trace(f, (f32(64, 8), ids, f32(4, 8)), {}).graph
    found = [k for k in kernels(graph, "gpu") if any(op.name == "scatter-add" for op in k.ops)]
    assert [[t.shape for t in k.writes] for k in found] == [[(64, 8)]]
    assert {"tanh", "add"} <= {op.name for op in found[0].ops}


@pytest.mark.parametrize(("rows", "count"), [(4, 1), (40, 3)])
def test_two_scatters_that_are_added_are_one_if_they_have_few_rows(rows, count):
    """The gradients of both ends of the edges of a graph: XLA concatenates fewer rows than there are nodes."""

    def f(to, updates, back, others):
        zeros = jnp.zeros((64, 8))
        return zeros.at[to].add(updates) + zeros.at[back].add(others)

    ids = jax.ShapeDtypeStruct((rows,), jnp.int32)
    graph = trace(f, (ids, f32(rows, 8), ids, f32(rows, 8)), {}).graph
    found = [k for k in kernels(graph, "gpu") if {op.name for op in k.ops} & {"scatter-add", "add"}]
    assert len(found) == count


def test_matmuls_on_gpu_compute_first_what_takes_no_more_than_it_makes():
    """Halving a matrix is part of both products that read it; the sum of two matrices is in memory."""

    def f(a, b, x, y):
        h = (a + b) * 0.5
        return x @ h, h @ y

    names = shown(f, *[f32(64, 64)] * 4)
    assert names[0] == "add"
    assert sorted(names[1:]) == ["mul dot_general"] * 2


def test_convolutions_on_gpu_read_from_memory_and_windows_compute_again():
    def conv(x, w):
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def pooled(x):
        y = jnp.tanh(x)
        window = (1, 2, 2, 1)
        return jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, window, window, "SAME"), jnp.sum(y)

    assert shown(lambda x, w: conv(-x, w), f32(2, 8, 8, 4), f32(3, 3, 4, 4)) == ["neg", "conv_general_dilated"]
    assert sorted(shown(pooled, f32(2, 8, 8, 4))) == ["tanh reduce_sum", "tanh reduce_window_max"]


def test_updates_that_read_the_zeros_of_a_scatter_are_one_kernel_on_gpu():
    """XLA:GPU makes equal constants once; the zeros that Adagrad's `where` takes are those that gradients are scattered
    into, so they are in memory, and what reads them there is joined."""

    def f(tables, ids, rows):
        gradients = [jnp.zeros_like(t).at[i].add(r) for t, i, r in zip(tables, ids, rows, strict=True)]
        return [t - jnp.where(g > 0, jax.lax.rsqrt(g), 0.0) for t, g in zip(tables, gradients, strict=True)]

    args = [f32(64, 8)] * 2, [jax.ShapeDtypeStruct((4,), jnp.int32)] * 2, [f32(4, 8)] * 2
    graph = trace(f, args, {}).graph
    tpu, gpu = ([k for k in kernels(graph, name) if any(op.name == "sub" for op in k.ops)] for name in ("tpu", "gpu"))
    assert [len(k.writes) for k in tpu] == [1, 1]
    (update,) = gpu
    assert len(update.writes) == 2
    assert len(update.reads) == 5, "two tables, two gradients, the zeros"


def test_an_update_reads_the_zeros_that_its_gradient_is_scattered_into_on_gpu():
    """As no kernel can compute them for the scatter, none does. Where XLA scatters into something else, they are not
    there."""

    def f(t, ids, rows, more):
        g = jnp.zeros_like(t).at[ids].add(rows)
        return t - jnp.where(g + more > 0, g * 3, 0.0)

    def merged(t, ids, rows, more):
        g = jnp.zeros_like(t).at[ids].add(rows) + more
        return t - jnp.where(g > 0, g * 3, 0.0)

    args = f32(64, 8), jax.ShapeDtypeStruct((4,), jnp.int32), f32(4, 8), f32(64, 8)
    for step, reads in ((f, 4), (merged, 2)):
        graph = trace(step, args, {}).graph
        (update,) = [k for k in kernels(graph, "gpu") if any(op.name == "sub" for op in k.ops)]
        assert len(update.reads) == reads, "the table, the gradient, what is added to it, the zeros"


def test_a_scatter_computes_its_updates_itself_on_gpu():
    def f(x, ids, rows):
        return x.at[ids].add(rows.astype(jnp.float32) * 2)

    args = f32(64, 8), jax.ShapeDtypeStruct((4,), jnp.int32), jax.ShapeDtypeStruct((4, 8), jnp.bfloat16)
    (kernel,) = [k for k in kernels(trace(f, args, {}).graph, "gpu") if any(op.name == "scatter-add" for op in k.ops)]
    assert {t.dtype for t in kernel.reads} >= {jnp.dtype(jnp.bfloat16)}
    assert {"convert_element_type", "mul", "scatter-add"} <= {op.name for op in kernel.ops}


def test_what_an_all_reduce_sums_is_told():
    """`neg` stands for the all-reduce."""
    graph = trace(lambda x, w: -jnp.tanh(x @ w), (f32(4, 8), f32(8, 16)), {}).graph
    whole = Layout(((), ()))
    next(op for op in graph.ops if op.name == "neg").move = Move("reduce", ("x",), None, None, whole, whole)
    uses = Traffic.of(graph, "tpu").uses
    assert {op.name: use.summed for op, use in uses.items()} == {"dot_general": False, "tanh": True, "neg": False}


def test_reductions_of_one_array_are_one_kernel_on_gpu():
    """The sums of a gradient and of its product with what it is of: neither reads what the other makes."""

    def f(x, g):
        return jnp.sum(g * x, 0), jnp.sum(g, 0)

    assert shown(f, f32(8, 8), f32(8, 8)) == ["mul reduce_sum reduce_sum"]
    assert shown(f, f32(8, 8), f32(8, 8), compiler="tpu") == ["mul reduce_sum", "reduce_sum"]


@pytest.mark.parametrize(("reader", "there"), [(jnp.tanh, True), (jnp.sum, True), (lambda y: y @ y, False)])
def test_what_reads_a_matmul_adds_up_the_parts_of_its_depth(reader, there):
    """If it can be computed with the sum: not a matmul of a library, which reads arrays."""
    graph = trace(lambda x, w: reader(x @ w), (f32(8, 8), f32(8, 8)), {}).graph
    product = graph.ops[0]
    (kernel,) = [k for k in kernels(graph, "gpu") if product in k.ops]
    assert (product in kernel.in_parts) is there


@pytest.mark.parametrize(("bias", "there"), [(True, 4), (False, 3)])
def test_the_operand_of_a_function_that_is_written_out_is_in_memory_on_gpu(bias, there):
    """As 147,456 x 4,096 values are for an H100: a matmul, of it erfc and GELU, and with a bias what erfc reads. The
    backward pass would otherwise compute that again, as XLA:TPU does."""

    def loss(w, b, x, v):
        h = x @ w.astype(x.dtype)
        h = h + b.astype(x.dtype) if bias else h
        return jnp.sum(jnp.sin((jax.nn.gelu(h, approximate=False) @ v.astype(x.dtype)).astype(jnp.float32)))

    x = jax.ShapeDtypeStruct((512, 64), jnp.bfloat16)
    graph = trace(jax.grad(loss), (f32(64, 256), f32(256), x, f32(256, 64)), {}).graph
    for compiler, expected in ("gpu", there), ("tpu", 1):
        made = [k for k in kernels(graph, compiler) if not k.root.backward]
        assert sum(t.shape == (512, 256) for k in made for t in k.writes) == expected
