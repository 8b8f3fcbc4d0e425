"""Rings follow the network: every pass goes to a neighbour where there is such a way around."""

import numpy as np
import pytest

from unity_jax.machine.machine import Machine
from unity_jax.machine.network import Matrix
from unity_jax.network.collectives import op_collectives
from unity_jax.network.ring import ring_of
from unity_jax.pcg.graph import Op, Tensor
from unity_jax.pcg.layout import Layout
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.pcg.parallel import Shift


@pytest.mark.parametrize(
    ("machine", "mesh", "axes", "ways"),
    [
        ("h100:8", MeshAxes(("x",), (8,)), ("x",), 1),  # a port sends and receives at once
        ("v5e:2x4", MeshAxes(("x", "y"), (2, 4)), ("y",), 1),  # a line: the way back takes the other direction
        ("v5e:2x4", MeshAxes(("x",), (8,)), ("x",), 2),
        ("v5e:4x4", MeshAxes(("x", "y"), (4, 4)), ("x", "y"), 2),
        ("v5e:16x16", MeshAxes(("x", "y"), (16, 16)), ("y",), 2),  # wraps around
        ("v5e:16x16", MeshAxes(("x", "y"), (32, 8)), ("y",), 1),
        ("v5p:4x4x4", MeshAxes(("x", "y"), (16, 4)), ("y",), 2),
        ("h100:2x8", MeshAxes(("x",), (16,)), ("x",), 1),
    ],
)
def test_directions(machine, mesh, axes, ways):
    ring = ring_of(Machine.preset(machine), mesh, axes)
    assert ring.ways == ways
    assert sorted(ring.members) == list(range(mesh.size(axes)))
    n = len(ring.members)
    for d in range(n):
        for member, other in enumerate(ring.ahead(d)):
            assert (ring.position[other] - ring.position[member]) % n == d


@pytest.mark.parametrize("order", [(), (0, 4, 1, 5, 2, 6, 3, 7)])
def test_a_grid_is_gone_around_by_single_hops_wherever_the_mesh_lies(order):
    mesh = MeshAxes(("x",), (8,), order)
    members = ring_of(Machine.preset("v5e:2x4"), mesh, ("x",)).members
    at = [np.array(divmod((order or range(8))[m], 4)) for m in members]
    assert [int(abs(a - b).sum()) for a, b in zip(at, at[1:] + at[:1], strict=True)] == [1] * 8


def test_groups_that_lie_differently_keep_their_order():
    mesh = MeshAxes(("x", "y"), (2, 4), (0, 1, 2, 3, 7, 6, 5, 4))
    assert ring_of(Machine.preset("h100:8"), mesh, ("y",)).members == (0, 1, 2, 3)
    links = ((0.0, 1e-6), (1e-6, 0.0))
    pair = Machine("pair", Machine.preset("h100:8").devices, Matrix(links, ((1e9, 1e9), (1e9, 1e9))))
    assert ring_of(pair, MeshAxes(("x",), (2,)), ("x",)).members == (0, 1)


def test_two_directions_together_take_as_long_as_one():
    machine, mesh = Machine.preset("v5e:16x16"), MeshAxes(("x", "y"), (16, 16))
    layout = Layout((("y",), ()))
    x = Tensor((16 * 4096, 4096), np.dtype("float32"), layout=layout)

    def seconds(ways):
        move = Shift("shift", ("y",), 0, None, layout, layout, tuple(range(16)), 1, "all_gather", ways)
        (c,) = op_collectives(Op("shift", (x,), (x,), move=move), mesh, machine)
        assert (c.kind, c.bytes, c.of) == ("permute", 4 * 4096**2, "all_gather")
        return c.seconds

    assert seconds(1) == pytest.approx(4 * 4096**2 / 4.5e10, rel=0.02)  # one link, one direction
    assert 2 * seconds(2) == pytest.approx(seconds(1), rel=0.02)
