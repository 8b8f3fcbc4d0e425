"""Timelines against hand-computed answers, and what must hold for every one."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cost.test_program import contracted, f32
from tests.search.planning import mesh, planner, program
from unity_jax.cost.compute import copy_seconds, fill_seconds
from unity_jax.cost.program import kernel_seconds
from unity_jax.cost.tasks import COLLECTIVES, COMPUTE, DEVICE_TO_HOST, HOST_TO_DEVICE, Task, crossed, tasks
from unity_jax.cost.timeline import simulate, unhidden
from unity_jax.machine.contention import Contention
from unity_jax.machine.machine import Machine
from unity_jax.network.collectives import op_collectives
from unity_jax.network.reshard import Resharder
from unity_jax.pcg.graph import nested
from unity_jax.pcg.layout import Layout
from unity_jax.pcg.loops import Scan
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.program import trace
from unity_jax.search.assemble import Decisions, assemble
from unity_jax.search.candidate import Candidate
from unity_jax.search.experts import expert_seeds
from unity_jax.search.planner import Planner
from unity_jax.search.rule_cache import RuleCache
from unity_jax.xla.traffic import Traffic

IDEAL = Machine.preset("v5e:4x4")  # two levels, no contention


def changed(**fields) -> Machine:
    """The ideal machine with other devices."""
    return dataclasses.replace(IDEAL, devices=(dataclasses.replace(IDEAL.device, **fields),))


HALF = changed(contention=Contention(compute_by_collectives=0.5))
BLOCKING = changed(asynchronous=())


def compute(seconds: float, *after: int) -> Task:
    return Task(COMPUTE, seconds, after)


def collective(seconds: float, *after: int, levels: int = 1, blocking: bool = False) -> Task:
    return Task(COLLECTIVES, seconds, after, levels=levels, blocking=blocking)


def assembled(plan: Planner, axes: MeshAxes) -> Iterator[Candidate]:
    """Every expert plan of a mesh."""
    built = plan._builder(axes).build(True)
    for name, assignment in expert_seeds(plan.program, built, axes, plan.rules).items():
        yield plan._finish(built, assignment, True, name)


HIDDEN = [compute(10), collective(2, 0), compute(5), compute(1, 1)]


def test_a_hidden_all_reduce_costs_nothing_but_contention():
    ideal, half = simulate(HIDDEN, IDEAL), simulate(HIDDEN, HALF)
    assert (ideal.step_seconds, ideal.exposed_communication_seconds) == (16, 0)
    assert ideal.starts == (0, 10, 10, 15)
    # Beside the all-reduce, two seconds long, arithmetic runs at half its speed: it loses one second.
    assert (half.step_seconds, half.exposed_communication_seconds) == (17, 1)
    assert half.ends[1] == 12
    assert (half.compute_seconds, half.communication_seconds) == (16, 2)


def test_an_exposed_all_reduce_costs_its_time():
    for machine in (IDEAL, HALF, BLOCKING):
        found = simulate([compute(10), collective(2, 0), compute(1, 1)], machine)
        assert (found.step_seconds, found.exposed_communication_seconds) == (13, 2)


def test_a_blocking_all_reduce_stops_arithmetic():
    found = simulate([compute(10), collective(2, 0, blocking=True), compute(5), compute(1, 1)], IDEAL)
    assert found.step_seconds == 18
    assert found.starts == (0, 10, 12, 17)  # in program order


def test_an_all_gather_contends_with_a_host_copy():
    machine = changed(contention=Contention(copies_by_collectives=0.5, collectives_by_copies=0.25))
    found = simulate([collective(4), Task(HOST_TO_DEVICE, 2, ())], machine)
    # Both links full: g + h/4 = 1 and h + g/2 = 1, so g = 6/7 and h = 4/7: the copy ends after 3.5 seconds, when one
    # second of the gather is left. The closed form: max(2 + 4/2, 4 + 2/4).
    assert found.ends == pytest.approx((4.5, 3.5))
    assert found.step_seconds == pytest.approx(machine.device.contention.seconds(collectives=4, host_to_device=2))


def test_collectives_on_different_levels_run_at_once():
    assert simulate([collective(3, levels=1), collective(2, levels=2)], IDEAL).step_seconds == 3
    assert simulate([collective(3, levels=1), collective(2, levels=1)], IDEAL).step_seconds == 5
    found = simulate([collective(3, levels=1), collective(2, levels=3), collective(1, levels=2)], IDEAL)
    assert found.starts == (0, 3, 5)  # a later one does not overtake


def test_levels_that_mesh_axes_cross():
    pods = Machine.preset("h100:2x8")
    assert [crossed(pods, MeshAxes(("x", "y"), (2, 8)), (a,)) for a in "xy"] == [0b01, 0b10]
    assert [crossed(pods, MeshAxes(("x", "y"), (4, 4)), (a,)) for a in "xy"] == [0b11, 0b10]
    assert [crossed(IDEAL, MeshAxes(("x", "y"), (4, 4)), axes) for axes in (("x",), ("y",), ("x", "y"))] == [1, 2, 3]


def test_arithmetic_that_waits_lets_later_arithmetic_go_first():
    found = simulate([compute(1), collective(4, 0), compute(1, 1), compute(2), compute(3)], IDEAL)
    assert found.starts == (0, 1, 6, 1, 3)
    assert found.step_seconds == 7


def test_a_chain_takes_the_sum():
    chain = [compute(1), collective(2, 0), Task(DEVICE_TO_HOST, 3, (1,)), compute(0, 2), compute(4, 3)]
    for machine in (IDEAL, HALF):
        assert simulate(chain, machine).step_seconds == 10


def test_a_loop_takes_its_iterations():
    body = (collective(1), compute(3), compute(2, 0))  # the collective is hidden
    loop = [compute(1), Task(COMPUTE, 0, (0,), levels=1, body=body, runs=4), compute(1, 1)]
    found = simulate(loop, IDEAL)
    assert found.step_seconds == 1 + 4 * 5 + 1
    assert (found.compute_seconds, found.communication_seconds) == (22, 4)
    assert simulate(loop, HALF).step_seconds == 1 + 4 * 5.5 + 1


def added_up(planned, axes, machine):
    """Seconds of all kernels and of all collectives of a planned graph."""
    traffic, compute, communication = Traffic.of(planned, machine.device.compiler), 0.0, 0.0
    for _, graph, repeat in nested(planned):
        compute += repeat * sum(kernel_seconds(k, machine.device) for k in traffic.kernels[graph])
        stacks = (t for op in graph.ops if op.name == "scan" for t in op.outputs[Scan.of(op.params).stacked])
        compute += repeat * sum(
            fill_seconds(machine.device, t.layout.local_shape(t.shape, axes), t.itemsize) for t in stacks
        )
        communication += repeat * sum(c.seconds for op in graph.ops for c in op_collectives(op, axes, machine))
    return compute, communication


def test_a_scan_awaits_in_an_iteration_what_it_started_there():
    def f(a, x):
        return jax.lax.scan(lambda c, _: (c @ a, None), x, None, length=5)[0]

    machine = Machine.preset("h100:8")
    axes = MeshAxes(("x",), (8,))
    traced = trace(f, (f32(64, 64), f32(64, 64)), {})
    graph = contracted(traced)
    found = tasks(graph, Traffic.of(graph, "gpu"), axes, machine)
    timeline = simulate(found, machine)
    (loop,) = [task for task in found if task.body]
    assert loop.runs == 4
    compute, communication = added_up(graph, axes, machine)
    assert timeline.step_seconds == pytest.approx(compute + communication)  # a chain
    counting = 5 * machine.device.kernel_overhead  # while the network is busy
    assert timeline.compute_seconds == pytest.approx(compute + counting)
    assert timeline.communication_seconds == pytest.approx(communication)


@pytest.mark.parametrize(("machine", "copies"), [("v5e:2x4", 1), ("h100:8", 0)])
def test_gathered_results_are_copied_on_tpus(machine, copies):
    found, axes = Machine.preset(machine), MeshAxes(("x",), (8,))
    traced = trace(lambda x: x * 2, (f32(64, 64),), {})
    (x,), (double,) = traced.graph.inputs, traced.graph.ops
    layouts = {x: Layout((("x",), ()))}
    decisions = Decisions({double: (0,)}, layouts, (Layout.replicated(2),))
    graph = assemble(traced.graph, decisions, Resharder(found, axes), RuleCache())
    planned = tasks(graph, Traffic.of(graph, found.device.compiler), axes, found)
    (gathered,) = [i for i, task in enumerate(planned) if task.collective is not None]
    after = [task.seconds for task in planned if gathered in task.after]
    assert after == [copy_seconds(found.device, (64, 64), 4)] * copies


def test_a_gradient_is_reduced_beside_the_rest_of_the_backward_pass():
    """Two layers, data parallel: the all-reduce of the last one's gradient hides behind the backward pass of the
    first; not on TPUs, where the compiler awaits it at once."""
    layers = program("mlp", "full", layers=2)
    timeline, blocking = (
        next(c for c in assembled(planner(layers, machine), mesh(8)) if c.label == "dp(x)").timeline
        for machine in ("h100:8", "v5e:2x4")
    )
    assert blocking.step_seconds == pytest.approx(blocking.compute_seconds + blocking.communication_seconds)
    reduced = [i for i, task in enumerate(timeline.tasks) if task.collective and task.collective.kind == "all_reduce"]
    assert len(reduced) >= 2
    assert timeline.step_seconds < timeline.compute_seconds + timeline.communication_seconds
    busy = [(timeline.starts[i], timeline.ends[i]) for i, task in enumerate(timeline.tasks) if task.stream == COMPUTE]
    first = reduced[0]
    assert any(s < timeline.ends[first] and e > timeline.starts[first] for s, e in busy if e > s)


@pytest.mark.parametrize(("machine", "combined"), [("h100:8", True), ("v5e:2x4", True), ("cpu:8", False)])
def test_what_the_compiler_combines_is_sent_at_once(machine, combined):
    """The gradients of data parallelism: one all-reduce, which waits for all of them and begins once."""
    layers = planner(program("mlp", layers=2), machine)
    found = next(c for c in assembled(layers, mesh(8)) if c.label == "dp(x)")
    sent = [t for t in found.timeline.tasks if t.collective is not None]
    whole = [t for t in sent if t.parts]
    assert bool(whole) == combined
    assert sum(len(t.parts) or 1 for t in sent) == sum(
        len(list(op_collectives(op, mesh(8), layers.machine))) for op in found.graph.ops
    )
    for t in whole:
        assert t.collective.bytes == sum(p.collective.bytes for p in t.parts)
        assert max(p.seconds for p in t.parts) < t.seconds < sum(p.seconds for p in t.parts)
        assert set(t.after) == {i for p in t.parts for i in p.after}


@pytest.mark.parametrize("name", ["mlp", "lstm_lm", "moe", "resnext"])
def test_sums_are_those_of_the_program(name):
    """Nothing is lost between the planned graph and its tasks; without asynchronous collectives times add up."""
    plan = planner(program(name), "cpu:8")
    for found in assembled(plan, mesh(8)):
        compute, communication = added_up(found.graph, found.mesh, plan.machine)
        timeline = found.timeline
        assert timeline.compute_seconds == pytest.approx(compute)
        assert timeline.communication_seconds == pytest.approx(communication)
        assert timeline.step_seconds == pytest.approx(compute + communication)


def test_a_barrier_holds_a_gather_back():
    def f(w, x):
        y = jnp.tanh(x @ w)
        w, y = jax.lax.optimization_barrier((w, y))
        return y @ w

    traced = trace(f, (f32(64, 64), f32(64, 64)), {})
    machine, axes = Machine.preset("h100:8"), MeshAxes(("x",), (8,))
    graph = contracted(traced)
    found = tasks(graph, Traffic.of(graph, "gpu"), axes, machine)
    timeline = simulate(found, machine)
    last = max(i for i, task in enumerate(found) if task.op is not None and task.op.name == "dot_general")
    assert all(timeline.ends[i] <= timeline.starts[last] for i in range(last))


# What holds for every set of tasks


@st.composite
def programs(draw: st.DrawFn) -> list[Task]:
    found: list[Task] = []
    for i in range(draw(st.integers(1, 12))):
        after = tuple(sorted(draw(st.sets(st.integers(0, i - 1), max_size=3)))) if i else ()
        stream = draw(st.sampled_from([COMPUTE, COMPUTE, COLLECTIVES, COLLECTIVES, HOST_TO_DEVICE, DEVICE_TO_HOST]))
        seconds = draw(st.sampled_from([0.0, 0.5, 1.0, 2.0, 7.0]))
        levels = draw(st.integers(1, 3)) if stream == COLLECTIVES else 0
        blocking = stream == COLLECTIVES and draw(st.booleans())
        found.append(Task(stream, seconds, after, levels=levels, blocking=blocking))
    return found


part = st.sampled_from([0.0, 0.25, 0.5, 1.0])


@given(programs(), st.builds(Contention, part, part, part, part, part))
def test_bounds_of_every_timeline(found, contention):
    machine = changed(contention=contention)
    timeline = simulate(found, machine)
    again = simulate(found, machine)
    assert (timeline.starts, timeline.ends) == (again.starts, again.ends)
    step, close = timeline.step_seconds, 1 + 1e-9
    path: list[float] = []
    for task, start, end in zip(found, timeline.starts, timeline.ends, strict=True):
        path.append(task.seconds + max((path[i] for i in task.after), default=0.0))
        assert end <= step
        assert end * close >= start + task.seconds
        assert all(timeline.ends[i] <= start for i in task.after)
    assert step * close >= max(path)
    assert step <= sum(task.seconds for task in found) * close
    for stream in (COMPUTE, HOST_TO_DEVICE, DEVICE_TO_HOST):
        assert step * close >= sum(task.seconds for task in found if task.stream == stream)
    for level in (1, 2):
        assert step * close >= sum(task.seconds for task in found if task.levels & level)
    assert step * close >= timeline.compute_seconds + unhidden(machine) * timeline.communication_seconds
    occupied = [
        (start, end)
        for task, start, end in zip(found, timeline.starts, timeline.ends, strict=True)
        if (task.stream == COMPUTE or task.blocking) and end > start
    ]
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(sorted(occupied)))


def test_a_scan_counts_copies_and_slices_in_kernels_on_gpu():
    """Besides what the body computes: the number of the iteration, what is carried as it is stacked, and the part of
    an iteration that a matmul reads."""

    def f(x, ws):
        def step(carry, w):
            carry = jnp.tanh(carry @ w)
            return carry, (carry, carry * 2)

        return jax.lax.scan(step, x, ws)

    traced = trace(f, (f32(8, 8), f32(5, 8, 8)), {})
    found = {}
    for name in ("h100:1", "v5e:1x1"):
        candidate, *_ = assembled(planner(traced, name), mesh(1))
        device = candidate.machine.device
        (scan,) = [op for op in candidate.graph.ops if op.name == "scan"]
        inside = candidate.traffic.kernels[scan.bodies[0]]
        (loop,) = [t for t in tasks(candidate.graph, candidate.traffic, mesh(1), candidate.machine) if t.body]
        more = sum(t.seconds for t in loop.body) - sum(kernel_seconds(k, device) for k in inside)
        copied = copy_seconds(device, (8, 8), 4)
        found[name] = more - (device.kernel_overhead + 2 * copied) * (name == "h100:1")
    assert found == pytest.approx({"h100:1": 0, "v5e:1x1": 0}, abs=1e-12)
