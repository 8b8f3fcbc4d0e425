"""What was planned for folded programs, done on the whole ones: a plan and its rivals, which may be of two programs."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import unity_jax as unity
from unity_jax.search import joint, planner, unfold
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
    for module in (planner, unfold):
        monkeypatch.setattr(module, "LIMITS", dataclasses.replace(LIMITS, alike=0.5, behind=1.5))
    unfolded, found = joint.unfolded, list[tuple[Candidate, Candidate]]()

    def noted(wholes: Any, plan: Candidate, *rest: Any, **named: Any) -> Candidate:
        found.append((plan, unfolded(wholes, plan, *rest, **named)))
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


@pytest.mark.parametrize("beyond", [1.0, 1.2])
def test_rivals_are_done_where_they_are_told_to_be_faster_than_the_whole_is(
    monkeypatch: pytest.MonkeyPatch, beyond: float
) -> None:
    """The whole takes so many times as long as the folded program tells of its best plan."""
    given = list[Any]()
    monkeypatch.setattr(joint, "unfolded", lambda *args, **_: given.append(args) or unfold.unfolded(*args))
    wide, of = Shape((1024, 1024), BF16), {"machine": "h100:8", "donate_argnums": 0}
    unity.plan(step, ([wide] * 18, wide, wide), Shape((4096, 1024), BF16), **of, options=unity.Options(cache=None))
    (args,) = given
    best, rivals, done = args[1], args[1].rivals, list[Candidate]()
    as_decided, seconds = planner.Planner.as_decided, Candidate.seconds.fget
    assert seconds is not None and rivals and [c.seconds for c in rivals] == sorted(c.seconds for c in rivals)
    assert best.seconds < rivals[0].seconds and rivals[-1].seconds <= LIMITS.behind * best.seconds

    def noted(self: planner.Planner, plan: Candidate, *rest: Any) -> Candidate:
        done.append(plan)
        slow.append(as_decided(self, plan, *rest))
        return slow[-1]

    slow = list[Candidate]()
    first = lambda c: beyond if slow and c is slow[0] else 1.0  # noqa: E731
    monkeypatch.setattr(planner.Planner, "as_decided", noted)
    monkeypatch.setattr(Candidate, "seconds", property(lambda c: first(c) * seconds(c)))
    chosen = unfold.unfolded(*args)
    fastest = min(c.seconds for c in slow)
    assert chosen.seconds == fastest and done[0] is best
    told = max(fastest, (1 + LIMITS.alike) * best.seconds)
    assert done[1:] == [c for c in rivals if c.seconds <= told or c in done]
    assert (len(done) > 1) == (beyond > 1 or rivals[0].seconds <= told)


def test_what_a_folded_program_decides_is_done_op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a problem of the whole is built, in which nothing but the layouts of results is left to choose."""
    monkeypatch.setattr(planner, "with_rivals", lambda chosen, *_: chosen)
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
