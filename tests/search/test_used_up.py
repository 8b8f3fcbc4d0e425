"""What the backward pass computes again waits for the gradients before it, and for nothing that waits for it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.numerics.harness import Case
from tests.residuals import steps
from tests.residuals.test_recompute import again, forward
from unity_jax.pcg.graph import nested
from unity_jax.search.used_up import used_up


def layered(params, x):
    """Layers with biases, which the user has computed again."""

    @jax.checkpoint
    def layer(x, weights):
        v, w, b = weights
        return x + jnp.tanh(jax.nn.gelu(x @ v + b) @ w)

    for weights in params:
        x = layer(x, weights)
    return (x**2).mean()


def by_hand():
    params = [(v, w, np.zeros(v.shape[1], v.dtype)) for v, w in steps.parameters()]
    return steps.program(steps.sgd(layered), params, steps.batch())


def recomputing():
    params, x = steps.parameters(), steps.batch()
    of = steps.program(steps.sgd(steps.mlp), params, x)
    kept = {op.outputs[0] for op in of.graph.ops if op.name == "add"}  # what goes from layer to layer
    return again(of, set(forward(of.graph)) - kept)[0]


def awaited(graph, barrier):
    """What must have run before a barrier does."""
    found, waiting = set(), [*barrier.inputs]
    while waiting:
        op = graph.producer.get(waiting.pop())
        if op is not None and op not in found:
            found.add(op)
            waiting += op.inputs
    return found


def barriers(graph):
    return [op for op in graph.ops if op.name == "optimization_barrier" and op.backward and op.traced is not None]


@pytest.mark.parametrize("make", [by_hand, recomputing])
def test_gradients_come_before_what_is_computed_again(make):
    """Two products per layer are for the cotangent and two for the weights: at the last barrier those of all layers
    but the one that it begins have run."""
    graph = steps.planned(make())
    found = barriers(graph)
    assert len(found) >= 2
    *_, last = (awaited(graph, b) for b in found)
    weights = {op for op in graph.ops if op.name == "dot_general" and op.backward and op.outputs[0].shape[0] != 16}
    assert len(weights) == 6
    assert len(weights & last) >= 4


def test_gradients_of_biases_do_as_well():
    graph = steps.planned(by_hand())
    sums = {op for op in graph.ops if op.name == "reduce_sum" and op.outputs[0].shape == (32,)}
    *_, last = barriers(graph)
    assert sums
    assert len(sums & awaited(graph, last)) == 2 / 3 * len(sums)


def test_weights_are_updated_once_nothing_reads_them():
    """The memory of the old one is that of the new one: all that reads it comes before in the program."""
    graph = steps.planned(by_hand())
    updates = {op for op in graph.ops if op.name == "sub" and op.outputs[0].shape in ((8, 32), (32, 8), (32,))}
    *_, last = (awaited(graph, b) for b in barriers(graph))
    assert len(updates) == 9 and len(updates & last) == 6
    for update in updates:
        weight = next(t for t in update.inputs if t in graph.inputs)
        (*before, latest) = sorted(graph.readers[weight], key=graph.ops.index)
        assert latest is update and before


def test_the_order_can_run_and_nothing_is_lost():
    for of in (by_hand(), recomputing()):
        graph = steps.planned(of)
        there = {*graph.inputs}
        for op in graph.ops:
            assert all(t in there or t.literal is not None for t in op.inputs)
            there.update(op.outputs)
        assert there.issuperset(t for t in graph.outputs if t.literal is None)
        assert {op.traced for op in graph.ops if op.traced is not None} == {*of.graph.ops}


def test_it_computes_the_same():
    params, x = steps.parameters(), steps.batch()
    of = steps.program(steps.sgd(steps.mlp), params, x)
    given = steps.flat(of, params, x)
    for got, want in zip(steps.alone(recomputing())(given), steps.alone(of)(given), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def test_a_graph_that_computes_nothing_again_is_left_alone():
    of = steps.program(steps.sgd(steps.mlp), steps.parameters(), steps.batch())
    graph = steps.planned(of)
    assert used_up(graph) is graph
    assert not any(op.name == "optimization_barrier" for _, inner, _ in nested(graph) for op in inner.ops)


def test_what_reads_a_gradient_comes_behind_its_barrier():
    """Its sum over devices would else let the compiler put it off all the same."""
    case, moves = Case(by_hand(), [], []), set()
    for seed in range(12):
        graph = used_up(case.sample((8,), seed).graph)
        late = [op for op in graph.ops if op.name == "optimization_barrier" and op.backward and op.traced is None]
        (added,) = (op for op in late if len(op.inputs) > 2)  # others are over a weight and what is read with it
        before = awaited(graph, added)
        for t, behind in zip(added.inputs[1:], added.outputs[1:], strict=True):
            assert {*graph.readers[t]} - before == {added}, seed  # but for other gradients that it waits for
            moves.update(op.move.kind for op in graph.readers.get(behind, ()) if op.move is not None)
    assert {"reduce", "reduce_scatter"} <= moves
