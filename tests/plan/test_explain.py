"""`plan.explain`: what a person asks about a layout or an op, answered from the plan and by searching again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import unity_jax as unity

W, X = np.ones((16, 32), np.float32), np.ones((8, 16), np.float32)


def step(w, v, x):
    with jax.named_scope("up"):
        y = jnp.tanh(x @ w)
    with jax.named_scope("down"):
        return (y @ v).sum()


@pytest.fixture(scope="module")
def plan():
    mesh = Mesh(np.array(jax.devices()), ("x",))
    options = unity.Options(cache=None)
    return unity.auto_shard(step, mesh=mesh, in_shardings=(P(None, "x"), None, None), options=options).plan(W, W.T, X)


def test_leaf_names_its_readers_and_what_its_alternatives_cost(plan):
    text = plan.explain("[1]")
    first, read, *rest = text.splitlines()
    assert first.startswith(f"[1]: {plan.inputs[1]}, ")
    assert read.startswith("  read by down/dot_general at ") and "test_explain.py" in read
    alternatives = {"f32[32,16]", "f32[32@x,16]", "f32[32,16@x]"} - {str(plan.inputs[1])}
    assert {line.split(": ")[0].removeprefix("  instead ") for line in rest} == alternatives
    assert all("x the time (" in line or "as fast (" in line for line in rest)  # no alternative is faster than the plan


def test_pinned_leaf_has_no_alternatives(plan):
    text = plan.explain("[0]")
    assert ", pinned\n" in text and "instead" not in text


def test_op_by_primitive_scope_and_line(plan):
    text = plan.explain("dot_general")
    assert "up/dot_general at " in text and "down/dot_general at " in text
    assert "rule ([i,j], [j,k]) -> ([i,k]) sum={j}" in text
    assert "x splits k (4 of 32)" in plan.explain("up")
    line = step.__code__.co_firstlineno + 4
    assert plan.explain(f"*test_explain.py:{line}*").count("dot_general at") == 1
    assert "tanh" in plan.explain("tan?")


def test_collectives_stand_beside_their_op(plan):
    kinds = {c.kind for c in plan.predicted.collectives}
    text = plan.explain("*")
    assert kinds and all(f"{kind} over x" in text for kind in kinds)


def test_nothing_matches(plan):
    with pytest.raises(
        ValueError, match=r"no argument and no op of step matches 'nope'; paths look like \[0\], \[1\], \[2\]"
    ):
        plan.explain("nope")
