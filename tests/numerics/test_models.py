"""Five train steps of every model of the zoo, in float64 with dropout on: sharded as unsharded."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from tests.numerics.harness import QUICK, TOLERANCE, Case
from tests.numerics.steps import CORE, STEPS, Reference, slow
from unity_jax.rewrite.library import applicable, stacking
from unity_jax.rewrite.towers import exchanged, stacked, towers
from unity_jax.search.planner import Planner
from unity_jax.search.variants import Moves

MACHINE = slow()
CHEAP = ("mlp", "dlrm", "lstm_lm")  # programs that XLA compiles in seconds under any plan


@functools.cache
def reference(name: str) -> Reference:
    return Reference.of(models.get(name, "tiny", dtype="float64"), QUICK)


def check(ref, plan):
    errors = ref.errors(ref.run(plan, QUICK))
    assert {path: e for path, e in errors.items() if not e <= TOLERANCE} == {}


@pytest.fixture
def ref(request):
    with jax.enable_x64(True):
        yield reference(request.param)


@pytest.mark.parametrize(
    "ref", [pytest.param(n, marks=() if n in CORE else pytest.mark.slow) for n in models.names()], indirect=True
)
def test_chosen_plan(ref):
    plan = ref.chosen(MACHINE, (2, 4))
    assert any(not t.layout.is_replicated for t in plan.graph.inputs)
    check(ref, plan)


@pytest.mark.parametrize("ref", CHEAP, indirect=True)
def test_chosen_plan_in_little_memory(ref):
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


@pytest.mark.parametrize("ref", [n for n in CORE if n not in CHEAP], indirect=True)
@pytest.mark.slow
def test_random_plan_of_large_programs(ref):
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


@pytest.mark.parametrize("name", ["mlp", "dlrm"])
def test_float32(name):
    """At most four times the error of an unsharded run whose sums run in another order: that of the shuffled batch."""
    model = models.get(name, "tiny", dtype="float32")
    ref = Reference.of(model)
    step = jax.jit(model.train_step)
    shuffled = []
    for seed in range(3):
        state = model.make_state(0)
        for i in range(STEPS):
            batch = model.make_batch(i)
            order = np.random.default_rng(seed).permutation(jax.tree.leaves(batch)[0].shape[0])
            state, metrics = step(state, jax.tree.map(lambda v: v[order], batch))  # noqa: B023
        shuffled.append(max(ref.errors(jax.tree.leaves((state, metrics))).values()))
    plan = ref.chosen(MACHINE, (2, 4))
    sharded = max(ref.errors(ref.run(plan)).values())
    assert 0 < max(shuffled) < 1e-4
    assert sharded <= 4 * max(shuffled)


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
        case = Case.of(fn, (jax.random.key(5, impl=impl), jnp.ones((12, 10))), options=QUICK)
        for seed, sizes in enumerate([(8,), (2, 4), (2, 2, 2), (3, 2)]):
            plan = case.sample(sizes, seed)
            assert case.differences(case.run(plan, QUICK), tolerance=0) == [], f"{sizes}"


UNROLLED = {"layers": 1, "scan": False, "remat": False, "dropout": 0.0}


@pytest.mark.parametrize(
    "name, options, rule, steps",
    [("dlrm", {}, "put-mul-take", 8), pytest.param("vit", UNROLLED, "slice", 80, marks=pytest.mark.slow)],
)
def test_random_plan_of_rows_that_go_far(name, options, rule, steps):
    """The selection of a class token goes down through all that follows attention, and its gradient up; the rows of a
    table's gradient go through Adagrad."""
    with jax.enable_x64(True):
        ref = Reference.of(models.get(name, "tiny", dtype="float64", **options), QUICK)
        program = ref.case.program
        moves = Moves(Planner(program, MACHINE), applicable(), (), math.inf)
        every = (moves.made(program.graph, m) for m in moves(program.graph) if rule in m.place.rule.name)
        made = next(m for m in every if m and len(m.steps) > steps)
        ref = dataclasses.replace(ref, case=Case(program.rewritten(made.graph, ()), ref.case.flat, ref.case.want))
        check(ref, ref.case.sample((2, 4), seed=1, machine="h100"))
