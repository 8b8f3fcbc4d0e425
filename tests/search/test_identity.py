"""One device: the identity plan is what a search would find, and no search is made for it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import unity_jax as unity
from unity_jax import planning
from unity_jax.machine.machine import Machine
from unity_jax.program import trace
from unity_jax.search import joint
from unity_jax.search.candidate import NO_PINS
from unity_jax.search.identity import identity
from unity_jax.search.placement import mesh_candidates
from unity_jax.search.planner import Planner


def looped(state, x):
    """Loops with constants, carries, slices and stacked results, a branch, and arrays made of nothing."""

    def layer(h, w):
        h = jnp.tanh(h @ w) + jnp.ones(16) + state["b"]
        return h, h.sum()

    h, sums = jax.lax.scan(layer, x, state["w"])
    h = jax.lax.while_loop(lambda c: c[1] < 3, lambda c: (c[0] * state["b"], c[1] + 1), (h, 0))[0]
    h = jax.lax.cond(sums[0] > 0, lambda y: y + 1, lambda y: y - jnp.arange(16.0), h)
    return {"w": state["w"] - h.mean(), "b": jax.lax.optimization_barrier(state["b"])}, sums


def trained(state, x):
    value, gradient = jax.value_and_grad(lambda s: jnp.mean(looped_layers(s, x) ** 2))(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradient), value


def looped_layers(state, x):
    return jax.lax.scan(jax.checkpoint(lambda h, w: (jnp.tanh(h @ w + state["b"]), None)), x, state["w"])[0]


SHAPES = {"w": jax.ShapeDtypeStruct((3, 16, 16), "float32"), "b": jax.ShapeDtypeStruct((16,), "float32")}
BATCH = jax.ShapeDtypeStruct((8, 16), "float32")


@pytest.mark.parametrize("step", [looped, trained])
def test_identity_is_what_the_search_finds(step):
    program, machine = trace(step, (SHAPES, BATCH), {}, donate_argnums=0), Machine.preset("h100:1")
    (mesh,) = mesh_candidates(1, machine)
    found, want = identity(program, machine, mesh), Planner(program, machine).plan([mesh])
    assert str(found.graph) == str(want.graph)
    assert (found.seconds, found.memory.peak_bytes) == (want.seconds, want.memory.peak_bytes)
    assert found.lower_bound == found.seconds and found.searched.meshes == ("x=1",)
    assert joint.plan(program, machine, None, NO_PINS, [mesh], []).lower_bound == found.seconds


def test_one_device_needs_no_search_no_rules_and_no_file(monkeypatch, tmp_path):
    def refused(*args, **kwargs):
        raise AssertionError("nothing is to be searched")

    monkeypatch.setattr(joint, "Planner", refused)
    monkeypatch.setattr(planning, "searched", refused)
    options = unity.Options(cache=tmp_path)
    step = unity.auto_shard(looped, mesh=jax.devices()[:1], options=options)
    state = {"w": np.ones((3, 16, 16), np.float32) / 16, "b": np.ones(16, np.float32)}
    for rows in (8, 4):  # a short last batch too
        x = np.ones((rows, 16), np.float32)
        found, want = step(state, x), jax.jit(looped)(state, x)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, want)
    assert not list(tmp_path.iterdir())
    mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
    pinned = unity.auto_shard(looped, mesh=mesh, in_shardings=(None, P("x")), options=options)
    assert pinned.plan(SHAPES, BATCH).searched.meshes == ("x=1",)  # an axis of one device splits nothing
