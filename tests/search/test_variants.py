"""Variants of a program share what they have in common: places, assignments, experts that were ruled out."""

from __future__ import annotations

import dataclasses

import pytest

from tests.search.planning import mesh, planner, program
from unity_jax.rewrite.directions import is_applicable
from unity_jax.rewrite.library import searched
from unity_jax.rewrite.sites import Place
from unity_jax.search.candidate import Candidate
from unity_jax.search.limits import LIMITS
from unity_jax.search.planner import Planner
from unity_jax.search.variants import Move, Moves

pytestmark = pytest.mark.slow  # the same on every JAX version


def moves_of(plan: Planner) -> Moves:
    return Moves(plan, [r for r in searched() if is_applicable(r)], [], 1.0)


def first_made(moves: Moves, graph) -> tuple[Move, object]:
    """The first move that can be made, and what it makes."""
    for move in moves(graph):
        made = moves.made(graph, move)
        if made is not None:
            return move, made
    raise AssertionError("nothing can be rewritten")


@pytest.mark.parametrize("name", ["mlp", "vit", "dlrm"])
def test_a_variant_has_the_places_that_it_would_have_by_itself(name: str) -> None:
    """Only what is near a change is matched again; what was found before, when its turn comes."""
    plan = planner(program(name))
    moves, fresh = moves_of(plan), moves_of(plan)
    _, made = first_made(moves, plan.program.graph)
    after = moves(made.graph)
    assert any(m.seen for m in after) and not all(m.seen for m in after)
    found = set()
    for move in after:
        assert isinstance(move.place, Place)
        place = move.finder.again(move.place) if move.seen else move.place
        if place is not None:
            found.add(place.spots)
    expected = {m.place.spots for m in fresh(made.graph) if isinstance(m.place, Place)}
    assert len(expected & found) >= 0.95 * len(expected)  # others are of kinds that are told apart elsewhere


def test_a_place_that_is_gone_is_not_found_again() -> None:
    plan = planner(program("mlp"))
    moves = moves_of(plan)
    move, made = first_made(moves, plan.program.graph)
    stale = [m for m in moves(made.graph) if m.seen and m.place.spots == move.place.spots]
    assert not stale or moves.made(made.graph, stale[0]) is None


@pytest.mark.parametrize("name", ["mlp", "vit", "candle_uno"])
def test_a_planner_that_follows_starts_where_the_other_ended(name: str) -> None:
    plan = planner(program(name))
    axes = mesh(8)
    before = plan.promising(axes)
    same = plan.like(plan.program, follows=True)
    assert same.promising(axes).seconds == pytest.approx(before.seconds, rel=1e-9)
    assert same.added(axes) == pytest.approx(plan.added(axes), rel=1e-9)


@pytest.mark.parametrize("name", ["mlp", "vit"])
def test_what_is_new_in_a_variant_is_solved(name: str) -> None:
    """Of a rewritten program the assignment costs what the best costs, or close to that."""
    plan, axes = planner(program(name)), mesh(8)
    plan.promising(axes)
    moves = moves_of(plan)
    _, made = first_made(moves, plan.program.graph)
    variant = plan.program.rewritten(made.graph, ())
    followed, solved = plan.like(variant, follows=True).added(axes), planner(variant).added(axes)
    assert followed is not None and solved is not None
    assert solved * (1 - 1e-9) <= followed <= solved * 1.02


def test_a_finer_mesh_completes_no_expert_that_a_coarser_one_has() -> None:
    plan = planner(program("mlp"))
    plan.plan([mesh(8), mesh(4, 2)])
    alone = planner(program("mlp"))
    alone.plan([mesh(4, 2)])
    assert {"dp(x,y)", "fsdp(x,y)"} <= set(alone._expert_seeds(mesh(4, 2)))
    assert not {"dp(x,y)", "fsdp(x,y)"} & set(plan._expert_seeds(mesh(4, 2)))


def test_a_variant_completes_no_expert_that_was_far_behind_on_a_coarser_mesh() -> None:
    plan = planner(program("mlp"))
    plan.plan([mesh(8), mesh(4, 2)])
    variant, expert = plan.like(plan.program, follows=True), "fsdp(x,y)"
    variant.promising(mesh(4, 2))
    for ratio, there in ((1.0, True), (1 + LIMITS.behind, False)):
        plan.seeds.behind[mesh(8), "fsdp(x)", True] = ratio
        variant.seeds._found.clear()
        assert (expert in variant._expert_seeds(mesh(4, 2), near=True)) == there


def test_a_mesh_that_cannot_be_better_is_left_out() -> None:
    """Communication takes nothing on eight devices in a row, and the arithmetic is split as it could be on others."""
    plan = planner(program("mlp"))
    first, other = mesh(8), mesh(4, 2)
    proposed: Candidate = plan._proposed(first)
    assert proposed.timeline.exposed_communication_seconds == 0.0
    assert not plan._may_win([proposed], other)
    slower = dataclasses.replace(proposed, label="an expert")
    assert plan._may_win([slower], other)  # of other plans nothing is known
