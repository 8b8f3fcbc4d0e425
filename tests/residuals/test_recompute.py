"""What is computed again is the same, stays computed again when it is compiled, and is not kept."""

import random

import jax
import numpy as np
import pytest

import models
from tests.numerics.steps import fresh_state
from tests.residuals import steps
from unity_jax.aot.flags import BARRIERS_KEPT
from unity_jax.pcg.graph import Graph
from unity_jax.program import trace
from unity_jax.residuals.recompute import can_repeat, recomputed
from unity_jax.xla.traffic import Traffic


def forward(graph):
    """What may be computed again."""
    return [t for op in graph.ops if not op.backward and can_repeat(op) for t in op.outputs]


def residuals(graph):
    made = {t for op in graph.ops if not op.backward for t in op.outputs}
    return {t for op in graph.ops if op.backward for t in op.inputs} & made


def again(of, values):
    found = recomputed(of.graph, values, Traffic.of(of.graph, "cpu").written)
    return of.rewritten(found.graph, ()), found


def equal(got, want):
    for a, b in zip(got, want, strict=True):
        is_key = jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key)
        a, b = map(jax.random.key_data, (a, b)) if is_key else (a, b)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def cases():
    params, x = steps.parameters(), steps.batch()
    return {
        "mlp": (steps.sgd(steps.mlp), (params, x)),
        "dropped": (steps.sgd(steps.dropped), (params, x, jax.random.key(3))),
    }


@pytest.mark.parametrize("name", cases())
@pytest.mark.parametrize("part", [0.3, 0.6, 0.9])
def test_any_values_computed_again_give_the_same_bits(name, part):
    fn, args = cases()[name]
    of = steps.program(fn, *args)
    values = forward(of.graph)
    chosen = set(random.Random(1).sample(values, round(part * len(values))))
    changed, found = again(of, chosen)
    assert len(changed.graph.ops) > len(of.graph.ops)
    assert all(t.shape == o.shape and t.dtype == o.dtype for t, o in found.origin.items())
    equal(steps.alone(changed)(steps.flat(of, *args)), steps.alone(of)(steps.flat(of, *args)))


def test_what_is_computed_again_is_not_kept():
    fn, args = cases()["mlp"]
    of = steps.program(fn, *args)
    wide = {t for t in forward(of.graph) if t.shape == (16, 32)}
    changed, _ = again(of, wide)
    assert wide & residuals(of.graph) and not wide & residuals(changed.graph)


def test_a_repetition_is_compiled_as_one():
    """Compilers merge equal products, but not behind a barrier. XLA:CPU takes barriers away first, unless it is told
    not to; the others do it last."""
    fn, args = cases()["mlp"]
    of = steps.program(fn, *args)
    rest = {t for t in forward(of.graph) if t.shape == (16, 32)}
    changed, _ = again(of, rest)
    found = [compiled(p, steps.flat(of, *args)) for p in (of, changed)]
    ahead = 2  # of the second layer from behind and the third, for the gradients of those behind them
    assert [text.count(" opt-barrier(") for text in found] == [0, 3 + ahead]
    assert [text.count(" dot(") for text in found] == [17, 17 + 3]


def compiled(program, inputs):
    lowered = steps.alone(program).lower(inputs)
    return lowered.compile(compiler_options=BARRIERS_KEPT).as_text()


def test_dropout_masks_are_drawn_again_from_their_keys():
    fn, args = cases()["dropped"]
    of = steps.program(fn, *args)
    masks = {t for t in forward(of.graph) if t.shape == (16, 32)}
    changed, _ = again(of, masks)
    drawn = [sum(op.name == "random_bits" for op in p.graph.walk()) for p in (of, changed)]
    assert drawn == [3, 6]


def test_a_program_without_a_backward_pass_stays_as_it_is():
    of = trace(steps.mlp, (steps.parameters(), steps.batch()), {})
    changed, _ = again(of, set(forward(of.graph)))
    assert str(changed.graph) == str(of.graph)


def test_a_model_of_the_zoo_computes_the_same():
    model = models.get("gpt", "tiny", dtype=np.float32)
    state, data = model.make_state(0), model.make_batch()
    of = trace(model.train_step, (state, data), {})
    values = {t for t in forward(of.graph) if t.rank > 1 and t not in of.graph.outputs}
    changed, _ = again(of, values)
    assert isinstance(changed.graph, Graph) and len(changed.graph.ops) > len(of.graph.ops)
    equal(steps.alone(changed)(steps.flat(of, state, data)), steps.alone(of)(steps.flat(of, state, data)))


def test_what_no_cotangent_is_before_stays_as_it_is():
    """All cotangents are computed of the last values: were these computed again, nothing would say when."""
    fn, args = cases()["mlp"]
    of = steps.program(fn, *args)
    changed, found = again(of, set(forward(of.graph)))
    assert len(changed.graph.ops) == len(of.graph.ops) and not found.origin


def test_no_constant_says_when_it_is_time():
    """Of zeros and of turned weights, which the backward pass reads as well, there is nothing to wait for."""
    fn, args = cases()["dropped"]
    of = steps.program(fn, *args)
    changed, _ = again(of, {t for t in forward(of.graph) if t.shape == (16, 32)})
    makers = changed.graph.producer
    barriers = [op for op in changed.graph.ops if op.name == "optimization_barrier"]
    for op in barriers:
        assert any(makers[t].backward and t.shape == (16, 8) for t in op.inputs if t in makers)
    assert len(barriers) == 3


def test_what_would_wait_for_itself_stays_as_it_is():
    """Of towers that are multiplied, the cotangents of each are computed of the others."""
    model = models.get("dlrm", "tiny")
    args = fresh_state(model), model.make_batch(0)
    of = steps.program(model.train_step, *args)
    for seed in (6, 27, 28, 33):
        rng = random.Random(seed)
        changed, found = again(of, {t for t in forward(of.graph) if rng.random() < 0.9})
        assert len(found.graph.ops) > len(of.graph.ops)
    inputs = steps.flat(of, *args)
    equal(steps.alone(changed)(inputs), steps.alone(of)(inputs))
