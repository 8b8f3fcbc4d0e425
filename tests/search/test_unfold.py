"""What was planned for folded programs, done on the whole ones: a plan and its rivals, which may be of two programs."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import unity_jax as unity
from unity_jax.search import joint, planner
from unity_jax.search.candidate import Candidate
from unity_jax.search.limits import LIMITS

BF16, F32 = jnp.bfloat16, jnp.float32
MESH = jax.sharding.AbstractMesh((8,), ("x",))
Shape = jax.ShapeDtypeStruct


def step(params: Any, x: jax.Array) -> Any:
    """Gradient descent on deep layers and a product with two matrices one after the other, which should be multiplied
    with each other first where there are more rows than columns."""

    def loss(params: Any) -> jax.Array:
        layers, a, b = params
        y = x
        for w in layers:
            y = jnp.tanh(y @ w)
        return ((y @ a @ b).astype(F32) ** 2).mean()

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


def test_plans_and_rivals_of_a_second_signature_are_of_two_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is written, and rewritten as for the first signature: whichever of them the plan is of, the other one's
    plans are rivals."""
    monkeypatch.setattr(planner, "LIMITS", dataclasses.replace(LIMITS, alike=0.5))
    unfolded, found = joint.unfolded, list[tuple[Candidate, Candidate]]()

    def noted(wholes: Any, plan: Candidate, *rest: Any) -> Candidate:
        found.append((plan, unfolded(wholes, plan, *rest)))
        return found[-1][1]

    monkeypatch.setattr(joint, "unfolded", noted)
    wide = Shape((1024, 1024), BF16)
    sharded = unity.auto_shard(step, machine="h100:8", mesh=MESH, donate_argnums=0, options=unity.Options(cache=None))
    first, *others = (sharded.plan(([wide] * 18, wide, wide), Shape((n, 1024), BF16)) for n in (65_536, 128, 32_768))
    assert first.rewrites
    for (_, whole), plan in zip(found[1:], others, strict=True):
        assert {len(c.program.rewrites) for c in (whole, *whole.rivals)} == {0, len(first.rewrites)}
        assert len(plan.rewrites) == len(whole.program.rewrites)
    assert not all(small.program.rewrites for small, _ in found[1:])  # rivals are rewritten, and it is not


def test_what_a_folded_program_decides_is_done_op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a problem of the whole is built, in which nothing but the layouts of results is left to choose."""
    wide = Shape((1024, 1024), BF16)
    asked, transferred = list[bool](), planner.transferred

    def planned(to: Any) -> unity.Plan:
        def noted(*of: Any) -> Any:
            made = to(*of)
            asked.append(made is not None)
            return made

        monkeypatch.setattr(planner, "transferred", noted)
        arguments = ([wide] * 18, wide, wide), Shape((4096, 1024), BF16)
        return unity.plan(step, *arguments, machine="h100:8", mesh=MESH, options=unity.Options(cache=None))

    by_op, by_problem = planned(transferred), planned(lambda *_: None)
    assert asked[:1] == [True] and asked[-1:] == [False]
    assert by_op.predicted.step_seconds == pytest.approx(by_problem.predicted.step_seconds, rel=1e-4)
    assert by_op.predicted.lower_bound_seconds == pytest.approx(by_problem.predicted.lower_bound_seconds)
    specs = [[str(s.spec) for s in jax.tree.leaves(p.in_shardings)] for p in (by_op, by_problem)]
    assert specs[0] == specs[1]
