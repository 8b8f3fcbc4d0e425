"""Mesh axes and their place on the network."""

import jax
import pytest

from unity_jax.pcg.mesh import MeshAxes


def test_the_order_of_the_network_is_no_order():
    mesh = MeshAxes(("x", "y"), (2, 2), (0, 1, 2, 3))
    assert mesh == MeshAxes(("x", "y"), (2, 2))
    assert hash(mesh) == hash(MeshAxes(("x", "y"), (2, 2)))
    placed = MeshAxes(("x", "y"), (2, 2), (0, 2, 1, 3))
    assert placed != mesh
    assert str(placed) == "x=2, y=2"


def test_of_a_mesh():
    found = MeshAxes.of(jax.sharding.AbstractMesh((4, 2), ("data", "model")), [7, 6, 5, 4, 3, 2, 1, 0])
    assert found == MeshAxes(("data", "model"), (4, 2), (7, 6, 5, 4, 3, 2, 1, 0))


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 1, 2, 2), (1, 2, 3, 4)])
def test_an_order_names_each_position_once(order):
    with pytest.raises(ValueError, match=r"the order of mesh \(x=4\) must name each of 4 positions once"):
        MeshAxes(("x",), (4,), order)


def test_names_and_sizes_agree():
    with pytest.raises(ValueError, match="one size per distinct name"):
        MeshAxes(("x", "x"), (2, 2))
