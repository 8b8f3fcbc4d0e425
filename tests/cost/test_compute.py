"""Seconds of kernels on a device whose numbers are easy to divide by."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

from unity_jax.aot.cycles import CLOCKS
from unity_jax.cost.compute import op_work, total
from unity_jax.machine.device import Device, weakest
from unity_jax.machine.machine import Machine
from unity_jax.machine.tiling import stored_bytes
from unity_jax.ops.rule import Shard
from unity_jax.ops.rules import rule_of
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.program import trace
from unity_jax.xla.dots import product_size, split
from unity_jax.xla.kernel import Use
from unity_jax.xla.layout_constraints import THIN

DEVICE = Device("toy", (("float32", 1e12), ("vector", 1e11)), 1e9, 1e10, 1e9, kernel_overhead=1e-6)


def shard(fn, *args, sizes=(1,), strategy=None, name=None):
    """The first op (called `name`) of a program under a strategy, or whole."""
    op = next(op for op in trace(fn, args, {}).graph.ops if name in (None, op.name))
    mesh = MeshAxes(tuple("xyz"[: len(sizes)]), sizes)
    return Shard(op, rule_of(op), mesh, strategy or (-1,) * len(sizes))


def f32(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def matmul(m, k, n):
    return shard(lambda x, y: x @ y, f32(m, k), f32(k, n))


def test_the_slower_part_decides():
    work = op_work(matmul(1000, 1000, 1000), DEVICE, Use((1, 1, 1), 1))
    assert work.matrix == pytest.approx(2e9 / 1e12)
    assert work.memory == pytest.approx(3 * 4e6 / 1e10)
    assert work.seconds(DEVICE) == pytest.approx(1e-6 + 2e-3)
    whole = dataclasses.replace(DEVICE, compiler="cpu")  # XLA:GPU would split the depth of such a narrow one
    assert op_work(matmul(10, 1000, 1000), whole, Use((1, 1, 1), 1)).seconds(whole) == pytest.approx(1e-6 + 4.08e-4)


def test_only_what_goes_through_memory_counts():
    add = shard(jnp.add, f32(1000), f32(1000))
    assert op_work(add, DEVICE, Use((1, 1, 1), 0)).memory == pytest.approx(12_000 / 1e10)
    assert op_work(add, DEVICE, Use((0, 2, 0), 0)).memory == pytest.approx(8_000 / 1e10)


def test_shards_of_the_same_sizes_share_their_work():
    op = next(op for op in trace(jnp.add, (f32(64, 64), f32(64, 64)), {}).graph.ops)
    rule, mesh, use = rule_of(op), MeshAxes(("x", "y"), (2, 4)), Use((1, 1, 1), 1)
    rows = [Shard(op, rule, mesh, (0, -1)), Shard(op, rule, mesh, (0, 2)), Shard(op, rule, mesh, (1, -1))]
    assert op_work(rows[0], DEVICE, use) is op_work(rows[1], DEVICE, use), "partial sums along y are as large as copies"
    assert (DEVICE, use) not in rows[2].works, "columns are not rows"


def test_small_matmuls_fill_tiles_and_units():
    device = dataclasses.replace(DEVICE, matmul_tile=(128, 128, 32), matmul_units=4)
    one = op_work(matmul(128, 64, 128), device, Use((1, 1, 1), 0)).matrix
    assert op_work(matmul(100, 33, 100), device, Use((1, 1, 1), 0)).matrix == pytest.approx(one)
    assert op_work(matmul(256, 64, 256), device, Use((1, 1, 1), 0)).matrix == pytest.approx(one), "four tiles at once"
    assert op_work(matmul(384, 64, 256), device, Use((1, 1, 1), 0)).matrix == pytest.approx(2 * one)


def test_results_leave_the_matrix_unit_at_their_own_rate():
    device = dataclasses.replace(DEVICE, results_per_second=1e9)
    assert op_work(matmul(1000, 1, 1000), device, Use((1, 1, 1), 0)).seconds(device) == pytest.approx(1e-3)


def test_what_is_summed_leaves_the_chip():
    device = dataclasses.replace(DEVICE, results_per_second=1e9, fast_results_per_second=4e9, fast_bytes=1e7)
    use = Use((1, 1, 1), 0)
    assert op_work(matmul(1000, 1, 1000), device, use).results == pytest.approx(2.5e-4)
    assert op_work(matmul(1000, 1, 1000), device, use._replace(summed=True)).results == pytest.approx(1e-3)


def test_sizes_of_products():
    batched = shard(lambda x, y: jnp.einsum("bmk,bkn->bmn", x, y), f32(3, 5, 7), f32(3, 7, 11))
    assert product_size(batched) == (3, 5, 11, 7)
    conv = jax.lax.conv_general_dilated
    images = shard(lambda x, w: conv(x, w, (1, 1), "SAME"), f32(2, 6, 8, 8), f32(10, 6, 3, 3))
    assert product_size(images) == (1, 2 * 8 * 8, 10, 6 * 9)
    grouped = shard(lambda x, w: conv(x, w, (1, 1), "SAME", feature_group_count=2), f32(2, 6, 8, 8), f32(10, 3, 3, 3))
    assert product_size(grouped) == (2, 2 * 8 * 8, 5, 3 * 9)


@pytest.mark.parametrize(
    ("shape", "minor", "expected"),
    [
        ((), None, 4),
        ((1000, 16), None, 16 * 1024 * 4),  # laid out with 1000 last
        ((1000, 16), (1,), 1000 * 128 * 4),
        ((256, 128), None, 256 * 128 * 4),
        ((3, 128), None, 4 * 128 * 4),
        ((64, 9, 16), (1, 2), 64 * 16 * 128 * 4),
        ((0, 16), None, 0),
    ],
)
def test_arrays_are_padded_to_tiles(shape, minor, expected):
    device = dataclasses.replace(DEVICE, layout_tile=(8, 128))
    assert stored_bytes(device, shape, 4, minor) == pytest.approx(expected)
    n = 1
    for d in shape:
        n *= d
    assert stored_bytes(DEVICE, shape, 4, minor) == 4 * n


def test_small_arrays_stay_on_the_chip():
    device = dataclasses.replace(DEVICE, fast_bytes=5_000, fast_bandwidth=1e11)
    add = shard(jnp.add, f32(1000), f32(1000))
    work = op_work(add, device, Use((1, 1, 1), 0))
    assert (work.memory, work.chip) == (0, pytest.approx(12_000 / 1e11))


@pytest.mark.parametrize("sizes", [(512, 512, 512), (8, 512, 512), (8, 8, 8)])
def test_an_op_takes_as_long_as_on_its_slowest_device(sizes):
    toy = dataclasses.replace(DEVICE, compiler="cpu")
    slow = dataclasses.replace(toy, peak_flops=(("float32", 4e11), ("vector", 1e11)))
    far = dataclasses.replace(toy, memory_bandwidth=5e9)

    def seconds(device):
        return op_work(matmul(*sizes), device, Use((1, 1, 1), 1)).seconds(device)

    assert seconds(weakest((toy, slow, far))) == max(map(seconds, (toy, slow, far)))


@pytest.mark.parametrize(
    ("rows", "depth", "columns", "dtype", "parts"),
    [
        (128, 4096, 128, "float32", 32),
        (128, 4100, 128, "float32", 32),
        (1024, 1024, 1024, "bfloat16", 1),
        (16, 1760, 1760, "bfloat16", 8),
        (64, 1760, 1760, "bfloat16", 8),
        (1760, 12800, 29, "bfloat16", 16),
        (512, 8192, 512, "bfloat16", 8),
        (64, 512, 512, "float32", 8),
        (256, 1024, 256, "float32", 8),
        (4096, 512, 64, "bfloat16", 1),
        (2048, 4096, 64, "bfloat16", 8),
    ],
)
def test_the_depth_of_products_is_split_as_the_compiler_does(rows, depth, columns, dtype, parts):
    """As in programs that XLA:GPU of jaxlib 0.10.2 made for an H100."""
    x, y = jax.ShapeDtypeStruct((rows, depth), dtype), jax.ShapeDtypeStruct((depth, columns), dtype)
    assert split(shard(lambda x, y: x @ y, x, y)).count == parts


def test_narrow_rows_are_turned_to_be_gathered():
    tiled = dataclasses.replace(DEVICE, layout_tile=(8, 128))
    table, ids = f32(1000, 16), jax.ShapeDtypeStruct((50,), jnp.int32)
    gather = shard(lambda t, i: t.at[i].get(mode="clip"), table, ids, name="gather")
    use = Use((1, 1, 1), 1, rows=(2, 0, 1))  # the table is an argument
    plain, padded = (op_work(gather, device, use) for device in (DEVICE, tiled))
    assert plain.memory * 1e10 == pytest.approx(2 * 50 * 16 * 4 + 50 * 4)
    assert plain.turned == 0
    assert padded.memory == pytest.approx(8 * plain.memory)
    assert padded.turned * 1e10 == pytest.approx(16 * 1024 * 4 + 1000 * 128 * 4)


def tpu(**numbers):
    return dataclasses.replace(DEVICE, compiler="tpu", **numbers)


def test_values_that_are_rounded_or_reduced_are_passed_over_once_more():
    half = jax.ShapeDtypeStruct((1000,), jnp.bfloat16)
    whole = op_work(shard(jnp.add, f32(1000), f32(1000)), tpu(), Use((1, 1, 1), 0))
    rounded = op_work(shard(jnp.add, half, half), tpu(), Use((1, 1, 1), 0))
    reduced = op_work(
        shard(lambda x: jax.lax.reduce_sum_p.bind(x, axes=(0,), out_sharding=None), f32(10, 100)), tpu(), Use((1, 1), 0)
    )
    assert whole.swept == 0
    assert rounded.swept * 1e10 == pytest.approx(1000 * 4)
    assert reduced.swept * 1e10 == pytest.approx(1000 * 4)
    assert total([rounded, reduced]).swept == pytest.approx(rounded.swept), "one pass for a kernel"
    assert rounded.seconds(DEVICE) == pytest.approx(rounded.memory + rounded.swept)


def test_a_kernel_of_one_instruction_takes_longer():
    device = tpu(unfused_per_second=1e9)
    add = shard(jnp.add, f32(1000), f32(1000))
    assert op_work(add, device, Use((1, 1, 1), 0, alone=True)).swept == pytest.approx(1e-6)
    assert op_work(add, device, Use((1, 1, 1), 0)).swept == 0


def test_vectors_times_matrices_are_added_up_element_by_element():
    """64 products of a vector of 2 with a matrix of 2 x 16: 64 along the lanes, of 128."""
    device = tpu(matmul_tile=(8, 128, 128), layout_tile=(8, 128))
    use = Use((1, 1, 1), 0)
    vector = op_work(shard(lambda x, w: jnp.einsum("bk,bkc->bc", x, w), f32(64, 2), f32(64, 2, 16)), device, use)
    assert (vector.matrix, vector.turned) == (0, 0)
    assert vector.swept * 1e10 == pytest.approx(128 * 2 * 16 * 4)
    rows = op_work(shard(lambda x, w: jnp.einsum("bqk,bkc->bqc", x, w), f32(64, 2, 2), f32(64, 2, 16)), device, use)
    assert rows.matrix > 0 and rows.swept == 0


def test_a_pass_over_thin_rows_takes_as_long_as_over_whole_tiles():
    device = tpu(layout_tile=(8, 128))
    tanh = shard(jnp.tanh, f32(64, 2, 16))
    packed, thin = (op_work(tanh, device, Use((1, 1), 0, rows=rows)) for rows in ((), (THIN, THIN)))
    assert packed.memory * 1e10 == pytest.approx(2 * 128 * 2 * 16 * 4)  # 64 along the lanes
    assert packed.swept == 0
    assert thin.memory * 1e10 == pytest.approx(2 * 64 * 2 * 128 * 4)  # tiles of two rows in memory
    assert thin.swept * 1e10 == pytest.approx(64 * 8 * 128 * 4)
    assert thin.turned == 0


@pytest.mark.parametrize(
    ("window", "taken", "made", "dilation", "stride", "cycles"),
    [
        ((9, 9), 4, 32, (1, 1), (1, 1), 24.9),  # several taps at once: makes more features than it takes
        ((9, 9), 4, 8, (1, 1), (1, 1), 12.6),
        ((9, 9), 16, 128, (1, 1), (1, 1), 22.5),
        ((7, 7), 32, 64, (1, 1), (1, 1), 25.4),
        ((5, 5), 64, 32, (1, 1), (1, 1), 50.9),  # tap by tap
        ((7, 7), 16, 4, (1, 1), (1, 1), 49.8),
        ((7, 7), 128, 256, (1, 1), (1, 1), 198.5),
        ((7, 7), 4, 32, (2, 1), (1, 1), 196.9),  # dilated: no zeros are multiplied
        ((7, 7), 32, 4, (2, 1), (1, 1), 25.1),
        ((7, 7), 64, 128, (2, 2), (1, 1), 25.4),
        ((7, 7), 128, 128, (2, 1), (1, 1), 99.2),  # but of many features
        ((7, 7), 128, 128, (2, 2), (1, 1), 50.2),
        ((7, 7), 32, 32, (1, 1), (2, 1), 48.9),  # strides
        ((7, 7), 64, 64, (1, 1), (2, 2), 91.6),
    ],
)
def test_a_convolution_takes_the_cycles_that_xla_estimates_for_v5e(window, taken, made, dilation, stride, cycles):
    """Per eight positions, in bfloat16; 16 images."""
    device = Machine.preset("v5e:1x1").device
    pads = [((n - 1) // 2, n // 2 + d - 1) for n, d in zip(window, dilation, strict=True)]

    def f(x, w):
        dims = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, w, stride, pads, lhs_dilation=dilation, dimension_numbers=dims)

    x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((16, 20, 104, taken), (*window, taken, made)))
    work = op_work(shard(f, x, w), device, Use((1, 1, 1), 0))
    positions = 16 * 20 * 104 * math.prod(dilation) / math.prod(stride)
    estimated = work.matrix * device.matmul_efficiency * CLOCKS["v5e"] * 8 / positions
    assert 0.7 < estimated / cycles < 1.3


@pytest.mark.parametrize(
    ("images", "size", "features", "cycles"),
    [(1, 128, 64, 33.3), (4, 128, 64, 29.3), (2, 64, 16, 25.7), (2, 64, 128, 55.7), (2, 64, 256, 118)],
)
def test_a_step_of_two_convolutions_on_few_images_pays_for_strips_of_them(images, size, features, cycles):
    """Per position, in bfloat16, forward and backward: what XLA estimates for v5e beyond a step on eight images."""
    device = Machine.preset("v5e:1x1").device

    dims = ("NHWC", "HWIO", "NHWC")

    def loss(x, first, second):
        for w in (first, second):
            x = jax.nn.relu(jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=dims))
        return (x.astype(jnp.float32) ** 2).sum()

    def turned(n):
        image, window = (n, size, size, features), (3, 3, features, features)
        arguments = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in (image, window, window))
        ops = trace(jax.grad(loss, (0, 1, 2)), tuple(arguments), {}).graph.ops
        shards = [Shard(op, rule_of(op), MeshAxes(("x",), (1,)), (-1,)) for op in ops if "conv_" in op.name]
        assert len(shards) == 6
        return sum(op_work(s, device, Use((1, 1, 1), 0)).turned for s in shards)

    assert turned(8) == 0
    per_position = turned(images) * CLOCKS["v5e"] / (images * size**2)
    assert 0.8 < per_position / cycles < 1.25


def conv(features, groups, images=16, stride=1):
    def f(x, w):
        dims, strides = ("NHWC", "HWIO", "NHWC"), (stride, stride)
        return jax.lax.conv_general_dilated(x, w, strides, "SAME", dimension_numbers=dims, feature_group_count=groups)

    return f, f32(images, 8, 8, features), f32(3, 3, features // groups, features)


def conv_gradients(f, x, w):
    """For the images and for the kernel."""
    y = jax.eval_shape(f, x, w)
    images = shard(lambda x, w, y: jax.vjp(lambda x: f(x, w), x)[1](y)[0], x, w, y, name="conv_general_dilated")
    kernel = shard(lambda x, w, y: jax.vjp(lambda w: f(x, w), w)[1](y)[0], x, w, y, name="conv_general_dilated")
    return images, kernel


def test_a_grouped_convolution_multiplies_per_group_and_position():
    device = tpu(matmul_tile=(8, 128, 128), layout_tile=(8, 128))
    f, *args = conv(32, 8)
    products = 8 * 64 * 9  # groups, positions of the result and of the window
    images, kernel = conv_gradients(f, *args)
    for made, rows in ((shard(f, *args), 8), (images, 8), (kernel, 4)):
        work = op_work(made, device, Use((1, 1, 1), 0))
        assert work.matrix == pytest.approx(2 * products * rows * 128 * 128 / 1e12)


def test_images_are_turned_for_a_grouped_convolution_and_its_kernel_gradient_takes_those():
    device = tpu(matmul_tile=(8, 128, 128), layout_tile=(8, 128))
    for count, inside in ((16, 128), (128, 128), (256, 256)):  # images, in lanes
        f, *args = conv(32, 8, images=count)
        images, kernel = conv_gradients(f, *args)
        outside = 4 * 64 * count * 128 * (32 / 128 if count >= 128 else 1)  # images or features in lanes
        for made in (shard(f, *args), images):
            turned = op_work(made, device, Use((1, 1, 1), 0)).turned * 1e10
            assert turned == pytest.approx(2 * (outside + 4 * 64 * inside * 32))
        assert op_work(kernel, device, Use((1, 1, 1), 0)).turned == 0


def test_a_strided_grouped_convolution_waits_for_memory_and_its_gradient_multiplies_with_zeros():
    device = tpu(matmul_tile=(8, 128, 128), layout_tile=(8, 128), fast_bytes=4.0 * 16 * 32 * 128)
    f, *args = conv(32, 8, stride=2)
    product = 2 * 8 * 128 * 128 / 1e12 * 8 * 16 * 9  # 4 x 4 positions of the result
    images, _ = conv_gradients(f, *args)
    large = 4 * 64 * 32 * 128 / 1e10  # 8 x 8 positions in memory; 4 x 4 stay on the chip
    assert op_work(shard(f, *args), device, Use((1, 1, 1), 0)).matrix == pytest.approx(product + large)
    assert op_work(images, device, Use((1, 1, 1), 0)).matrix == pytest.approx(2 * product + large)


def test_taps_fill_the_depth_of_a_tile_together():
    device = tpu(matmul_tile=(8, 128, 128))
    for features, depth in ((64, 5 * 128), (16, 2 * 128), (256, 9 * 256)):
        f, *args = conv(features, 1)
        work = op_work(shard(f, *args), device, Use((1, 1, 1), 0))
        rows, columns = 16 * 64, -(-features // 128) * 128
        assert work.matrix == pytest.approx(2 * rows * columns * depth / 1e12)


def test_borders_of_neighbours_are_joined_by_a_copy():
    """Images of 8 x 8 in halves of 4 rows: half of the operand is read and written once more."""
    f, *args = conv(16, 1)
    whole = shard(f, *args)
    rows = next(i for i, factor in enumerate(whole.rule.factors) if factor.halo)
    halves = shard(f, *args, sizes=(2,), strategy=(rows,))
    half = 4 * 16 * 4 * 8 * 16
    assert op_work(halves, DEVICE, Use((1, 1, 1), 0)).turned == pytest.approx(2 * half / 1e10)
    assert op_work(whole, DEVICE, Use((1, 1, 1), 0)).turned == 0


def test_a_kernel_gradient_takes_joined_images_on_tpu_only():
    f, *args = conv(16, 1)
    _, whole = conv_gradients(f, *args)
    rows = next(i for i, factor in enumerate(whole.rule.factors) if factor.halo)
    halves = Shard(whole.op, whole.rule, MeshAxes(("a",), (2,)), (rows,))
    half = 4 * 16 * 4 * 8 * 16
    assert op_work(halves, DEVICE, Use((1, 1, 1), 0)).turned == pytest.approx(2 * half / 1e10)
    assert op_work(halves, tpu(matmul_tile=(8, 128, 128)), Use((1, 1, 1), 0)).turned == 0


def test_rows_are_read_and_added_to_one_after_the_other():
    """A gather reads its rows; a scatter adds them to a table on the chip, to a sorted part of one, or unsorted."""
    device = tpu(layout_tile=(8, 128), gathered_rows_per_second=1e6, scattered_rows_per_second=1e5)

    def seconds(rows, table, zeros=False, dtype=jnp.float32):
        args = jax.ShapeDtypeStruct((table, 128), dtype), jax.ShapeDtypeStruct((rows,), jnp.int32)
        updates = jax.ShapeDtypeStruct((rows, 128), dtype)
        scatter = shard(lambda t, i, u: t.at[i].add(u), *args, updates, name="scatter-add")
        return op_work(scatter, device, Use((1, 1, 1, 1), 1, zeros=zeros))

    gather = shard(lambda t, i: t[i], f32(100_000, 128), jax.ShapeDtypeStruct((1000,), jnp.int32), name="gather")
    assert op_work(gather, device, Use((1, 1, 1), 1)).swept == pytest.approx(1e-3)
    assert op_work(gather, DEVICE, Use((1, 1, 1), 1)).swept == 0, "where nothing is known of rows, the traffic counts"
    assert seconds(1000, 1000).swept == pytest.approx(0.4 * 1e-2), "512 kB lie on the chip"
    assert seconds(1000, 100_000).swept == pytest.approx(3.7 * 1e-2), "12,500 tiles"
    assert seconds(20_000, 100_000, zeros=True).swept == pytest.approx(0.2)
    assert seconds(20_000, 100_000).swept == pytest.approx(0.55 * 0.2)
    assert seconds(20_000, 100_000, zeros=True, dtype=jnp.bfloat16).swept == pytest.approx(1.4 * 0.2)
    table, updates, rows = 100_000 * 512, 20_000 * 512, 20_000 * 4
    assert seconds(20_000, 100_000).memory * 1e10 == pytest.approx(2 * table + updates + rows), "all of it, in parts"
    assert seconds(20_000, 100_000, zeros=True).memory * 1e10 == pytest.approx(table + updates + rows)


def test_rows_that_other_devices_have_are_masked_on_tpu():
    device = tpu(layout_tile=(8, 128), gathered_rows_per_second=1e6)
    args = f32(100_000, 128), jax.ShapeDtypeStruct((1000, 4), jnp.int32)
    parts = {"sizes": (8,), "name": "gather"}
    whole, split = (
        op_work(shard(lambda t, i: t[i], *args, **parts, strategy=(s,)), device, Use((1, 1, 1), 1)) for s in (-1, 0)
    )
    rows, registers = 4000 * 128 * 4, 1000 * 8 * 128 * 4  # four rows of a register of eight
    assert (split.swept - whole.swept) * 1e10 == pytest.approx(2 * rows + 2 * registers)


@pytest.mark.parametrize(("gap", "pads", "times"), [(1, (0, 2), 1), (4, (0, 8), 9), (4, (4, 4), 1)])
def test_a_library_multiplies_with_the_gaps_of_a_dilated_kernel_of_images_padded_on_one_side(gap, pads, times):
    def matrix(gap, pads):  # 3 x 3 values are 9 x 9 with the zeros between them
        def f(x, w):
            return jax.lax.conv_general_dilated(x, w, (1, 1), [pads] * 2, rhs_dilation=(gap, gap))

        convolution = shard(f, f32(64, 256, 32, 32), f32(256, 256, 3, 3))
        return op_work(convolution, Machine.preset("h100:1").device, Use((1, 1, 1), 1)).matrix

    assert matrix(gap, pads) == pytest.approx(times * matrix(1, (1, 1)))
