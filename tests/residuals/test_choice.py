"""What is computed again is what frees most for its seconds, of all layers alike, and never a whole chain of them."""

import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.validation import recomputation
from tests.residuals import steps
from unity_jax.machine.machine import Machine
from unity_jax.pcg.mesh import WHOLE
from unity_jax.program import trace
from unity_jax.residuals.choice import Residuals, choices
from unity_jax.residuals.flat import Flat
from unity_jax.residuals.pair import pairs
from unity_jax.residuals.recompute import can_repeat, recomputed
from unity_jax.rewrite.estimate import by_kernels
from unity_jax.search.rule_cache import RuleCache
from unity_jax.xla.traffic import Traffic

DEVICE = Machine.preset("h100:1").device
LAYERS, ROWS, WIDTH, INNER = 8, 4096, 2048, 4096


def found(of, devices=1):
    rules = RuleCache()
    seconds = by_kernels(DEVICE, lambda op: rules.shard(op, WHOLE, ()))
    return list(choices(of.graph, Traffic.of(of.graph, DEVICE.compiler), seconds, devices))


def peak(graph):
    """Of whole arrays, by the same model that choices are made by."""
    return Residuals.of(Flat(graph), Traffic.of(graph, DEVICE.compiler)).profile.max()


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, np.float32)


@pytest.fixture(scope="module")
def mlp():
    params = [(shape(WIDTH, INNER), shape(INNER, WIDTH))] * LAYERS
    return steps.program(steps.sgd(steps.mlp), params, shape(ROWS, WIDTH))


def test_ever_more_is_freed_for_ever_more_seconds(mlp):
    every = found(mlp)
    assert len(every) > 2
    for before, after in itertools.pairwise(every):
        assert before.freed.keys() < after.freed.keys() and before.values <= after.values
        assert before.bytes <= after.bytes and before.seconds <= after.seconds


def test_activations_come_before_products(mlp):
    first, *_, last = found(mlp)
    made_by = [{mlp.graph.producer[t].name for t in choice.freed} for choice in (first, last)]
    assert made_by[0] == {"tanh"} and len(made_by[1]) > 1


def test_layers_are_chosen_together(mlp):
    wide = [sum(t.shape == (ROWS, INNER) for t in choice.freed) for choice in found(mlp)]
    assert max(after - before for before, after in itertools.pairwise(wide)) >= LAYERS - 4  # but at the ends


def test_neither_new_weights_nor_their_gradients_are_in_the_way():
    """Weights are most of it, and updated as soon as their gradients are there: what is left are their casts."""

    def narrow(params, x):
        return steps.mlp(jax.tree.map(lambda w: w.astype(jnp.bfloat16), params), x.astype(jnp.bfloat16))

    step = steps.program(steps.sgd(narrow), [(shape(WIDTH, INNER), shape(INNER, WIDTH))] * LAYERS, shape(16, WIDTH))
    *_, last = found(step)
    casts = 2 * LAYERS * 2 * WIDTH * INNER
    assert casts / 2 < last.bytes <= peak(step.graph) < 1.5 * casts


def test_what_one_layer_gives_to_the_next_is_kept(mlp):
    """Of a chain, all would be computed and kept at once; that of one layer may be computed from that before."""
    *_, last = found(mlp)
    stream = [op.outputs[0] for op in mlp.graph.ops if op.name == "add" and op.outputs[0].shape == (ROWS, WIDTH)]
    kept = [t for t in stream if t not in last.freed]
    assert len(stream) == LAYERS and len(kept) >= LAYERS // 2


def test_the_estimate_is_of_what_the_program_then_keeps(mlp):
    *_, last = found(mlp)
    traffic = Traffic.of(mlp.graph, DEVICE.compiler)
    after = recomputed(mlp.graph, last.values, traffic.written).graph
    peaks = [peak(graph) for graph in (mlp.graph, after)]
    assert peaks[0] - peaks[1] == pytest.approx(last.bytes, rel=0.25)


def test_all_that_is_chosen_can_be_computed_again(mlp):
    for choice in found(mlp):
        assert all(can_repeat(mlp.graph.producer[t]) for t in choice.values)


def squared(params, x):
    for w in params:
        x = jax.checkpoint(lambda x, w: x + jax.nn.silu(x @ w[0]) @ w[1])(x, w)
    return ((x - 1.0) ** 2).mean()


def test_what_the_backward_pass_makes_in_a_matmul_of_the_forward_pass_is_not_chosen():
    """XLA:TPU scales the distance from the target where it computes it, in memory for what is behind a barrier."""
    device = Machine.preset("v5e:1x1").device
    params, x = [(shape(WIDTH, INNER), shape(INNER, WIDTH))] * 2, shape(ROWS, WIDTH)
    graph = steps.program(steps.sgd(squared), params, x).graph
    traffic = Traffic.of(graph, device.compiler)
    mixed = [k for ks in traffic.kernels.values() for k in ks if not k.root.backward and any(o.backward for o in k.ops)]
    assert mixed
    assert not any(graph.producer[t].backward for t in Residuals.of(Flat(graph), traffic).spans)


def looped(params, x):
    def layer(x, w):
        return x + jax.nn.gelu(x @ w[0]) @ w[1], None

    return (jax.lax.scan(layer, x, params)[0] ** 2).mean()


@pytest.fixture(scope="module")
def scanned():
    stacked = shape(LAYERS, WIDTH, INNER), shape(LAYERS, INNER, WIDTH)
    return steps.program(steps.sgd(looped), stacked, shape(ROWS, WIDTH))


def test_what_layers_of_a_scan_stack_is_chosen_like_that_of_unrolled_layers(scanned):
    (pair,), every = pairs(scanned.graph), found(scanned)
    assert every and all(n == LAYERS for n in every[-1].freed.values())
    assert {op for op in pair.forward.bodies[0].ops for t in op.outputs if t in every[-1].freed}
    for before, after in itertools.pairwise(every):
        assert before.bytes <= after.bytes and before.seconds <= after.seconds


def test_the_estimate_for_a_scan_is_of_what_it_then_stacks(scanned):
    *_, last = found(scanned)
    traffic = Traffic.of(scanned.graph, DEVICE.compiler)
    after = recomputed(scanned.graph, last.values, traffic.written).graph
    assert peak(scanned.graph) - peak(after) == pytest.approx(last.bytes, rel=0.25)


def test_a_program_without_a_backward_pass_keeps_nothing():
    assert not found(trace(steps.mlp, (steps.parameters(), steps.batch()), {}))


@pytest.mark.parametrize("seed", [15, 25, 95, 101])
def test_a_random_chain_takes_no_longer_than_by_the_best_subset(seed):
    rng = random.Random(seed)
    row = recomputation.compared(recomputation.chain(rng), rng)
    assert row is not None and row.chosen <= recomputation.WITHIN * row.best
