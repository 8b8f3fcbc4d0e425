"""Which buffers stay on the chip: by gain, while there is room, and not for long."""

import dataclasses

import jax
import jax.numpy as jnp

from unity_jax.kernels import attention
from unity_jax.machine.machine import Machine
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.program import trace
from unity_jax.search.identity import identity
from unity_jax.xla.memory_space_assignment import Away, away, fetching_tuples

DEVICE = dataclasses.replace(Machine.preset("v5e:1x1").device, chip_bytes=10.0, memory_bandwidth=10.0)  # 20 s at most


def test_a_buffer_stays_while_there_is_room_for_it():
    """Buffers 0 and 1 overlap at position 2 alone; 1 gains more."""
    accesses = {0: [0, 2], 1: [2, 3], 2: [3, 4]}
    assert away(accesses, {0: 1, 1: 2, 2: 1}, (6, 6, 4), range(6), DEVICE) == {0: Away(0, 2, evicted=False)}
    assert away(accesses, {0: 3, 1: 2, 2: 1}, (6, 6, 4), range(6), DEVICE) == {1: Away(2, 3, evicted=False)}
    assert away(accesses, {0: 3, 1: 2, 2: 1}, (6, 4, 4), range(6), DEVICE) == {}


def test_a_buffer_that_waits_too_long_leaves_and_comes_back():
    clock = (0, 1, 2, 30, 31, 60, 61)
    assert away({0: [0, 1, 2]}, {0: 1}, (1,), clock, DEVICE) == {}
    assert away({0: [0, 1, 3]}, {0: 1}, (1,), clock, DEVICE) == {0: Away(1, 3, evicted=True)}
    assert away({0: [0, 3, 4]}, {0: 1}, (1,), clock, DEVICE) == {0: Away(0, 3, evicted=False)}
    assert away({0: [0, 1, 3, 5]}, {0: 1}, (1,), clock, DEVICE) == {0: Away(1, 5, evicted=True)}


def test_a_loop_has_what_it_makes_on_the_chip():
    """Position 1 makes and reads the buffer; the next access is late."""
    assert away({0: [1, 1, 3]}, {0: 1}, (1,), (0, 1, 2, 30, 31), DEVICE) == {0: Away(1, 3, evicted=True)}
    assert away({0: [1, 1, 3]}, {0: 1}, (11,), (0, 1, 2, 30, 31), DEVICE) == {0: Away(1, 3, evicted=False)}


def test_a_buffer_takes_its_room_once_between_accesses():
    """It would not fit twice, and position 1 belongs to both of its lives."""
    assert away({0: [0, 1, 2]}, {0: 1}, (6,), range(4), DEVICE) == {}


def test_large_arrays_come_in_slices():
    """Of each of four slices a tuple, and one of what it is of; what is larger than the chip does not come."""
    device = Machine.preset("v5e:1x1").device
    found = [fetching_tuples(n, device) for n in (4, 2**21 - 1, 2**21, device.chip_bytes + 1)]
    assert found == [1, 1, 8, 0]


def test_what_a_kernel_of_attention_reads_is_on_the_chip():
    """As XLA:TPU has it; all of this fits there, so that nothing but arguments and the result takes memory."""
    t = jax.ShapeDtypeStruct((1, 512, 8, 128), jnp.bfloat16)
    program = trace(lambda q, k, v: attention(2 * q, 2 * k, 2 * v) * 2, (t, t, t), {})
    machine = Machine.preset("v5e:1x1")
    plan = identity(program, machine, MeshAxes(("x",), (1,)))
    assert any(op.name == "attention" for op in plan.graph.ops)
    assert plan.memory.peak_bytes < 4.5 * 2**20  # four arrays of a MiB
