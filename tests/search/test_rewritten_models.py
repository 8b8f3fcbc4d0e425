"""Rewrites that the search finds by itself in models of the zoo."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import optax
import pytest

import models
import unity_jax as unity
from models import bert
from tests.search.rewriting import F32, cross_entropy, ops, unrewritten
from unity_jax.machine.machine import Machine
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.program import trace
from unity_jax.rewrite.library import applicable
from unity_jax.search import joint, variants
from unity_jax.search.candidate import NO_PINS
from unity_jax.search.limits import LIMITS
from unity_jax.search.placement import mesh_candidates
from unity_jax.search.planner import Planner


def zoo(name, size, **overrides):
    """A model of the zoo, trained by SGD, as Unity's recommenders were."""
    return dataclasses.replace(models.get(name, size, **overrides), optimizer=optax.sgd(0.01))


def plan_of(model, machine, mesh=None, **options):
    shapes = model.abstract_state(), model.abstract_batch()
    settings = {"machine": machine, "mesh": mesh, "options": unity.Options(**options)}
    return unity.plan(model.train_step, *shapes, donate_argnums=0, **settings)


def test_dlrm_scatters_into_the_tables_of_its_bags(monkeypatch):
    monkeypatch.setattr(variants, "LIMITS", dataclasses.replace(LIMITS, variants=6))  # it comes early
    sizes = {"rows": (1_000_000,) * 3, "bags": (20, 1, 7), "bottom": (256,), "top": (256, 1), "batch_size": 8192}
    model = zoo("dlrm", "unity", **sizes)
    found = plan_of(model, "h100:8")
    tables = [op for op in ops(found, "scatter-add") if op.outputs[0].shape[1:] == (256,)]
    assert [len(op.inputs[1].shape) for op in tables] == [3] * 3  # ids of samples and bags
    assert not any(t.rank == 2 and t.shape[0] > 8192 for op in ops(found, "broadcast_in_dim") for t in op.outputs)
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


@pytest.mark.slow
def test_vit_runs_its_last_block_for_the_class_token_alone(monkeypatch):
    """But for keys and values, which that attends to, and their gradients and the queries'. No rule looks into a
    kernel."""
    monkeypatch.setattr(variants, "LIMITS", dataclasses.replace(LIMITS, variants=2))
    layers, options = 2, {"scan": False, "remat": False, "dropout": 0.0}  # as on JFT-300M
    found = plan_of(models.get("vit", "base", batch_size=1024, layers=layers, **options), "h100:8", attention="xla")
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


def test_falcon_reduces_once_for_both_branches_of_a_block_and_gathers_weights_that_are_cast(monkeypatch):
    monkeypatch.setattr(variants, "LIMITS", dataclasses.replace(LIMITS, variants=0))  # layouts alone do it
    model = models.get("falcon", "40b", layers=4, batch_size=8)
    found = plan_of(model, "h100:8", jax.sharding.AbstractMesh((2, 4), ("x", "y")))
    maker = {t: op for op in found.pcg.walk() for t in op.outputs}
    reduced = [op for op in found.pcg.walk() if op.name in ("reduce", "reduce_scatter") and not op.backward]
    sums = [op for op in reduced if op.outputs[0].shape == (8, 2048, 8192)]
    assert [maker[op.inputs[0]].name for op in sums] == ["add"]  # in the loop, of both branches together
    shapes = {(8192, 8, 16, 64), (8, 16, 64, 8192), (8192, 32_768), (32_768, 8192)}
    weights = [op for op in ops(found, "combine") if op.outputs[0].shape in shapes]
    cast = [op for op in weights if not op.backward]
    assert [maker[op.inputs[0]].name for op in cast] == ["convert_element_type"] * 4
    kept = [op for op in weights if op.backward and op.inputs[0] not in maker]  # cast in the forward pass, and read so
    inside = {t for op in found.pcg.walk() for body in op.bodies for t in body.inputs}
    assert len(kept) == 4 and inside.issuperset(op.inputs[0] for op in kept)
    (further,) = [op for op in weights if op not in cast and op not in kept]  # one of those over the other axis, too
    assert further.backward and maker[further.inputs[0]] in kept
    assert {str(op.inputs[0].dtype) for op in weights} == {"bfloat16"}


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
