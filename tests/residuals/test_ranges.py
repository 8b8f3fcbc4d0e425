"""Layers in two ranges compute the same, and only the first ones compute again what the others keep, in loops over
microbatches too."""

import json

import jax
import numpy as np
import pytest

from tests.residuals import steps
from tests.residuals.test_keep import found, scanned, unrolled
from tests.residuals.test_microbatch import by_microbatches
from tests.residuals.test_pair import attention, mlp, stack
from unity_jax.aot.flags import BARRIERS_KEPT
from unity_jax.pcg.loops import START, Scan
from unity_jax.residuals.change import positions
from unity_jax.residuals.keep import Rematerialized
from unity_jax.residuals.pair import innermost, pairs
from unity_jax.residuals.ranges import Layers, cut, early, layer_count
from unity_jax.residuals.record import Keep, Recompute, from_json, to_json
from unity_jax.rewrite.estimate import Seconds
from unity_jax.xla.traffic import Traffic

LAYERS = 5


def cases():
    params, x = steps.parameters(LAYERS, dtype=np.float64), steps.batch(dtype=np.float64)
    return {
        "scan": (steps.sgd(mlp), (stack(params), x)),
        "unrolled": (steps.sgd(steps.mlp), (params, x)),
        "attention": (steps.sgd(attention), (stack(params), x, jax.random.key(3))),
        "scanned checkpoints": (steps.sgd(scanned), (stack(params), x)),
        "unrolled checkpoints": (steps.sgd(unrolled), (params, x)),
    }


def program(name, parts=1):
    """A program, maybe by microbatches, and its arguments."""
    fn, args = cases()[name]
    of = steps.program(fn, *args)
    return (of, by_microbatches(of, args, parts, {1}) if parts > 1 else of, args)


def wide(graph):
    """The values of layers that are larger than what goes from layer to layer."""
    made = (t for op in graph.walk() if not op.backward for t in op.outputs)
    return {t for t in made if t.shape[-1:] == (32,) and t.rank == 2 and t.shape[0] != 8}


def recompute(graph, layers):
    ranges = cut(graph, layers)
    values = early(ranges.graph, wide(ranges.graph), layers)
    return Recompute(positions(ranges.graph, values), "", len(values), 0, 0.0, compiler="cpu", layers=layers)


def keep(graph, layers):
    """Nothing is computed again but what the first layers have."""
    ranges = cut(graph, layers)
    inner = innermost(ranges.graph)
    again = Rematerialized(inner, Traffic.of(inner, "gpu"), lambda graph: Seconds(float(len(graph.ops))), 1)
    choice = again.keeping(early(inner, again.originals, layers))
    return Keep.of(ranges.graph, choice, 0, layers)


def barriers(graph):
    return sum(op.name == "optimization_barrier" for op in graph.walk())


@pytest.mark.parametrize("name", ["scan", "attention"])
@pytest.mark.parametrize("first", [2, 3])
def test_scans_over_ranges_compute_the_same(name, first):
    with jax.enable_x64(True):
        of, _, args = program(name)
        changed = cut(of.graph, Layers(first, LAYERS))
        ranges = [(op.params[START], op.params["length"]) for op in changed.graph.ops if op.name == "scan"]
        a, b = (0, first), (first, LAYERS - first)
        assert ranges == [a, b, b, a]
        assert all(t.shape[1:] == of.shape[1:] for t, of in changed.origin.items() if hasattr(of, "shape"))
        steps.same(of.rewritten(changed.graph, ()), of, args, 1e-12)


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("name", ["scan", "unrolled"])
@pytest.mark.parametrize("first", [2, 3])
def test_the_first_layers_compute_again_what_the_others_keep(name, first, parts):
    with jax.enable_x64(True):
        of, before, args = program(name, parts)
        assert layer_count(before.graph, wide(before.graph)) in (LAYERS, 2 * LAYERS)
        how = recompute(before.graph, Layers(first, LAYERS))
        assert from_json(json.loads(json.dumps(to_json(how)))) == how and f"more in {first} of {LAYERS}" in str(how)
        changed = of.rewritten(how.applied(before.graph).graph, ())
        assert barriers(changed.graph) == (1 if name == "scan" else first)
        steps.same(changed, of, args, 1e-12)
        text = steps.alone(changed).lower(steps.flat(of, *args)).compile(compiler_options=BARRIERS_KEPT).as_text()
        assert text.count(" opt-barrier(") == barriers(steps.planned(changed)), "the compiler merges nothing of it"


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("name", ["scanned checkpoints", "unrolled checkpoints"])
def test_the_last_layers_keep_what_checkpoints_would_compute_again(name, parts):
    with jax.enable_x64(True):
        of, before, args = program(name, parts)
        how = keep(before.graph, Layers(2, LAYERS))
        assert from_json(json.loads(json.dumps(to_json(how)))) == how and "fewer in 2 of 5 layers" in str(how)
        changed = of.rewritten(how.applied(before.graph).graph, ())
        again = [op for op in changed.graph.walk() if "rematted_computation" in op.scope and op.name == "dot_general"]
        assert len(again) == (2 if name == "scanned checkpoints" else 2 * 2)
        assert found(before) or parts > 1
        steps.same(changed, of, args, 1e-12)


def test_no_range_is_one_iteration():
    """Which XLA would compute among what is around it."""
    of = program("scan")[1]
    for first in (1, LAYERS - 1):
        assert cut(of.graph, Layers(first, LAYERS)).graph is of.graph


def test_only_the_others_stack_what_the_first_compute_again():
    with jax.enable_x64(True):
        _, of, _ = program("scan")
        changed = recompute(of.graph, Layers(2, LAYERS)).applied(of.graph)
        both = [[t.shape for t in p.forward.outputs[Scan.of(p.forward.params).stacked]] for p in pairs(changed.graph)]
        first, rest = sorted(both, key=lambda shapes: shapes[0][0])
        assert (2, 16, 8) in first and (2, 16, 32) not in first and (3, 16, 32) in rest
