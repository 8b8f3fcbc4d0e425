"""Small compiled programs, each with one thing that a compiler does to collectives, or with one that none does."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from unity_jax.aot.account import MERGED, REALIGNED, account
from unity_jax.aot.collectives import Collective
from unity_jax.aot.duplicates import duplicates
from unity_jax.aot.hlo import parse
from unity_jax.aot.rewrites import COMBINED, PIPELINED, SUMMED
from unity_jax.aot.sites import sites
from unity_jax.pcg.mesh import MeshAxes

AXES = MeshAxes(("x",), (4,))
ALL = "replica_groups={{0,1,2,3}}"
HLO = """HloModule jit_f, is_scheduled=true, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}}
{computations}
ENTRY %main (p: f32[64,8], q: bf16[64,8], i: s32[]) -> f32[64,8] {{
  %p = f32[64,8] parameter(0)
  %q = bf16[64,8] parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
{body}
}}
"""


def planned(kind, nbytes, count=1, trips=1):
    return Collective(kind, ("x",), nbytes, count), trips


WHOLE = 64 * 8 * 4

FUSED_CAST = """
%cast (a: f32[64,8]) -> bf16[64,8] {
  %a = f32[64,8] parameter(0)
  ROOT %c = bf16[64,8] convert(%a)
}
"""
UPDATE = """
%update (a: f32[16,8], i: s32[]) -> f32[64,8] {{
  %a = f32[16,8] parameter(0)
  %i = s32[] parameter(1)
  %n = f32[] constant({start})
  %z = s32[] constant(0)
  %base = f32[64,8] broadcast(%n), dimensions={{}}
  ROOT %u = f32[64,8] dynamic-update-slice(%base, %a, %i, %z)
}}
"""
UPDATED = f"""  %s = f32[16,8] slice(%p), slice={{[0:16], [0:8]}}
  %f = f32[64,8] fusion(%s, %i), kind=kLoop, calls=%update
  ROOT %r = f32[64,8] all-reduce(%f), {ALL}, to_apply=%add"""
SHARE = """
%share (a: bf16[64,8], i: s32[]) -> f32[16,8] {
  %a = bf16[64,8] parameter(0)
  %i = s32[] parameter(1)
  %z = s32[] constant(0)
  %wide = f32[64,8] convert(%a)
  %d = f32[16,8] dynamic-slice(%wide, %i, %z), dynamic_slice_sizes={16,8}
  ROOT %t = f32[16,8] tanh(%d)
}
"""
PADDED = f"""
%all-reduce-scatter.1 (a: f32[64,8], i: s32[]) -> f32[24,8] {{
  %a = f32[64,8] parameter(0)
  %n = f32[] constant(0)
  %i = s32[] parameter(1)
  %z = s32[] constant(0)
  %pad = f32[96,8] pad(%a, %n), padding=0_32x0_0
  %all-reduce.1 = f32[96,8] all-reduce(%pad), {ALL}, to_apply=%add
  ROOT %d = f32[24,8] dynamic-slice(%all-reduce.1, %i, %z), dynamic_slice_sizes={{24,8}}
}}
"""
SUM_GATHERED = """  %s0 = f32[16,8] slice(%p), slice={[0:16], [0:8]}
  %s1 = f32[16,8] slice(%p), slice={[16:32], [0:8]}
  %s2 = f32[16,8] slice(%p), slice={[32:48], [0:8]}
  %t0 = f32[16,8] tanh(%s0)
  %two = f32[16,8] add(%t0, %s1)
  %three = f32[16,8] add(%two, %s2)
  ROOT %r = f32[64,8] all-gather(%three), ALL, dimensions={0}, metadata={op_name="jit(f)/NAME"}""".replace("ALL", ALL)
REALIGNED_BODY = """  %scatter = f32[24,8] fusion(%p, %i), kind=kCustom, calls=%all-reduce-scatter.1
  %slice = f32[8,8] slice(%{source}), slice={{[16:24], [0:8]}}
  %start = (f32[8,8], f32[8,8]) collective-permute-start(%slice), source_target_pairs={{{{0,1}},{{1,2}},{{2,3}}}}
  %done = f32[8,8] collective-permute-done(%start)
  ROOT %r = f32[32,8] concatenate(%done, %scatter), dimensions={{0}}"""
LOOP = f"""
%body (s: (s32[], f32[64,8])) -> (s32[], f32[64,8]) {{
  %s = (s32[], f32[64,8]) parameter(0)
  %n = s32[] get-tuple-element(%s), index=0
  %v = f32[64,8] get-tuple-element(%s), index=1
  %in = f32[64,8] all-reduce(%v), {ALL}, to_apply=%add
  %t = f32[64,8] tanh(%in)
  ROOT %next = (s32[], f32[64,8]) tuple(%n, %t)
}}

%condition (s: (s32[], f32[64,8])) -> pred[] {{
  %s = (s32[], f32[64,8]) parameter(0)
  ROOT %always = pred[] constant(true)
}}
"""
WHILE = (
    "%w = (s32[], f32[64,8]) while(%init), condition=%condition, body=%body, "
    'backend_config={"known_trip_count":{"n":"3"},"known_init_step":{"init":"START","step":"1"}}'
)
FIRST_ROUND = f"""  %out = f32[64,8] all-reduce(%p), {ALL}, to_apply=%add, metadata={{op_name="jit(f)/SCOPE"}}
  %tanh = f32[64,8] tanh(%out)
  %init = (s32[], f32[64,8]) tuple(%i, %tanh)
  {WHILE}
  ROOT %r = f32[64,8] get-tuple-element(%w), index=1"""
LAST_ROUND = f"""  %init = (s32[], f32[64,8]) tuple(%i, %p)
  {WHILE}
  %v = f32[64,8] get-tuple-element(%w), index=1
  %wrapped = f32[64,8] copy(%v)
  ROOT %r = f32[64,8] all-reduce(%wrapped), {ALL}, to_apply=%add"""
OTHER_SIDES = """  %flat = f32[32,16] reshape(%p)
  %sum = f32[32,16] all-reduce(%flat), ALL, to_apply=%add, metadata={op_name="jit(f)/while/body/psum"}
  %back = f32[64,8] reshape(%sum)
  %init = (s32[], f32[64,8]) tuple(%i, %back)
  WHILE
  ROOT %r = f32[64,8] get-tuple-element(%w), index=1""".replace("ALL", ALL).replace(
    "WHILE", WHILE.replace("START", "1")
)
UNCHANGED_LOOP = f"""
%body (s: (s32[], bf16[64,8])) -> (s32[], bf16[64,8]) {{
  %s = (s32[], bf16[64,8]) parameter(0)
  %n = s32[] get-tuple-element(%s), index=0
  %v = bf16[64,8] get-tuple-element(%s), index=1
  %in = bf16[64,8] all-reduce(%v), {ALL}, to_apply=%add
  ROOT %next = (s32[], bf16[64,8]) tuple(%n, %v)
}}

%condition (s: (s32[], bf16[64,8])) -> pred[] {{
  %s = (s32[], bf16[64,8]) parameter(0)
  ROOT %always = pred[] constant(true)
}}
"""
CAST_BEFORE = """  %narrow = bf16[64,8] convert(%p)
  %init = (s32[], bf16[64,8]) tuple(%i, %narrow)
  WHILE
  ROOT %r = bf16[64,8] get-tuple-element(%w), index=1""".replace(
    "WHILE", WHILE.replace("START", "0").replace("f32[64", "bf16[64")
)
FOUR_ROUNDS = [planned("all_reduce", WHOLE, trips=4)]


def explained(plan, body, computations="", same=()):
    return account(plan, parse(HLO.format(computations=computations, body=body)), AXES, same)


REWRITTEN = {
    "as planned": (
        [planned("all_reduce", WHOLE)],
        f"  ROOT %r = f32[64,8] all-reduce(%p), {ALL}, to_apply=%add",
        "",
        {},
    ),
    "combined into a tuple": (
        [planned("all_reduce", WHOLE), planned("all_reduce", WHOLE // 2)],
        f"  ROOT %r = (f32[64,8], bf16[64,8]) all-reduce(%p, %q), {ALL}, to_apply=%add",
        "",
        {COMBINED: 2},
    ),
    "combined into one array": (
        [planned("all_reduce", WHOLE), planned("all_reduce", WHOLE // 4)],
        f"""  %s = f32[16,8] slice(%p), slice={{[0:16], [0:8]}}
  %both = f32[80,8] concatenate(%p, %s), dimensions={{0}}
  ROOT %r = f32[80,8] all-reduce(%both), {ALL}, to_apply=%add""",
        "",
        {COMBINED: 2},
    ),
    "narrowed before, inside a fusion": (
        [planned("all_reduce", WHOLE)],
        f"""  %f = bf16[64,8] fusion(%p), kind=kLoop, calls=%cast
  ROOT %r = bf16[64,8] all-reduce(%f), {ALL}, to_apply=%add""",
        FUSED_CAST,
        {"moved cast": 1},
    ),
    "widened after": (
        [planned("all_gather", 4 * WHOLE)],
        f"""  %g = bf16[256,8] all-gather(%q), {ALL}, dimensions={{0}}
  %c = bf16[256,8] copy(%g)
  ROOT %r = f32[256,8] convert(%c)""",
        "",
        {"moved cast": 1},
    ),
    "widened after a copy in slices": (
        [planned("all_reduce", WHOLE)],
        f"""  %g = bf16[64,8] all-reduce(%q), {ALL}, to_apply=%add
  %s0 = ((bf16[64,8]), bf16[32,8], s32[]) slice-start(%g), slice={{[0:32], [0:8]}}
  %d0 = bf16[32,8] slice-done(%s0)
  %s1 = ((bf16[64,8]), bf16[32,8], s32[]) slice-start(%g), slice={{[32:64], [0:8]}}
  %d1 = bf16[32,8] slice-done(%s1)
  %both = bf16[64,8] custom-call(%d0, %d1), custom_call_target="ConcatBitcast"
  ROOT %r = f32[64,8] convert(%both)""",
        "",
        {"moved cast": 1},
    ),
    "widened in the collective": (
        [planned("all_reduce", WHOLE // 2)],
        f"  ROOT %r = f32[64,8] all-reduce(%q), {ALL}, to_apply=%add",
        "",
        {"moved cast": 1},
    ),
    "all-gather as all-reduce": (
        [planned("all_gather", WHOLE)],
        UPDATED,
        UPDATE.format(start=0),
        {"all-gather as all-reduce": 1},
    ),
    "reduce-scatter as all-reduce and slice": (
        [planned("reduce_scatter", WHOLE // 2)],
        f"""  %g = bf16[64,8] all-reduce(%q), {ALL}, to_apply=%add
  ROOT %r = f32[16,8] fusion(%g, %i), kind=kLoop, calls=%share""",
        SHARE,
        {"reduce-scatter as all-reduce and slice": 1},
    ),
    "sum gathered once": (
        [planned("all_gather", WHOLE, count=3)],
        SUM_GATHERED.replace("NAME", "add_any"),
        "",
        {SUMMED: 2},
    ),
    "padded, and its shares realigned": (
        [planned("reduce_scatter", WHOLE)],
        REALIGNED_BODY.format(source="scatter"),
        PADDED,
        {"padded": 1, REALIGNED: 1},
    ),
    "first round out of the loop": (
        FOUR_ROUNDS,
        FIRST_ROUND.replace("START", "1").replace("SCOPE", "while/body/psum"),
        LOOP,
        {PIPELINED: 1},
    ),
    "narrowed before a loop that leaves it as it is": (
        [planned("all_reduce", WHOLE, trips=3)],
        CAST_BEFORE,
        UNCHANGED_LOOP,
        {"moved cast": 1},
    ),
    "last round out of the loop": (FOUR_ROUNDS, LAST_ROUND.replace("START", "0"), LOOP, {PIPELINED: 1}),
}


@pytest.mark.parametrize("name", REWRITTEN)
def test_rewrites(name):
    plan, body, computations, rewrites = REWRITTEN[name]
    found = explained(plan, body, computations)
    assert found.unexplained == []
    assert found.rewrites == rewrites


NOT_REWRITTEN = {
    "another size": (
        [planned("all_reduce", WHOLE // 2)],
        f"  ROOT %r = f32[64,8] all-reduce(%p), {ALL}, to_apply=%add",
        "",
    ),
    "an update of something else than zeros": ([planned("all_gather", WHOLE)], UPDATED, UPDATE.format(start=1)),
    "a slice beside another use": (
        [planned("reduce_scatter", WHOLE // 2)],
        f"""  %g = bf16[64,8] all-reduce(%q), {ALL}, to_apply=%add
  %f = f32[16,8] fusion(%g, %i), kind=kLoop, calls=%share
  ROOT %r = bf16[64,8] tanh(%g)""",
        SHARE,
    ),
    "a round before a loop that leaves none out": (
        FOUR_ROUNDS,
        FIRST_ROUND.replace("START", "0").replace("SCOPE", "while/body/psum"),
        LOOP,
    ),
    "another one before a loop that leaves one out": (
        FOUR_ROUNDS,
        FIRST_ROUND.replace("START", "1").replace("SCOPE", "psum"),
        LOOP,
    ),
    "one of other sides before a loop": (FOUR_ROUNDS, OTHER_SIDES, LOOP),
    "a loop that runs less often": (FOUR_ROUNDS, LAST_ROUND.replace('"3"', '"2"').replace("START", "0"), LOOP),
}


@pytest.mark.parametrize("name", NOT_REWRITTEN)
def test_what_is_no_rewrite(name):
    found = explained(*NOT_REWRITTEN[name])
    assert found.unexplained[0].startswith("planned, not compiled: 1 x ")
    assert found.unexplained[-1].startswith("compiled, not planned: 1 x all_reduce over x")
    assert "all-reduce(%" in found.unexplained[-1]


def test_a_permute_of_something_else():
    found = explained([planned("reduce_scatter", WHOLE)], REALIGNED_BODY.format(source="p"), PADDED)
    (line,) = found.unexplained
    assert line.startswith("compiled, not planned: 1 x permute over x, 256 bytes, 1 times a step: %start = ")


def test_merged_duplicates():
    body = f"  ROOT %r = f32[64,8] all-reduce(%p), {ALL}, to_apply=%add"
    plan = [planned("all_reduce", WHOLE, count=2)]
    found = explained(plan, body, same=[Collective("all_reduce", ("x",), WHOLE)])
    assert (found.rewrites, found.unexplained) == ({MERGED: 1}, [])
    missing = "planned, not compiled: 1 x all_reduce over x, 2,048 bytes, 1 times a step"
    assert explained(plan, body).unexplained == [missing]  # equal sizes are no reason to merge
    assert explained(plan, "  ROOT %r = f32[64,8] tanh(%p)", same=[plan[0][0]]).unexplained == [missing] * 2


def test_a_sum_that_is_gathered_as_planned_stands_for_one_gather():
    """Its name says that it was an all-gather from the beginning."""
    found = explained([planned("all_gather", WHOLE, count=2)], SUM_GATHERED.replace("NAME", "all_gather"))
    assert found.unexplained == ["planned, not compiled: 1 x all_gather over x, 2,048 bytes, 1 times a step"]


def test_what_can_stand_for_two_stands_for_the_one_that_is_no_duplicate():
    updated = UPDATED.replace("ROOT ", "") + "\n  ROOT %d = f32[16,8] dynamic-slice(%r, %i, %zero)"
    body = f"  %o = f32[64,8] all-reduce(%p), {ALL}, to_apply=%add\n  %e = f32[16,8] dynamic-slice(%o, %i, %zero)\n"
    plan = [planned("reduce_scatter", WHOLE, count=2), planned("all_gather", WHOLE)]
    found = explained(plan, body + updated, UPDATE.format(start=0), same=[Collective("reduce_scatter", ("x",), WHOLE)])
    assert found.unexplained == []
    assert found.rewrites == {"all-gather as all-reduce": 1, "reduce-scatter as all-reduce and slice": 1, MERGED: 1}


def test_a_chain_through_a_loop_runs_as_often_as_it_starts():
    gather = f'f32[256,8] all-gather(%v), {ALL}, dimensions={{0}}, frontend_attributes={{chain_id="0"}}'
    loop = LOOP.replace("f32[64,8] all-reduce(%v), replica_groups={{0,1,2,3}}, to_apply=%add", gather)
    body = LAST_ROUND.replace("START", "0").replace("f32[64,8] all-reduce(%wrapped)", "f32[256,8] all-gather(%wrapped)")
    body = body.replace("to_apply=%add", 'dimensions={0}, frontend_attributes={chain_id="0"}')
    (site,) = sites(parse(HLO.format(computations=loop, body=body)), AXES)
    assert (site.kind, site.bytes, site.trips) == ("all_gather", 4 * WHOLE, 1)


def gathered(x, dim):
    return lax.all_gather(x, "x", axis=dim, tiled=True)


@pytest.mark.parametrize(
    ("program", "count"),
    [
        (lambda x: (lax.psum(x, "x"), lax.psum(x, "x")), 1),
        (lambda x: (lax.psum(jnp.sin(x), "x"), lax.psum(jnp.sin(x), "x"), lax.psum(jnp.cos(x), "x")), 1),
        (lambda x: (lax.psum(x.sum(0).sum(0), "x"), lax.psum(x.sum(), "x")), 1),
        (lambda x: (lax.psum(x.sum(0).max(0), "x"), lax.psum(x.sum(), "x")), 0),
        (lambda x: (gathered(x, 0), gathered(x[:, None], 0), gathered(lax.rev(x[None], (0,)), 1)), 2),
        (lambda x: (gathered(x, 0), gathered(x, 1), gathered(x.T, 0), gathered(lax.rev(x, (0,)), 0)), 0),
        (lambda x: (lax.psum(x, "x"), lax.pmax(x, "x")), 0),
        (lambda x: (lax.psum(x, "x"), lax.psum(lax.optimization_barrier(x), "x")), 0),
    ],
)
def test_duplicates(program, count, make_mesh):
    spmd = jax.shard_map(program, mesh=make_mesh(x=4), in_specs=P("x"), out_specs=P(), check_vma=False)
    lowered = jax.jit(spmd).lower(jax.ShapeDtypeStruct((16, 8), jnp.float32))
    found = duplicates(lowered.as_text(), AXES)
    assert sum(c.count for c in found) == count
    assert all(c.axes == ("x",) for c in found)
