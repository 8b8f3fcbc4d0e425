"""The validation programs are real train steps: small ones learn, those of full size trace and keep their state."""

import jax
import numpy as np
import pytest

from experiments.validation.programs import VALIDATION, zoo

ALONE = sorted(set(VALIDATION) - set(zoo.SIZES))  # the zoo's tiny sizes are trained in tests/models


@pytest.mark.parametrize("name", ALONE)
def test_small_programs_learn_a_batch(name):
    program = VALIDATION[name](tiny=True)
    step = jax.jit(program.step, donate_argnums=program.donate_argnums)
    state, batch = jax.jit(program.make)(0)
    losses = []
    for _ in range(10):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", VALIDATION)
def test_full_programs_trace_and_replace_their_state(name):
    program = VALIDATION[name]()
    state, batch = program.arguments
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves((state, batch)))
    traced = jax.jit(program.step, donate_argnums=program.donate_argnums).trace(state, batch)
    replaced, metrics = traced.out_info
    described = [[(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)] for tree in (state, replaced)]
    assert described[0] == described[1]
    assert jax.tree.structure(state) == jax.tree.structure(replaced)
    assert metrics["loss"].shape == () and program.source
