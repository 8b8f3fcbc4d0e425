"""Collective times against hand-computed values, and the orders that a planner relies on."""

import dataclasses
import itertools

import pytest

from unity_jax.machine.machine import Machine
from unity_jax.network.communication import KINDS, collective_lines, collective_seconds, groups_of
from unity_jax.network.spans import spans
from unity_jax.pcg.mesh import MeshAxes

H100, H100X2, V5E, POD = (Machine.preset(s) for s in ("h100:8", "h100:2x8", "v5e:2x4", "v5e:16x16"))
SWITCH, SWITCHES = (
    dataclasses.replace(m, network=tuple(dataclasses.replace(level, links="switch") for level in m.network))
    for m in (H100, H100X2)
)
START = H100.device.kernel_overhead
ONE = MeshAxes(("data",), (8,))
TWO = MeshAxes(("data", "model"), (2, 8))


def per_byte(machine, mesh, kind, axes):
    """Of the algorithm that is fastest for many bytes; on levels each is one line."""
    return min(slope for ((_, slope),) in collective_lines(machine, mesh, kind, axes))


def crossed(machine, mesh, axes):
    return [tuple(s)[1:] for s in spans(machine.network, groups_of(machine, mesh, axes))]


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        ("all_gather", 7 / 8 * 1e9 / 3.708e11 + 3 * 1.9e-6),
        ("reduce_scatter", 7 / 8 * 1e9 / 3.708e11 + 3 * 1.9e-6),
        ("all_reduce", 2 * 7 / 8 * 1e9 / 3.708e11 + 6 * 1.9e-6),
        ("all_to_all", 7 / 8 * 1e9 / 3.708e11 + 3 * 1.9e-6),
        ("permute", 1e9 / 3.708e11 + 1.9e-6),
    ],
)
def test_switch(kind, seconds):
    assert collective_seconds(SWITCH, ONE, kind, 1e9, ("data",)) == pytest.approx(START + seconds)


@pytest.mark.parametrize(
    ("kind", "nbytes", "seconds"),
    [
        ("all_gather", 1e3, 6.6e-6 + 7 * 0.6e-6 + 7 / 8 * 1e3 / 1.41e11),  # LL
        ("all_reduce", 1e7, 14e-6 + 14 * 1.9e-6 + 2 * 7 / 8 * 1e7 / (120 / 128 * 3.708e11)),  # LL128
        ("reduce_scatter", 1e9, 8.4e-6 + 7 * 3.4e-6 + 7 / 8 * 1e9 / 3.708e11),  # Simple
        ("all_to_all", 1e9, 8.4e-6 + 3.4e-6 + 7 / 8 * 1e9 / 3.708e11),
        ("permute", 1e9, 8.4e-6 + 3.4e-6 + 1e9 / 3.708e11),
    ],
)
def test_nccl(kind, nbytes, seconds):
    """The start of a protocol, its hops along the ring, and what it makes of the bandwidth."""
    assert collective_seconds(H100, ONE, kind, nbytes, ("data",)) == pytest.approx(START + seconds)


def test_nccl_over_nodes():
    """A ring goes from node to node once and uses the card of every device; a tree needs fewer hops over many nodes."""
    ring = 14e-6 + 14 * 1.9e-6 + 4e-6 + 15 / 16 * 1e7 / (120 / 128 * 3.708e11)
    assert collective_seconds(H100X2, TWO, "all_gather", 1e7, TWO.names) == pytest.approx(START + ring)
    alone = 6.6e-6 + 2.7e-6 + 1 / 2 * 1e3 / 2.5e10
    assert collective_seconds(H100X2, TWO, "all_gather", 1e3, ("data",)) == pytest.approx(START + alone)
    many = Machine.preset("h100:32x8")
    tree = 6.6e-6 + 14 * 0.6e-6 + 10 * 2.7e-6 + 2 * 1e3 / 2.04e10
    assert collective_seconds(many, MeshAxes(("x",), (256,)), "all_reduce", 1e3, ("x",)) == pytest.approx(START + tree)


@pytest.mark.parametrize(
    ("kind", "ring", "line"),  # bytes over one link of 4.5e10 B/s, for 1 byte on 16 and on 4 devices
    [
        ("all_gather", 15 / 16 / 2, 3 / 4),
        ("all_reduce", 15 / 16, 3 / 2),
        ("all_to_all", 64 / 16 / 2, 4 / 4),
        ("permute", 1, 1),
    ],
)
def test_torus(kind, ring, line):
    for machine, size, moved in ((Machine.preset("v5e:1x16"), 16, ring), (Machine.preset("v5e:1x4"), 4, line)):
        assert per_byte(machine, MeshAxes(("x",), (size,)), kind, ("x",)) == pytest.approx(moved / 4.5e10)


def test_interleaved_groups_share_the_links_of_a_torus():
    mesh = MeshAxes(("a", "b", "y"), (4, 4, 16))
    assert crossed(POD, mesh, ("a",)) == [(4, 4, 1)]
    outer, inner = (per_byte(POD, mesh, "all_gather", (axis,)) for axis in "ab")
    assert outer == pytest.approx(3 / 4 / 4.5e10 / 2 * 4)  # a wrapped ring, shared by four
    assert inner == pytest.approx(3 / 4 / 4.5e10)  # a line of its own


def test_interleaved_groups_share_the_links_of_a_line():
    """Eight chips: groups {0, 2, 4, 6} and {1, 3, 5, 7} cross each link together, {0..3} and {4..7} do not."""
    line = Machine.preset("v5e:1x8")
    apart = per_byte(line, MeshAxes(("x", "y"), (4, 2)), "all_gather", ("x",))
    together = per_byte(line, MeshAxes(("x", "y"), (2, 4)), "all_gather", ("y",))
    assert together == pytest.approx(3 / 4 / 4.5e10)
    assert apart == pytest.approx(2 * together)


def test_both_axes_of_a_torus_work_at_once():
    """On 16 x 16, half of the payload goes along x first and half along y: 15/16 of a half through two links of 4.5e10
    B/s on the way out, a 16th of that before."""
    both = per_byte(POD, MeshAxes(("x", "y"), (16, 16)), "all_gather", ("x", "y"))
    assert both == pytest.approx(15 / 16 / 2 / 9e10 * (1 + 1 / 16))


def test_a_grid_of_lines_is_one_ring():
    """Eight chips as 2 x 4 without wraparound have a closed way through all of them: 7/8 of the bytes through two
    links. Fifteen as 3 x 5 have none."""
    grid, mesh = Machine.preset("v5e:2x4"), MeshAxes(("x",), (8,))
    assert per_byte(grid, mesh, "all_gather", ("x",)) == pytest.approx(7 / 8 / 9e10)
    assert per_byte(grid, mesh, "all_reduce", ("x",)) == pytest.approx(2 * 7 / 8 / 9e10)
    odd = Machine.preset("v5e:3x5")
    assert per_byte(odd, MeshAxes(("x",), (15,)), "all_gather", ("x",)) > 14 / 15 / 9e10


def test_a_user_order_is_priced_as_placed():
    """Four chips in a line in the order 0, 2, 1, 3: the pairs {0, 2} and {1, 3} cross the middle link together."""
    line = Machine.preset("v5e:1x4")
    for order, shared in (((), 1), ((0, 2, 1, 3), 2)):
        mesh = MeshAxes(("x", "y"), (2, 2), order)
        assert per_byte(line, mesh, "all_gather", ("y",)) == pytest.approx(shared / 2 / 4.5e10)


def test_a_group_with_one_device_in_a_node_has_one_network_card_there():
    """Three of four devices in one node: the fourth receives the rest of the bytes alone."""
    mesh = MeshAxes(("x", "y"), (4, 4), (0, 1, 2, 8, 3, 4, 5, 9, 6, 7, 10, 11, 12, 13, 14, 15))
    uneven, even = (per_byte(H100X2, m, "all_gather", ("y",)) for m in (mesh, MeshAxes(("x", "y"), (4, 4))))
    assert uneven > 1 / 2 / 5e10 > even


def test_hierarchical():
    # An all-reduce over both levels: reduce-scatter inside nodes, all-reduce of an eighth across, all-gather inside.
    got = collective_seconds(SWITCHES, TWO, "all_reduce", 1e9, ("data", "model"))
    assert got == pytest.approx(START + 2 * 7 / 8 * 1e9 / 3.708e11 + 6 * 1.9e-6 + 2 / 2 * 1e9 / 8 / 5e10 + 2 * 4e-6)
    shift = collective_seconds(SWITCHES, TWO, "permute", 1e9, ("data", "model"))
    assert shift == pytest.approx(START + 4e-6 + 1e9 / 5e10)
    single = MeshAxes(("all",), (16,))
    for kind in KINDS:  # one axis over both levels is the same group
        assert collective_seconds(H100X2, single, kind, 1e6, ("all",)) == collective_seconds(
            H100X2, TWO, kind, 1e6, ("data", "model")
        )


@pytest.mark.parametrize("kind", KINDS)
def test_crossing_nodes_is_slower(kind):
    across, inside = (collective_seconds(H100X2, TWO, kind, 1e8, (axis,)) for axis in TWO.names)
    assert across > inside


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("machine", [H100, POD, Machine.preset("cpu:8")], ids=lambda m: m.name)
def test_monotonic(kind, machine):
    meshes = [MeshAxes(("x",), (n,)) for n in (1, 2, 4, 8)]
    for small, large in itertools.pairwise(meshes):
        for nbytes in (0, 1e3, 1e8):
            small_time, large_time = (collective_seconds(machine, m, kind, nbytes, ("x",)) for m in (small, large))
            assert small_time <= large_time
            assert large_time < collective_seconds(machine, large, kind, nbytes + 1e6, ("x",))


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
@pytest.mark.parametrize("machine", [H100, H100X2, V5E, POD], ids=lambda m: m.name)
def test_one_collective_beats_two_smaller_ones(kind, machine):
    """Over two axes at once, against each in turn in the better order, with the bytes that each would move. One ring of
    NCCL has more hops than two short ones: of many bytes they may take as long."""
    close = 1.001 if machine in (H100, H100X2) else 1.0
    for sizes in ((2, 4), (4, 2)):
        mesh = MeshAxes(("x", "y"), sizes)
        shrinks = kind in ("all_gather", "reduce_scatter")
        for nbytes in (1e2, 1e5, 1e9):
            both = collective_seconds(machine, mesh, kind, nbytes, mesh.names)
            for first, last in (("x", "y"), ("y", "x")):
                small = collective_seconds(machine, mesh, kind, nbytes / mesh[last] if shrinks else nbytes, (first,))
                assert both < close * (small + collective_seconds(machine, mesh, kind, nbytes, (last,)))


def test_alone_is_free_and_sizes_need_not_align():
    assert collective_seconds(H100, MeshAxes(("x", "y"), (1, 8)), "all_reduce", 1e9, ("x",)) == 0
    assert collective_seconds(H100, ONE, "all_reduce", 1e9, ()) == 0
    mesh = MeshAxes(("x", "y"), (5, 3))  # groups of three at 6, 7, 8 cross the two nodes of eight
    assert crossed(H100X2, mesh, ("y",)) == [(2, 1, 1), (2, 1, 1)]  # and one of them is alone in its node


def test_part_of_a_torus():
    mesh = MeshAxes(("x", "y"), (2, 4))
    x, y = (collective_seconds(V5E, mesh, "all_gather", 1e8, (axis,)) for axis in mesh.names)
    both = collective_seconds(V5E, mesh, "all_gather", 1e8, mesh.names)
    assert both < x < y  # the ring through all chips uses two links of each, a line only one at its ends


def test_errors():
    with pytest.raises(ValueError, match="unknown collective 'gather'"):
        collective_seconds(H100, ONE, "gather", 1, ("data",))
    with pytest.raises(ValueError, match="mesh data=16 has 16 devices, h100:8 has 8"):
        collective_seconds(H100, MeshAxes(("data",), (16,)), "all_reduce", 1, ("data",))
