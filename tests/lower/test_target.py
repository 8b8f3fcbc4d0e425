"""What one compiler needs of a lowered program and others do not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.numerics.harness import Case
from unity_jax.lower import target
from unity_jax.lower.compile import spmd
from unity_jax.lower.target import TARGETS, hoisted, separated
from unity_jax.pcg.graph import nested
from unity_jax.pcg.loops import Scan


def attention(x, w):
    """A softmax outside and one inside a loop."""
    y, _ = jax.lax.scan(lambda c, _: (jax.nn.softmax(c @ w, -1), None), x, None, length=2)
    return jax.nn.softmax(y @ w, -1)


def barriers(graph):
    return [op for _, g, _ in nested(graph) for op in g.ops if op.name == "optimization_barrier"]


def test_what_is_separate_stands_behind_a_barrier_everywhere_and_the_program_computes_the_same():
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        case = Case.of(attention, [jnp.asarray(rng.normal(size=(8, 8))) for _ in range(2)])
        plan = case.sample((2, 4), 0)
        apart = separated(plan.graph, TARGETS["tpu"].separate)
        maxima = [op for op in plan.graph.walk() if op.name == "reduce_max"]
        assert len(maxima) == 2
        assert len(barriers(apart)) == len(barriers(plan.graph)) + 2
        made = {t for op in apart.walk() if op.name == "reduce_max" for t in op.outputs}
        readers = [op.name for op in apart.walk() for t in op.inputs if t in made]
        assert readers == ["optimization_barrier"] * 2
        got = jax.jit(spmd(apart, plan.mesh))(case.flat)
        assert case.differences(got) == []


def test_a_program_without_such_results_is_itself():
    case = Case.traced(lambda x: x + 1, [jnp.ones(8)])
    assert separated(case.program.graph, TARGETS["tpu"].separate) is case.program.graph


def masked(x, w):
    """A causal mask for all rows in a loop inside a loop, from outside of both."""
    mask = (jnp.tril(w) != 0)[None]

    def inner(c, _):
        scores = jnp.where(mask, c @ w, 0.0)
        return jnp.tanh(scores), scores.sum()

    def outer(c, _):
        return jax.lax.scan(inner, c, None, length=2)

    return jax.lax.scan(outer, x, None, length=3)


def inside(graph):
    """What loops broadcast of their constants."""
    consts = [(op, set(op.bodies[0].inputs[Scan.of(op.params).constants])) for op in graph.walk() if op.bodies]
    bodies = [(b, c) for op, c in consts for b in op.bodies]
    return [o for b, c in bodies for o in b.ops if o.name == "broadcast_in_dim" and set(o.inputs) & c]


def test_what_a_loop_broadcasts_of_its_constants_stands_before_it():
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        case = Case.of(masked, [jnp.asarray(rng.normal(size=s)) for s in ((16, 8, 8), (8, 8))])
        plans = (case.sample((2, 4), seed) for seed in range(20))
        plan = next(p for p in plans if inside(p.graph))  # where nothing is moved before it is broadcast
        before = hoisted(plan.graph)
        assert not inside(before)
        got = jax.jit(spmd(before, plan.mesh))(case.flat)
        assert case.differences(got) == []


def test_an_fft_whose_result_is_gathered_runs_on_the_cpu():
    """XLA:CPU would lay it out as the all-gather likes it, and fail when it runs."""

    def step(x):
        return jnp.fft.ifft(jax.lax.complex(jnp.abs(x), jnp.cos(x))).imag

    with jax.enable_x64(True):
        case = Case.of(step, [jnp.asarray(np.random.default_rng(0).normal(size=(8, 16)))])
        for seed in range(10):
            assert case.differences(case.run(case.sample((2, 4), seed))) == []


def tied(table, ids):
    """The gradient of a table that is read twice and multiplied with."""

    def loss(table):
        return jnp.tanh(table[ids] @ table[ids[::-1]].T @ table[: ids.size]).sum()

    return jax.grad(loss)(table)


def shared(plan):
    """The scatters into zeros whose updates are terms of a sum over devices."""
    made = {t: op.name for op in plan.graph.walk() for t in op.outputs}
    ops = [op for op in plan.graph.walk() if op.name == "scatter-add"]
    scatters = (op.shard for op in ops if made.get(op.inputs[0]) != "optimization_barrier")
    return [
        shard
        for shard in scatters
        if any(factor.kind == "sum" and shard.ways(f) > 1 for f, factor in enumerate(shard.rule.factors))
    ]


def masks(plan, flat):
    """How often the program chooses on one device from two arrays."""
    return jax.jit(spmd(plan.graph, plan.mesh)).lower(flat).as_text().count("call @_where")


@pytest.mark.parametrize("rows", [8, 7])
def test_zeros_that_scatters_add_to_are_not_masked(monkeypatch, rows):
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        args = [jnp.asarray(rng.normal(size=(16, 8))), jnp.asarray(rng.integers(0, 16, size=rows))]
        case = Case.of(tied, args)
        plans = [plan for seed in range(40) if shared(plan := case.sample((2, 4), seed))][:6]
        assert max(len(shared(plan)) for plan in plans) == 2
        assert [d for plan in plans for d in case.differences(case.run(plan))] == []
        bare = [masks(plan, case.flat) for plan in plans]
        monkeypatch.setattr(target, "unmasked", lambda graph: graph)
        fewer = [masks(plan, case.flat) - n for plan, n in zip(plans, bare, strict=True)]
        assert fewer == [len(shared(plan)) for plan in plans]
