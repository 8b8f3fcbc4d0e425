"""Meshes and device orders: aligned with levels, and found on a matrix of links."""

import itertools

import numpy as np
import pytest

from tests.network.test_matrix import machine, sites
from unity_jax.machine.machine import Machine
from unity_jax.network.communication import collective_seconds
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.search.placement import device_order, mesh_candidates


def scrambled(of, order):
    """The machine with its devices renumbered: new device `i` is the old `order[i]`."""
    at = np.ix_(order, order)
    return machine(np.array(of.network.latency)[at], np.array(of.network.bandwidth)[at])


def groups(mesh):
    """The network positions that each group of the last axis joins."""
    return {frozenset(row) for row in np.array(mesh.order or range(mesh.num_devices)).reshape(-1, mesh.sizes[-1])}


def test_levels_need_no_order_of_their_own():
    found = mesh_candidates(16, Machine.preset("h100:2x8"))
    assert [mesh.sizes for mesh in found] == [(16,), (8, 2), (4, 4), (2, 8)]
    assert not any(mesh.order for mesh in found)


def test_an_inner_axis_may_span_some_of_many_nodes():
    sizes = [mesh.sizes for mesh in mesh_candidates(512, Machine.preset("h100:64x8"))]
    assert sizes == [(512,), (256, 2), (128, 4), (64, 8), (8, 64), (32, 2, 8), (8, 8, 8)]


def test_three_axes_are_those_of_a_torus_or_parts_of_many_nodes():
    def three(devices, machine):
        return [m.sizes for m in mesh_candidates(devices, Machine.preset(machine)) if len(m.sizes) == 3]

    assert three(512, "v5p:8x8x8") == [(8, 8, 8)]
    assert three(128, "v5p:4x8x4") == [(4, 8, 4)]
    assert three(192, "h100:24x8") == [(12, 2, 8), (6, 4, 8)]
    assert not any(three(n, m) for n, m in ((8, "h100:8"), (16, "h100:2x8"), (64, "v5e:8x8"), (8, "v5p:2x2x2")))


def test_each_axis_of_a_torus_is_tried():
    torus = Machine.preset("v5p:4x8x4")
    middle = next(mesh for mesh in mesh_candidates(128, torus) if mesh.order)
    assert middle.sizes == (16, 8)
    assert groups(middle) >= {frozenset(range(0, 32, 4))}
    assert not any(mesh.order for mesh in mesh_candidates(64, Machine.preset("v5p:4x4x4")))  # all axes are alike


@pytest.mark.parametrize("seed", range(3))
def test_scrambled_sites_are_found(seed):
    order = np.random.default_rng(seed).permutation(8)
    wide = scrambled(sites(4, 4), order)
    near = {frozenset(i for i in range(8) if order[i] // 4 == site) for site in range(2)}
    for mesh in mesh_candidates(8, wide):
        if mesh.sizes == (2, 4):
            assert groups(mesh) == near
        elif mesh.sizes == (4, 2):
            assert all(any(g <= site for site in near) for g in groups(mesh))


def test_unequal_sites():
    """Three and five devices: one group of four must cross, and the other may not."""
    mesh = next(m for m in mesh_candidates(8, sites(3, 5)) if m.sizes == (2, 4))
    assert sorted(len(g & {0, 1, 2}) for g in groups(mesh)) in ([0, 3], [1, 2])
    assert min(len(g & {0, 1, 2}) for g in groups(mesh)) == 0


def partitions(items, k):
    if not items:
        yield []
        return
    for rest in itertools.combinations(items[1:], k - 1):
        group = (items[0], *rest)
        for others in partitions([x for x in items if x not in group], k):
            yield [group, *others]


@pytest.mark.parametrize("k", [2, 4])
def test_close_to_the_best_grouping(k):
    """Random links between 8 devices, against every way to group them: 105 pairs of pairs, 35 pairs of fours."""
    excess = []
    for seed in range(10):
        rng = np.random.default_rng(seed)
        latency, bandwidth = rng.uniform(1e-3, 0.2, (8, 8)), rng.uniform(4e7, 1.2e9, (8, 8))
        wide = machine((latency + latency.T) / 2, (bandwidth + bandwidth.T) / 2)
        costs = []
        for order in (device_order(wide.network, tuple(range(8)), k), *map(np.ravel, partitions(range(8), k))):
            mesh = MeshAxes(("x", "y"), (8 // k, k), tuple(map(int, order)))
            costs.append(collective_seconds(wide, mesh, "all_to_all", 2.0**20, ("y",)))
        excess.append(costs[0] / min(costs[1:]))
    assert np.mean(excess) < 1.05
    assert max(excess) < 1.3


# Published between regions of a cloud (https://arxiv.org/abs/2206.01288): milliseconds, Gb/s.
REGIONS = {
    ("Oregon", "Virginia"): (67, 0.79),
    ("Oregon", "Tokyo"): (96, 0.523),
    ("Oregon", "London"): (136, 0.42),
    ("Virginia", "Tokyo"): (143, 0.524),
    ("Virginia", "London"): (76, 1.16),
    ("Tokyo", "London"): (210, 0.366),
}


def test_regions_of_a_cloud():
    """Two devices in each of four regions: pairs stay in their region, fours join Virginia with London or Oregon."""
    names = [*dict.fromkeys(a for pair in REGIONS for a in pair)] * 2
    latency, bandwidth = np.full((8, 8), 5e-4), np.full((8, 8), 1.25e9)
    for i, j in itertools.permutations(range(8), 2):
        found = REGIONS.get((names[i], names[j])) or REGIONS.get((names[j], names[i]))
        if found:
            latency[i, j], bandwidth[i, j] = found[0] * 1e-3, found[1] * 1.25e8
    for mesh in mesh_candidates(8, machine(latency, bandwidth)):
        places = {frozenset(names[i] for i in g) for g in groups(mesh)}
        if mesh.sizes == (4, 2):
            assert places == {frozenset({name}) for name in names}
        if mesh.sizes == (2, 4):
            assert places == {frozenset({"Virginia", "London"}), frozenset({"Oregon", "Tokyo"})}


def test_deterministic():
    wide = scrambled(sites(3, 3, 6), np.random.default_rng(7).permutation(12))
    assert mesh_candidates(12, wide) == mesh_candidates(12, wide)
