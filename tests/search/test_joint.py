"""Rewrites that the search finds by itself, on programs that have them; never worse, and the same every time."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import ShapeDtypeStruct as Shape

import unity_jax as unity
from tests.search import planning
from tests.search.rewriting import BF16, F32, cross_entropy, ops, plan, sgd, unrewritten
from unity_jax.machine.machine import Machine
from unity_jax.program import trace
from unity_jax.rewrite.library import searched
from unity_jax.search import joint, variants
from unity_jax.search.candidate import NO_PINS
from unity_jax.search.limits import LIMITS
from unity_jax.search.placement import mesh_candidates
from unity_jax.search.planner import Planner
from unity_jax.search.searched import Searched


def masked_head(params, batch):
    x = jnp.tanh(batch["x"] @ params["in"])
    logits = jnp.einsum("btd,dv->btv", x, params["out"])
    picked = jnp.take_along_axis(logits, batch["positions"][:, :, None], axis=1)
    return optax.softmax_cross_entropy_with_integer_labels(picked.astype(F32), batch["labels"]).mean()


def test_selection_of_masked_positions_goes_below_the_vocabulary_projection(monkeypatch):
    monkeypatch.setattr(variants, "LIMITS", dataclasses.replace(LIMITS, variants=4))  # it comes early
    params = {"in": Shape((1024, 1024), BF16), "out": Shape((1024, 30_522), BF16)}
    batch = {"x": Shape((64, 512, 1024), BF16), "positions": Shape((64, 76), jnp.int32)}
    batch["labels"] = Shape((64, 76), jnp.int32)
    found = plan(masked_head, params, batch)
    logits = [t for op in ops(found, "dot_general") for t in op.outputs if 30_522 in t.shape]
    assert logits and not any(512 in t.shape for t in logits)  # 76 positions of 512, forward and backward
    assert found.predicted.step_seconds < 0.7 * unrewritten(found)


def embedding(params, batch):
    return (jnp.tanh(params["table"][batch["ids"]] @ params["w"]) ** 2).mean()


def test_sgd_scatters_straight_into_an_embedding_table():
    params = {"table": Shape((1_000_000, 64), F32), "w": Shape((64, 64), F32)}
    found = plan(embedding, params, {"ids": Shape((4096,), jnp.int32)})
    assert not any(t.shape == (1_000_000, 64) for op in ops(found, "broadcast_in_dim") for t in op.outputs)
    assert all(c.bytes < 1_000_000 * 64 for c in found.predicted.collectives)  # no dense gradient travels
    assert found.predicted.step_seconds < 0.7 * unrewritten(found)


def factored(params, batch):
    x = batch["x"]
    for down, up in params:
        x = jnp.tanh(x @ (down @ up))
    return (x.astype(F32) ** 2).mean()


def test_products_with_low_rank_factors_are_reassociated(monkeypatch):
    monkeypatch.setattr(variants, "LIMITS", dataclasses.replace(LIMITS, variants=4))  # it comes early
    params = [(Shape((4096, 16), BF16), Shape((16, 4096), BF16))] * 2
    batch = {"x": Shape((65_536, 4096), BF16)}
    found = plan(factored, params, batch)
    products = [t.shape for op in ops(found, "dot_general") for t in op.outputs]
    assert [16, 65_536] in map(sorted, products)  # as written, only the product of the factors meets the tokens
    assert found.predicted.step_seconds < 0.7 * unrewritten(found)


def first_position(params, batch):
    x = jnp.tanh(batch["x"] @ params["in"])
    return cross_entropy((x @ params["last"])[:, 0] @ params["head"], batch["labels"])


def mean_pooled(params, batch):
    x = jnp.tanh(batch["x"] @ params["in"])
    return cross_entropy((x @ params["last"]).mean(1) @ params["head"], batch["labels"])


@pytest.mark.parametrize("loss, dtype", [(first_position, BF16), (mean_pooled, F32)])
def test_a_classifier_selects_or_pools_positions_before_its_last_projection(loss, dtype):
    params = {"in": Shape((768, 1024), dtype), "last": Shape((1024, 2048), dtype), "head": Shape((2048, 1000), dtype)}
    batch = {"x": Shape((512, 196, 768), dtype), "labels": Shape((512,), jnp.int32)}
    found = plan(loss, params, batch)
    assert not any(t.shape == (512, 196, 2048) for op in ops(found, "dot_general") for t in op.outputs)
    assert found.predicted.step_seconds < 0.85 * unrewritten(found)


def convolved(x, w):
    return jax.nn.relu(jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))


def inception(params, batch):
    x = convolved(batch["x"], params["in"])
    one, three, five = (convolved(x, params[k]) for k in ("one", "before three", "before five"))
    branches = [one, convolved(three, params["three"]), convolved(five, params["five"])]
    return (jnp.concatenate(branches, axis=-1).astype(F32) ** 2).mean()


@pytest.mark.slow  # of the search, which does not depend on the version of JAX
def test_sibling_convolutions_of_an_inception_block_are_merged(monkeypatch):
    """They read far more than they make, as in the late blocks."""
    monkeypatch.setattr(variants, "LIMITS", dataclasses.replace(LIMITS, variants=8))  # it comes early
    params = {k: Shape((1, 1, 768, 32), BF16) for k in ("one", "before three", "before five")}
    params |= {"in": Shape((3, 3, 3, 768), BF16)} | {k: Shape((3, 3, 32, 96), BF16) for k in ("three", "five")}
    batch = {"x": Shape((256, 35, 35, 3), BF16)}
    found = plan(inception, params, batch)
    merged = [op for op in ops(found, "conv_general_dilated") if sorted(op.inputs[1].shape) == [1, 1, 96, 768]]
    assert sorted(op.backward for op in merged) == [False, True]  # of all 3 x 32 features of the branches
    assert found.predicted.step_seconds < 0.95 * unrewritten(found)


# What the search does by its layouts, without a rewrite.


def two_products(params, batch):
    y = batch["x"] @ params["v"] + batch["z"] @ params["w"]
    return (jnp.tanh(y.astype(F32)) ** 2).mean()


def test_partial_sums_are_added_before_they_are_reduced_once():
    params = {k: Shape((65_536, 1024), BF16) for k in "vw"}
    found = plan(two_products, params, {k: Shape((512, 65_536), BF16) for k in "xz"})
    assert not found.rewrites
    assert [(c.kind, c.count) for c in found.predicted.collectives] == [("all_reduce", 1)]


def cast_weights(params, batch):
    x = batch["x"]
    for w in params:
        x = jnp.tanh(x @ w.astype(BF16))
    return (x.astype(F32) ** 2).mean()


def test_weights_are_cast_before_they_are_gathered():
    found = plan(cast_weights, [Shape((4096, 4096), F32)] * 4, {"x": Shape((16_384, 4096), BF16)})
    gathered = [c.bytes for c in found.predicted.collectives if c.kind == "all_gather"]
    assert gathered and max(gathered) == 4096 * 4096 * 2


# Never worse


@pytest.mark.parametrize("name, on", [("mlp", "h100:8"), ("xdl", "h100:8")])
def test_never_slower_than_rewriting_for_one_device_first(name, on):
    """Steps of a few hundred microseconds at most, where the start of every kernel counts."""
    program, machine = planning.program(name), Machine.preset(on)
    meshes, limit = mesh_candidates(machine.num_devices, machine), machine.device.memory_bytes
    found = joint.plan(program, machine, limit, NO_PINS, meshes, searched())
    rewritten = joint.alone(program, machine, searched()).program
    assert found.seconds <= Planner(rewritten, machine).plan(meshes).seconds * (1 + 1e-9)
    assert found.seconds < Planner(program, machine).plan(meshes).seconds


# Deep programs


def deep_masked_head(params, batch):
    x = jnp.tanh(batch["x"] @ params["in"])
    for layer in params["layers"]:
        x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
    logits = jnp.einsum("btd,dv->btv", x, params["out"])
    picked = jnp.take_along_axis(logits, batch["positions"][:, :, None], axis=1)
    return cross_entropy(picked, batch["labels"])


def deep_program(layers):
    params = {"in": Shape((1024, 1024), BF16), "out": Shape((1024, 30_522), BF16)}
    params["layers"] = [{"up": Shape((1024, 4096), BF16), "down": Shape((4096, 1024), BF16)}] * layers
    batch = {"x": Shape((64, 512, 1024), BF16), "positions": Shape((64, 76), jnp.int32)}
    return params, batch | {"labels": Shape((64, 76), jnp.int32)}


def test_every_layer_of_a_deep_program_is_rewritten():
    params = [(Shape((4096, 16), BF16), Shape((16, 4096), BF16))] * 12
    found = plan(factored, params, {"x": Shape((65_536, 4096), BF16)})
    products = [t.shape for op in ops(found, "dot_general") for t in op.outputs]
    assert products.count((65_536, 16)) + products.count((16, 65_536)) >= 12
    assert max(r.count for r in found.rewrites) >= 11  # all that read another layer's result


def test_a_plan_with_rewrites_is_saved_loaded_and_the_same_again(tmp_path):
    params, batch = {"table": Shape((100_000, 64), F32), "w": Shape((64, 64), F32)}, {"ids": Shape((4096,), jnp.int32)}
    first, second = (plan(embedding, params, batch) for _ in range(2))
    assert first.rewrites and str(first) == str(second)
    first.save(tmp_path / "plan.json")
    saved = unity.Plan.load(tmp_path / "plan.json")
    assert saved.rewrites == first.rewrites
    assert saved.searched == first.searched
    assert 0 < first.searched.variants <= first.searched.allowed
    tried, skipped = first.searched.meshes, first.searched.skipped
    assert {*tried, *skipped} == set(map(str, mesh_candidates(8, first.priced_on))) and not {*tried} & {*skipped}
    assert str(first.axes) in tried
    step = unity.auto_shard(sgd(embedding), plan=saved, machine=Machine.preset("h100:8"), donate_argnums=0)
    again = step.plan(params, batch)
    assert str(again.pcg) == str(first.pcg)
    assert again.searched == first.searched
    assert first.rewrites[0].rule in first.explain(first.rewrites[0].rule)


def test_a_file_that_says_nothing_of_its_search_is_read(tmp_path):
    path = tmp_path / "plan.json"
    unity.plan(lambda x: x * 2.0, Shape((8,), F32), machine="cpu:2").save(path)
    written = json.loads(path.read_text())
    assert written.pop("searched")["meshes"] == ["x=2"]
    path.write_text(json.dumps(written))
    assert "searched" not in str(unity.Plan.load(path))


def test_a_search_says_which_meshes_it_tried_and_what_ended_it(monkeypatch):
    def squares(x):
        for _ in range(3):
            x = x @ x
        return x

    monkeypatch.setattr(variants, "LIMITS", dataclasses.replace(LIMITS, variants=1))
    found = unity.plan(lambda x, w, v: (x @ w) @ v + x @ (w @ v), *[Shape((512, 512), F32)] * 3, machine="cpu:8")
    assert found.searched.variants == found.searched.allowed > 0
    assert found.searched.out_of_budget
    found = unity.plan(squares, Shape((64, 64), F32), machine="cpu:8", memory_limit=1e3)
    assert not found.fits  # and so is not rewritten
    assert (found.searched.variants, found.searched.allowed, found.searched.out_of_budget) == (0, 0, False)
    assert found.searched.inexact


def test_variants_that_are_the_same_program_are_planned_once():
    program = trace(lambda x, y: (x + y) * y, (Shape((8, 8), jnp.float32),) * 2, {})
    again = program.rewritten(program.graph, ())
    other = trace(lambda x, y: (x - y) * y, (Shape((8, 8), jnp.float32),) * 2, {})
    assert joint._distinct([program, other, again]) == [program, other]


def test_what_searches_tried_adds_up():
    first = Searched(("x=8",), ("x=4, y=2", "x=2, y=4"), (), 3, 32)
    second = Searched(("x=8", "x=4, y=2"), ("x=2, y=4",), ("x=4, y=2",), 32, 32, True)
    assert first + second == Searched(("x=8", "x=4, y=2"), ("x=2, y=4",), ("x=4, y=2",), 35, 64, True)


# Programs of tiny tensors, whose variants are many and none is faster


def muon(params, gradients):
    optimizer = optax.contrib.muon(1e-3)
    updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    return optax.apply_updates(params, updates)


TINY = {
    "associative_scan": (lambda x: jax.lax.associative_scan(jnp.add, x), [Shape((8, 16), F32)]),
    "gradient of cumprod": (jax.grad(lambda x: jnp.cumprod(x, 0).sum()), [Shape((4, 8), F32)]),
    "gradient of cummax": (jax.grad(lambda x: jax.lax.cummax(x, 0).sum()), [Shape((4, 8), F32)]),
    "gradient of a scan of products": (
        jax.grad(lambda x: jax.lax.associative_scan(jnp.multiply, x).sum()),
        [Shape((4, 4), F32)],
    ),
    "expm": (jax.scipy.linalg.expm, [Shape((4, 4), F32)]),
    "muon": (muon, [{"w": Shape((8, 8), F32)}] * 2),
}


@pytest.mark.parametrize("name", TINY)
def test_rules_that_say_the_same_and_steps_in_any_order_are_followed_once(monkeypatch, name):
    """Five rules say of a sum of slices that it is a slice of the sum, and any of them undoes any other; what is
    rewritten in two places is rewritten in either order."""
    count, following = [], variants.Moves._following

    def counted(*arguments):
        count.append(1)
        return following(*arguments)

    monkeypatch.setattr(variants.Moves, "_following", counted)
    function, arguments = TINY[name]
    found = unity.plan(function, *arguments, machine="cpu:8", options=unity.Options(cache=None))
    assert not found.rewrites
    assert len(count) < (120 if name == "associative_scan" else 150), len(count)
