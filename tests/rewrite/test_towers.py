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
from unity_jax.rewrite.towers import exchanged, stacked, towers

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


def four(params, batch):
    """Two towers each for features of two sizes, of which the later layers are alike, as in CANDLE-Uno."""
    features = [tower(layers, x) for layers, x in zip(params, batch, strict=True)]
    return (jnp.concatenate(features, axis=1) ** 2).sum()


def test_stacks_of_two_towers_are_joined_to_stacks_of_four():
    with jax.enable_x64(True):
        sizes = (5, 4, 5, 4)
        params = [[(normal(n, 6) + i, normal(6)), *((normal(6, 6), normal(6)),) * 2] for i, n in enumerate(sizes)]
        args = params, [normal(7, n) * (i + 1) for i, n in enumerate(sizes)]
        program, arrays = trace(step(four), args, {}), jax.tree.leaves(args)
        graph, records = program.graph, []
        for _ in range(2):
            graph, steps = stacked(graph, towers(graph), stacking(), {})
            records.append(Rewrite("towers", "", 1, 0.0, "", tuple(((), s) for s in steps)))
        assert not towers(graph)
        wide = [op.outputs[0].shape for op in graph.ops if op.name == "dot_general"]
        assert sorted(wide) == sorted(
            [(2, 7, 6), (2, 5, 6)] + [(2, 7, 6), (2, 4, 6)] + 2 * [(4, 7, 6), (4, 6, 6), (4, 7, 6)]
        )
        known = evaluate(program.graph, arrays)
        assert not [e for e in errors(program.out_paths, known, evaluate(graph, arrays)) if e.error > 1e-12]
        assert fingerprint(replay(program.graph, records, searched()), seen := {}) == fingerprint(graph, seen)


def bags(params, batch):
    """Sums of rows of four tables, side by side, as the features of DLRM are."""
    rows = [table[ids].sum(1).astype(jnp.float32) for table, ids in zip(params["tables"], batch, strict=True)]
    return (jnp.concatenate(rows, axis=1) @ params["head"] ** 2).sum()


def test_rows_of_several_tables_are_stacked_where_they_are_exchanged():
    with jax.enable_x64(True):
        sizes = (9, 9, 8, 7)
        params = {"tables": [normal(n, 6) for n in sizes], "head": jnp.float32(normal(24, 3))}
        args = params, [jnp.arange(10).reshape(5, 2) * 3 % n for n in sizes]
        program, arrays = trace(step(bags), args, {}), jax.tree.leaves(args)
        graph, records = program.graph, []
        while pairs := exchanged(graph):
            assert not any(op.name == "gather" or op.name.startswith("scatter") for pair in pairs for op in pair)
            graph, steps = stacked(graph, pairs, stacking(), {})
            records.append(Rewrite("towers", "", 1, 0.0, "", tuple(((), s) for s in steps)))
        made = [(op.name, op.outputs[0].shape) for op in graph.ops]
        assert made.count(("reduce_sum", (4, 5, 6))) == 1
        assert made.count(("convert_element_type", (4, 5, 6))) == 2  # there, and back
        known = evaluate(program.graph, arrays)
        assert not [e for e in errors(program.out_paths, known, evaluate(graph, arrays)) if e.error > 1e-12]
        assert fingerprint(replay(program.graph, records, searched()), seen := {}) == fingerprint(graph, seen)


def test_rows_that_depend_on_rows_are_not_stacked_with_them():
    def walk(params, batch):
        ids = batch
        for table in params["tables"]:
            ids = table[ids].sum(1).astype(jnp.int32)[:, None] % 7
        return jnp.float32(ids).sum()

    tables = {"tables": [jnp.ones((7, 3))] * 2}
    assert not exchanged(trace(walk, (tables, jnp.zeros((4, 1), jnp.int32)), {}).graph)


def test_towers_that_look_up_other_rows_are_stacked_but_for_their_tables():
    def tied(params, batch):
        scores = [jnp.tanh(p["table"][i] @ p["w"]) @ p["table"].T for p, i in zip(params, batch, strict=True)]
        return (scores[0] * scores[1]).sum()

    with jax.enable_x64(True):
        params = [{"table": normal(9, 5) * n, "w": normal(5, 5)} for n in (1, 2)]
        args = params, [jnp.arange(4), jnp.arange(4) + 3]
        program, arrays = trace(step(tied), args, {}), jax.tree.leaves(args)
        pairs = towers(program.graph)
        assert any(op.name == "gather" for pair in pairs for op in pair)
        graph, _ = stacked(program.graph, pairs, stacking(), {})
        assert sum(op.name == "gather" for op in graph.ops) == 2
        known = evaluate(program.graph, arrays)
        assert not [e for e in errors(program.out_paths, known, evaluate(graph, arrays)) if e.error > 1e-12]


def test_layers_of_one_tower_are_no_towers():
    def chain(params, batch):
        return tower(params["one"] + params["two"], batch["x"]).sum()

    assert not towers(trace(step(chain), arguments(), {}).graph)
