"""The lowered program contains exactly the collectives that the plan predicts."""

import random

import pytest

import models
from tests.numerics.harness import Case, Planned
from tests.numerics.plans import NAMES, named_plans
from tests.numerics.savings import saved
from tests.numerics.steps import CHEAP, CORE, one_layer, slow
from unity_jax.aot.collectives import Collective, count_difference, stablehlo_collectives
from unity_jax.lower.compile import lower
from unity_jax.network.collectives import collectives
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.program import trace

MACHINE = slow()
AXES = MeshAxes(("x", "y"), (2, 4))


def predicted(plan: Planned) -> list[Collective]:
    return [Collective(c.kind, c.axes, c.bytes, c.count) for c in collectives(plan.graph, plan.axes, MACHINE)]


@pytest.mark.parametrize("name", [n if n in CHEAP else pytest.param(n, marks=pytest.mark.slow) for n in CORE])
def test_lowered_collectives_are_the_planned_ones(name):
    model = models.get(name, "tiny", **one_layer(name))
    program = trace(model.train_step, (model.abstract_state(), model.abstract_batch()), {}, donate_argnums=0)
    seen = {}
    for label, plan in named_plans(program, MACHINE, AXES):
        planned = predicted(plan)
        found = stablehlo_collectives(lower(program, plan.graph, plan.mesh).compiler_ir("stablehlo"), AXES)
        assert count_difference(planned, found) == [], f"{name}, {label}"
        seen[label] = sum(c.count for c in found)
    assert set(seen) == set(NAMES)
    assert all(seen.values()), f"a plan without communication shows nothing: {seen}"
    assert seen["random"] > 10 * seen["dp"] or seen["random"] > 50


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CHEAP[:2])
def test_those_of_programs_that_need_less_memory(name, seed):
    """Values computed again, losses by chunks, microbatches: what a loop over these communicates is planned as well."""
    model = models.get(name, "tiny")
    case = Case.traced(model.train_step, (model.abstract_state(), model.abstract_batch()), donate=(0,))
    case = saved(case, random.Random(seed))
    assert case.program.savings
    plan = case.sample(AXES.sizes, seed, "h100")
    found = stablehlo_collectives(lower(case.program, plan.graph, plan.mesh).compiler_ir("stablehlo"), plan.axes)
    assert found and count_difference(predicted(plan), found) == []
