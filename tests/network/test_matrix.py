"""Collectives on a matrix of links, by hand: data-parallel cost as in DT-FM, rings, groups that differ."""

import dataclasses

import numpy as np
import pytest

from unity_jax.machine.machine import Machine
from unity_jax.machine.network import Matrix
from unity_jax.network.communication import collective_lines, collective_seconds
from unity_jax.network.matrix import best_ring
from unity_jax.pcg.mesh import MeshAxes

DEVICE = dataclasses.replace(Machine.preset("h100:8").device, kernel_overhead=0.0)


def machine(latency, bandwidth):
    rows = [tuple(map(tuple, np.array(a, float).tolist())) for a in (latency, bandwidth)]
    return Machine("matrix", (DEVICE,), Matrix(*rows))


def sites(*sizes, inside=(1e-5, 1e10), across=(1e-2, 1e8)):
    """Sites of devices: (latency, bandwidth) inside one and between two."""
    site = np.repeat(np.arange(len(sizes)), sizes)
    same = site[:, None] == site
    return machine(np.where(same, inside[0], across[0]), np.where(same, inside[1], across[1]))


# Three devices. Latency 1, 2 and 4 ms, bandwidth 1, 0.5 and 0.25 GB/s between 0-1, 1-2 and 0-2.
TRIANGLE = machine(
    [[0, 1e-3, 4e-3], [1e-3, 0, 2e-3], [4e-3, 2e-3, 0]],
    [[0, 1e9, 0.25e9], [1e9, 0, 0.5e9], [0.25e9, 0.5e9, 0]],
)
ALL = MeshAxes(("x",), (3,))


def test_three_devices_by_hand():
    """Direct: device 2 sends a third over 4 ms + 0.25 GB/s and a third over 2 ms + 0.5 GB/s. Ring: two steps as long as
    the slowest link."""
    for nbytes in (0.0, 3e6, 3e9):
        direct = 4e-3 + nbytes / 3 / 0.25e9 + 2e-3 + nbytes / 3 / 0.5e9
        ring = 2 * (4e-3 + nbytes / 3 / 0.25e9)
        assert direct < ring
        assert collective_seconds(TRIANGLE, ALL, "all_gather", nbytes, ("x",)) == pytest.approx(direct)
        assert collective_seconds(TRIANGLE, ALL, "all_reduce", nbytes, ("x",)) == pytest.approx(2 * direct)
        assert collective_seconds(TRIANGLE, ALL, "all_to_all", nbytes, ("x",)) == pytest.approx(direct)
        shift = 4e-3 + nbytes / 0.25e9  # the last sends to the first
        assert collective_seconds(TRIANGLE, ALL, "permute", nbytes, ("x",)) == pytest.approx(shift)


def test_a_ring_that_avoids_slow_links():
    """A square without diagonals: a ring needs four fast links, direct exchange the diagonals too."""
    fast, slow = 1e9, 1e6
    near = [[abs(i - j) in (1, 3) for j in range(4)] for i in range(4)]
    square = machine(np.full((4, 4), 1e-4), np.where(near, fast, slow))
    mesh = MeshAxes(("x",), (4,), (0, 2, 1, 3))  # in an order that jumps across
    seconds = collective_seconds(square, mesh, "reduce_scatter", 4e6, ("x",))
    assert seconds == pytest.approx(3 * (1e-4 + 1e6 / fast))
    assert collective_seconds(square, mesh, "permute", 4e6, ("x",)) == pytest.approx(1e-4 + 4e6 / slow)
    assert best_ring(square.network, (0, 2, 1, 3)) in {(0, 1, 2, 3), (0, 3, 2, 1)}


def test_the_slower_group_decides():
    """Two sites, the second with links a tenth as fast; both gather at once."""
    bandwidth = np.full((4, 4), 1e7)
    bandwidth[:2, :2], bandwidth[2:, 2:] = 1e9, 1e8
    pair = machine(np.zeros((4, 4)), bandwidth)
    mesh = MeshAxes(("site", "inside"), (2, 2))
    assert collective_seconds(pair, mesh, "all_gather", 2e8, ("inside",)) == pytest.approx(1e8 / 1e8)
    both = MeshAxes(("site", "inside"), (2, 2), (0, 2, 1, 3))  # now every group crosses
    assert collective_seconds(pair, both, "all_gather", 2e8, ("inside",)) == pytest.approx(1e8 / 1e7)


def test_one_direction_may_be_slower():
    pair = machine([[0, 0], [1e-3, 0]], [[0, 1e9], [1e8, 0]])
    assert collective_seconds(pair, MeshAxes(("x",), (2,)), "all_gather", 2e8, ("x",)) == pytest.approx(1e-3 + 1)


def test_exact_where_one_device_has_the_latency_and_another_the_bytes():
    """The maximum over devices of two lines that cross is neither of them."""
    mixed = machine(
        [[0, 1, 1e-9, 1e-9], [1, 0, 1e-9, 1e-9], [1e-9, 1e-9, 0, 0], [1e-9, 1e-9, 0, 0]],
        [[0, 1e9, 1e15, 1e15], [1e9, 0, 1e15, 1e15], [1e15, 1e15, 0, 1e6], [1e15, 1e15, 1e6, 0]],
    )
    mesh = MeshAxes(("pair", "x"), (2, 2))
    assert len(collective_lines(mixed, mesh, "all_gather", ("x",))[0]) == 2
    for nbytes in (1e3, 1e6, 1e7):
        seconds = collective_seconds(mixed, mesh, "all_gather", nbytes, ("x",))
        assert seconds == pytest.approx(max(1 + nbytes / 2 / 1e9, nbytes / 2 / 1e6))


@pytest.mark.parametrize("spec", ["h100:2x4", "h100:8", "v5e:1x8", "sites"])
def test_synchronization_grows_with_the_replicas(spec):
    """Data-parallel gradients of fixed size, over 2, 4 and 8 replicas."""
    wide = sites(4, 4) if spec == "sites" else Machine.preset(spec)
    costs = []
    for n in (2, 4, 8):
        mesh = MeshAxes(("model", "data"), (8 // n, n))
        costs.append(collective_seconds(wide, mesh, "all_reduce", 1e8, ("data",)))
    assert costs == sorted(costs)
    assert costs[0] < costs[-1]


def test_order_follows_the_mesh():
    """The same mesh over the same devices, near ones together or apart."""
    wide = sites(2, 2)
    together, apart = (MeshAxes(("x", "y"), (2, 2), order) for order in ((), (0, 2, 1, 3)))
    near, far = (collective_seconds(wide, m, "all_reduce", 1e8, ("y",)) for m in (together, apart))
    assert (near, far) == (pytest.approx(2 * (1e-5 + 5e7 / 1e10)), pytest.approx(2 * (1e-2 + 5e7 / 1e8)))
    assert collective_seconds(wide, apart, "all_reduce", 1e8, ("x",)) == near
