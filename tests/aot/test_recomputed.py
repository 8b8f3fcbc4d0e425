"""What the backward pass computes again stays so in what the compilers make of it: they merge equal values, but not
across the barriers of the plan."""

from collections import Counter

import jax
import numpy as np
import pytest

import models
from tests.numerics.plans import named_plans, without_barriers
from unity_jax.aot.hlo import parse
from unity_jax.aot.topologies import compiled_for, topology
from unity_jax.lower.compile import lower
from unity_jax.machine.machine import Machine
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.program import trace
from unity_jax.residuals.choice import Choice
from unity_jax.residuals.recompute import can_repeat
from unity_jax.residuals.record import Recompute

AXES = MeshAxes(("x",), (8,))
HLO = {"gpu": ("dot", "tanh", "exponential"), "tpu": ("convolution", "tanh", "exponential")}
"""How the compilers call products, and what is elementwise."""


def compiled(program, graph, mesh, platform):
    """How many of each there are of a planned program, and of the same without barriers."""
    found = []
    for now in (graph, without_barriers(graph)):
        module = parse(compiled_for(lower(program, now, mesh), platform).as_text())
        count = Counter(op.opcode for ops in module.computations.values() for op in ops.values())
        found.append([count[name] for name in HLO[platform]])
    return found


@pytest.mark.parametrize(
    ("name", "platform"),
    [
        pytest.param("h100:8", "gpu", marks=pytest.mark.extra("gpu-aot")),
        pytest.param("v5e:2x4", "tpu", marks=pytest.mark.extra("tpu-aot")),
    ],
)
def test_no_recomputation_is_merged(name, platform):
    """Of a transformer of two layers all but what the layers add up: products, softmax, activations."""
    model = models.get("gpt", "tiny", layers=2, scan=False, remat=False, dropout=0.0)
    of = trace(model.train_step, (model.abstract_state(), model.abstract_batch()), {}, donate_argnums=0)
    machine = Machine.preset(name)
    forward = [op for op in of.graph.ops if not op.backward and can_repeat(op) and op.name != "add"]
    values = frozenset(t for op in forward for t in op.outputs)
    how = Recompute.of(of.graph, Choice(dict.fromkeys(values, 1), values, 0, 0), machine.device.compiler, 0)
    program = of.saving(how.applied(of.graph), how)
    ((_, plan),) = named_plans(program, machine, AXES, ("dp",))
    planned, before = (Counter(op.name for op in graph.walk()) for graph in (plan.graph, of.graph))
    again = [planned[op] - before[op] for op in ("dot_general", "tanh", "exp")]
    assert all(again)
    kept, merged = compiled(program, plan.graph, jax.sharding.Mesh(np.array(topology(name)), AXES.names), platform)
    assert kept[0] == planned["dot_general"] and merged[0] == before["dot_general"]
    # Activations are part of the kernels that read them, and computed in each; a softmax is in memory.
    assert kept[1] >= planned["tanh"] and kept[2] - merged[2] >= again[2]
