"""Policies of rematerialization change what is kept for the backward pass, and nothing of what is computed."""

import jax
import numpy as np
import pytest

import models
from unity_jax.program import trace


def step(model, remat):
    made = models.get(model, "tiny", remat=remat)
    return made.train_step, (made.make_state(jax.random.key(0)), made.make_batch(0))


@pytest.mark.parametrize("model", ["gpt", "llama", "moe"])
def test_what_is_kept_changes_no_result(model):
    found = []
    for remat in (False, True, 1, "save_qkv_proj", "minimal_with_context"):
        fn, args = step(model, remat)
        state, metrics = jax.jit(fn)(*args)
        found.append((float(metrics["loss"]), jax.tree.leaves(state.params)))
    (loss, params), *others = found
    for other, changed in others:
        assert abs(other - loss) < 1e-5 * loss
        for a, b in zip(params, changed, strict=True):  # after a step of Adam
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-4)


def products(model, remat):
    """How many products a step has, those of a loop over layers once."""
    fn, args = step(model, remat)
    return sum(op.name == "dot_general" for op in trace(fn, args, {}, donate_argnums=0).graph.walk())


def test_a_policy_that_keeps_more_repeats_less():
    found = [products("llama", remat) for remat in (True, "save_qkv_proj", "save_dot_except_mlp", "minimal", False)]
    assert found == sorted(found, reverse=True) and found[0] > found[1] > found[3]


def test_the_first_layers_alone_are_computed_again():
    """Two layers, one of them."""
    fn, args = step("gpt", 1)
    graph = trace(fn, args, {}, donate_argnums=0).graph
    loops = [op for op in graph.ops if op.name == "scan"]
    assert len(loops) == 4 and products("gpt", 2) == products("gpt", True)
