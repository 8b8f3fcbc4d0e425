"""Rings compute what the collectives and contractions compute that they stand for, by the permutes that are planned."""

import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.numerics.harness import Case
from unity_jax.aot.collectives import Collective, count_difference, stablehlo_collectives
from unity_jax.lower.compile import lower
from unity_jax.machine.machine import Machine
from unity_jax.network.collectives import collectives
from unity_jax.pcg.graph import nested
from unity_jax.search.decompose import decompose, matches


def attention(x, w1, w2):
    """A train step with products of every form: batches, several contracted dimensions, shared operands."""

    def loss(weights):
        h = jnp.tanh(jnp.einsum("bsd,dhf->bshf", x, weights[0]))
        scores = jnp.einsum("bshf,bthf->bhst", h, h)
        return jnp.mean(jnp.einsum("bhst,bthf,hfd->bsd", scores, h, weights[1]) ** 2)

    grads = jax.grad(loss)((w1, w2))
    return w1 - grads[0], w2 - grads[1]


def layers(x, weights):
    def loss(weights):
        out = jax.lax.scan(lambda c, w: (jnp.tanh(c @ w[0]) @ w[1] + c, None), x, weights)[0]
        return (out**2).mean()

    return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))


@pytest.fixture(scope="module")
def cases():
    rng = np.random.default_rng(0)

    def array(*shape):
        return jnp.asarray(rng.normal(size=shape) * 0.3)

    with jax.enable_x64(True):
        return {
            "attention": Case.of(attention, (array(8, 16, 16), array(16, 4, 8), array(4, 8, 16))),
            "layers": Case.of(layers, (array(16, 16), (array(3, 16, 32), array(3, 32, 16)))),
        }


MESHES = [((8,), "v5e:2x4"), ((8,), "cpu:8"), ((2, 4), "v5e:2x4")]


def forced(plan, machine):
    """A plan with rings wherever they match, and how often each form of ring was found."""
    found, seen = set(), Counter()
    for path, graph, _ in nested(plan.graph):
        for match in matches(graph, plan.axes):
            found.update(match.places)
            product, side = match.products[0]
            move = match.collective.move
            (factor,) = (
                product.shard.rule.results[0][move.dim] if side == 2 else product.shard.rule.operands[side][move.dim]
            )
            summed = product.shard.rule.factors[factor].kind == "sum"
            seen[move.kind, side, "term" if summed else "slice", "loop" if path else "", len(match.products) > 1] += 1
    graph = decompose(plan.graph, found, plan.axes, machine)
    return dataclasses.replace(plan, graph=graph), seen


def test_random_plans_with_rings_wherever_they_match(cases):
    seen = Counter()
    with jax.enable_x64(True):
        for name, case in cases.items():
            for seed in range(3):
                sizes, machine = MESHES[seed % len(MESHES)]
                machine = Machine.preset(machine)
                plan, forms = forced(case.sample(sizes, seed), machine)
                seen += forms
                if not forms:
                    continue
                assert case.differences(case.run(plan)) == [], f"{name}, seed {seed}"
                planned = [
                    Collective(c.kind, c.axes, c.bytes, c.count) for c in collectives(plan.graph, plan.axes, machine)
                ]
                lowered = lower(case.program, plan.graph, plan.mesh).compiler_ir("stablehlo")
                assert count_difference(planned, stablehlo_collectives(lowered, plan.axes)) == [], (
                    f"{name}, seed {seed}"
                )
    forms = {(kind, how, loop) for kind, _, how, loop, _ in seen}
    assert forms == {
        ("combine", "slice", ""),
        ("combine", "slice", "loop"),
        ("combine", "term", ""),
        ("combine", "term", "loop"),
        ("reduce_scatter", "slice", ""),
        ("reduce_scatter", "slice", "loop"),
    }
    assert any(many for *_, many in seen), "one gathered array for several products"
