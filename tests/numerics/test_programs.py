"""Random programs, rewritten and planned at random, agree with the unsharded run; each strategy of each rule is run."""

import contextlib
import functools
import random

import hypothesis
import hypothesis.strategies as st
import jax
import pytest

from tests.numerics import programs
from tests.numerics.coverage import Coverage, steer
from tests.numerics.harness import Case
from tests.numerics.programs.drawer import Skip
from tests.numerics.savings import saved
from tests.residuals.steps import batch, parameters, sgd
from tests.residuals.test_pair import attention, stack
from unity_jax.ops.bags import GATHER, SCATTER
from unity_jax.ops.rule import RULES
from unity_jax.ops.rules import POINTWISE

MESHES = ((8,), (2, 4), (4, 2), (2, 2, 2), (3, 2), (7,))
SMALL_MESHES = ((2, 4), (7,), (3, 2))
MACHINES = ("cpu", "h100", "v100-summit")  # each prefers other paths between layouts

_OLD = "JAX makes it no more, or only in another version than ours, or only of scalars."
_EFFECT = "It has an effect, or is a user's own sharding: see tests/api."
_NEWEST = jax.__version_info__ >= (0, 12)
ABSENT = {
    **dict.fromkeys("bessel_i0 bessel_i1 copy_p log2 mulhi nan_to_num one_minus_square polynomial".split(), _OLD),
    **dict.fromkeys("empty empty2 pcast platform_index pvary random_gamma_grad".split(), _OLD),
    **dict.fromkeys("debug_callback debug_print io_callback shard_map sharding_constraint".split(), _EFFECT),
    "persistent_scan": "No primitive of JAX: loops become it, with all else that has another implementation.",
    **dict.fromkeys((GATHER, SCATTER), "No primitives of JAX: sums of rows in float32 become them (`test_bags`)."),
    **({"add_any": "JAX 0.12 does not add cotangents so in these programs."} if _NEWEST else {}),
}


@hypothesis.settings(max_examples=20 if _NEWEST else 60)  # XLA:CPU takes three times as long there
@hypothesis.given(st.randoms(use_true_random=False), st.sampled_from(MESHES), st.sampled_from(MACHINES))
def test_random_programs(rng, sizes, machine):
    with jax.enable_x64(True):
        program = programs.draw(rng, most=6)
        hypothesis.note(f"{program}")
        hypothesis.assume(program.steps)
        case = Case.of(program.fn, program.args, program.donate)
        case, rewrites = (case.implemented() if rng.random() < 0.5 else case).rewritten(rng, steps=2)
        plan = case.sample(sizes, rng.randint(0, 2**30), machine)
        hypothesis.note(f"{rewrites}: {plan.graph}")
        assert case.differences(case.run(plan), floor=1.0) == []


@hypothesis.settings(max_examples=6 if _NEWEST else 16)
@hypothesis.given(st.randoms(use_true_random=False), st.sampled_from(MESHES), st.sampled_from(MACHINES))
def test_random_programs_that_need_less_memory(rng, sizes, machine):
    """Train steps whose values are computed again, whose loss is by chunks, or whose batch is by microbatches."""
    with jax.enable_x64(True):
        program = programs.draw(rng, most=5)
        hypothesis.note(f"{program}")
        with contextlib.suppress(Skip):
            program = programs.trained(program, rng)
        case = saved(Case.of(program.fn, program.args, program.donate), rng)
        hypothesis.assume(case.program.savings)
        plan = case.sample(sizes, rng.randint(0, 2**30), machine)
        hypothesis.note(f"{case.program.savings}: {plan.graph}")
        assert case.differences(case.run(plan), floor=1.0) == []


@hypothesis.settings(max_examples=2 if _NEWEST else 10)
@hypothesis.given(st.randoms(use_true_random=False), st.sampled_from(MESHES), st.sampled_from(MACHINES))
def test_random_layers_that_need_less_memory(rng, sizes, machine):
    """Of layers in a scan the first ones may do otherwise than the rest."""
    with jax.enable_x64(True):
        params, x = stack(parameters(layers=6, width=16, dtype="float64")), batch(width=16, dtype="float64")
        wrapped = rng.choice([jax.checkpoint, lambda layer: layer])
        loss = functools.partial(attention, wrapped=wrapped)
        case = saved(Case.of(sgd(loss), (params, x, jax.random.key(3)), (0,)), rng)
        plan = case.sample(sizes, rng.randint(0, 2**30), machine)
        hypothesis.note(f"{case.program.savings}: {plan.graph}")
        assert case.differences(case.run(plan), floor=1.0) == []


def batches(size: int = 8) -> list[tuple[str, ...]]:
    """The entries of the table, a few at a time."""
    names = list(dict.fromkeys(programs.ENTRIES))
    return [tuple(names[i : i + size]) for i in range(0, len(names), size)]


@functools.cache
def one_of_each(names: tuple[str, ...], seed: int = 1) -> programs.Program:
    return programs.one_of_each(names, seed=seed, times=2)


@pytest.mark.slow
@pytest.mark.parametrize("names", batches(), ids=lambda names: names[0])
def test_every_strategy(names):
    with jax.enable_x64(True):
        program = one_of_each(names)
        case = Case.of(program.fn, program.args)
        coverage = Coverage()
        for i in range(12):
            sizes = SMALL_MESHES[i % 3]
            plan = steer(case, case.sample(sizes, seed=i), coverage)
            assert case.differences(case.run(plan), floor=1.0) == [], f"{sizes}, seed {i}"
            coverage.record(case, plan)
            if i >= 2 and not coverage.missing():
                break
        assert coverage.missing() == []


def test_every_rule_is_met_also_with_a_dimension_that_does_not_divide():
    coverage, met = Coverage(), set()
    with jax.enable_x64(True):
        for names in batches():
            program = one_of_each(names)
            case = Case.traced(program.fn, program.args)
            met |= {op.name for op in case.program.graph.walk()}  # constants such as iota are made in any layout
            for sizes in SMALL_MESHES:
                coverage.record(case, case.sample(sizes, seed=0))
    assert {*RULES, *POINTWISE} - met <= set(ABSENT)
    assert set(coverage.always_divisible()) <= set(ABSENT)


def test_the_generator_repeats_itself():
    first, second = (programs.draw(random.Random(7)) for _ in range(2))
    assert first.steps == second.steps
