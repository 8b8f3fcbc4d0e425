"""Rewrites that the search finds by itself, on programs that have them; never worse, and the same every time."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import ShapeDtypeStruct as Shape

import unity_jax as unity
from unity_jax.machine.machine import Machine
from unity_jax.program import trace
from unity_jax.search.planner import Planner

BF16, F32 = jnp.bfloat16, jnp.float32


@pytest.fixture(autouse=True)
def no_cache(monkeypatch):
    monkeypatch.setenv("UNITY_JAX_CACHE", "")


def sgd(loss):
    """A train step: every parameter a hundredth of its gradient further down."""

    def step(params, batch):
        gradients = jax.grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.01 * g.astype(p.dtype), params, gradients)

    return step


def plan(loss, params, batch, machine="h100:8"):
    return unity.plan(sgd(loss), params, batch, machine=machine, donate_argnums=0)


def unrewritten(loss, params, batch, machine="h100:8"):
    """Predicted seconds of the best plan of the program as it is."""
    program = trace(sgd(loss), (params, batch), {}, donate_argnums=0)
    found = plan(loss, params, batch, machine)
    planner = Planner(program, Machine.preset(machine))
    return min(c.seconds for c in planner.candidates(found.axes))


def ops(found, name):
    return [op for op in found.pcg.walk() if op.name == name]


def masked_head(params, batch):
    x = jnp.tanh(batch["x"] @ params["in"])
    logits = jnp.einsum("btd,dv->btv", x, params["out"])
    picked = jnp.take_along_axis(logits, batch["positions"][:, :, None], axis=1)
    return optax.softmax_cross_entropy_with_integer_labels(picked.astype(F32), batch["labels"]).mean()


def test_selection_of_masked_positions_goes_below_the_vocabulary_projection():
    params = {"in": Shape((1024, 1024), BF16), "out": Shape((1024, 30_522), BF16)}
    batch = {"x": Shape((64, 512, 1024), BF16), "positions": Shape((64, 76), jnp.int32)}
    batch["labels"] = Shape((64, 76), jnp.int32)
    found = plan(masked_head, params, batch)
    logits = [t for op in ops(found, "dot_general") for t in op.outputs if 30_522 in t.shape]
    assert logits and not any(512 in t.shape for t in logits)  # 76 positions of 512, forward and backward
    assert found.predicted.step_seconds < 0.7 * unrewritten(masked_head, params, batch)


def embedding(params, batch):
    return (jnp.tanh(params["table"][batch["ids"]] @ params["w"]) ** 2).mean()


def test_sgd_scatters_straight_into_an_embedding_table():
    params = {"table": Shape((1_000_000, 64), F32), "w": Shape((64, 64), F32)}
    found = plan(embedding, params, {"ids": Shape((4096,), jnp.int32)})
    assert not any(t.shape == (1_000_000, 64) for op in ops(found, "broadcast_in_dim") for t in op.outputs)
    assert all(c.bytes < 1_000_000 * 64 for c in found.predicted.collectives)  # no dense gradient travels
    assert found.predicted.step_seconds < 0.7 * unrewritten(embedding, params, {"ids": Shape((4096,), jnp.int32)})


def factored(params, batch):
    x = batch["x"]
    for down, up in params:
        x = jnp.tanh(x @ (down @ up))
    return (x.astype(F32) ** 2).mean()


def test_products_with_low_rank_factors_are_reassociated():
    params = [(Shape((4096, 16), BF16), Shape((16, 4096), BF16))] * 2
    batch = {"x": Shape((65_536, 4096), BF16)}
    found = plan(factored, params, batch)
    products = [t.shape for op in ops(found, "dot_general") for t in op.outputs]
    assert [16, 65_536] in map(sorted, products)  # as written, only the product of the factors meets the tokens
    assert found.predicted.step_seconds < 0.7 * unrewritten(factored, params, batch)


def test_a_plan_with_rewrites_is_saved_loaded_and_the_same_again(tmp_path):
    params, batch = {"table": Shape((100_000, 64), F32), "w": Shape((64, 64), F32)}, {"ids": Shape((4096,), jnp.int32)}
    first, second = (plan(embedding, params, batch) for _ in range(2))
    assert first.rewrites and str(first) == str(second)
    first.save(tmp_path / "plan.json")
    saved = unity.Plan.load(tmp_path / "plan.json")
    assert saved.rewrites == first.rewrites
    step = unity.auto_shard(sgd(embedding), plan=saved, machine=Machine.preset("h100:8"), donate_argnums=0)
    again = step.plan(params, batch)
    assert str(again.pcg) == str(first.pcg)
    assert first.rewrites[0].rule in first.explain(first.rewrites[0].rule)
