"""On GPUs what a loop of the backward pass writes into is filled when the loop begins."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.numerics.harness import Case
from unity_jax import _compat
from unity_jax.lower.compile import spmd
from unity_jax.lower.fills import FILLS, filled_late
from unity_jax.pcg.graph import nested

GPU, CPU = "h100", "cpu"


def some(*shape):
    return np.random.default_rng(len(shape)).normal(size=shape)


def stacked(unroll=1, reverse=False):
    """The gradients of layers of their own, of one weight of all, and of what goes in."""

    def loss(ws, v, x):
        def layer(x, w):
            return jnp.tanh(x @ w) @ v, x.sum()

        y, sums = jax.lax.scan(layer, x, ws, unroll=unroll, reverse=reverse)
        return (y * y).sum() + (sums * sums).sum()

    return jax.grad(loss, (0, 1, 2))


def counted(x, w):
    """A loop that stacks and carries numbers of its own beside a key."""

    def loss(w):
        def step(c, r):
            key, total = c
            noise = jax.random.normal(jax.random.fold_in(key, 1), r.shape)
            return (key, total + (r * w * noise).sum()), r * w

        (_, total), ys = jax.lax.scan(step, (jax.random.key(0), jnp.zeros(())), x)
        return total * ys.sum()

    return jax.grad(loss)(w)


WEIGHTS = some(5, 8, 8), some(8, 8), some(8, 8)
PROGRAMS = {
    "layers": (stacked(), WEIGHTS),
    "reversed": (stacked(reverse=True), WEIGHTS),
    "two at a time, and one left": (stacked(unroll=2), WEIGHTS),
    "three at a time, reversed, and two left": (stacked(unroll=3, reverse=True), WEIGHTS),
    "unrolled": (stacked(unroll=5), WEIGHTS),
    "one layer": (stacked(), (some(1, 8, 8), *WEIGHTS[1:])),
    "keys": (counted, (some(6, 8), some(8))),
}


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def late(graph):
    return [op for op in graph.walk() if FILLS in op.params]


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_program_computes_the_same(name):
    case = Case.of(*PROGRAMS[name])
    for seed, sizes in enumerate([(8,), (2, 4), (3, 2)]):
        plan = case.sample(sizes, seed, GPU)
        assert late(plan.graph)
        assert case.differences(case.run(plan)) == []


def test_loops_of_the_forward_pass_are_as_they_were():
    case = Case.of(*PROGRAMS["layers"])
    scans = [op for op in case.sample((8,), 0, GPU).graph.walk() if op.name == "scan"]
    assert [FILLS in op.params for op in scans] == [op.backward for op in scans]
    assert {op.backward for op in scans} == {True, False}
    assert late(case.sample((8,), 0, CPU).graph) == []


def test_accumulators_and_stacks_wait_for_what_the_loop_carries():
    """The gradient of the weight of all layers begins as zeros; what is stacked is that of each layer's own."""
    case = Case.of(*PROGRAMS["layers"])
    plan = case.sample((8,), 0, GPU)
    (loop,) = late(plan.graph)
    assert all(number == 0 for number in loop.params[FILLS].numbers.values())
    assert loop.params[FILLS].numbers
    program = jax.make_jaxpr(spmd(plan.graph, plan.mesh))(case.flat)
    (body,) = (eqn.params["jaxpr"] for eqn in program.jaxpr.eqns if eqn.primitive.name == "shard_map")
    barriers = [e for e in body.eqns if e.primitive.name == "optimization_barrier"]
    (barrier,) = (e for e in barriers if e.invars[0].aval.shape == ())
    given = [v.aval.shape for v in barrier.invars]
    assert given.count(()) == len(loop.params[FILLS].numbers) + 1
    assert len(given) > given.count(()), "what the loop carries"
    passed = {*barrier.outvars}
    filled = {
        v for e in body.eqns if any(u in passed for u in e.invars if not _compat.is_literal(u)) for v in e.outvars
    }
    (last,) = [e for e in body.eqns if e.primitive.name == "while"]
    assert sum(v in filled for v in last.invars if not _compat.is_literal(v)) >= given.count(())


def test_numbers_that_become_terms_of_a_sum_are_not_known():
    """Ones on every device of which all but one device's are dropped are no ones."""
    case = Case.of(lambda x: jax.grad(lambda x: stacked_ones(x).sum())(x), [some(8, 8)])
    for seed in range(6):
        plan = case.sample((2, 4), seed, GPU)
        for _, graph, _ in nested(plan.graph):
            for op in graph.ops:
                for i, number in op.params[FILLS].numbers.items() if FILLS in op.params else ():
                    made = graph.producer[op.inputs[i]]
                    assert number == 0 or made.move is None
        assert case.differences(case.run(plan)) == []


def stacked_ones(x):
    y, _ = jax.lax.scan(lambda c, r: (c * jnp.sin(r), None), jnp.ones(8), x)
    return y


def test_marking_a_marked_program_changes_nothing():
    case = Case.of(*PROGRAMS["layers"])
    graph = case.sample((8,), 0, GPU).graph
    assert [op.params.get(FILLS) for op in filled_late(graph).walk()] == [op.params.get(FILLS) for op in graph.walk()]
