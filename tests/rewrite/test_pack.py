"""State that is concatenated every step is held as one array, moments and all, and the step computes the same."""

import jax
import optax
import pytest

from tests.numerics.harness import errors
from tests.rewrite.steps import flat, grouped, normal
from tests.rewrite.test_apply import evaluate
from unity_jax.program import trace
from unity_jax.rewrite.estimate import Seconds
from unity_jax.rewrite.library import applicable
from unity_jax.rewrite.pack import packed
from unity_jax.rewrite.packing import gathered, spread
from unity_jax.rewrite.sites import Finder, rewrite

NAMES = ("concat-dot-siblings-sharing-one", "add-of-dots-to-dot-of-concats")
MERGING = tuple(r for r in applicable() if r.name in NAMES)


def merged(program):
    """The program with siblings merged until there are none."""
    while places := list((finder := Finder(program.graph, lambda graph: Seconds(len(graph.ops)))).places(MERGING)):
        made = rewrite(finder, max(places, key=lambda place: place.gain))
        program = program.rewritten(made[0], ())
    return program


def adam(loss):
    optimizer = optax.adamw(1e-2)

    def step(state, x):
        params, moments = state
        gradients = jax.grad(loss)(params, x)
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments

    return step, optimizer.init


def attention():
    params = {"q": normal(5, 3, 2, 4), "k": normal(5, 3, 4) * 0.3, "v": normal(5, 3, 4) * 0.1}
    return (lambda p, x: grouped(p["q"], p["k"], p["v"], x)), params, normal(2, 6, 5)


def biased():
    params = {"w": {"q": normal(5, 12), "k": normal(5, 6)}, "b": {"q": normal(12), "k": normal(6)}}
    return (lambda p, x: flat(p["w"], p["b"], x)), params, normal(2, 4, 5)


@pytest.mark.parametrize(("make", "whole"), [(attention, (5, 3, 16)), (biased, (5, 18))])
def test_weights_and_moments_are_held_as_one(make, whole):
    with jax.enable_x64(True):
        loss, params, x = make()
        step, init = adam(loss)
        state = params, init(params)
        program = merged(trace(step, (state, x), {}, donate_argnums=0))
        smaller = packed(program)
        groups = smaller.packed
        assert [len(g.inputs) for g in groups] == [len(groups[0].inputs)] * 3  # weights and two moments
        assert [t.shape for t in smaller.graph.inputs[-3:]] == [whole] * 3
        joined = [op for op in smaller.graph.ops if op.name == "concatenate" and op.outputs[0].shape == whole]
        assert not joined

        given = gathered(
            jax.tree.leaves((state, x)), smaller.entering, lambda n, arrays: groups[n].packing.joined(arrays)
        )
        got = jax.jit(lambda arrays: evaluate(smaller.graph, arrays))(given)
        want = jax.tree.leaves(jax.jit(step)(state, x))
        got = spread(
            got,
            smaller.leaving,
            lambda n, k, whole: groups[n].packing.part(whole, k, program.graph.inputs[groups[n].inputs[k]].shape),
        )
        assert not [e for e in errors(program.out_paths, want, got) if e.error > 1e-9]


def test_state_that_the_caller_keeps_is_not_packed():
    with jax.enable_x64(True):
        loss, params, x = attention()
        step, init = adam(loss)
        program = merged(trace(step, ((params, init(params)), x), {}))
        assert packed(program) is program
        assert any(op.name == "concatenate" for op in program.graph.ops)
