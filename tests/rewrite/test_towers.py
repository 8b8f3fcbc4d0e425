"""Towers of a train step, stacked: what is found, and that the program computes the same."""

import jax
import jax.numpy as jnp
import pytest

from tests.numerics.harness import errors
from tests.rewrite.steps import normal
from tests.rewrite.test_apply import evaluate
from unity_jax.program import trace
from unity_jax.rewrite.library import searched, stacking
from unity_jax.rewrite.record import Rewrite, replay
from unity_jax.rewrite.sites import fingerprint
from unity_jax.rewrite.towers import stacked, towers

LAYERS = 3


def tower(params, x):
    for w, b in params:
        x = jnp.tanh(x @ w + b)
    return x


def matched(params, batch):
    """Scored by a product, as two towers of queries and documents are."""
    scores = (tower(params["one"], batch["x"]) * tower(params["two"], batch["y"])).sum(-1)
    return ((scores - batch["z"]) ** 2).mean()


def joined(params, batch):
    """Read side by side, as the features of CANDLE-Uno are, by what has another tower for one of them."""
    features = [tower(params[k], batch[v]) for k, v in (("one", "x"), ("two", "y"), ("other", "w"))]
    return (jnp.tanh(jnp.concatenate(features, axis=1) @ params["head"]) ** 2).sum()


def shared(params, batch):
    return (tower(params["one"], batch["x"]) + tower(params["two"], batch["x"])).sum()


def step(loss):
    def update(params, batch):
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, batch))

    return update


def arguments():
    layers = {k: [(normal(5 + i, 5) + k, normal(5) * k) for i in (0, 0, 0)] for k in (1, 2)}
    params = {"one": layers[1], "two": layers[2], "other": [(normal(4, 6), normal(6))], "head": normal(16, 3)}
    return params, {"x": normal(7, 5), "y": normal(7, 5) * 2, "w": normal(7, 4), "z": normal(7)}


@pytest.mark.parametrize("loss", [matched, joined, shared])
def test_stacked_towers_compute_the_same(loss):
    with jax.enable_x64(True):
        args = arguments()
        program, arrays = trace(step(loss), args, {}), jax.tree.leaves(args)
        graph, steps = stacked(program.graph, towers(program.graph), stacking(), {})
        wide = [op for op in graph.ops if op.name == "dot_general" and 2 in op.outputs[0].shape]
        single = [op for op in program.graph.ops if op.name == "dot_general" and 5 in op.outputs[0].shape]
        assert len(wide) == len(single) // 2 >= 3 * LAYERS - 2  # forward, of the inputs, of the weights
        assert not [
            e
            for e in errors(program.out_paths, evaluate(program.graph, arrays), evaluate(graph, arrays))
            if e.error > 1e-12
        ]
        record = Rewrite.from_json(Rewrite("towers", "", 1, 0.0, "", tuple(((), s) for s in steps)).to_json())
        again, known = replay(trace(step(loss), args, {}).graph, [record], searched()), {}
        assert fingerprint(again, known) == fingerprint(graph, known)


def test_layers_of_one_tower_are_no_towers():
    def chain(params, batch):
        return tower(params["one"] + params["two"], batch["x"]).sum()

    assert not towers(trace(step(chain), arguments(), {}).graph)
