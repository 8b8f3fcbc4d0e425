"""Expert plans of a program are completed once, and left out where they were far behind."""

import numpy as np

import models
from unity_jax.machine.machine import Machine
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.program import trace
from unity_jax.search.limits import LIMITS
from unity_jax.search.planner import Planner

H100 = Machine.preset("h100:8")
ONE, TWO = MeshAxes(("x",), (8,)), MeshAxes(("x", "y"), (4, 2))


def planner():
    model = models.get("mlp", "tiny")
    return Planner(trace(model.train_step, (model.abstract_state(), model.abstract_batch()), {}), H100)


def test_an_expert_is_made_on_the_coarsest_mesh_that_expresses_it():
    plans = planner().experts([ONE, TWO], np.inf)
    there = {mesh: {plan.label for plan in plans if plan.mesh == mesh} for mesh in (ONE, TWO)}
    assert {"dp(x)", "fsdp(x)"} <= there[ONE] and {"dp(x,y)", "fsdp(x,y)"}.isdisjoint(there[TWO])
    assert "fsdp(x) x tp(y)" in there[TWO]
    assert "fsdp(x,y)" in {plan.label for plan in planner().experts([TWO], np.inf)}


def test_an_expert_that_was_far_behind_is_not_made_again():
    base = planner()
    variant = base.like(base.program)
    base.seeds.behind[ONE, "fsdp(x)", True] = 1.01 * LIMITS.behind
    assert base.seeds.is_far(ONE, "fsdp(x)") and variant.seeds.was_far(ONE, "fsdp(x)")
    for of in (base, variant):
        made = {plan.label for plan in of.experts([ONE], np.inf)}
        assert "fsdp(x)" not in made and "dp(x)" in made
        assert "fsdp(x,y)" not in {plan.label for plan in of.experts([TWO], np.inf)}  # does the same
