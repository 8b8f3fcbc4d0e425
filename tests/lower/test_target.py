"""What one compiler needs of a lowered program and others do not."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.numerics.harness import QUICK, Case
from unity_jax.lower.compile import spmd
from unity_jax.lower.target import TARGETS, hoisted, late_zeros, separated
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
        case = Case.of(attention, [jnp.asarray(rng.normal(size=(8, 8))) for _ in range(2)], options=QUICK)
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
        case = Case.of(masked, [jnp.asarray(rng.normal(size=s)) for s in ((16, 8, 8), (8, 8))], options=QUICK)
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
        case = Case.of(step, [jnp.asarray(np.random.default_rng(0).normal(size=(8, 16)))], options=QUICK)
        for seed in range(10):
            assert case.differences(case.run(case.sample((2, 4), seed), QUICK)) == []


def reader(times):
    """The gradient of a table that is read so often."""

    def loss(table, ids):
        return sum(jnp.tanh(table[ids + n] @ table[ids + n].T).sum() for n in range(times))

    return jax.grad(loss)


def waiting(graph):
    return {t for op in graph.walk() if op.name == "zeros_after" for t in op.outputs}


def test_equal_zeros_that_scatters_add_to_follow_from_the_updates():
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        args = [jnp.asarray(rng.normal(size=(16, 8))), jnp.asarray(rng.integers(0, 15, size=8))]
        case, found = Case.of(reader(2), args, options=QUICK), 0
        for plan in (case.sample((2, 4), seed) for seed in range(8)):
            late = late_zeros(plan.graph)
            found += len(waiting(late))
            assert waiting(late) <= {op.inputs[0] for op in late.ops if op.name == "scatter-add"}
            assert case.differences(jax.jit(spmd(late, plan.mesh))(case.flat)) == []
        assert found


def test_zeros_that_no_other_scatter_adds_to_are_as_they_were():
    case = Case.traced(reader(1), [jnp.ones((16, 8)), jnp.arange(8)])
    assert "scatter-add" in [op.name for op in case.program.graph.walk()]
    assert not waiting(late_zeros(case.program.graph))


def test_a_compiler_that_scatters_into_another_sum_sees_the_zeros():
    case = Case.traced(reader(2), [jnp.ones((16, 8)), jnp.arange(8)])
    assert [op.name for op in case.program.graph.walk()].count("scatter-add") >= 2
    assert not waiting(late_zeros(case.program.graph))
