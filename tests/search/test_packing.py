"""Products with an operand in common are merged where a plan gains: queries, keys and values; gates and their twins."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import ShapeDtypeStruct as Shape

import models
from models import bert
from models._attention import GroupedAttention
from models._common import causal_mask, make_precision
from tests.numerics.harness import errors
from tests.rewrite.steps import normal
from tests.rewrite.test_apply import evaluate
from tests.rewrite.test_pack import MERGING, merged
from unity_jax.machine.machine import Machine
from unity_jax.program import trace
from unity_jax.search import joint
from unity_jax.search.candidate import NO_PINS
from unity_jax.search.placement import mesh_candidates
from unity_jax.search.planner import Planner

SIBLINGS, SUMS = "concat-dot-siblings-sharing-one", "add-of-dots-to-dot-of-concats"
H100 = Machine.preset("h100:8")


def searched(program):
    """Seconds of the best plan as written and as the search rewrites it by the rules that merge, and the latter."""
    meshes = mesh_candidates(8, H100)[:1]
    plain = Planner(program, H100).plan(meshes)
    found = joint.plan(program, H100, H100.device.memory_bytes, NO_PINS, meshes, MERGING)
    return plain.seconds, found.seconds, found.program


def products(program):
    return [op.outputs[0].shape for op in program.graph.walk() if op.name == "dot_general"]


def fired(program, where):
    """The rules of the steps whose first place is at a line of the user's."""
    return {step.rule for r in program.rewrites if where in r.where for _, step in r.steps}


def test_queries_keys_and_values_of_bert_forward_and_backward():
    sizes = {"layers": 1, "batch_size": 8, "length": 128, "predictions": 20, "vocabulary": 1024, "max_length": 128}
    model = models.get("bert", **sizes)
    args = model.abstract_state(), model.abstract_batch()
    plain, best, program = searched(trace(model.train_step, args, {}, donate_argnums=0))
    assert fired(program, "bert.py") == {SIBLINGS, SUMS}
    assert products(program).count((8, 128, 16, 192)) == 1  # three products are one
    assert products(program).count((1024, 16, 192)) == 1  # and the gradients of three weights
    assert (1024, 16, 64) not in products(program)
    assert best < 0.99 * plain


def swiglu(params, batch):
    x = batch["x"]
    for w in params:
        gate, up, down = (w[name].astype(x.dtype) for name in ("gate", "up", "down"))
        x = x + (jax.nn.silu(x @ gate) * (x @ up)) @ down
    return (x.astype(jnp.float32) ** 2).mean()


def step(params, batch):
    return jax.tree.map(lambda p, g: p - 0.01 * g, params, jax.grad(swiglu)(params, batch))


def test_gate_and_up_projections():
    wide = Shape((512, 1408), jnp.float32)
    params = [{"gate": wide, "up": wide, "down": Shape((1408, 512), jnp.float32)}] * 2
    batch = {"x": Shape((512, 512), jnp.bfloat16)}
    plain, best, program = searched(trace(step, (params, batch), {}, donate_argnums=0))
    assert fired(program, "test_packing.py") == {SIBLINGS, SUMS}
    assert (512, 2816) in products(program)
    assert best < 0.99 * plain


def with_biases(precision):
    config = bert.SIZES["tiny"]
    layer = bert.Attention(config, precision, nnx.Rngs(0))
    return layer, (2, config.length, config.hidden), (jnp.zeros(()), None)


def grouped(precision):
    turn = (normal(16, 4),) * 2
    layer = GroupedAttention(32, 4, 2, 8, precision, nnx.Rngs(0))
    return layer, (2, 16, 32), (turn, causal_mask(16))


@pytest.mark.parametrize("attention", [with_biases, grouped])
def test_merged_attention_computes_the_same(attention):
    """Biases and heads of their own in one, grouped queries and rotated positions in the other; in double precision."""
    with jax.enable_x64(True):
        layer, shape, more = attention(make_precision(jnp.float64))
        graphdef, params = nnx.split(layer)
        x = normal(*shape)

        def loss(params, x):
            return (nnx.merge(graphdef, params)(x, *more) ** 2).sum()

        args = nnx.to_pure_dict(params), x
        gradient = jax.grad(loss, (0, 1))
        program = trace(gradient, args, {})
        after = merged(program)
        assert len(products(after)) == len(products(program)) - 6  # two less forward, of weight and of input gradients
        leaves = [*program.constants, *jax.tree.leaves(args)]
        got = jax.jit(lambda arrays: evaluate(after.graph, arrays))(leaves)
        want = jax.tree.leaves(jax.jit(gradient)(*args))
        assert not [e for e in errors(program.out_paths, want, got) if e.error > 1e-9 and "key']['bias" not in e.path]
