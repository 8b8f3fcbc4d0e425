"""Hand-written SPMD programs, whose collectives are known, read back from StableHLO and from optimized HLO."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from unity_jax.aot.collectives import (
    Collective,
    bytes_difference,
    count_difference,
    stablehlo_collectives,
)
from unity_jax.aot.sites import compiled_collectives
from unity_jax.pcg.mesh import MeshAxes

AXES = MeshAxes(("data", "model"), (2, 4))
BLOCK = 8 * 8 * 4  # one device's f32[8,8]
RING = [(i, (i + 1) % 4) for i in range(4)]


@jax.jit
def shared(x):
    return lax.psum(jnp.sin(x), "data")


def scanned(x):
    return lax.scan(lambda c, _: (lax.psum(c, "model"), lax.all_gather(c, "data", tiled=True)), x, None, length=3)


def branches(x):
    return lax.cond(x[0, 0] > 0, lambda: lax.psum(x, "model"), lambda: lax.ppermute(x, "data", [(0, 1), (1, 0)]))


PROGRAMS = {
    "psum": (lambda x: lax.psum(x, "model"), [Collective("all_reduce", ("model",), BLOCK)]),
    "psum over both axes": (lambda x: lax.psum(x, ("data", "model")), [Collective("all_reduce", AXES.names, BLOCK)]),
    "axes in another order": (lambda x: lax.psum(x, ("model", "data")), [Collective("all_reduce", AXES.names, BLOCK)]),
    "pmax": (lambda x: lax.pmax(x, "data"), [Collective("all_reduce", ("data",), BLOCK)]),
    "two bytes": (
        lambda x: lax.all_gather(x.astype(jnp.int16), "model", tiled=True),
        [Collective("all_gather", ("model",), 4 * BLOCK // 2)],
    ),
    "complex": (lambda x: lax.ppermute(x + 1j, "model", RING), [Collective("permute", ("model",), 2 * BLOCK)]),
    "all_gather": (
        lambda x: lax.all_gather(x, "model", axis=1, tiled=True),
        [Collective("all_gather", ("model",), 4 * BLOCK)],
    ),
    "psum_scatter": (
        lambda x: lax.psum_scatter(x, "model", tiled=True),
        [Collective("reduce_scatter", ("model",), BLOCK)],
    ),
    "all_to_all": (
        lambda x: lax.all_to_all(x, "data", 0, 1, tiled=True),
        [Collective("all_to_all", ("data",), BLOCK)],
    ),
    "ppermute": (lambda x: lax.ppermute(x, "model", RING), [Collective("permute", ("model",), BLOCK)]),
    "ppermute of some": (lambda x: lax.ppermute(x, "model", [(1, 2)]), [Collective("permute", ("model",), BLOCK)]),
    "ppermute along both axes": (
        lambda x: lax.ppermute(x, ("data", "model"), [(0, 5)]),
        [Collective("permute", ("data", "model"), BLOCK)],
    ),
    "a loop body counts once": (
        scanned,
        [Collective("all_gather", ("data",), 2 * BLOCK), Collective("all_reduce", ("model",), BLOCK)],
    ),
    "every branch counts": (
        branches,
        [Collective("all_reduce", ("model",), BLOCK), Collective("permute", ("data",), BLOCK)],
    ),
    "no communication": (lambda x: lax.ppermute(x, "model", [(i, i) for i in range(4)]), []),
    "groups that no axes make": (
        lambda x: lax.all_gather(x, ("data", "model"), axis_index_groups=[[0, 3], [1, 2], [4, 5], [6, 7]], tiled=True),
        [Collective("all_gather", ("?",), 2 * BLOCK)],
    ),
}


def lower(program, mesh, reverse=False):
    if reverse:
        mesh = jax.sharding.Mesh(mesh.devices.ravel()[::-1].reshape(mesh.devices.shape), mesh.axis_names)
    spmd = jax.shard_map(program, mesh=mesh, in_specs=P(*mesh.axis_names[:2]), out_specs=P(), check_vma=False)
    return jax.jit(spmd).lower(jax.ShapeDtypeStruct((16, 32), jnp.float32))


@pytest.mark.parametrize("reverse", [False, True], ids=["devices in order", "devices reversed"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name, reverse, make_mesh):
    program, expected = PROGRAMS[name]
    lowered = lower(program, make_mesh(data=2, model=4), reverse)
    assert stablehlo_collectives(lowered.as_text(), AXES) == expected
    assert stablehlo_collectives(lowered.compiler_ir("stablehlo"), AXES) == expected
    assert compiled_collectives(lowered.compile().as_text(), AXES) == expected


def test_a_function_counts_once_per_call(make_mesh):
    lowered = lower(lambda x: shared(shared(x)), make_mesh(data=2, model=4))
    expected = [Collective("all_reduce", ("data",), BLOCK, 2)]
    assert lowered.as_text().count("stablehlo.all_reduce") == 1
    assert stablehlo_collectives(lowered.as_text(), AXES) == expected
    assert compiled_collectives(lowered.compile().as_text(), AXES) == expected


def test_axes_of_size_one_never_appear(make_mesh):
    axes = MeshAxes(("data", "one", "model"), (2, 1, 4))
    lowered = lower(lambda x: lax.psum(lax.psum(x, ("data", "one")), "one"), make_mesh(data=2, one=1, model=4))
    expected = [Collective("all_reduce", ("data",), BLOCK // 8 * 32)]
    assert stablehlo_collectives(lowered.as_text(), axes) == expected
    assert compiled_collectives(lowered.compile().as_text(), axes) == expected


def test_combined_collectives_keep_their_bytes(make_mesh):
    lowered = lower(lambda x: (lax.psum(x, "data"), lax.psum(x * 2, "data")), make_mesh(data=2, model=4))
    planned = stablehlo_collectives(lowered.as_text(), AXES)
    compiled = compiled_collectives(lowered.compile().as_text(), AXES)
    assert planned == [Collective("all_reduce", ("data",), BLOCK, 2)]
    assert compiled == [Collective("all_reduce", ("data",), 2 * BLOCK, 1)]
    assert bytes_difference(planned, compiled) == []
    assert count_difference(planned, compiled) == [
        "all_reduce over data, 256 bytes: planned 2, lowered 0",
        "all_reduce over data, 512 bytes: planned 0, lowered 1",
    ]


def test_bfloat16_is_widened_by_the_cpu_compiler_only(make_mesh):
    lowered = lower(lambda x: lax.psum(x.astype(jnp.bfloat16), "model"), make_mesh(data=2, model=4))
    planned = stablehlo_collectives(lowered.as_text(), AXES)
    compiled = compiled_collectives(lowered.compile().as_text(), AXES)
    assert planned == [Collective("all_reduce", ("model",), BLOCK // 2)]
    assert bytes_difference(planned, compiled) == [
        "all_reduce over model: planned 128 bytes in 1, compiled 256 bytes in 1"
    ]


def test_differences_are_readable():
    planned = [Collective("all_gather", ("data", "model"), 1000), Collective("all_gather", ("data", "model"), 1000)]
    compiled = [Collective("permute", ("data",), 4)]
    assert bytes_difference(planned, compiled) == [
        "all_gather over data+model: planned 2,000 bytes in 2, compiled 0 bytes in 0",
        "permute over data: planned 0 bytes in 0, compiled 4 bytes in 1",
    ]
    assert bytes_difference(planned, planned) == count_difference(planned, planned[::-1]) == []


HLO = """HloModule jit_f, is_scheduled=true, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}}
{computations}
ENTRY %main (p: f32[8,8]) -> f32[32,8] {{
  %p = f32[8,8]{{1,0:T(8,128)S(1)}} parameter(0), metadata={{op_name="x"}}
{body}
}}
"""


def read(body, computations="", axes=AXES):
    return compiled_collectives(HLO.format(body=body, computations=computations), axes)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", ("model",)),
        ("{{0,4},{1,5},{2,6},{3,7}}", ("data",)),
        ("{{4,0},{1,5},{6,2},{3,7}}", ("data",)),
        ("{}", ("data", "model")),
        ("[2,4]<=[8]", ("model",)),
        ("[4,2]<=[2,4]T(1,0)", ("data",)),
        ("[1,8]<=[8]", ("data", "model")),
        ("[4,2]<=[8]", ("?",)),
        ("mesh['data'=2,'model'=4] {'model'}", ("model",)),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_1','axis_0'}", ("data", "model")),
        ("mesh['x'=8] {'x':(2)4}", ("model",)),
        ("mesh['x'=8] {'x':(1)2}", ("data",)),
        ("mesh['x'=4,'y'=2], device_ids=([0,4,1,5,2,6,3,7]) {'x'}", ("model",)),
        ("mesh['x'=4,'y'=2], device_ids=([2,4]T(1,0)) {'x'}", ("model",)),
        ("{{0},{1},{2},{3},{4},{5},{6},{7}}", None),
    ],
)
def test_every_way_to_write_groups(groups, expected):
    body = f"  ROOT %r = f32[8,8]{{1,0}} all-reduce(%p), channel_id=1, replica_groups={groups}, to_apply=%add"
    assert read(body) == ([] if expected is None else [Collective("all_reduce", expected, BLOCK)])


def test_asynchronous_pairs_count_once():
    body = """  %s = (f32[8,8]{1,0}, f32[32,8]{1,0}) all-gather-start(%p), replica_groups={{0,1,2,3},{4,5,6,7}}
  %t = ((f32[8,8]{1,0}), f32[2,8]{1,0}) reduce-scatter-start(%p), replica_groups=[2,4]<=[8], to_apply=%add
  %c = (f32[8,8], f32[8,8], u32[]{:S(2)}, u32[]) collective-permute-start(%p), source_target_pairs={{0,4},{4,0}}
  %e = f32[8,8]{1,0} collective-permute-done(%c)
  %u = f32[2,8]{1,0} reduce-scatter-done(%t)
  ROOT %d = f32[32,8]{1,0} all-gather-done(%s)"""
    assert read(body) == [
        Collective("all_gather", ("model",), 4 * BLOCK),
        Collective("permute", ("data",), BLOCK),
        Collective("reduce_scatter", ("model",), BLOCK),
    ]


def test_async_wrapped_computations_count_once():
    wrapped = """%wrapped (q: f32[8,8]) -> f32[8,8] {
  %q = f32[8,8]{1,0} parameter(0)
  ROOT %a2a = f32[8,8]{1,0} all-to-all(%q), replica_groups={{0,4},{1,5},{2,6},{3,7}}, dimensions={0}
}
"""
    body = """  %s = ((f32[8,8]), f32[8,8], u32[]) async-start(%p), calls=%wrapped
  %u = ((f32[8,8]), f32[8,8], u32[]) async-update(%s), calls=%wrapped
  ROOT %d = f32[8,8]{1,0} async-done(%u), calls=%wrapped"""
    assert read(body, wrapped) == [Collective("all_to_all", ("data",), BLOCK)]


def test_tpu_fusions():
    """A gather spread over a chain of fusions, and a reduce-scatter that XLA:TPU made of an all-reduce."""
    gather = (
        "f32[32,8]{1,0:T(8,128)} all-gather(%q), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}, "
        'frontend_attributes={chain_id="0"}'
    )
    computations = "".join(
        f"\n%async_{i} (q: f32[8,8]) -> f32[32,8] {{\n  %q = f32[8,8]{{1,0}} parameter(0)\n  ROOT %g = {gather}\n}}\n"
        for i in range(3)
    )
    computations += """
%all-reduce-scatter.1 (q: f32[8,8]) -> f32[2,8] {
  %q = f32[8,8]{1,0} parameter(0)
  %i = s32[] constant(0)
  %r = f32[8,8]{1,0} all-reduce(%q), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  ROOT %s = f32[2,8]{1,0} dynamic-slice(%r, %i, %i), dynamic_slice_sizes={2,8}
}
"""
    body = "\n".join(f"  %f{i} = f32[32,8] fusion(%p), kind=kCustom, calls=%async_{i}" for i in range(3))
    body += "\n  ROOT %f = f32[2,8]{1,0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1"
    assert read(body, computations) == [
        Collective("all_gather", ("model",), 4 * BLOCK),
        Collective("reduce_scatter", ("model",), BLOCK),
    ]


def test_text_that_is_not_compiled_hlo(make_mesh):
    with pytest.raises(ValueError, match="no ENTRY computation"):
        compiled_collectives("module @jit_f {}", AXES)
    with pytest.raises(ValueError, match="replica groups written in a way"):
        read("  ROOT %r = f32[8,8]{1,0} all-reduce(%p), replica_groups=nothing, to_apply=%add")


def test_collectives_print():
    assert str(Collective("all_gather", ("data",), 2048, 3)) == "3 x all_gather over data, 2,048 bytes"
