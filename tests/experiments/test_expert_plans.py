"""What was published of experts' plans is about models and machines that there are, and can be costed."""

import math

import models
from experiments.tables import expert_plans
from unity_jax.machine.machine import Machine
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.residuals.record import Chunk, Recompute


def test_axes_have_as_many_devices_as_the_machine():
    rows = expert_plans.published()
    assert len({tuple(row[s] for s in expert_plans.SETTINGS) for row in rows}) == len(rows)
    for row in rows:
        assert row["model"] in models.names() and row["size"] in models.sizes(row["model"])
        assert math.prod(int(row[a]) for a in expert_plans.AXES) == Machine.preset(row["machine"]).num_devices
        assert int(row["batch"]) % (int(row["data"]) * int(row["fsdp"])) == 0
        assert row["source"].startswith("https://github.com/")


def test_context_parallelism_as_pins():
    program = expert_plans.program_of("gpt", "tiny")
    pins = expert_plans.pinned(program, MeshAxes(("x", "y"), (2, 4)))
    by_name = {t.name: lay.dims for t, lay in pins.tensors.items()}
    assert by_name["[1]['tokens']"] == (("x",), ("y",))
    assert any(by_name["[0].params['token']['embedding']"])  # as all of the state
    state = {name: dims for name, dims in by_name.items() if "kernel" in name}
    assert any("mu" in name for name in state) and all(("x", "y") in dims for dims in state.values())


def published(machine, devices, **what):
    axes = {"data": "1", "fsdp": str(devices), "tensor": "1", "context": "1"}
    settings = {"model": "gpt", "batch": "16", "offloads": "", "flash": "", "accumulates": "1", **axes, **what}
    return expert_plans.expert_plan(settings, Machine.preset(machine))


def test_an_expert_computes_some_layers_again():
    plan = published("h100:2", 2, size="tiny", length="32", vocabulary="256", remat="1")
    assert not plan.program.savings and (256, 64) in {t.shape for t in plan.program.graph.inputs}
    assert any("rematted_computation" in op.scope for op in plan.program.graph.walk())


def test_an_expert_accumulates():
    plan = published("h100:8", 8, size="gpt3-1.3b", length="512", vocabulary="", remat="none", accumulates="2")
    assert [str(how) for how in plan.program.savings] == ["2 microbatches of 8 of 16 rows, gradients accumulated"]


def test_an_expert_keeps_what_its_framework_does():
    """Where all that JAX keeps does not fit, and attention by a kernel where the published run has one."""
    what = {"size": "gpt3-1.3b", "length": "2048", "vocabulary": "", "remat": "none", "batch": "256", "flash": "yes"}
    plan = published("h100:8", 8, **what)
    assert [type(how) for how in plan.program.savings] == [Chunk, Recompute]
    assert plan.fits(Machine.preset("h100:8").device.memory_bytes)
    assert str(plan.program.implementations[0]).startswith("attention by a kernel")


def test_an_expert_is_completed_on_meshes_of_its_sizes():
    program, machine = expert_plans.program_of("mlp", "tiny", batch_size=64), Machine.preset("h100:8")
    found = list(expert_plans.experts_plans(program, machine, {"data": 1, "fsdp": 4, "tensor": 2, "context": 1}))
    assert {plan.mesh.sizes for plan in found} == {(4, 2)}
    assert {"fsdp(x) x tp(y)"} <= {plan.label for plan in found}
    weights = [t.layout for t in found[0].graph.inputs if ".params" in t.name and t.rank == 2]
    assert any(layout.axis_dim.keys() == {"x", "y"} for layout in weights)
