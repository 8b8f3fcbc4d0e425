"""Deep programs, folded: three layers stand for all, in every sum and in time; what is planned is done on the whole."""

from __future__ import annotations

import functools
import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import models
from tests.search.planning import mesh
from unity_jax.machine.machine import Machine
from unity_jax.pcg.graph import Graph
from unity_jax.program import Program, trace
from unity_jax.residuals.ranges import Layers
from unity_jax.rewrite.library import searched
from unity_jax.search import joint
from unity_jax.search.candidate import NO_PINS, Candidate
from unity_jax.search.experts import expert_seeds
from unity_jax.search.fold import Folded, Folds, folded
from unity_jax.search.limits import LIMITS
from unity_jax.search.options import SearchOptions
from unity_jax.search.planner import Planner
from unity_jax.search.unfold import numbered, unfolded

BF16, F32 = jnp.bfloat16, jnp.float32
H100 = Machine.preset("h100:8")
Shape = jax.ShapeDtypeStruct


def residual(x: jax.Array, layer: Any) -> jax.Array:
    return x + jax.nn.gelu(x * layer["scale"] @ layer["up"]) @ layer["down"]


def step(params: Any, moments: Any, batch: Any, layer_of: Any = residual) -> Any:
    """Adam on residual layers whose parameters are sorted by name: layer 10 comes before layer 2."""

    def loss(params: Any) -> jax.Array:
        x = jnp.tanh(batch["x"] @ params["in"])
        for i in range(len(params) - 2):
            x = layer_of(x, params[f"layer_{i}"])
        return optax.softmax_cross_entropy_with_integer_labels((x @ params["out"]).astype(F32), batch["y"]).mean()

    adam = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    updates, moments = adam.update(jax.grad(loss)(params), moments, params)
    return optax.apply_updates(params, updates), moments


def program(layers: int, layer_of: Any = residual) -> Program:
    layer = {"up": Shape((1024, 4096), BF16), "down": Shape((4096, 1024), BF16), "scale": Shape((1024,), BF16)}
    params = {f"layer_{i}": layer for i in range(layers)}
    params |= {"in": Shape((1024, 1024), BF16), "out": Shape((1024, 32_000), BF16)}
    moments = jax.eval_shape(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)).init, params)
    batch = {"x": Shape((8192, 1024), BF16), "y": Shape((8192,), jnp.int32)}
    of = functools.partial(step, layer_of=layer_of)
    return trace(of, (params, moments, batch), {}, donate_argnums=(0, 1))


def of(whole: Program) -> Folded:
    found = folded(whole, NO_PINS)
    assert found is not None
    return found


def counted(graph: Graph) -> Counter[str]:
    """Ops by what they are, each as many times as it stands for."""
    found: Counter[str] = Counter()
    for op in graph.ops:
        found[f"{op.name} {op.signature[1:3]} {op.backward}"] += op.times
    return found


def assert_no_expert_is_faster(plan: Candidate, whole: Program) -> None:
    """Of those for eight H100 whose plans fit."""
    planner = Planner(whole, H100)
    built = planner.problem(mesh(8))
    for name, seed in expert_seeds(whole, built, mesh(8), planner.rules).items():
        expert = planner._finish(built, seed, True, name)
        assert plan.seconds <= expert.seconds * (1 + LIMITS.saves) or not expert.fits(planner.limit), name


@pytest.mark.parametrize("layers", [8, 12])
def test_three_layers_stand_for_all(layers: int) -> None:
    whole = program(layers)
    small = of(whole).program
    assert counted(small.graph) == counted(whole.graph)
    assert sum(t.times for t in small.graph.inputs) == len(whole.graph.inputs)
    assert len(small.graph.ops) == len(of(program(16)).program.graph.ops)
    known = set(small.graph.inputs)
    for op in small.graph.ops:
        assert all(t in known or t.literal is not None for t in op.inputs)
        known.update(op.outputs)
    assert len(set(small.ties.values())) == len(small.donated) == len(small.ties)


def test_what_an_op_reads_stands_for_what_its_like_read() -> None:
    """Of the same layer, that is, in every pass; but for what goes from layer to layer, of which gradients of three
    weights read what enters the first layer that is cut out."""
    model = models.get("bert", "tiny", layers=12)
    whole = trace(model.train_step, (model.abstract_state(), model.abstract_batch()), {}, donate_argnums=0)
    small, like, *_ = of(whole)
    maker = {t: op for op in small.graph.ops for t in op.outputs}
    others = [
        op.name
        for op in whole.graph.ops
        for t, stands in zip(op.inputs, maker[like[op.outputs[0]]].inputs, strict=True)
        if t.literal is None and like[t] is not stands and not (stands.enters or like[t].leaves)
    ]
    assert others == ["dot_general"] * 3


@pytest.mark.parametrize("first", [1, 2, 5, 11])
def test_the_first_layers_stand_apart_from_the_rest(first: int) -> None:
    whole = program(12)
    folds = Folds(whole, NO_PINS)
    every = folds.made[None].program
    assert every.parts is not None and every.parts.count == 12
    small, like = every.parts.apart(Layers(first, 12))
    assert counted(small.graph) == counted(whole.graph)
    assert {like[t] for t in small.graph.inputs} == set(every.graph.inputs)
    wide = [t.times for op in small.graph.ops if not op.backward for t in op.outputs if op.name == "tanh" and t.rank]
    few = [n for n in (1, first - 1, 11 - first, 1) if n]
    assert wide in ([1, *few], few)  # one before the layers


def test_what_is_not_deep_is_not_folded() -> None:
    assert folded(program(4), NO_PINS) is None


NEAR = {"kept": (residual, 0.05, 0.1, 0.07), "again": (jax.checkpoint(residual), 0.085, 0.13, 0.08)}
"""A layer, and to within what part of them folded programs tell seconds, bytes and costs of the problem."""


@pytest.mark.parametrize("kind", NEAR)
@pytest.mark.parametrize("sizes", [(8,), (2, 4)])
def test_experts_take_as_long_and_as_much_as_on_the_whole(sizes: tuple[int, ...], kind: str) -> None:
    layer_of, *near = NEAR[kind]
    whole, axes = program(12, layer_of), mesh(*sizes)
    found = []
    for one in (whole, of(whole).program):
        planner = Planner(one, H100)
        built = planner.problem(axes)
        seeds = expert_seeds(one, built, axes, planner.rules)
        plans = ((name, planner._finish(built, x, True, name), built.problem.cost(x)) for name, x in seeds.items())
        found.append({name: (plan, cost) for name, plan, cost in plans})
    assert set(found[0]) == set(found[1])
    for name, (plan, cost) in found[0].items():
        small, as_much = found[1][name]
        assert small.seconds == pytest.approx(plan.seconds, rel=near[0]), name
        assert small.memory.peak_bytes == pytest.approx(plan.memory.peak_bytes, rel=near[1]), name
        assert as_much == pytest.approx(cost, rel=near[2]), name


def moved(plan: Candidate) -> Counter[str]:
    """The collectives of a step, each as often as it is run."""
    found: Counter[str] = Counter()
    for task in plan.timeline.tasks:
        for part in task.parts or (task,):
            if (of := part.collective) is not None:
                found[f"{of.kind} {of.axes} {of.bytes}"] += part.times
    return found


def adapted(factors: Any, weights: Any, x: jax.Array) -> Any:
    """Residual layers whose weights are all changed by factors of a low rank before the first is used."""

    def loss(factors: Any) -> jax.Array:
        full = [w + a @ b for (a, b), w in zip(factors, weights, strict=True)]
        y = x
        for up, down in zip(full[::2], full[1::2], strict=True):
            y = y + jax.nn.relu(y @ up) @ down
        return (y.astype(F32) ** 2).mean()

    return jax.tree.map(lambda p, g: p - 0.1 * g, factors, jax.grad(loss)(factors))


@pytest.mark.parametrize("sizes", [(8,), (2, 4)])
def test_what_is_made_for_all_layers_before_the_first_is_folded_with_them(sizes: tuple[int, ...]) -> None:
    """So what is gathered for one layer is gathered as often as there are layers, in the plans of every expert."""
    layers, axes = 12, mesh(*sizes)
    wide = [((4096, 8), (8, 1024)), ((1024, 8), (8, 4096))][::-1] * layers
    factors = [tuple(Shape(s, BF16) for s in pair) for pair in wide]
    weights = [Shape((a[0], b[1]), BF16) for a, b in wide]
    whole = trace(adapted, (factors, weights, Shape((8192, 1024), BF16)), {}, donate_argnums=0)
    small = of(whole)
    assert counted(small.program.graph) == counted(whole.graph)
    assert sum(op.name == "dot_general" and op.times == 1 for op in small.program.graph.ops) <= 3 * 3 * 6
    for plan in Planner(small.program, H100).experts([axes], math.inf):
        same = unfolded([(whole, small)], plan, math.inf, NO_PINS, ())
        assert moved(plan) == moved(same), plan.label
        assert plan.seconds == pytest.approx(same.seconds, rel=0.15), plan.label  # combined ones start once


def test_every_layer_is_planned_as_the_one_that_stands_for_it() -> None:
    whole = program(12)
    plan = joint.plan(whole, H100, None, NO_PINS, [mesh(8)], [], SearchOptions(rewrite=False))
    named = zip(whole.input_names, plan.program.graph.inputs, strict=True)
    layouts = {path: plan.decisions.layouts[t] for path, t in named}
    for leaf in ("up", "down", "scale"):
        assert len({layouts[f"[0]['layer_{i}']['{leaf}']"] for i in range(1, 11)}) == 1
    assert_no_expert_is_faster(plan, whole)


@pytest.mark.parametrize("layers", [18, 19])
def test_layers_of_one_product_take_turns(layers: int) -> None:
    """Columns of a matrix are split, then rows of the next one: what lies between needs no collective."""

    def dense(weights: Any, x: jax.Array) -> Any:
        def loss(weights: Any) -> jax.Array:
            y = x
            for w in weights:
                y = jax.nn.relu(y @ w)
            return (y.astype(F32) ** 2).mean()

        return jax.tree.map(lambda p, g: p - 0.1 * g, weights, jax.grad(loss)(weights))

    args = [Shape((4096, 4096), BF16)] * layers, Shape((1024, 4096), BF16)
    whole = trace(dense, args, {}, donate_argnums=0)
    small = of(whole).program
    assert counted(small.graph) == counted(whole.graph)
    stood = sorted(t.times for t in small.graph.inputs)
    assert stood[-2:] == [(layers - 4) // 2] * 2 and set(stood[:-2]) == {1}
    plan = joint.plan(whole, H100, None, NO_PINS, [mesh(8)], [], SearchOptions(rewrite=False))
    assert_no_expert_is_faster(plan, whole)


def test_a_whole_that_is_rewritten_is_folded_to_what_was_rewritten() -> None:
    """Products of low rank are multiplied in another order, in every layer."""

    def low_rank(factors: Any, x: jax.Array) -> Any:
        def loss(factors: Any) -> jax.Array:
            y = x
            for down, up in factors:
                y = jnp.tanh(y @ (down @ up))
            return (y.astype(F32) ** 2).mean()

        return jax.tree.map(lambda p, g: p - 0.1 * g, factors, jax.grad(loss)(factors))

    factors = [(Shape((4096, 16), BF16), Shape((16, 4096), BF16))] * 12
    whole = trace(low_rank, (factors, Shape((65_536, 4096), BF16)), {}, donate_argnums=0)
    plan = joint.plan(whole, H100, None, NO_PINS, [mesh(8)], searched())
    assert max(r.count for r in plan.program.rewrites) >= 11
    again = of(plan.program).program.graph
    assert len(set(numbered(again, {}).values())) <= len(again.inputs) + sum(len(op.outputs) for op in again.ops)


def test_layers_with_other_pins_are_not_alike() -> None:
    model = models.get("mlp", "tiny")
    assert folded(trace(model.train_step, (model.abstract_state(), model.abstract_batch()), {}), NO_PINS) is None
