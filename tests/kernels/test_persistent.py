"""Loops as one kernel: the kernel, interpreted, is the scan; what it compiles; which loops can be one."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, Mesh, NamedSharding, PartitionSpec

from tests.kernels.cells import CELLS, ROOM, SIZE, drawn, errors, gradients, loops, operands
from tests.numerics.harness import Case
from unity_jax.implement import persistable, persisted
from unity_jax.implement.record import from_json, to_json
from unity_jax.kernels.tiles import SUBLANES, nbytes
from unity_jax.machine.machine import Machine
from unity_jax.ops.persistent import NAME, loop
from unity_jax.ops.rule import Shard
from unity_jax.ops.rules import rule_of
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.program import trace
from unity_jax.search.implementing import implemented
from unity_jax.search.options import SearchOptions


@pytest.mark.parametrize("most", [256, 8])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("cell", CELLS)
def test_a_kernel_computes_what_the_scan_does(cell, dtype, most):
    """Rows in one block and in three, steps in either order; rounded alike, operation by operation."""
    arguments = {"cell": cell, "dtype": dtype, "reverse": most == 8, "most": most}
    assert [loop(shard)[0].blocks for shard in loops(**arguments)] == [1 if most == 256 else SIZE.rows // 8] * 2
    found = errors(arguments)
    assert {name: (error, bound) for name, (error, bound) in found.items() if not error <= bound} == {}


def lowered(platform, fn, given):
    """The text of what is compiled for a TPU that is not there, or for a CPU."""
    device = AbstractDevice(device_kind="TPU v5 lite", num_cores=None, platform="tpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)):
        return jax.jit(fn).trace(*given).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("cell", CELLS)
def test_kernels_are_lowered_for_tpus_that_are_not_there(cell, dtype):
    for shard in loops(cell, dtype):
        (made, block, every), given = loop(shard), operands(shard)
        on_tpu, on_cpu = (lowered(of, lambda *x: made.run(block, every, x), given) for of in ("tpu", "cpu"))  # noqa: B023
        assert on_tpu.count("tpu_custom_call") == 1 and "stablehlo.while" not in on_tpu
        assert "tpu_custom_call" not in on_cpu and "stablehlo.while" in on_cpu


OPERATIONS = {
    "float32": "abs add div exp log log1p logistic max min mul neg rsqrt sign sqrt square sub tanh".split(),
    "bool": "and not or".split(),
    "compared": "eq ge gt le lt ne".split(),
}


def everything():
    """A loop with all of them."""

    def step(h, x):
        y, results = jnp.abs(x) + 0.5, []
        for name in OPERATIONS["float32"]:
            operands = (y, y + h) if name in ("add", "div", "max", "min", "mul", "sub") else (y,)
            results.append(getattr(jax.lax, name)(*operands))
        known = [getattr(jax.lax, name)(x, h) for name in OPERATIONS["compared"]]
        known += [known[0] & known[1], known[1] | known[2], ~known[3]]
        results += [jnp.where(k, x, h) for k in known]
        results += [jax.lax.integer_pow(y, 3), x.astype(jnp.bfloat16).astype(jnp.float32), x.astype(jnp.int32) + 1]
        return jnp.tanh(h + sum(r.astype(jnp.float32) for r in results)), results[-1]

    of = trace(lambda h, xs: jax.lax.scan(step, h, xs), (drawn(8, 8), drawn(3, 8, 8)), {})
    (op,) = (op for op in persisted(of.graph, persistable(of.graph, ROOM)).ops if op.name == NAME)
    return Shard(op, rule_of(op), MeshAxes(("x",), (1,)), (-1,))


def test_kernels_have_every_operation_that_a_loop_may_have():
    shard = everything()
    asked = {"select_n", "integer_pow", "convert_element_type"}.union(*OPERATIONS.values())
    assert asked <= {op.name for op in shard.op.params["body"].graph.ops}
    (made, block, every), given = loop(shard), operands(shard)
    assert lowered("tpu", lambda *x: made.run(block, every, x), given).count("tpu_custom_call") == 1
    for a, b in zip(made.kernel(block, *given, interpret=True), made.scan(every, *given), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_rows_that_make_no_blocks_of_whole_tiles_stay_a_loop():
    body = loops("lstm", jnp.float32)[0].op.params["body"]
    few = body.__class__(body.graph, body.splits, body.rows, 16)
    assert [few.blocks(n) for n in (3, 16, 24, 32, 40, 48, 20, 17)] == [1, 1, 3, 2, 5, 3, 0, 0]


@pytest.mark.parametrize("cell", CELLS)
def test_rows_are_split_over_devices_that_do_not_divide_them(cell):
    fn, args = gradients(cell, jnp.float32, False)
    case = Case.of(fn, args).implemented()
    assert sum(op.name == NAME for op in case.program.graph.walk()) == 2
    for seed, sizes in enumerate([(8,), (5,), (2, 2), (3, 2)]):
        assert case.differences(case.run(case.sample(sizes, seed)), tolerance=1e-4) == []


def mixing(h, x):
    return h + x.mean(0), x


def looking(h, x):
    return h + x[jnp.argsort(x[:, 0])], x


def turning(h, x):
    return h + (x.T @ x)[: h.shape[0]], x


@pytest.mark.parametrize("step", [mixing, looking, turning])
def test_what_mixes_rows_or_no_kernel_has_stays_a_loop(step):
    of = trace(lambda h, xs: jax.lax.scan(step, h, xs), (drawn(8, 8), drawn(3, 8, 8)), {})
    assert persistable(of.graph, ROOM) == {}
    assert persisted(of.graph, {}) is of.graph


def test_as_many_rows_as_fit_on_the_chip():
    """Weights once, and two of what a step has of its own."""

    def fn(w, h, xs):
        return jax.lax.scan(lambda h, x: (jnp.tanh(h @ w + x), h), h, xs)

    def most(width, room):
        shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((width, width), (512, width), (3, 512, width))]
        (body,) = persistable(trace(fn, tuple(shapes), {}).graph, room).values() or [None]
        return body and body.most

    weights = nbytes((512, 512), np.dtype(np.float32))
    rows = {n: nbytes((n, 512), np.dtype(np.float32)) for n in (8, 256)}
    assert most(512, weights + 11 * rows[256]) == 256
    assert most(512, weights + 5 * rows[256]) == 64
    assert most(512, weights + 5 * rows[8]) is None
    assert nbytes((3, 130), np.dtype(jnp.bfloat16)) == 2 * SUBLANES * 256 * 2


@pytest.mark.extra("tpu-aot")
@pytest.mark.parametrize("on", ["v5e:2x4", "v6e:2x4"])
def test_tpus_compile_them(on):
    from unity_jax.aot.topologies import topology

    mesh, everywhere = Mesh(np.array(topology(on)), ("x",)), PartitionSpec()
    for shard in (*loops("lstm", jnp.bfloat16), *loops("clipped", jnp.float32), everything()):
        made, block, every = loop(shard)
        each = jax.shard_map(
            lambda *x: made.run(block, every, x),  # noqa: B023
            mesh=mesh,
            in_specs=everywhere,
            out_specs=everywhere,
            check_vma=False,
        )
        given = [
            jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=NamedSharding(mesh, everywhere)) for t in shard.op.inputs
        ]
        text = jax.jit(each).lower(*given).compile().as_text()
        assert text.count('custom_call_target="tpu_custom_call"') == 1 and " while(" not in text


def test_loops_of_a_saved_plan_are_kernels_again():
    args = jax.eval_shape(lambda: gradients("lstm", jnp.bfloat16, False)[1])
    of = trace(gradients("lstm", jnp.bfloat16, False)[0], args, {})
    made = implemented(of, Machine.preset("v5e:2x4"), SearchOptions(loops="kernel"))
    batch, kernels = made.implementations
    assert (batch.name, kernels.name) == ("loops", "persistent") and "loop as one kernel at" in str(kernels)
    again = from_json(json.loads(json.dumps(to_json(kernels))))
    assert again == kernels
    assert str(again.applied(batch.applied(of.graph))) == str(made.graph)
    with pytest.raises(LookupError, match=r"no loop at .* that a kernel can run"):
        dataclasses.replace(kernels, room=2.0**10).applied(batch.applied(of.graph))


def test_loops_are_kernels_where_that_is_faster():
    """On TPUs, whose compiler reads the weights again in each step; never where they do not fit."""

    def step(width):
        shapes = jax.ShapeDtypeStruct((width, width), jnp.float32), jax.ShapeDtypeStruct((64, 16, width), jnp.float32)

        def loss(w, xs):
            return jax.lax.scan(lambda h, x: (jnp.tanh(h @ w + x),) * 2, xs[0], xs)[1].sum()

        return trace(jax.grad(loss), shapes, {})

    def names(width, on, **options):
        made = implemented(step(width), Machine.preset(on), SearchOptions(**options)).implementations
        return [of.name for of in made]

    assert "persistent" in names(1024, "v5e:2x4") and "persistent" not in names(8192, "v5e:2x4")
    assert "persistent" not in names(1024, "h100:8") and "persistent" not in names(1024, "v5e:2x4", loops="batch")
    assert "persistent" in names(64, "h100:8", loops="kernel")
