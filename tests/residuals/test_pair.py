"""Layers of a scan: what is computed again in the backward scan is the same, and not stacked."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.residuals import steps
from tests.residuals.test_recompute import equal
from unity_jax.pcg.loops import Scan
from unity_jax.residuals.pair import pairs
from unity_jax.residuals.recompute import can_repeat, recomputed
from unity_jax.xla.traffic import Traffic


def stack(params):
    return jax.tree.map(lambda *ws: jnp.stack(ws), *params)


def mlp(params, x):
    """Layers of two products, scanned."""

    def layer(x, vw):
        v, w = vw
        return x + jnp.tanh(jax.nn.gelu(x @ v) @ w), None

    return (jax.lax.scan(layer, x, params)[0] ** 2).mean()


def attention(params, x, key, wrapped=lambda layer: layer):
    """Layers of attention with dropout, whose keys are scanned too, with a mask that all have, and a metric of each."""
    mask = jnp.tril(jnp.ones((x.shape[0], x.shape[0]), bool))

    def layer(carry, inputs):
        x, total = carry
        (v, w), key = inputs
        y = jax.nn.gelu((x - x.mean(-1, keepdims=True)) @ v)
        scores = jax.nn.softmax(jnp.where(mask, y @ y.T, -1e9))
        kept = jax.random.bernoulli(key, 0.8, y.shape)
        x = x + jnp.where(kept, scores @ y, 0.0) @ w
        return (x, total + (x**2).mean()), jnp.abs(x).max()

    keys = jax.random.split(key, params[0].shape[0])
    (x, total), largest = jax.lax.scan(wrapped(layer), (x, 0.0), (params, keys))
    return (x**2).mean() + 0.1 * total + 0.01 * largest.sum()


def cases():
    params, x = stack(steps.parameters()), steps.batch()
    return {
        "mlp": (steps.sgd(mlp), (params, x)),
        "attention": (steps.sgd(attention), (params, x, jax.random.key(3))),
    }


def layered(pair):
    return [t for op in pair.forward.bodies[0].ops if can_repeat(op) for t in op.outputs]


def again(of, values):
    return of.rewritten(recomputed(of.graph, values, Traffic.of(of.graph, "cpu").written).graph, ())


@pytest.mark.parametrize("name", cases())
@pytest.mark.parametrize("part", [0.0, 0.3, 0.6, 1.0])
def test_any_values_of_layers_computed_again_give_the_same(name, part):
    fn, args = cases()[name]
    of = steps.program(fn, *args)
    (pair,) = pairs(of.graph)
    values = [*layered(pair), *(t for op in of.graph.ops if not op.backward and can_repeat(op) for t in op.outputs)]
    chosen = set(random.Random(1).sample(values, round(part * len(values))))
    changed = again(of, chosen)
    assert part == 0.0 or len(list(changed.graph.walk())) > len(list(of.graph.walk()))
    steps.same(changed, of, args)


def test_two_halves_of_what_is_not_changed_are_the_same_scans():
    for fn, args in cases().values():
        of = steps.program(fn, *args)
        (pair,) = pairs(of.graph)
        halves = pair.split(pair.joined)
        replaced = {pair.forward: halves.forward, pair.backward: halves.backward}
        ops = [replaced.get(op, op) for op in of.graph.ops]
        other = of.rewritten(type(of.graph)(of.graph.inputs, of.graph.outputs, ops), ())
        assert not halves.origin
        equal(steps.alone(other)(steps.flat(of, *args)), steps.alone(of)(steps.flat(of, *args)))


def test_what_is_computed_again_is_not_stacked():
    fn, args = cases()["mlp"]
    of = steps.program(fn, *args)
    (pair,) = pairs(of.graph)
    wide = {t for t in layered(pair) if t.shape == (16, 32)}
    (after,) = pairs(again(of, wide).graph)
    stacked = [[t.shape[1:] for t in p.forward.outputs[Scan.of(p.forward.params).stacked]] for p in (pair, after)]
    assert (16, 32) in stacked[0] and (16, 32) not in stacked[1] and (16, 8) in stacked[1]
    assert sum(op.name == "optimization_barrier" for op in after.backward.bodies[0].ops) == 1


def test_a_scan_without_a_backward_pass_is_no_pair():
    params, x = cases()["mlp"][1]
    assert not pairs(steps.program(mlp, params, x).graph)


def test_what_others_read_stays_stacked():
    def loss(params, x):
        def layer(x, vw):
            y = jnp.tanh(x @ vw[0])
            return y @ vw[1], y

        x, hidden = jax.lax.scan(layer, x, params)
        return (x**2).mean() + (hidden**3).mean()

    params, x = cases()["mlp"][1]
    of = steps.program(steps.sgd(loss), params, x)
    (pair,) = pairs(of.graph)
    steps.same(again(of, set(layered(pair))), of, (params, x))
    assert np.prod(pair.forward.outputs[1].shape) == 3 * 16 * 32
