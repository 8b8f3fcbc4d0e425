"""Peak memory, on programs small enough to say by hand: what the order of kernels, donation and loops make of it."""

import dataclasses
import random

import jax
import jax.numpy as jnp
import pytest

from unity_jax.cost.memory import memory
from unity_jax.machine.machine import Machine
from unity_jax.network.reshard import Resharder
from unity_jax.pcg.layout import Layout
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.program import trace
from unity_jax.search.assemble import Decisions, assemble
from unity_jax.search.candidate import finish
from unity_jax.search.rule_cache import RuleCache
from unity_jax.search.sample import sample
from unity_jax.xla.traffic import Traffic

MESH, MACHINE = MeshAxes(("x",), (1,)), Machine.preset("h100:1")
N = 64 * 64 * 4
TUPLE = 2**14
"""Bytes of a tuple on a TPU. They are not alive in the eyes of the compiler, and so count twice in what it reports."""


def f32(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def with_device(machine, device):
    return dataclasses.replace(machine, devices=(device,))


def peak(fn, *args, donate=(), device=MACHINE.device):
    """Peak memory of a function on one device."""
    program = trace(fn, args, {}, donate_argnums=donate)
    decisions = Decisions(outputs=tuple(Layout.replicated(t.rank) for t in program.graph.outputs))
    for graph in [program.graph, *(b for op in program.graph.walk() for b in op.bodies)]:
        decisions.layouts.update((t, Layout.replicated(t.rank)) for t in graph.inputs)
        decisions.strategies.update((op, (-1,)) for op in graph.ops if not op.bodies)
        stacks = (t for op in graph.ops if op.bodies for t in op.outputs)
        decisions.layouts.update((t, Layout.replicated(t.rank)) for t in stacks)
    planned = assemble(program.graph, decisions, Resharder(MACHINE, MESH), RuleCache())
    machine = with_device(MACHINE, device)
    return memory(planned, Traffic.of(planned, device.compiler), MESH, machine, program.donated)


def sort(x):
    return jax.lax.sort(x)


def test_values_live_from_writer_to_last_reader():
    """Argument, result, and two values between: x is sorted into a, a into b, and b into the result."""
    assert peak(lambda x: sort(sort(sort(x))), f32(64, 64)).peak_bytes == 4 * N


def test_elementwise_results_are_written_over_what_nobody_reads_again():
    """The sorted value makes way for its exponential, which is not the result."""
    assert peak(lambda x: sort(jnp.exp(sort(x))), f32(64, 64)).peak_bytes == 3 * N


def test_donated_arguments_make_room_for_results():
    assert peak(lambda x: sort(sort(x)), f32(64, 64)).peak_bytes == 3 * N
    assert peak(lambda x: sort(sort(x)), f32(64, 64), donate=0).peak_bytes == 2 * N


def test_the_order_that_saves_memory_is_taken():
    """As written, all three products are alive before the first is summed; in a better order, one at a time."""

    def f(x):
        products = [sort(x * i) for i in range(1, 4)]
        return sum(jnp.sum(sort(p)) for p in products)

    assert peak(f, f32(64, 64)).peak_bytes < 4.1 * N


def test_a_loop_holds_its_stack_and_one_iteration():
    def f(x):
        return jax.lax.scan(lambda c, _: (sort(sort(sort(c))), c), x, None, length=5)[1]

    found = peak(f, f32(64, 64))
    assert found.peak_bytes == pytest.approx((1 + 5 + 1 + 2) * N, rel=0.01)  # argument, stack, carry, between sorts


def test_scanned_weights_are_cast_before_the_loop_on_tpu():
    """Of what iterations only cast there is a copy of half the size."""

    def f(x, weights, cast):
        layer = lambda y, w: (jnp.tanh(y @ (w.astype(jnp.bfloat16) if cast else w).astype(y.dtype)), None)  # noqa: E731
        return jax.lax.scan(layer, x, weights)[0]

    tpu = dataclasses.replace(MACHINE.device, compiler="tpu")
    bare, cast = (
        peak(lambda x, w, cast=cast: f(x, w, cast), f32(8, 64), f32(50, 64, 64), device=tpu) for cast in (False, True)
    )
    assert cast.peak_bytes - bare.peak_bytes == pytest.approx(50 * N / 2, rel=0.05)


def test_stacks_of_one_shape_exist_from_the_first_loop_on_gpu():
    """The second loop has its stack while the first one runs; on the CPU only from its own start."""

    def f(x):
        first = jax.lax.scan(lambda c, _: (sort(c), c), x, None, length=50)[1]
        return jax.lax.scan(lambda c, _: (sort(c), c), sort(jnp.sum(first, 0)), None, length=50)[1].sum()

    cpu = dataclasses.replace(MACHINE.device, compiler="cpu")
    assert peak(f, f32(64, 64)).peak_bytes > 100 * N
    assert peak(f, f32(64, 64), device=cpu).peak_bytes < 60 * N


def test_short_lives_are_spent_on_the_chip():
    tpu = dataclasses.replace(MACHINE.device, compiler="tpu", fast_bytes=2 * N, chip_bytes=N)
    f = lambda x: sort(sort(sort(x)))  # noqa: E731
    assert peak(f, f32(64, 64)).peak_bytes == 4 * N
    found = peak(f, f32(64, 64), device=tpu)
    assert found.peak_bytes == 3 * N + 2 * TUPLE  # one value between; two are fetched


def test_rows_are_gathered_from_a_padded_copy():
    """A table of four columns lies along the lanes while rows are taken from it: 32 times its size."""
    tiled = dataclasses.replace(MACHINE.device, compiler="tpu", layout_tile=(8, 128))
    take = lambda table, i: sort(table.at[i].get(mode="clip")).sum()  # noqa: E731
    indices = jax.ShapeDtypeStruct((8,), jnp.int32)
    narrow, wide = (peak(take, f32(4096, n), indices, device=tiled).peak_bytes for n in (4, 128))
    assert narrow > 4096 * 128 * 4 + 4096 * 4 * 4
    assert wide < 4096 * 128 * 4 * 1.1


def test_rows_that_two_numbers_name_are_padded_as_well():
    """Of a stack of four tables of four columns, a row is named by its table and its number: the same 32 times."""
    tiled = dataclasses.replace(MACHINE.device, compiler="tpu", layout_tile=(8, 128))
    take = lambda tables, i: sort(tables.at[i, i].get(mode="clip")).sum()  # noqa: E731
    indices = jax.ShapeDtypeStruct((8,), jnp.int32)
    narrow, wide = (peak(take, f32(4, 1024, n), indices, device=tiled).peak_bytes for n in (4, 128))
    assert narrow > 4096 * 128 * 4 + 4096 * 4 * 4
    assert wide < 4096 * 128 * 4 * 1.1


def test_what_is_sorted_for_a_batch_of_products_is_not_padded():
    """Of 256 products of 9 x 4 the batch fills the lanes in the argument, and in both that are sorted."""
    tiled = dataclasses.replace(MACHINE.device, compiler="tpu", layout_tile=(8, 128))
    f = lambda x: jnp.sum(jnp.matmul(sort(x), sort(x).transpose(0, 2, 1), precision="highest"))  # noqa: E731
    found = peak(f, f32(256, 9, 4), device=tiled)
    assert found.peak_bytes == pytest.approx(3 * 9 * 256 * 4 * 4, rel=0.001)


def test_what_is_gathered_from_a_value_does_not_hold_it():
    """The rows that are picked from y wait for their numbers to be gathered, as late as that can be; so does y's
    next reader."""

    def f(x, rows):
        y = sort(x)
        picked = y.at[rows].get(mode="clip").sum()
        return picked, sort(sort(sort(y))).sum()

    program = trace(f, (f32(64, 64), jax.ShapeDtypeStruct((4,), jnp.int32)), {})
    mesh, machine, (x, rows) = MeshAxes(("x",), (2,)), Machine.preset("h100:2"), program.graph.inputs
    decisions = Decisions(dict.fromkeys(program.graph.ops, (-1,)), {x: Layout.replicated(2), rows: Layout((("x",),))})
    decisions.outputs = (Layout.replicated(0), Layout.replicated(0))
    planned = assemble(program.graph, decisions, Resharder(machine, mesh), RuleCache())
    found = memory(planned, Traffic.of(planned, "gpu"), mesh, machine, ())
    assert found.peak_bytes == pytest.approx((1 + 2) * N, rel=0.1)  # x and two values


@pytest.mark.parametrize("compiler", ["gpu", "cpu"])
def test_rows_that_are_divided_by_their_sums_are_written_in_place(compiler):
    device = dataclasses.replace(MACHINE.device, compiler=compiler)
    f = lambda x: sort((y := sort(x)) / (1 + jnp.sum(y, -1, keepdims=True)))  # noqa: E731
    assert peak(f, f32(64, 64), donate=0, device=device).peak_bytes == pytest.approx(2 * N, rel=0.02)


def test_what_is_alive_is_named_largest_first():
    found = peak(lambda x: (sort(sort(x)), x.sum()), f32(64, 64))
    sizes = [n for _, n in found.alive]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) == found.peak_bytes


def test_padding_counts():
    tiled = dataclasses.replace(MACHINE.device, layout_tile=(8, 128))
    assert peak(sort, f32(3, 5), device=tiled).peak_bytes == 2 * 4 * 128 * 4


def test_never_less_than_arguments_and_results():
    program = trace(lambda w, x: (w - (x.T @ jnp.tanh(x @ w)), x), (f32(64, 32), f32(16, 64)), {})
    axes, machine = MeshAxes(("x", "y"), (2, 2)), Machine.preset("h100:4")
    rules = RuleCache()
    for seed in range(20):
        decisions = sample(program.graph, program.ties, axes, rules, random.Random(seed))
        planned = assemble(program.graph, decisions, Resharder(machine, axes), rules)
        found = memory(planned, Traffic.of(planned, "gpu"), axes, machine, ())
        held = sum(t.itemsize * _local(t, axes) for t in planned.inputs)
        assert found.peak_bytes >= held


def _local(t, axes):
    n = 1
    for d in t.layout.local_shape(t.shape, axes):
        n *= d
    return n


def test_parts_that_are_no_whole_tiles_are_copied_together_on_tpu():
    """Part of the argument, the result, and what is gathered, which of four rows of each device is not in order yet, of
    eight it is."""
    mesh, machine = MeshAxes(("x",), (2,)), Machine.preset("h100:2")
    tiled = dataclasses.replace(machine.device, compiler="tpu", layout_tile=(8, 128))
    machine = with_device(machine, tiled)
    found = []
    for rows in (8, 16):
        program = trace(sort, (f32(rows, 2048),), {})
        decisions = Decisions(dict.fromkeys(program.graph.ops, (-1,)), {program.graph.inputs[0]: Layout((("x",), ()))})
        decisions.outputs = (Layout.replicated(2),)
        planned = assemble(program.graph, decisions, Resharder(machine, mesh), RuleCache())
        peak_bytes = memory(planned, Traffic.of(planned, "tpu"), mesh, machine, ()).peak_bytes
        found.append(peak_bytes / (rows * 2048 * 4))
    assert found == [1 / 2 + 1 + 2, 1 / 2 + 1 + 1]


def test_several_all_reduces_are_one_on_tpu():
    """Beside arguments and results there is one sum at a time, finished in place; or two, combined or beside others."""

    def f(x, y):
        return sort(jnp.sum(x, 0)), sort(jnp.sum(y, 0))

    mesh, machine = MeshAxes(("x",), (2,)), Machine.preset("h100:2")
    program = trace(f, (f32(2, 64, 64),) * 2, {})
    decisions = Decisions(dict.fromkeys(program.graph.ops, (-1,)))
    decisions.layouts = {t: Layout((("x",), (), ())) for t in program.graph.inputs}
    decisions.strategies.update((op, (0,)) for op in program.graph.ops if op.name == "reduce_sum")
    decisions.outputs = (Layout.replicated(2),) * 2
    planned = assemble(program.graph, decisions, Resharder(machine, mesh), RuleCache())
    found = {}
    for compiler in ("gpu", "tpu", "cpu"):
        on = with_device(machine, dataclasses.replace(machine.device, compiler=compiler))
        found[compiler] = memory(planned, Traffic.of(planned, compiler), mesh, on, ()).peak_bytes
    assert found == {"gpu": (2 + 2 + 2) * N, "tpu": (2 + 2 + 2) * N + TUPLE, "cpu": (2 + 2 + 1) * N}


def test_every_plan_of_scanned_layers_has_an_order():
    """What is reduced after a loop may be combined with what does not wait for it, and never with what does: on TPU."""

    def f(w, v, x):
        def loss(w, v):
            part = lambda x, v: (jnp.tanh(x @ v), None)  # noqa: E731
            layer = lambda x, wv: (jax.lax.scan(part, x @ wv[0], wv[1])[0], None)  # noqa: E731
            return jnp.sum(jax.lax.scan(layer, x, (w, v))[0])

        dw, dv = jax.grad(loss, (0, 1))(w, v)
        return w - dw / jnp.sum(dw * dw), v - dv / jnp.sum(dv * dv)

    program = trace(f, (f32(4, 64, 64), f32(4, 2, 64, 64), f32(16, 64)), {}, donate_argnums=(0, 1))
    axes, machine, rules = MeshAxes(("x", "y"), (2, 2)), Machine.preset("v5e:2x2"), RuleCache()
    for seed in range(60):
        decisions = sample(program.graph, program.ties, axes, rules, random.Random(seed))
        found = finish(program, decisions, Resharder(machine, axes), rules, "random")
        assert found.memory.peak_bytes > sum(t.itemsize * _local(t, axes) for t in found.graph.inputs)


def test_what_only_matrix_units_read_takes_half_on_tpu():
    """Of x, w and the result N each, and of what is sorted a half; all of it where it is sorted again."""
    tpu = dataclasses.replace(MACHINE.device, compiler="tpu")
    rounded = lambda x, w: jnp.reshape(sort(x), (64, 64)) @ w  # noqa: E731
    exact = lambda x, w: jnp.matmul(sort(x), w, precision="highest")  # noqa: E731
    both = lambda x, w: sort(x) @ w + sort(sort(x))  # noqa: E731
    assert peak(rounded, f32(64, 64), f32(64, 64), device=tpu).peak_bytes == 3.5 * N
    assert peak(rounded, f32(64, 64), f32(64, 64)).peak_bytes == 4 * N
    assert peak(exact, f32(64, 64), f32(64, 64), device=tpu).peak_bytes == 4 * N
    assert peak(both, f32(64, 64), f32(64, 64), device=tpu).peak_bytes >= 5 * N


def test_what_waits_long_leaves_the_chip():
    """The first of many sorted arrays is read at once, and again at the end."""
    tpu = dataclasses.replace(MACHINE.device, compiler="tpu", chip_bytes=3 * N, memory_bandwidth=1e6)

    def f(x, times):
        first = last = sort(x)
        for _ in range(times):
            last = sort(last)
        return first + last

    assert peak(lambda x: f(x, 3), f32(64, 64), device=tpu).peak_bytes == 2 * N + TUPLE
    assert peak(lambda x: f(x, 300), f32(64, 64), device=tpu).peak_bytes == 3 * N + 3 * TUPLE
