"""What `jax.checkpoint` has the backward pass compute again is found, and kept the program computes the same."""

import json
import random

import jax
import pytest

import models
from tests.residuals import steps
from tests.residuals.test_pair import attention, stack
from unity_jax.pcg.loops import Scan
from unity_jax.program import trace
from unity_jax.residuals.change import at, positions
from unity_jax.residuals.keep import Rematerialized, kept
from unity_jax.residuals.pair import pairs
from unity_jax.residuals.recompute import recomputed
from unity_jax.residuals.record import Keep, from_json, to_json
from unity_jax.rewrite.estimate import Seconds
from unity_jax.xla.op_classes import PRODUCTS
from unity_jax.xla.traffic import Traffic


def unrolled(params, x):
    for vw in params:
        x = jax.checkpoint(layer)(x, vw)
    return (x**2).mean()


def layer(x, vw):
    v, w = vw
    return x + jax.numpy.tanh(jax.nn.gelu(x @ v) @ w)


def scanned(params, x):
    again = jax.checkpoint(layer, prevent_cse=False)
    return (jax.lax.scan(lambda x, vw: (again(x, vw), None), x, params)[0] ** 2).mean()


def dropped(params, x, key):
    return attention(params, x, key, jax.checkpoint)


def cases():
    params, x = steps.parameters(), steps.batch()
    return {
        "unrolled": (steps.sgd(unrolled), (params, x)),
        "scanned": (steps.sgd(scanned), (stack(params), x)),
        "dropped": (steps.sgd(dropped), (stack(params), x, jax.random.key(3))),
    }


def products(graph):
    return sum(op.name in PRODUCTS for op in graph.walk())


def keeping(of, values):
    return of.rewritten(kept(of.graph, set(values)).graph, ())


def found(of):
    again = Rematerialized(of.graph, Traffic.of(of.graph, "gpu"), lambda graph: Seconds(float(len(graph.ops))), 1)
    return at(of.graph, positions(of.graph, again.values))


@pytest.mark.parametrize("name", cases())
@pytest.mark.parametrize("part", [0.4, 1.0])
def test_any_values_kept_give_the_same(name, part):
    fn, args = cases()[name]
    of = steps.program(fn, *args)
    every = found(of)
    changed = keeping(of, random.Random(1).sample(every, max(1, round(part * len(every)))))
    assert products(changed.graph) < products(of.graph) or part < 1
    steps.same(changed, of, args)


@pytest.mark.parametrize("name", ["unrolled", "scanned"])
def test_with_all_kept_no_product_is_computed_again(name):
    fn, args = cases()[name]
    of = steps.program(fn, *args)
    changed = keeping(of, found(of))
    layers = 3 if name == "unrolled" else 1
    assert products(of.graph) - products(changed.graph) == 2 * layers


def test_what_is_kept_of_a_scan_is_stacked():
    fn, args = cases()["scanned"]
    of = steps.program(fn, *args)
    (before,), (after,) = pairs(of.graph), pairs(keeping(of, found(of)).graph)
    stacked = [[t.shape[1:] for t in p.forward.outputs[Scan.of(p.forward.params).stacked]] for p in (before, after)]
    assert stacked[0] == [(16, 8)] and (16, 32) in stacked[1]


def test_nothing_is_found_without_checkpoints():
    params, x = steps.parameters(), steps.batch()
    assert not found(steps.program(steps.sgd(steps.mlp), params, x))


@pytest.mark.parametrize(("name", "scan"), [("gpt", True), ("llama", False)])
def test_models_of_the_zoo_compute_the_same(name, scan):
    model = models.get(name, "tiny", scan=scan)
    state, data = model.make_state(0), model.make_batch()
    of = trace(model.train_step, (state, data), {})
    changed = keeping(of, found(of))
    assert products(changed.graph) < products(of.graph)
    steps.same(changed, of, (state, data), 1e-4)  # Adam divides by what gradients are


@pytest.mark.parametrize("name", ["unrolled", "scanned"])
def test_what_is_kept_is_told_by_places_and_moves_to_a_changed_graph(name):
    fn, args = cases()[name]
    of = steps.program(fn, *args)
    again = Rematerialized(of.graph, Traffic.of(of.graph, "gpu"), lambda graph: Seconds(float(len(graph.ops))), 1)
    how = Keep.of(of.graph, again.keeping(), 0)
    assert from_json(json.loads(json.dumps(to_json(how)))) == how
    values = {t for op in of.graph.walk() if op.name == "tanh" and not op.backward for t in op.outputs}
    other = recomputed(of.graph, values, Traffic.of(of.graph, "gpu").written)
    moved = how.moved(of.graph, other.graph, other.origin)
    changed = of.rewritten(moved.applied(other.graph).graph, ())
    assert products(changed.graph) < products(of.graph)
    steps.same(changed, of, args)
