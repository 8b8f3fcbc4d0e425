"""The planner: never worse than an expert, deterministic, within its limits."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.numerics.steps import CORE, one_layer, slow
from tests.search.planning import mesh, planner, program
from unity_jax.machine.contention import ASYNCHRONOUS
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.search.candidate import best
from unity_jax.search.experts import expert_seeds
from unity_jax.search.floors import arithmetic_seconds
from unity_jax.search.limits import LIMITS
from unity_jax.search.placement import mesh_candidates
from unity_jax.search.planner import Planner
from unity_jax.search.solver import solve

pytestmark = pytest.mark.slow  # the same numbers on every JAX version

SEVERAL_AXES = mesh(2, 4), mesh(2, 2, 2)


def experts_of(plan, axes: MeshAxes):
    """Every expert on a mesh, finished with and without reuse of gathered weights."""
    for keep in (True, False):
        built = plan._builder(axes).build(keep)
        for name, assignment in expert_seeds(plan.program, built, axes, plan.rules).items():
            yield plan.common.finished(plan.program, built.decisions(assignment, keep), axes, name, 0.0)


@pytest.mark.parametrize("machine", ["h100:8", "v5e:2x4"])
@pytest.mark.parametrize("name", CORE)
def test_never_worse_than_an_expert_on_one_axis(name: str, machine: str) -> None:
    plan = planner(program(name), machine)
    chosen = best(plan.candidates(mesh(8)), plan.limit)
    fitting = [e for e in experts_of(plan, mesh(8)) if e.fits(plan.limit)]
    assert fitting
    assert all(chosen.seconds <= e.seconds * (1 + 1e-9) for e in fitting)


@pytest.mark.parametrize("name", CORE)
def test_never_worse_than_an_expert_on_several_axes(name: str) -> None:
    plan = planner(program(name, **one_layer(name)))
    found = plan.candidates(mesh(8))  # an expert that a coarser mesh can express takes part there only
    for axes in SEVERAL_AXES:
        found += plan.candidates(axes)
        chosen = best(found, plan.limit)
        fitting = [e for e in experts_of(plan, axes) if e.fits(plan.limit)]
        assert all(chosen.seconds <= e.seconds * (1 + 1e-9) for e in fitting)


def test_a_plan_that_is_there_is_not_made_again() -> None:
    plan = planner(program("mlp"))
    built, own = plan.problem(mesh(8)), plan._proposed(mesh(8))
    seconds = own.seconds
    same = built.decisions(plan._solved(mesh(8)).assignment, True)
    again = plan.common.finished(plan.program, same, mesh(8), "again", 1.0)
    assert (again.label, again.lower_bound, again.graph) == ("again", 1.0, own.graph)
    assert vars(again)["timeline"].step_seconds == seconds  # known before it is asked for
    another = plan.common.finished(plan.program, dataclasses.replace(same, keep=False), mesh(8), "again", 1.0)
    assert another.graph is not own.graph
    told = plan.common.known(own.noting(program=plan.program.rewritten(plan.program.graph, ())))
    for form in (plan.program, told.program):
        assert plan.like(form)._proposed(mesh(8)).graph is own.graph


def test_a_plan_of_a_coarser_mesh_takes_part_once() -> None:
    coarse, fine = mesh(64), mesh(32, 2)
    alone = planner(program("dlrm"), "v5e:8x8").candidates(fine)
    assert "search on (x=64)" in [c.label for c in alone]
    plan = planner(program("dlrm"), "v5e:8x8")
    both = plan.candidates(coarse)
    plan._compete(both, fine)
    assert "search on (x=64)" not in [c.label for c in both]
    assert min(c.seconds for c in both) == min(c.seconds for c in alone)


def test_goes_on_where_one_axis_splits_badly() -> None:
    """Four utterances per device are few rows for weights that a recurrent cell reads again in every step: little
    communication is exposed, but a second axis, over the weights, saves much of the arithmetic."""
    plan = planner(program("deep_speech", "full", layers=2, batch_size=256), "v5e:8x8")
    meshes = mesh_candidates(64, plan.machine)
    alone, chosen = best(plan.candidates(meshes[0]), plan.limit), plan.plan(meshes)
    assert alone.timeline.exposed_communication_seconds < LIMITS.waiting * alone.seconds
    assert len(chosen.mesh.names) == 2
    assert chosen.seconds < 0.8 * alone.seconds


def test_never_worse_under_a_limit() -> None:
    free = planner(program("gpt"))
    peak = best(free.candidates(mesh(8)), free.limit).memory.peak_bytes
    plan = planner(program("gpt"), limit=0.9 * peak)
    chosen = best(plan.candidates(mesh(8)), plan.limit)
    fitting = [e for e in experts_of(plan, mesh(8)) if e.fits(plan.limit)]
    assert all(chosen.fits(plan.limit) and chosen.seconds <= e.seconds * (1 + 1e-9) for e in fitting)


def test_same_plan_every_time() -> None:
    first, second = (planner(program("bert", layers=1)).plan([mesh(8)]) for _ in range(2))
    assert str(first.graph) == str(second.graph)


def test_problem_prices_what_the_planned_graph_costs() -> None:
    """The cost of a solution is that of its assembled plan, but for reshards that assembling finds it can share."""
    for name in ("bert", "dlrm", "mlp"):
        plan = planner(program(name, **one_layer(name)))
        built = plan._builder(mesh(8)).build(True)
        solution = solve(built.problem)
        timeline = plan.candidates(mesh(8))[0].timeline
        total = timeline.compute_seconds + timeline.communication_seconds
        assert total <= solution.cost * (1 + 1e-3), "the problem leaves constants out"
        assert total >= 0.97 * solution.cost
        assert solution.gap < 1e-9


@pytest.mark.parametrize("machine", ["h100:8", "v5e:2x4", "cpu:8"])
@pytest.mark.parametrize("name", CORE)
def test_no_expert_is_faster_than_its_floor(name: str, machine: str) -> None:
    """What rules a seed out unseen is below its simulated step, and the bound of a mesh below all of them."""
    plan = planner(program(name, **one_layer(name)), machine)
    for keep in (True, False):
        built = plan._builder(mesh(8)).build(keep)
        for label, assignment in expert_seeds(plan.program, built, mesh(8), plan.rules).items():
            timeline = plan._finish(built, assignment, keep, label).timeline
            floor = plan.floor(built, assignment)
            assert arithmetic_seconds(built, assignment) <= timeline.compute_seconds * (1 + 1e-9)
            assert built.least_seconds <= floor <= timeline.step_seconds * (1 + 1e-9)


def test_an_expert_wins_whose_times_add_up_to_more() -> None:
    """FSDP on a slow network communicates more than the plan with the least sum of times, and hides it where the
    compiler hides every collective."""
    machine = slow("v5p:2x2x2", 20)
    hiding = dataclasses.replace(machine.device, asynchronous=ASYNCHRONOUS)
    plan = Planner(program("bert", layers=1), dataclasses.replace(machine, devices=(hiding,)))
    found = plan.candidates(mesh(8))
    (fsdp,), searched = [c for c in found if c.label == "fsdp(x)"], found[0]
    sums = [c.timeline.compute_seconds + c.timeline.communication_seconds for c in (fsdp, searched)]
    assert sums[0] > 1.05 * sums[1]
    assert fsdp.seconds < searched.seconds
    assert best(found, plan.limit).label != "search"


def test_an_expert_that_cannot_win_is_not_assembled() -> None:
    """On a machine where collectives stop arithmetic, tensor parallelism could not beat the least sum of times."""
    plan = planner(program("bert", layers=1), "cpu:8")
    found = plan.candidates(mesh(8))
    built = plan._solved(mesh(8)).built
    floors = {name: plan.floor(built, a) for name, a in plan._expert_seeds(mesh(8)).items()}
    assert all(c.label in ("search", *floors) for c in found)
    ruled_out = {name for name, floor in floors.items() if floor >= best(found, plan.limit).seconds}
    assert {"tp(x)", "tp+sp(x)"} <= ruled_out
    assert not ruled_out & {c.label for c in found}


def test_no_table_is_too_large() -> None:
    for name in ("mlp", "dlrm"):
        plan = planner(program(name))
        built = plan._builder(mesh(2, 4)).build(True)
        solution = solve(built.problem, seeds=[np.zeros(len(built.nodes), int)])
        assert solution.largest_table <= 10**7


def test_mesh_candidates_have_all_devices() -> None:
    for machine in ("h100:8", "h100:2x8", "v5e:4x4", "cpu:6", "cpu:7", "cpu:1"):
        m = planner(program("mlp"), machine).machine
        found = mesh_candidates(m.num_devices, m)
        assert all(axes.num_devices == m.num_devices for axes in found)
        assert len(set(found)) == len(found)
