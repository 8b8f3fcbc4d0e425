"""Cheapest paths between layouts: against a plain Dijkstra, and executed on eight devices."""

import functools
import heapq
import itertools
import math
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from unity_jax import _compat
from unity_jax.lower.moves import apply_move
from unity_jax.machine.machine import Machine
from unity_jax.network import reshard
from unity_jax.network.communication import collective_seconds
from unity_jax.network.reshard import Resharder, move_bytes, turning_seconds
from unity_jax.pcg.layout import Layout
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.pcg.parallel import Move

ONE = MeshAxes(("a",), (8,))
TWO = MeshAxes(("a", "b"), (2, 4))
THREE = MeshAxes(("a", "b", "c"), (2, 2, 2))
H100 = Machine.preset("h100:8")


def all_layouts(rank, mesh, reductions=("sum",)):
    """Every canonical layout, written independently of the resharder's own numbering."""
    found = set()
    for reduction in reductions:
        for where in itertools.product([*range(rank), "copy", "partial"], repeat=len(mesh.names)):
            place = dict(zip(mesh.names, where, strict=True))
            dims = tuple(tuple(a for a in mesh.names if place[a] == d) for d in range(rank))
            found.add(Layout(dims, tuple((a, reduction) for a in mesh.names if place[a] == "partial")))
    return sorted(found, key=str)


def aligned(n, finer, coarser):
    """Whether shards of the finer split concatenate to those of the coarser one (its padding can be cut if unsplit)."""
    starts = [[i * -(-n // k) for i in range(k + 1)] for k in (finer, coarser)]
    return coarser == 1 or starts[0][:: finer // coarser] == starts[1]


def neighbours(shape, mesh, layout, reduction):
    """Every legal move from a layout, read off the definition."""
    free = tuple(a for a in mesh.names if a not in layout.axis_dim and a not in layout.partial_axes)

    def make(kind, axes, dim=None, target=None):
        dims = list(layout.dims)
        partial = dict(layout.partial)
        for a in axes:
            partial.pop(a, None)
        for at, gains in ((dim, kind in ("partition", "reduce_scatter")), (target, True)):
            if at is None:
                continue
            grown = dims[at] + axes if gains else dims[at][: -len(axes)]
            many, few = (grown, dims[at]) if gains else (dims[at], grown)
            if mesh.ordered(grown) != grown or not aligned(shape[at], mesh.size(many), mesh.size(few)):
                return
            dims[at] = grown
        if kind == "replicate":
            partial.update(dict.fromkeys(axes, reduction))
        after = Layout(tuple(dims), tuple((a, partial[a]) for a in mesh.names if a in partial))
        yield Move(kind, axes, dim, target, layout, after)

    def subsets(axes):
        return itertools.chain.from_iterable(itertools.combinations(axes, n) for n in range(1, len(axes) + 1))

    dimensions = range(len(shape))
    for axes in subsets(free):
        yield from make("replicate", axes)
        for d in dimensions:
            yield from make("partition", axes, d)
    for axes in subsets(layout.partial_axes):
        yield from make("reduce", axes)
        if reduction == "sum":
            for d in dimensions:
                yield from make("reduce_scatter", axes, d)
    for d in dimensions:
        for i in range(len(layout.dims[d])):
            yield from make("combine", layout.dims[d][i:], d)
            for t in set(dimensions) - {d}:
                yield from make("exchange", layout.dims[d][i:], d, t)


def move_seconds(machine, move, shape, dtype, mesh):
    local = math.prod(move.after.local_shape(shape, mesh)) * np.dtype(dtype).itemsize
    seconds = reshard._PASSES[move.kind] * local / machine.device.memory_bandwidth
    if move.collective:
        nbytes = move_bytes(move, shape, dtype, mesh)
        seconds += turning_seconds(move, shape, dtype, mesh, machine.device)
        seconds += collective_seconds(machine, mesh, move.collective, nbytes, move.axes)
    return seconds


def dijkstra(machine, shape, dtype, mesh, source, reduction):
    best, queue = {}, [(0.0, 0, source)]
    count = itertools.count(1)
    while queue:
        seconds, _, layout = heapq.heappop(queue)
        if layout in best:
            continue
        best[layout] = seconds
        for move in neighbours(shape, mesh, layout, reduction):
            cost = move_seconds(machine, move, shape, dtype, mesh)
            heapq.heappush(queue, (seconds + cost, next(count), move.after))
    return best


@pytest.mark.parametrize(
    ("machine", "mesh", "shape", "reduction"),
    [
        ("h100:8", ONE, (64,), "sum"),
        ("h100:8", ONE, (12, 7), "sum"),
        ("h100:2x4", TWO, (), "sum"),
        ("h100:2x4", TWO, (512, 1024), "sum"),
        ("h100:2x4", TWO, (30, 50257), "sum"),
        ("h100:2x4", TWO, (64, 64), "max"),
        ("v5e:2x4", TWO, (7, 1, 64), "sum"),
        ("cpu:8", THREE, (7, 6), "sum"),
        ("cpu:8", THREE, (64,), "min"),
    ],
)
def test_table_equals_dijkstra(machine, mesh, shape, reduction):
    machine = Machine.preset(machine)
    layouts = tuple(all_layouts(len(shape), mesh, (reduction,)))
    resharder = Resharder(machine, mesh)
    table = resharder.table(shape, "float32", layouts)
    for i, source in enumerate(layouts):
        best = dijkstra(machine, shape, "float32", mesh, source, reduction)
        np.testing.assert_allclose(table[i], [best[t] for t in layouts], rtol=1e-12)
        legal = set(itertools.chain.from_iterable(neighbours(shape, mesh, at, reduction) for at in layouts))
        for j, target in enumerate(layouts):
            path = resharder.path(shape, "float32", source, target)
            assert legal.issuperset(path)
            ends = [source, *(m.after for m in path)]
            assert [m.before for m in path] == ends[:-1]
            assert ends[-1] == target
            cost = sum(move_seconds(machine, m, shape, "float32", mesh) for m in path)
            assert cost == pytest.approx(table[i, j], rel=1e-8)


def one(kinds, source, target, shape=(64, 64), mesh=TWO, dtype="float32"):
    path = Resharder(H100, mesh).path(shape, dtype, source, target)
    assert [m.kind for m in path] == kinds
    return path


def test_the_moves_people_know():
    rows, columns = Layout((("a",), ())), Layout(((), ("a",)))
    copy, partial = Layout(((), ())), Layout(((), ()), (("a", "sum"),))
    assert one(["partition"], copy, rows) == (Move("partition", ("a",), 0, None, copy, rows),)
    assert one(["combine"], columns, copy)[0].dim == 1
    assert one(["reduce"], partial, copy)[0].axes == ("a",)
    assert one(["reduce_scatter"], partial, columns)[0].dim == 1
    move = one(["exchange"], rows, columns)[0]
    assert (move.dim, move.target_dim) == (0, 1)
    assert one(["replicate"], copy, partial)[0].after == partial
    assert one([], rows, rows) == ()
    both = Layout((("a", "b"), ()))
    assert one(["combine"], both, copy)[0].axes == ("a", "b")  # one collective, not two
    assert str(one(["exchange"], both, Layout((("a",), ("b",))))[0]) == "exchange [a+b,.] -> [a,b]"


def test_a_path_through_a_third_layout_keeps_shards_small():
    # To drop axis "a" from the major place of the rows, go through the columns: nothing is ever gathered whole.
    big = (4096, 4096)
    path = one(["exchange", "exchange", "combine"], Layout((("a", "b"), ())), Layout((("b",), ())), shape=big)
    assert [str(m.after) for m in path] == ["[.,a+b]", "[b,a]", "[b,.]"]


def test_moves_that_would_misalign_are_not_taken():
    source, target = Layout((("a", "b"),)), Layout((("a",),))  # 30 over 8: four each; over 2: fifteen
    path = one(["combine", "partition"], source, target, shape=(30,))
    assert path[0].after.is_replicated
    assert len(one(["combine"], source, target, shape=(32,))) == 1
    assert len(one(["combine"], source, target, shape=(31,))) == 1  # the padding is at the end on both sides


@pytest.mark.parametrize(
    ("kind", "source", "target", "shape", "elements"),
    [
        ("combine", Layout((("b",), ())), Layout(((), ())), (30, 5), 32 * 5),
        ("partition", Layout(((), ())), Layout((("b",), ())), (30, 5), 0),
        ("reduce", Layout(((), ("a",)), (("b", "sum"),)), Layout(((), ("a",))), (30, 5), 30 * 3),
        ("reduce_scatter", Layout(((), ()), (("b", "sum"),)), Layout((("b",), ())), (30, 5), 32 * 5),
        ("exchange", Layout((("b",), ())), Layout(((), ("b",))), (30, 5), 8 * 8),
        ("replicate", Layout(((), ())), Layout(((), ()), (("b", "sum"),)), (30, 5), 0),
    ],
)
def test_move_bytes(kind, source, target, shape, elements):
    (move,) = one([kind], source, target, shape=shape)
    assert move_bytes(move, shape, "bfloat16", TWO) == 2 * elements
    assert move_bytes(move, shape, "bool", TWO) == elements
    assert move_bytes(move, shape, jax.random.key(0).dtype, TWO) == 8 * elements


def test_reductions_finish_before_another_begins():
    def partial(*reductions):
        return Layout(((), ()), tuple(zip("ab", reductions, strict=False)))

    total, largest, mixed, copy = partial("sum"), partial("max"), partial("sum", "max"), Layout(((), ()))
    layouts = (total, largest, mixed, copy)
    resharder = Resharder(H100, TWO)
    table = resharder.table((8, 8), "float32", layouts)
    assert np.isinf(table[2]).tolist() == [True, True, False, True]
    assert np.isinf(table[:, 2]).tolist() == [True, True, False, True]
    assert np.all(np.diag(table) == 0)
    path = resharder.path((8, 8), "float32", total, largest)
    assert path[-1].after == largest
    assert sum(move_seconds(H100, m, (8, 8), "float32", TWO) for m in path) == pytest.approx(table[0, 1])
    assert "reduce_scatter" not in [m.kind for m in resharder.path((8, 8), "float32", largest, Layout((("a",), ())))]
    with pytest.raises(ValueError, match="do not commute"):
        resharder.path((8, 8), "float32", mixed, copy)


@pytest.mark.parametrize(
    "layout", [Layout((("b", "a"), ())), Layout((("a",), ("a",))), Layout((("c",), ())), Layout((("a",),))], ids=str
)
def test_layouts_that_are_not_canonical(layout):
    with pytest.raises(ValueError, match="not one of a rank-2 tensor on mesh a=2, b=4"):
        Resharder(H100, TWO).table((8, 8), "float32", (layout,))


def test_axes_of_size_one_and_empty_tensors():
    mesh = MeshAxes(("a", "b"), (8, 1))
    layouts = tuple(all_layouts(2, mesh))
    for shape in ((16, 16), (0, 16), (1, 1)):
        resharder = Resharder(H100, mesh)
        assert np.isfinite(resharder.table(shape, "float32", layouts)).all()
        for s, t in itertools.product(layouts, repeat=2):
            assert (resharder.path(shape, "float32", s, t) == ()) == (s == t)


def test_more_bytes_never_cost_less():
    layouts = tuple(all_layouts(2, TWO))
    resharder = Resharder(H100, TWO)
    tables = [resharder.table((n, n), "float32", layouts) for n in (8, 64, 512, 4096)]
    for small, large in itertools.pairwise(tables):
        assert (small <= large).all()
    assert not tables[0].flags.writeable


# --- executed -----------------------------------------------------------------------------------------------------


def shards(mesh, shape, layout):
    """Per device, in order: its coordinates and the slices of the global array it holds (without padding)."""
    local = layout.local_shape(shape, mesh)
    for coordinates in np.ndindex(mesh.sizes):
        at = dict(zip(mesh.names, coordinates, strict=True))
        index = (functools.reduce(lambda i, a: i * mesh[a[0]] + a[1], [(a, at[a]) for a in d], 0) for d in layout.dims)
        starts = [min(i * m, n) for i, m, n in zip(index, local, shape, strict=True)]
        yield at, tuple(slice(s, min(s + m, n)) for s, m, n in zip(starts, local, shape, strict=True))


def split(rng, value, mesh, layout):
    """(devices, *local) shards of `value`; padding is garbage and partial terms are random."""
    reduction = layout.partial[0][1] if layout.partial else None
    sizes = [mesh[a] for a in layout.partial_axes]
    terms = np.broadcast_to(value, (*sizes, *value.shape)).copy()
    if reduction:
        lead = (math.prod(sizes), *value.shape)
        noise = rng.integers(0, 2 if value.dtype == bool else 3, lead).astype(value.dtype)
        flat = terms.reshape(lead)
        keep = rng.integers(0, lead[0], value.shape)
        others = np.arange(lead[0]).reshape(-1, *[1] * value.ndim) != keep
        if value.dtype == bool:
            flat = np.where(others, flat & noise if reduction != "min" else flat | noise, flat)
        elif reduction == "sum":
            noise = np.where(others, noise, 0)
            flat = np.where(others, noise, flat - noise.sum(axis=0))
        else:
            flat = np.where(others, flat - noise if reduction == "max" else flat + noise, flat)
        terms = flat.reshape(*sizes, *value.shape).astype(value.dtype)
    local = layout.local_shape(value.shape, mesh)
    out = []
    for at, where in shards(mesh, value.shape, layout):
        garbage = np.full(local, 99, value.dtype)
        piece = terms[tuple(at[a] for a in layout.partial_axes)][where]
        garbage[tuple(slice(0, n) for n in piece.shape)] = piece
        out.append(garbage)
    return np.stack(out)


def check(got, value, mesh, layout):
    """Whether the shards `got` are `value` in `layout`; reduces partial terms."""
    combine = {"sum": np.add, "max": np.maximum, "min": np.minimum}
    groups = {}
    for piece, (at, where) in zip(got, shards(mesh, value.shape, layout), strict=True):
        assert piece.shape == layout.local_shape(value.shape, mesh)
        valid = piece[tuple(slice(0, w.stop - w.start) for w in where)]
        key = tuple(i for a, i in at.items() if a not in layout.partial_axes)
        groups.setdefault(key, (where, []))[1].append(valid)
    for where, pieces in groups.values():
        reduction = combine[layout.partial[0][1]] if layout.partial else None
        total = functools.reduce(reduction, pieces) if reduction else pieces[0]
        np.testing.assert_array_equal(total, value[where])


CASES = [
    (ONE, (13,), "float32", ("sum",)),
    (ONE, (3, 8), "bfloat16", ("sum", "max")),
    (TWO, (16, 8), "float32", ("sum",)),
    (TWO, (7, 5), "int32", ("sum", "min")),
    (TWO, (30, 1, 8), "bool", ("sum", "max", "min")),
    (TWO, (31, 6), "float64", ("sum", "max")),
    (TWO, (), "float32", ("sum", "max")),
    (THREE, (8, 8, 8), "float32", ("sum",)),
    (THREE, (9, 4), "float32", ("sum",)),
]


@pytest.mark.parametrize(("mesh", "shape", "dtype", "reductions"), CASES)
def test_paths_executed(make_mesh, mesh, shape, dtype, reductions):
    """Random resharding of random values, on eight devices: right values, and exactly the planned collectives."""
    pick, rng = random.Random(0), np.random.default_rng(0)
    layouts = all_layouts(len(shape), mesh, reductions)
    resharder = Resharder(Machine.preset("h100:8"), mesh)
    pairs = list(itertools.product(layouts, repeat=2))
    pairs = pairs if len(pairs) <= 40 else pick.sample(pairs, 40)
    paths = [resharder.path(shape, dtype, s, t) for s, t in pairs]

    with jax.enable_x64(dtype == "float64"):
        value = rng.integers(0, 2 if dtype == "bool" else 9, shape)
        value = np.asarray(value).astype(jnp.dtype(dtype))
        stacked = [split(rng, value, mesh, source) for source, _ in pairs]

        def body(*locals_):
            out = []
            for x, path in zip(locals_, paths, strict=True):
                y = x[0]
                for move in path:
                    y = apply_move(y, move, shape, mesh)
                out.append(y[None])
            return out

        axes = make_mesh(**dict(zip(mesh.names, mesh.sizes, strict=True)))
        run = jax.jit(_compat.shard_map(body, axes, P(mesh.names), P(mesh.names)))
        text = run.lower(*stacked).as_text()
        results = run(*stacked)
        assert all(r.dtype == jnp.dtype(dtype) for r in results)
        results = [np.asarray(r) for r in results]

    planned = [m.collective for path in paths for m in path if m.collective]
    for kind in ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "collective_permute"):
        assert len(re.findall(rf'"?stablehlo\.{kind}"?\(', text)) == planned.count(kind), kind
    for result, (_, target) in zip(results, pairs, strict=True):
        check(result, value, mesh, target)


def test_a_tpu_turns_arrays_around_an_all_to_all():
    """Eight parts of 64 channels lie in rows of 128 lanes, 28 of them in tiles of 8, and in float32 on the way; three
    passes."""
    shape, mesh = (256, 28, 28, 512), MeshAxes(("a",), (8,))
    move = Move("exchange", ("a",), 3, 0, Layout(((), (), (), ("a",))), Layout((("a",), (), (), ())))
    back = Move("exchange", ("a",), 0, 3, move.after, move.before)
    tpu, plain = Machine.preset("v5e:2x4").device, 2 * math.prod(shape) / 8
    bandwidth = tpu.memory_bandwidth * tpu.memory_efficiency
    apart = 2 * 32 / 28
    expected = 3 * (1 + apart + 2 * apart) * plain / bandwidth
    assert turning_seconds(back, shape, "bfloat16", mesh, tpu) == pytest.approx(expected)
    assert turning_seconds(move, shape, "bfloat16", mesh, H100.device) == 0
    gather = Move("combine", ("a",), 3, None, move.before, Layout(((), (), (), ())))
    assert turning_seconds(gather, shape, "bfloat16", mesh, tpu) == 0
