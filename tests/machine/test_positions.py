"""Where devices lie on the network, in whatever order JAX or the caller lists them."""

import itertools
import random
from types import SimpleNamespace

import jax

from unity_jax.machine.detect import positions
from unity_jax.machine.machine import Machine


def chip(x, y, z=0, core=0, ident=0, process=0):
    return SimpleNamespace(coords=(x, y, z), core_on_chip=core, id=ident, process_index=process)


def gpu(ident, process):
    return SimpleNamespace(id=ident, process_index=process)


def test_torus_positions_follow_the_coordinates():
    network = Machine.preset("v5e:2x4").network
    jax_order = [chip(x, y) for y in range(4) for x in range(2)]
    assert positions(jax_order, network) == (0, 4, 1, 5, 2, 6, 3, 7)
    part = [chip(x + 4, y + 8) for x in range(2) for y in range(4)]  # a part of a larger slice
    assert positions(part, network) == tuple(range(8))


def test_hosts_of_a_slice_own_blocks_of_it():
    """v5e:4x4 in the order of its ahead-of-time topology: four hosts of 2 x 2 chips."""
    devices = [chip(2 * hx + x, 2 * hy + y) for hy in range(2) for hx in range(2) for y in range(2) for x in range(2)]
    assert positions(devices, Machine.preset("v5e:4x4").network)[:6] == (0, 4, 1, 5, 8, 12)


def test_two_cores_of_a_chip_are_neighbours():
    devices = [chip(x, y, 0, core) for y, x, core in itertools.product(range(2), range(2), range(2))]
    assert positions(devices, Machine.preset("tpu7x:2x2x1").network) == (0, 1, 4, 5, 2, 3, 6, 7)


def test_nodes_by_process_and_id():
    devices = [gpu(i, i // 8) for i in range(16)]
    random.Random(0).shuffle(devices)
    assert positions(devices, Machine.preset("h100:2x8").network) == tuple(d.id for d in devices)
    interleaved = [gpu(i, i % 2) for i in range(4)]
    assert positions(interleaved, Machine.preset("h100:2x2").network) == (0, 2, 1, 3)


def test_devices_that_are_not_those_of_the_machine_are_taken_in_order():
    for spec in ("v5e:2x4", "h100:2x4", "cpu:8"):
        assert positions(jax.devices("cpu")[:8], Machine.preset(spec).network) == tuple(range(8))
    scattered = [chip(x, y, ident=i) for i, (x, y) in enumerate([(0, 0), (5, 0), (0, 3), (1, 1)])]
    assert positions(scattered, Machine.preset("v5e:2x2").network) == (0, 1, 2, 3)
