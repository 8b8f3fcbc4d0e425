"""The judge of compiled programs, on schedules written by hand, against times worked out by hand."""

import pytest

from experiments.validation.judge import judge
from experiments.validation.judge.kernels import H100
from experiments.validation.judge.nccl import Nodes
from experiments.validation.judge.network import Mesh2D
from unity_jax.aot.bundles import with_schedules
from unity_jax.aot.hlo import parse

CLOCK = 1.5e9  # of v5e
RING, PAIRS = ((0, 1, 2, 3, 4, 5, 6, 7),), ((0, 4), (1, 5), (2, 6), (3, 7))


def judged(hlo_text: str, machine: str) -> float:
    return judge(parse(hlo_text), machine)


def tpu(instructions: str, more: str = "") -> float:
    """Seconds of a program on v5e:2x4 whose entry takes `x` and makes what stands there."""
    return judged(
        f"""\
HloModule step, is_scheduled=true
{more}
ENTRY %main (x: bf16[1024,1024]) -> bf16[1024,1024] {{
  %x = bf16[1024,1024]{{1,0}} parameter(0)
{instructions}
}}
""",
        "v5e:2x4",
    )


def kernel(name: str, operand: str, cycles: int) -> str:
    return f"""\
  %{name} = bf16[1024,1024]{{1,0}} fusion(%{operand}), kind=kLoop, calls=%f, \
backend_config={{"estimated_cycles":"{cycles}"}}"""


FUSED = """\
%f (p: bf16[1024,1024]) -> bf16[1024,1024] {
  %p = bf16[1024,1024]{1,0} parameter(0)
  ROOT %t = bf16[1024,1024]{1,0} tanh(%p)
}"""
PERMUTE = """\
  %s = (bf16[1024,1024]{1,0}, bf16[1024,1024]{1,0}) collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}"""
DONE = "  %d = bf16[1024,1024]{1,0} collective-permute-done(%s)"
PERMUTED = 1e-6 + 2 * 1024 * 1024 / 4.5e10  # one hop and 2 MiB over a link


@pytest.mark.parametrize("cycles", [15_000, 1_500_000])
def test_what_runs_between_start_and_done_hides_a_collective(cycles):
    between = "\n".join([PERMUTE, kernel("k", "x", cycles), DONE, kernel("last", "d", 1500)])
    assert tpu(between, FUSED) == pytest.approx(max(cycles / CLOCK, PERMUTED) + 1e-6)


def test_nothing_hides_a_collective_awaited_at_once_or_started_late():
    exposed = "\n".join([kernel("k", "x", 150_000), PERMUTE, DONE])
    assert tpu(exposed, FUSED) == pytest.approx(1e-4 + PERMUTED)


def test_collectives_share_one_network():
    second = PERMUTE.replace("%s", "%s2"), DONE.replace("%s", "%s2").replace("%d", "%d2")
    assert tpu("\n".join([PERMUTE, second[0], DONE, second[1]]), FUSED) == pytest.approx(2 * PERMUTED)


def test_a_chain_of_fusions_hides_its_collective():
    gather = 'all-gather(%p), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, frontend_attributes={chain_id="1"}'
    parts = "\n".join(
        f"""\
%{name} (p: bf16[1024,1024]) -> bf16[8192,1024] {{
  %p = bf16[1024,1024]{{1,0}} parameter(0)
  %g = bf16[8192,1024]{{1,0}} {gather}
  ROOT %r = bf16[8192,1024]{{1,0}} custom-call(%g), custom_call_target="{target}"
}}"""
        for name, target in [("begin", "AsyncCollectiveStart"), ("step", "Other"), ("end", "AsyncCollectiveDone")]
    )
    fusion = "bf16[8192,1024]{1,0} fusion(%x), kind=kCustom, calls=%"
    cycles = 'backend_config={"estimated_cycles":"750000"}'
    chain = f"  %b = {fusion}begin\n  %m = {fusion}step, {cycles}\n  %e = {fusion}end"
    gathered = 7 * (1e-6 + 2 * 2**20 / 2 / 4.5e10)  # a ring of 8, both directions
    assert gathered < 750_000 / CLOCK
    assert tpu(chain, parts) == pytest.approx(750_000 / CLOCK)
    assert tpu(chain.replace("750000", "75000"), parts) == pytest.approx(gathered)


def test_a_loop_runs_as_often_as_its_condition_says():
    state = "(s32[], bf16[1024,1024])"
    loop = f"""\
%body (s: {state}) -> {state} {{
  %s = {state} parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = bf16[1024,1024]{{1,0}} get-tuple-element(%s), index=1
{kernel("y", "x", 3000)}
  ROOT %r = {state} tuple(%i, %y)
}}
%until (c: {state}) -> pred[] {{
  %c = {state} parameter(0)
  %at = s32[] get-tuple-element(%c), index=0
  %n = s32[] constant(35)
  ROOT %more = pred[] compare(%at, %n), direction=LT
}}
"""
    once = "  %t = (s32[], bf16[1024,1024]) tuple(%zero, %x)\n  %w = (s32[], bf16[1024,1024]) while(%t), "
    found = tpu(f"  %zero = s32[] constant(0)\n{once}condition=%until, body=%body", f"{FUSED}\n{loop}")
    assert found == pytest.approx(35 * 2e-6)


def test_of_branches_the_slowest_counts():
    ways = "\n".join(
        f"%{name} (x: bf16[1024,1024]) -> bf16[1024,1024] {{\n"
        f"  %x = bf16[1024,1024]{{1,0}} parameter(0)\n{kernel('y', 'x', cycles)}\n}}"
        for name, cycles in [("a", 1500), ("b", 4500)]
    )
    branch = "  %c = bf16[1024,1024]{1,0} conditional(%x, %x, %x), branch_computations={%a, %b}"
    assert tpu(branch, f"{FUSED}\n{ways}") == pytest.approx(3e-6)


def test_copies_between_memories_run_beside_kernels():
    start = "  %c = (f32[1024,1024]{1,0:S(1)}, f32[1024,1024]{1,0}, u32[]) copy-start(%x)"
    done = "  %cd = f32[1024,1024]{1,0:S(1)} copy-done(%c)"
    copied = 4 * 1024 * 1024 / 8.19e11
    assert tpu("\n".join([start, kernel("k", "x", 1500), done]), FUSED) == pytest.approx(copied)
    assert tpu("\n".join([start, kernel("k", "x", 150_000), done]), FUSED) == pytest.approx(1e-4)


def test_of_what_the_compiler_does_not_estimate_the_bytes_that_it_touches_count():
    gather = """\
HloModule step, is_scheduled=true
%f (t: f32[1000000,128], i: s32[2048]) -> f32[2048,128] {
  %t = f32[1000000,128]{1,0} parameter(0)
  %i = s32[2048]{0} parameter(1)
  ROOT %g = f32[2048,128]{1,0} gather(%t, %i), offset_dims={1}, collapsed_slice_dims={0}
}
ENTRY %main (x: f32[1000000,128], y: s32[2048]) -> f32[2048,128] {
  %x = f32[1000000,128]{1,0} parameter(0)
  %y = s32[2048]{0} parameter(1)
  ROOT %k = f32[2048,128]{1,0} fusion(%x, %y), kind=kCustom, calls=%f
}
"""
    rows = 2 * 2048 * 128 * 4 + 2048 * 4  # read and written, and their numbers
    assert judged(gather, "v5e:2x4") == pytest.approx(rows / 8.19e11)
    scheduled = with_schedules(parse(gather), {"%k": 15_000})  # and its schedule, where that is known
    assert judge(scheduled, "v5e:2x4") == pytest.approx(rows / 8.19e11 + 1e-5)


def test_an_all_reduce_that_is_sliced_inside_its_fusion_is_a_reduce_scatter():
    def fused(root: str) -> str:
        return f"""\
%f (p: bf16[1024,1024]) -> bf16[1024,1024] {{
  %p = bf16[1024,1024]{{1,0}} parameter(0)
  %i = s32[] constant(0)
  %a = bf16[1024,1024]{{1,0}} all-reduce(%p), replica_groups={{{{0,4}},{{1,5}},{{2,6}},{{3,7}}}}, to_apply=%add
  ROOT {root}
}}"""

    scattered = fused("%r = bf16[512,1024]{1,0} dynamic-slice(%a, %i, %i), dynamic_slice_sizes={512,1024}")
    reduced = fused("%r = bf16[1024,1024]{1,0} copy(%a)")
    call = "  %k = bf16[512,1024]{1,0} fusion(%x), kind=kCustom, calls=%f"
    once = 1e-6 + 2**20 / 4.5e10
    assert tpu(call, scattered) == pytest.approx(once)
    assert tpu(call, reduced) == pytest.approx(2 * once)


# Networks


def test_rings_on_a_mesh_use_the_links_that_they_have():
    mesh, nbytes = Mesh2D(2, 4), 8 * 4.5e10  # a part of an eighth takes a link one second
    assert mesh.seconds("all-gather", RING, nbytes) == pytest.approx(7 * (1e-6 + 1 / 2))  # both directions
    assert mesh.seconds("all-reduce", RING, nbytes) == pytest.approx(14 * (1e-6 + 1 / 2))
    assert mesh.seconds("all-gather", PAIRS, nbytes) == pytest.approx(1e-6 + 4)  # a half over one link
    # A row is a line: around its ring of {0, 1, 3, 2} each inner link has two messages, both directions together.
    rows = ((0, 1, 2, 3), (4, 5, 6, 7))
    assert mesh.seconds("reduce-scatter", rows, nbytes) == pytest.approx(3 * (2e-6 + 2), rel=1e-5)


def test_an_all_to_all_on_a_mesh_is_as_slow_as_its_busiest_link():
    # Over the middle links of a row of four, two devices send to two others, each a quarter.
    rows = ((0, 1, 2, 3), (4, 5, 6, 7))
    assert Mesh2D(2, 4).seconds("all-to-all", rows, 4.5e10) == pytest.approx(3e-6 + 4 / 4)


def test_a_switch_takes_the_fastest_protocol():
    switch = Nodes(8)
    assert switch.seconds("all-reduce", RING, 8.0) == pytest.approx(6.6e-6 + 14 * 0.6e-6, rel=1e-3)  # LL
    large = switch.seconds("all-gather", RING, 8e9)  # Simple
    assert large == pytest.approx(8.4e-6 + 7 * 3.4e-6 + 7e9 / (18 * 20.6e9))


NODES, ALL = Nodes(8), (tuple(range(32)),)
ONES = tuple((i, i + 8, i + 16, i + 24) for i in range(8))  # one of each of four nodes
PORT, CARD = 18 * 20.6e9, 48e9


@pytest.mark.parametrize(
    ("kind", "groups", "nbytes", "expected"),
    [
        # Simple: 28 steps inside nodes and 3 between them; 8 cards have more than a port.
        ("all-gather", ALL, 32e9, 8.4e-6 + 28 * 3.4e-6 + 3 * 14e-6 + 31e9 / PORT),
        ("reduce-scatter", ONES, 4e9, 8.4e-6 + 3 * 14e-6 + 3e9 / CARD),
        # Two members on each of two nodes enter and leave them through two cards.
        ("all-gather", ((0, 1, 8, 9), (2, 3, 10, 11)), 4e9, 8.4e-6 + 2 * 3.4e-6 + 14e-6 + 3e9 / (2 * CARD)),
        # LL, whose steps over NVLink are no shorter than to post one to the network.
        ("all-gather", ALL, 32.0, 6.6e-6 + 28 * 1e-6 + 3 * 2.7e-6),
        # A tree, LL: up and down 7 members of a node and 2 levels of nodes.
        ("all-reduce", ALL, 8.0, 6.8e-6 + 2 * (7 * 0.6e-6 + 2 * 5e-6)),
        # A tree, LL128, of 4 MiB: of its 29 GB/s for each card 0.8 at this size.
        ("all-reduce", ALL, 2.0**22, 14e-6 + 2 * (7 * 1.25e-6 + 2 * 8.5e-6) + 2 * 2**22 / (8 * 29e9 * 0.8)),
        ("all-reduce", ALL, 32e9, 1.4 * (8.4e-6 + 56 * 3.4e-6 + 6 * 14e-6) + 62e9 / PORT),
        ("all-to-all", ALL, 32e9, 8.4e-6 + 14e-6 + 24e9 / CARD),  # 24 of 32 are on other nodes
    ],
)
def test_collectives_between_nodes(kind, groups, nbytes, expected):
    assert NODES.seconds(kind, groups, nbytes) == pytest.approx(expected, rel=1e-3)


def test_a_cluster_is_nodes_of_gpus():
    gather = """\
HloModule step, is_scheduled=true
ENTRY %main () -> f32[1048576] {
  %x = f32[32768]{0} parameter(0)
  ROOT %g = f32[1048576]{0} all-gather(%x), replica_groups={}, dimensions={0}
}
"""
    for machine, gpus, devices in (("h100:4x8", 8, 32), ("h100:2x4", 4, 8), ("h100:8", 8, 8)):
        groups = (tuple(range(devices)),)
        assert judged(gather, machine) == Nodes(gpus).seconds("all-gather", groups, 4 * 32768 * devices)


def test_inside_the_nodes_of_a_cluster_a_collective_takes_what_it_takes_on_one_node():
    inside = tuple(tuple(range(8 * i, 8 * i + 8)) for i in range(4))
    for kind in ("all-gather", "all-reduce", "all-to-all"):
        assert NODES.seconds(kind, inside, 1e6) == NODES.seconds(kind, RING, 1e6)


def test_a_permute_between_nodes_goes_through_one_card():
    assert NODES.permute_seconds(((0, 1), (8, 9)), 1e9) == pytest.approx(8.4e-6 + 3.4e-6 + 1e9 / PORT)
    assert NODES.permute_seconds(((0, 8), (8, 9)), 1e9) == pytest.approx(8.4e-6 + 14e-6 + 1e9 / CARD)


def test_many_members_of_a_mesh_are_joined_once_around_the_grid_that_they_fill():
    mesh, nbytes = Mesh2D(4, 8), 32 * 4.5e10  # a part of a 32nd takes a link one second
    assert mesh.seconds("all-gather", ALL, nbytes) == pytest.approx(31 * (1e-6 + 1 / 2))
    halves = (tuple(range(16)), tuple(range(16, 32)))
    assert mesh.seconds("all-reduce", halves, nbytes / 2) == pytest.approx(30 * (1e-6 + 1 / 2))
    # Every second column: two hops along a row, over links that both groups use.
    columns = (tuple(range(0, 32, 2)), tuple(range(1, 32, 2)))
    assert mesh.seconds("all-gather", columns, nbytes / 2) == pytest.approx(15 * (2e-6 + 2 / 2))
    # A line, by every second member and back by the others: each inner link carries both.
    line = Mesh2D(1, 12)
    assert line.seconds("all-gather", (tuple(range(12)),), 12 * 4.5e10) == pytest.approx(11 * (2e-6 + 2 / 2))


# Kernels of GPUs


def gpu(instructions: str, more: str = "") -> float:
    return judged(
        f"HloModule step, is_scheduled=true\n{more}\nENTRY %main () -> f32[] {{\n{instructions}\n}}\n", "h100:8"
    )


DOT = """\
%g (a: bf16[4096,8192], b: bf16[8192,2048]) -> bf16[4096,2048] {
  %a = bf16[4096,8192]{1,0} parameter(0)
  %b = bf16[8192,2048]{1,0} parameter(1)
  ROOT %d = bf16[4096,2048]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}"""
OPERANDS = """\
  %x = bf16[4096,8192]{1,0} parameter(0)
  %y = bf16[8192,2048]{1,0} parameter(1)
"""


def test_a_matmul_runs_at_the_rate_of_its_type():
    fused = OPERANDS + "  %k = bf16[4096,2048]{1,0} fusion(%x, %y), kind=kCustom, calls=%g"
    expected = H100.start + 2 * 4096 * 8192 * 2048 / H100.matmul["bf16"]
    assert gpu(fused, DOT) == pytest.approx(expected)
    config = 'custom_call_target="__cublas$lt$matmul", backend_config={"lhs_contracting_dimensions":["1"]}'
    called = f"{OPERANDS}  %k = (bf16[4096,2048]{{1,0}}, s8[4194304]{{0}}) custom-call(%x, %y), {config}"
    assert gpu(called) == pytest.approx(expected)
    assert gpu(called.replace("bf16", "f32")) == pytest.approx(H100.start + 2 * 4096 * 8192 * 2048 / H100.matmul["f32"])


@pytest.mark.parametrize(
    ("target", "operands", "result"),
    [
        ("Forward", ("8,14,14,1024", "2048,3,3,512"), "8,14,14,2048"),
        ("BackwardInput", ("8,14,14,2048", "2048,3,3,512"), "8,14,14,1024"),
        ("BackwardFilter", ("8,14,14,1024", "8,14,14,2048"), "2048,3,3,512"),
    ],
)
def test_a_grouped_convolution_multiplies_each_output_with_the_weights_of_its_channel(target, operands, result):
    text = "".join(f"  %p{i} = bf16[{shape}]{{3,2,1,0}} parameter({i})\n" for i, shape in enumerate(operands))
    call = f'custom_call_target="__cudnn$conv{target}", feature_group_count=2'
    text += f"  %k = (bf16[{result}]{{3,2,1,0}}, u8[99]{{0}}) custom-call(%p0, %p1), dim_labels=b01f_o01i->b01f, {call}"
    assert gpu(text) == pytest.approx(H100.start + 2 * (8 * 14 * 14 * 2048) * (3 * 3 * 512) / H100.matmul["bf16"])


def test_kernels_of_attention_are_told_by_their_names():
    operands = "k q v".split()
    text = "".join(f"  %{of} = bf16[4,8,2048,64]{{3,2,1,0}} parameter({i})\n" for i, of in enumerate(operands))
    text += "  %k0 = (bf16[4,8,2048,64]{3,2,1,0}, f32[4,8,2,2048]{3,2,1,0}) custom-call(%k, %q, %v), "
    text += 'custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(f)/attention_forward/pallas_call"}'
    products = 2 * 2 * (4 * 8 * 2048 * 2048) * 64 / (H100.attention * H100.matmul["bf16"])
    assert gpu(text) == pytest.approx(H100.start + products)
    assert gpu(text.replace("_forward/", "_forward_causal/")) == pytest.approx(H100.start + products / 2)
    dropped = text.replace("2,2048]{3,2,1,0})", "2,2048]{3,2,1,0}, u32[4,8,64,2048]{3,2,1,0})")
    assert gpu(dropped) == pytest.approx(H100.start + products + 115 * 4 * 8 * 2048 * 2048 / H100.lanes)


def test_attention_by_cudnn_is_told_by_its_target():
    operands = "qkv"
    text = "".join(f"  %{of} = bf16[4,8,2048,128]{{3,2,1,0}} parameter({i})\n" for i, of in enumerate(operands))
    text += "  %k0 = (bf16[4,8,2048,128]{3,2,1,0}, f32[4,8,2048]{2,1,0}, u8[0]{0}) custom-call(%q, %k, %v), "
    text += 'custom_call_target="__cudnn$fmhaSoftmax", backend_config={"mask_type": "NO_MASK"}'
    scores = 4 * 8 * 2048 * 2048
    assert gpu(text) == pytest.approx(H100.start + 2 * 2 * scores * 128 / 617e12)
    hidden = text.replace("NO_MASK", "CAUSAL")
    assert gpu(hidden) == pytest.approx(H100.start + 2 * 2 * scores / 2 * 128 / (0.78 * 617e12))
    back = text.replace("Softmax", "SoftmaxBackward")
    assert gpu(back) == pytest.approx(H100.start + 2 * 5 * scores * 128 / 465e12)


def test_a_kernel_moves_its_operands_and_results_once():
    add = """\
%f (a: f32[1048576], b: f32[1048576]) -> f32[1048576] {
  %a = f32[1048576]{0} parameter(0)
  %b = f32[1048576]{0} parameter(1)
  %c = f32[1048576]{0} multiply(%a, %b)
  ROOT %d = f32[1048576]{0} add(%a, %c)
}"""
    text = "  %x = f32[1048576]{0} parameter(0)\n  %k = f32[1048576]{0} fusion(%x, %x), kind=kLoop, calls=%f"
    assert gpu(text, add) == pytest.approx(H100.start + 3 * 4 * 2**20 / H100.memory)


def test_what_is_updated_in_place_is_written_in_part_and_what_is_sliced_is_read_in_part():
    update = """\
%f (all: f32[64,1048576], x: f32[64,1048576], i: s32[]) -> f32[64,1048576] {
  %all = f32[64,1048576]{1,0} parameter(0)
  %x = f32[64,1048576]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %part = f32[1,1048576]{1,0} dynamic-slice(%x, %i, %i), dynamic_slice_sizes={1,1048576}
  ROOT %d = f32[64,1048576]{1,0} dynamic-update-slice(%all, %part, %i, %i)
}"""
    text = """\
  %a = f32[64,1048576]{1,0} parameter(0)
  %n = s32[] parameter(1)
  %k = f32[64,1048576]{1,0} fusion(%a, %a, %n), kind=kLoop, calls=%f"""
    assert gpu(text, update) == pytest.approx(H100.start + 2 * 4 * 2**20 / H100.memory, rel=1e-4)


def test_random_bits_are_bound_by_their_instructions():
    rounds = "\n".join(
        f"  %s{i} = u32[1048576]{{0}} shift-left(%v{i}, %v{i})\n  %v{i + 1} = u32[1048576]{{0}} xor(%s{i}, %v{i})"
        for i in range(30)
    )
    body = f"  %v0 = u32[1048576]{{0}} parameter(0)\n{rounds}\n  ROOT %r = pred[1048576]{{0}} compare(%v30, %v0)"
    bits = f"%f (v0: u32[1048576]) -> pred[1048576] {{\n{body}, direction=LT\n}}"
    text = "  %x = u32[1048576]{0} parameter(0)\n  %k = pred[1048576]{0} fusion(%x), kind=kLoop, calls=%f"
    # 60 integer instructions at 64 of 128 lanes, and one comparison.
    assert gpu(text, bits) == pytest.approx(H100.start + (60 * 2 + 1) * 2**20 / H100.lanes)


def test_only_what_it_knows_is_judged():
    with pytest.raises(ValueError, match="no judge for 'a100:8'"):
        judged("HloModule m\nENTRY %main () -> f32[] {\n  ROOT %c = f32[] constant(0)\n}\n", "a100:8")
