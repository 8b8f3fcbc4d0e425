"""Rewrites that the search finds by itself, on programs that have them; never worse, and the same every time."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import ShapeDtypeStruct as Shape

import models
import unity_jax as unity
from models import bert
from tests.search import planning
from unity_jax.machine.machine import Machine
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.program import trace
from unity_jax.rewrite.library import applicable, searched
from unity_jax.search import joint, variants
from unity_jax.search.candidate import NO_PINS
from unity_jax.search.limits import LIMITS
from unity_jax.search.placement import mesh_candidates
from unity_jax.search.planner import Planner
from unity_jax.search.searched import Searched

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


def unrewritten(found):
    """Predicted seconds of the best plan of the program as it was written, for the same mesh."""
    planner = Planner(found.bound().traced, found.priced_on)
    return min(c.seconds for c in planner.candidates(found.axes))


def ops(found, name):
    return [op for op in found.pcg.walk() if op.name == name]


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


def zoo(name, size, **overrides):
    """A model of the zoo, trained by SGD, as Unity's recommenders were."""
    return dataclasses.replace(models.get(name, size, **overrides), optimizer=optax.sgd(0.01))


def plan_of(model, machine, mesh=None):
    shapes = model.abstract_state(), model.abstract_batch()
    return unity.plan(model.train_step, *shapes, machine=machine, mesh=mesh, donate_argnums=0)


def test_dlrm_scatters_into_the_tables_of_its_bags(monkeypatch):
    monkeypatch.setattr(variants, "LIMITS", dataclasses.replace(LIMITS, variants=6))  # it comes early
    sizes = {"rows": (1_000_000,) * 3, "bags": (20, 1, 7), "bottom": (256,), "top": (256, 1), "batch_size": 8192}
    model = zoo("dlrm", "unity", **sizes)
    found = plan_of(model, "h100:8")
    tables = [op for op in ops(found, "scatter-add") if op.outputs[0].shape[1:] == (256,)]
    assert [len(op.inputs[1].shape) for op in tables] == [3] * 3  # ids of samples and bags
    assert not any(t.rank == 2 and t.shape[0] > 8192 for op in ops(found, "broadcast_in_dim") for t in op.outputs)
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


@pytest.mark.slow
def test_lora_makes_no_gradient_of_a_weight_that_adapters_are_merged_into(monkeypatch):
    """LLaMA 7B, two layers: the gradient of W + A B, which only A and B need, is multiplied by them token by token."""
    monkeypatch.setattr(variants, "LIMITS", dataclasses.replace(LIMITS, variants=2))
    model = models.get("lora", layers=2)
    found = plan_of(model, "h100:8")
    merged = [op for op in ops(found, "dot_general") if math.prod(op.outputs[0].shape) == 4096 * 4096]
    assert len(merged) == 2 * 2  # A B of queries and values, forward
    assert found.predicted.step_seconds < 0.98 * unrewritten(found)


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(F32), labels).mean()


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


@pytest.mark.slow
def test_vit_runs_its_last_block_for_the_class_token_alone(monkeypatch):
    """But for keys and values, which that attends to, and their gradients and the queries'."""
    monkeypatch.setattr(variants, "LIMITS", dataclasses.replace(LIMITS, variants=2))
    layers, options = 2, {"scan": False, "remat": False, "dropout": 0.0}  # as on JFT-300M
    found = plan_of(models.get("vit", "base", batch_size=1024, layers=layers, **options), "h100:8")
    products = ops(found, "dot_general")
    whole = [op for op in products if any({197, 3072} <= set(t.shape) for t in (*op.inputs, *op.outputs))]
    assert len(whole) == 6 * (layers - 1)  # two products of all blocks but one, each with two gradients
    mixed = [op for op in products if op.outputs[0].shape == (1024, 12, 64, 197) and not op.backward]
    assert len(mixed) == layers - 1
    assert found.predicted.step_seconds < 0.88 * unrewritten(found)


SPLITTING = (
    "dot-of-concat-to-add-of-dots-of-slice",
    "concat-of-dots-to-dot-of-concat, back",
    "dot-of-take-to-take-of-dot, back",
    "slice-of-concat-cancels",
)
TWO = {"rows": (1_000_000,) * 2, "bags": (1, 1), "bottom": (256,), "top": (1024, 1), "batch_size": 24 * 1024}
NARROW = {"tower": (4192,) * 3, "head": (4192,), "batch_size": 24 * 256}


@pytest.mark.slow
@pytest.mark.parametrize(
    "model, sizes, on, most, times",
    [
        ("dlrm", {"size": "unity", **TWO}, "v100-summit:4x6", 3, 0.98),
        ("xdl", {"size": "full", "batch_size": 96 * 1024}, "v100-summit:16x6", 32, 0.999),
        ("candle_uno", {"size": "full", **NARROW}, "v100-summit:4x6", 8, 0.87),
    ],
)
def test_a_product_with_concatenated_features_is_split(monkeypatch, model, sizes, on, most, times):
    """By the rules that split alone, of which few variants are planned: the machines have many meshes."""
    monkeypatch.setattr(variants, "LIMITS", dataclasses.replace(LIMITS, variants=most))
    made, machine = zoo(model, dtype=F32, **sizes), Machine.preset(on)
    args = made.abstract_state(), made.abstract_batch()
    program = trace(made.train_step, args, {}, donate_argnums=0)
    rules = [r for r in applicable() if r.name in SPLITTING]
    first = Planner(program, machine)
    sketches = first.sketch(mesh_candidates(machine.num_devices, machine))
    meshes = [min(sketches, key=lambda c: c.seconds).mesh if model != "candle_uno" else MeshAxes(("x", "y"), (4, 6))]
    found = joint.plan(program, machine, None, NO_PINS, meshes, rules)
    assert "dot-of-concat-to-add-of-dots-of-slice" in {step.rule for r in found.program.rewrites for _, step in r.steps}
    if model == "candle_uno":  # most of it: no product has more than half of the six inputs, forward or backward
        widths = [op.inputs[1].shape[0] for op in found.program.graph.walk() if op.name == "dot_general"]
        assert max(widths) <= 3 * 4192
    assert found.seconds < times * first.plan(meshes).seconds


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


@pytest.mark.slow
def test_inception_merges_sibling_convolutions(monkeypatch):
    """A block of each kind, at the published widths; by the rules of convolutions alone."""
    blocks = tuple("stem1 stem2 a64 b c192 d e".split())
    model, machine = models.get("inception", "unity", batch_size=512, blocks=blocks), Machine.preset("h100:8")
    args = model.abstract_state(), model.abstract_batch()
    program = trace(model.train_step, args, {}, donate_argnums=0)
    rules = [r for r in applicable() if any(t.op == "conv" for s in r.source for t in s.walk())]
    first = Planner(program, machine)
    meshes = [min(first.sketch(mesh_candidates(machine.num_devices, machine)), key=lambda c: c.seconds).mesh]
    found = joint.plan(program, machine, None, NO_PINS, meshes, rules)
    assert "concat-conv-siblings-sharing-first" in {s.rule for r in found.program.rewrites for _, s in r.steps}
    before, after = (
        [op for op in p.graph.walk() if op.name == "conv_general_dilated"] for p in (program, found.program)
    )
    assert len(after) < len(before) - 5  # forward and backward
    assert found.seconds < 0.995 * first.plan(meshes).seconds


@pytest.mark.slow  # of the search, which does not depend on the version of JAX
def test_towers_are_stacked_and_split_over_the_tower_dimension():
    found = plan_of(zoo("mlp", "towers", width=1024, classes=1024, batch_size=8192), "h100:2x8")
    products = [op for op in ops(found, "dot_general") if not op.backward]
    assert len(products) == 8  # of two towers, eight layers each
    assert all(op.inputs[1].shape == (2, 1024, 1024) for op in products)
    assert any(op.outputs[0].layout.dims[0] for op in products)  # a tower on each node
    assert found.predicted.step_seconds < 0.9 * unrewritten(found)


@pytest.mark.slow
def test_candle_stacks_four_towers_a_node_each(monkeypatch):
    """Features of two drugs, of two sizes each: pairs of towers first, then pairs of pairs behind the first layers. As
    written the program is best on eight times three devices; stacked it is better on four nodes of six."""
    monkeypatch.setattr(variants, "LIMITS", dataclasses.replace(LIMITS, variants=5))  # they come early
    sizes = {"tower": (4192,) * 3, "head": (4192,), "batch_size": 256 * 24}
    found = plan_of(zoo("candle_uno", "full", dtype=F32, **sizes), "v100-summit:4x6")
    products = ops(found, "dot_general")
    stacked = [op for op in products if op.inputs[1].shape == (4, 4192, 4192) and not op.backward]
    assert len(stacked) == 2  # the first layers differ
    assert all(found.mesh.shape[op.outputs[0].layout.dims[0][0]] == 4 for op in stacked)
    assert found.predicted.step_seconds < 0.85 * unrewritten(found)


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


def test_falcon_reduces_once_for_both_branches_of_a_block_and_gathers_weights_that_are_cast(monkeypatch):
    monkeypatch.setattr(variants, "LIMITS", dataclasses.replace(LIMITS, variants=0))  # layouts alone do it
    model = models.get("falcon", "40b", layers=4, batch_size=8)
    found = plan_of(model, "h100:8", jax.sharding.AbstractMesh((2, 4), ("x", "y")))
    maker = {t: op for op in found.pcg.walk() for t in op.outputs}
    reduced = [op for op in found.pcg.walk() if op.name in ("reduce", "reduce_scatter") and not op.backward]
    sums = [op for op in reduced if op.outputs[0].shape == (8, 2048, 8192)]
    assert len(sums) == 1  # in the loop; what is summed by one branch alone has no other to be added to
    shapes = {(8192, 8, 16, 64), (8, 16, 64, 8192), (8192, 32_768), (32_768, 8192)}
    weights = [op for op in ops(found, "combine") if op.outputs[0].shape in shapes]
    assert weights and all(maker[op.inputs[0]].name == "convert_element_type" for op in weights)
    assert {str(op.inputs[0].dtype) for op in weights} == {"bfloat16"}


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


class Unselective(bert.Bert):
    """BERT that projects every position to the vocabulary, and picks the masked ones then."""

    def loss(self, batch, key):
        x = self.transform_norm(jax.nn.gelu(self.transform(self.encode(batch, key)), approximate=False))
        table = self.token.embedding[...].astype(x.dtype)
        logits = jnp.einsum("bpd,vd->bpv", x, table, preferred_element_type=F32) + self.output_bias[...]
        picked = jnp.take_along_axis(logits, batch["masked_positions"][:, :, None], axis=1)
        return cross_entropy(picked, batch["masked_tokens"]), {}


@pytest.mark.slow
def test_a_deep_bert_projects_only_its_masked_positions():
    model = models.get("bert", batch_size=128, layers=12)
    precision = bert.make_precision(model.config.dtype)
    model = dataclasses.replace(model, make_module=lambda rngs: Unselective(model.config, precision, rngs))
    state, batch = model.abstract_state(), model.abstract_batch()
    found = unity.plan(model.train_step, state, batch, machine="h100:8", donate_argnums=0)
    logits = [t for op in ops(found, "dot_general") for t in op.outputs if 30_522 in t.shape and len(t.shape) > 2]
    assert logits and not any(model.config.length in t.shape for t in logits)


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
