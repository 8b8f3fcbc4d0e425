"""Five train steps of every model of the zoo, in float64 with dropout on: sharded as unsharded."""

import dataclasses
import functools
import math
import random

import jax
import jax.numpy as jnp
import pytest

import models
from tests.numerics.harness import TOLERANCE, Case
from tests.numerics.savings import saved
from tests.numerics.steps import CHEAP, CORE, Reference, one_layer, slow
from unity_jax.machine.machine import Machine
from unity_jax.residuals import microbatched
from unity_jax.rewrite.library import applicable, stacking
from unity_jax.rewrite.towers import exchanged, stacked, towers
from unity_jax.search import variants
from unity_jax.search.batch import batch_dims
from unity_jax.search.implementing import implemented
from unity_jax.search.limits import LIMITS
from unity_jax.search.options import SearchOptions
from unity_jax.search.planner import Planner
from unity_jax.search.variants import Moves

MACHINE = slow()
MERGING = slow(factor=5e2)
REWRITTEN = {"dlrm": MACHINE, "mlp": MERGING, "xdl": MACHINE}  # where each is sharded and rewritten
QUICK = (*CHEAP, "gpt")  # every third also on the newest JAX


@functools.cache
def reference(name: str, **overrides: int) -> Reference:
    return Reference.of(models.get(name, "tiny", dtype="float64", **overrides))


def check(ref, plan):
    errors = ref.errors(ref.run(plan))
    assert {path: e for path, e in errors.items() if not e <= TOLERANCE} == {}


@pytest.fixture
def ref(request):
    with jax.enable_x64(True):
        yield reference(request.param)


@pytest.fixture
def few_variants(monkeypatch):
    """The joint search, cut short: it plans the most promising variants, and gives up early."""
    monkeypatch.setattr(variants, "LIMITS", dataclasses.replace(LIMITS, variants=3, vain=4))


@pytest.mark.parametrize(
    "ref", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in models.names()], indirect=True
)
def test_chosen_plan(ref, few_variants):
    """That of `auto_shard`: rewrites and layouts are chosen together."""
    plan = ref.chosen(REWRITTEN.get(ref.model.name, MACHINE), (8,))
    assert any(not t.layout.is_replicated for t in plan.graph.inputs)
    assert plan.rewrites or ref.model.name not in REWRITTEN
    check(ref, plan)


@pytest.mark.slow  # other layouts of what the other tests run
@pytest.mark.parametrize("ref", CHEAP, indirect=True)
def test_chosen_plan_in_little_memory(ref, few_variants):
    plan = ref.chosen(MACHINE, (2, 4))
    state = sum(t.nbytes for t in plan.graph.inputs)
    tight = ref.chosen(MACHINE, (2, 4), limit=state / 3)
    stored = [sum(t.layout is not None and t.layout.is_replicated for t in p.graph.inputs) for p in (plan, tight)]
    assert stored[1] <= stored[0]
    check(ref, tight)


@pytest.mark.parametrize("sizes", [(8,), (2, 2, 2), (3, 2)], ids=str)
@pytest.mark.parametrize("ref", CHEAP[:2], indirect=True)
def test_random_plan(ref, sizes):
    check(ref, ref.case.sample(sizes, seed=len(sizes), machine="h100"))


@pytest.mark.parametrize("name", [n for n in CORE if n not in CHEAP])
@pytest.mark.slow
def test_random_plan_of_large_programs(name):
    """Of a transformer one layer: of two, each with layouts of its own, XLA takes more than twice as long."""
    with jax.enable_x64(True):
        ref = reference(name, **one_layer(name))
        check(ref, ref.case.sample((2, 4), seed=0, machine="h100"))


@pytest.mark.parametrize(
    "ref", ["dlrm", *(pytest.param(n, marks=pytest.mark.slow) for n in ("xdl", "candle_uno"))], indirect=True
)
def test_random_plan_of_stacked_towers(ref):
    """All that is alike of towers, and of rows of several tables, two by two until nothing is left."""
    program = ref.case.program
    for alike in (towers, exchanged):
        while pairs := alike(program.graph):
            graph, _ = stacked(program.graph, pairs, stacking(), {})
            program = program.rewritten(graph, ())
    assert any(op.name == "stack" for op in program.graph.ops)
    ref = dataclasses.replace(ref, case=Case(program, ref.case.flat, ref.case.want))
    check(ref, ref.case.sample((2, 4), seed=1, machine="h100"))


MICROBATCHED = ("mlp", "dlrm", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gpt", "lstm_lm")))


@pytest.mark.parametrize("name", MICROBATCHED)
def test_random_plan_of_microbatches(name):
    """Loops over layers, dropout, weighted means, clipped gradients: all within or behind one over microbatches."""
    with jax.enable_x64(True):
        ref = reference(name, **one_layer(name))
        program, batch = ref.case.program, batch_dims(ref.case.program, ref.case.rules, 8)
        rows = [(t, d) for (t, d), major in batch.items() if major == 1 and t in program.graph.inputs]
        program = program.rewritten(microbatched(program.graph, rows, 4).graph, ())
        assert any(op.name == "scan" and op.params["length"] == 4 for op in program.graph.ops)
        ref = dataclasses.replace(ref, case=Case(program, ref.case.flat, ref.case.want))
        check(ref, ref.case.sample((2, 2), seed=2, machine="h100"))


SAVED = [(name, seed) for name in CHEAP[:2] for seed in range(4)]


@pytest.mark.parametrize("name, seed", [*SAVED, *(pytest.param("gpt", n, marks=pytest.mark.slow) for n in range(2))])
def test_random_plan_that_needs_less_memory(name, seed):
    """Values computed again, losses by chunks, microbatches, one upon another; more are in `experiments.validation`."""
    with jax.enable_x64(True):
        ref = reference(name, **one_layer(name))
        ref = dataclasses.replace(ref, case=saved(ref.case, random.Random(seed)))
        assert ref.case.program.savings
        check(ref, ref.case.sample((2, 2), seed=seed, machine="h100"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit", "llama"])
def test_random_plan_of_kernels(name):
    """Attention as one op of each pass, computed again where `jax.checkpoint` says so."""
    with jax.enable_x64(True):
        ref = reference(name, **one_layer(name))
        program = implemented(ref.case.program, Machine.preset("cpu:2"), SearchOptions(attention="kernel"))
        assert {"attention", "attention_back"} <= {op.name for op in program.graph.walk()}
        ref = dataclasses.replace(ref, case=Case(program, ref.case.flat, ref.case.want))
        check(ref, ref.case.sample((2, 2), seed=3, machine="h100"))


PRECISE = ["mlp", "xdl", pytest.param("dlrm", marks=pytest.mark.slow)]
"""Models whose examples may be shuffled, and whose plans rewrite them."""


@pytest.mark.parametrize("name", PRECISE)
def test_float32(name, few_variants):
    """At most four times the error of an unsharded run whose sums run in another order: that of the shuffled batch.
    Rewrites count: they multiply in another order."""
    ref = Reference.of(models.get(name, "tiny", dtype="float32"))
    plan = ref.chosen(REWRITTEN[name], (8,))
    assert plan.rewrites
    shuffled = max(max(ref.errors(ref.shuffled(seed)).values()) for seed in range(3))
    assert 0 < shuffled < 1e-4
    assert max(ref.errors(ref.run(plan)).values()) <= 4 * shuffled


@pytest.mark.parametrize("name", PRECISE)
def test_bfloat16(name, few_variants):
    """At most twice as far from the run in float32 as the unsharded one in bfloat16 is.

    Sums accumulate in float32, so that their order changes almost nothing; what changes is where values are rounded.
    """
    exact, ref = (Reference.of(models.get(name, "tiny", dtype=d)) for d in ("float32", "bfloat16"))
    plan = ref.chosen(REWRITTEN[name], (8,))
    assert plan.rewrites

    def distance(got):
        pairs = zip(exact.want, got, strict=True)
        return max(exact.errors([g if g.dtype == w.dtype else g.astype(w.dtype) for w, g in pairs]).values())

    unsharded = distance(ref.want)
    assert 1e-5 < unsharded < 0.3
    assert distance(ref.run(plan)) <= 2 * unsharded


@pytest.mark.parametrize("partitionable", [True, False])
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_masks_and_keys_are_bitwise_equal(impl, partitionable):
    def fn(key, x):
        def layer(x, key):
            keep = jax.random.bernoulli(jax.random.fold_in(key, 3), 0.9, x.shape)
            return jnp.where(keep, x / 0.9, 0), keep

        first, second = jax.random.split(key)
        y, mask = layer(x, first)
        z, masks = jax.lax.scan(layer, y, jax.random.split(second, 3))
        return mask, masks, jax.random.split(second, 6), jax.random.bits(second, (5, 3), "uint16"), z

    with jax.enable_x64(True), jax.threefry_partitionable(partitionable):
        case = Case.of(fn, (jax.random.key(5, impl=impl), jnp.ones((12, 10))))
        for seed, sizes in enumerate([(8,), (2, 4), (2, 2, 2), (3, 2)]):
            plan = case.sample(sizes, seed)
            assert case.differences(case.run(plan), tolerance=0) == [], f"{sizes}"


UNROLLED = {"layers": 1, "scan": False, "remat": False, "dropout": 0.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, options, rule, steps",
    [("dlrm", {}, "put-of-mul-of-take-to-mul-of-put", 8), ("vit", UNROLLED, "slice", 80)],
)
def test_random_plan_of_rows_that_go_far(name, options, rule, steps):
    """The selection of a class token goes down through all that follows attention, and its gradient up; the rows of a
    table's gradient go through Adagrad."""
    with jax.enable_x64(True):
        ref = Reference.of(models.get(name, "tiny", dtype="float64", **options))
        program = ref.case.program
        moves = Moves(Planner(program, MACHINE), applicable(), (), math.inf)
        every = (moves.made(program.graph, m) for m in moves(program.graph) if rule in m.place.rule.name)
        made = next(m for m in every if m and len(m.steps) > steps)
        ref = dataclasses.replace(ref, case=Case(program.rewritten(made.graph, ()), ref.case.flat, ref.case.want))
        check(ref, ref.case.sample((2, 4), seed=1, machine="h100"))
