"""What each pass makes of a small planned program, as text: tests/xla/snapshots/, one page for each."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from tests.xla.kernels import f32
from tests.xla.written import PROGRAMS, SNAPSHOTS, before, before_and_after, module
from unity_jax.xla.pipelines import PIPELINES, compiled


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_a_pass_makes_of_a_program(name):
    found = before_and_after(name)
    assert found == (SNAPSHOTS / f"{name}.txt").read_text()
    was, after = found.split(f"-> {name}\n")
    assert was.strip() != after.strip()


def test_every_pass_has_a_page():
    passes = {run.__name__ for pipeline in PIPELINES.values() for run in pipeline}
    assert passes == {*PROGRAMS} == {page.stem for page in SNAPSHOTS.iterdir()}


def test_a_module_is_compiled_by_the_pipeline_of_its_device():
    """Without collectives the list is the schedule, and arguments are not part of it."""
    found = compiled(module(*PROGRAMS["loop_stacks"]))
    by_list = module(*PROGRAMS["loop_stacks"])
    for run in PIPELINES["gpu"][:-1]:
        run(by_list)
    outer = str(found).splitlines()
    assert [line for line in outer if not line.startswith(" ")] == [
        line for line in str(by_list).splitlines() if not line.startswith(" ")
    ]
    assert not {*found.schedule}.intersection(found.arguments.values())
    assert all(body.schedule for i in found.schedule for body in i.bodies)


def test_a_scatter_writes_into_its_operand_though_it_is_of_a_tuple():
    """Two arrays of zeros are made by one kernel; the gradient takes the place of its own, and the update reads the
    other."""

    def step(t, ids, rows):
        g = jnp.zeros_like(t).at[ids].add(rows)
        return t - jnp.where(g > 0, g, 0.0)

    ids = jax.ShapeDtypeStruct((8,), jnp.int32)
    found = compiled(module("h100:1", step, (f32(64, 64), ids, f32(8, 64)), "dp"))
    (zeros,) = [i for i in found.schedule if i.opcode == "broadcast"]
    (scatter,) = [i for i in found.schedule if i.opcode == "scatter-add"]
    taken = [b for b in zeros.makes if b in scatter.reads]
    assert len(zeros.makes) == 2 and len(taken) == 1
    assert [b.in_tuple for b in zeros.makes] == [b not in taken for b in zeros.makes]


@pytest.mark.parametrize(("times", "early"), [(2, True), (1.9, False)])
def test_gathers_are_early_as_far_as_half_of_the_memory_has_room(times, early):
    """Beside the arguments and what the program holds at its peak: the sorted array and the gathered one."""
    found, start_at_zero_depth = before("start_at_zero_depth")
    array = 2**15  # bytes, in tiles
    memory = int(sum(map(found.storage, found.graph.inputs)) + times * (2 * array + array))
    found.storage.device = dataclasses.replace(found.storage.device, memory_bytes=memory)
    start_at_zero_depth(found)
    opcodes = [i.opcode for i in found.schedule]
    assert (opcodes.index("combine") < opcodes.index("sort")) is early
