"""The interpreter runs a planned graph as written: its collectives, its barriers, its loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.numerics.harness import Case
from unity_jax.aot.collectives import Collective, count_difference, stablehlo_collectives
from unity_jax.lower.compile import lower
from unity_jax.machine.machine import Machine
from unity_jax.network.collectives import collectives
from unity_jax.ops.rules import rule_of
from unity_jax.pcg.layout import Layout
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.search.assemble import Decisions, is_free
from unity_jax.search.sample import internal

AXES = MeshAxes(("x",), (8,))
ROWS = Layout((("x",), ()))


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def replicated(case: Case) -> Decisions:
    """Everything on every device."""
    decisions = Decisions()
    graph = case.program.graph
    for t in graph.inputs:
        decisions.layouts[t] = Layout.replicated(t.rank)
    for op in graph.walk():
        if not op.bodies and op.name != "optimization_barrier" and not is_free(op):
            decisions.strategies[op] = (-1,) * len(AXES.names)
        for t in (t for body in op.bodies for t in body.inputs):
            decisions.layouts[t] = Layout.replicated(t.rank)
        if op.bodies:
            decisions.layouts.update((t, Layout.replicated(t.rank)) for t in op.outputs)
    decisions.outputs = tuple(Layout.replicated(t.rank) for t in graph.outputs)
    return decisions


def agree(case, plan):
    assert case.differences(case.run(plan)) == []
    issued = stablehlo_collectives(lower(case.program, plan.graph, plan.mesh).compiler_ir("stablehlo"), plan.axes)
    machine = Machine.preset(f"cpu:{plan.axes.num_devices}")
    planned = [Collective(c.kind, c.axes, c.bytes, c.count) for c in collectives(plan.graph, plan.axes, machine)]
    assert count_difference(planned, issued) == []


def some(*shape):
    return jnp.asarray(np.random.default_rng(shape).normal(size=shape))


PROGRAMS = {
    "results that are inputs, literals and repeats": lambda x, y: (x, 1.5, x + y, x + y, y),
    "scan": lambda x, y: jax.lax.scan(lambda c, r: (jnp.sin(c) + r.sum(), (c, r * 2)), x, y, reverse=True),
    "scan without a carry": lambda x, y: jax.lax.scan(lambda c, r: (c, jnp.cos(r) @ x), None, y),
    "scan of literals": lambda x, y: jax.lax.scan(lambda c, _: (c * 2, 0.0), 1.0, None, length=3),
    "while": lambda x, y: jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] @ x @ y.T), (0, x @ y)),
    "cond": lambda x, y: jax.lax.cond(x.sum() > 0, lambda a: (a @ y, 0.0), lambda a: (a - 1, a.sum()), x),
    "remat": lambda x, y: jax.grad(lambda x: jax.checkpoint(lambda a: jnp.sin(jnp.sin(a) @ y))(x).sum())(x),
    "uneven": lambda x, y: jnp.concatenate([x, y[:3]]).sum(0) @ y,
    # XLA of JAX 0.10 adds the starts of nested slices without clamping the inner ones.
    "a slice past the end": lambda x, y: jax.lax.dynamic_slice(x, (jnp.int32(7), jnp.int32(-2) + 9), (4, 5)) * 2,
    "a lookup past the end": lambda x, y: jnp.take(x, jnp.array([9]), 1, mode="clip") + jnp.take(y, jnp.array([9]), 0),
    "an update past the end": lambda x, y: (x.at[jnp.array([8])].set(y[0]), x.at[:, jnp.array([-9])].max(2.0)),
    "keys": lambda x, y: jax.random.split(jax.random.key(3), 6),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_random_plans(name):
    case = Case.of(PROGRAMS[name], (some(8, 8), some(8, 8)))
    for seed, sizes in enumerate([(8,), (2, 4), (3, 2)]):
        agree(case, case.sample(sizes, seed))


def test_every_layout_of_a_carry():
    """A carry keeps its layout from one iteration to the next, partial sums included."""
    case = Case.of(lambda x, w: jax.lax.scan(lambda c, _: (c @ w * 0.1, None), x, None, length=3)[0],
                   (some(8, 6), some(6, 6)))  # fmt: skip
    (scan,) = (op for op in case.program.graph.ops if op.name == "scan")
    carry = scan.bodies[0].inputs[1]
    for layout in internal(carry, AXES):
        decisions = replicated(case)
        decisions.layouts[carry] = layout
        plan = case.planned(AXES, decisions)
        inner = next(op for op in plan.graph.ops if op.name == "scan").bodies[0]
        assert inner.inputs[1].layout == inner.outputs[0].layout == layout
        agree(case, plan)


def test_moved_keys():
    """Typed keys travel as their words, also where their number does not divide."""
    case = Case.of(lambda k: jax.vmap(jax.random.split)(jax.random.split(k, 6)), (jax.random.key(1),))
    for seed in range(2):
        for sizes in ((8,), (4, 2), (3, 2)):
            agree(case, case.sample(sizes, seed))


def test_barriers_are_lowered():
    def fn(x, ws):
        def loss(ws):
            h = x
            for w in ws:
                h = jnp.tanh(h @ w)
            return h.sum()

        return jax.grad(loss)(ws)

    case = Case.of(fn, (some(16, 8), [some(8, 8)] * 3))
    decisions = replicated(case)
    decisions.keep = False
    for t in case.program.graph.inputs[1:]:
        decisions.layouts[t] = ROWS
    plan = case.planned(AXES, decisions)
    barriers = sum(op.name == "optimization_barrier" for op in plan.graph.ops)
    assert barriers > 0
    assert lower(case.program, plan.graph, plan.mesh).as_text().count("optimization_barrier") == barriers
    agree(case, plan)


def test_padding_is_overwritten_once():
    """What several ops read without its padding is made so; who can read it with its padding reads the same."""

    def fn(x, w):
        y = jnp.tanh(x)
        return x.T @ y, y @ w, y.sum(1)

    case = Case.of(fn, (some(16, 30), some(30, 8)))
    decisions = replicated(case)
    for op in decisions.strategies:
        sizes = [f.size for f in rule_of(op).factors]
        decisions.strategies[op] = (max(i for i, n in enumerate(sizes) if n == 30),) if 30 in sizes else (-1,)
    plan = case.planned(AXES, decisions)
    agree(case, plan)
    text = lower(case.program, plan.graph, plan.mesh).as_text()
    assert text.count("stablehlo.tanh") == 1 and text.count("call @_where") == 2  # of y and of w
