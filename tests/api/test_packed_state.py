"""State that a step concatenates is held packed, and nobody can tell: trees, arrays, checkpoints, other functions."""

import copy
import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import unity_jax as unity
from tests.api.steps import close
from tests.numerics.steps import slow
from unity_jax import planning, processes
from unity_jax.aot.collectives import Collective, count_difference, stablehlo_collectives
from unity_jax.lower.compile import lower
from unity_jax.lower.parts import Part
from unity_jax.search import packing
from unity_jax.search.limits import LIMITS

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))


def loss(params, batch):
    """Queries, keys and values by one product, written so by hand; the output projection is tied to the queries'."""
    x = batch["x"]
    heads = x @ jnp.concatenate([params["q"], params["k"], params["v"]], 1)
    q, k, v = jnp.split(heads, (32, 48), 2)
    k, v = (jnp.tile(t, (1, 1, 2)) for t in (k, v))
    mixed = jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, k), -1) @ v
    return jnp.mean((x + (mixed + params["b"]) @ params["q"].T - batch["y"]) ** 2)


def make_state(key):
    widths = {"q": (16, 32), "k": (16, 16), "v": (16, 16), "b": (32,)}
    keys = jax.random.split(key, len(widths))
    params = {name: jax.random.normal(k, s) / 4 for k, (name, s) in zip(keys, widths.items(), strict=True)}
    return {"params": params, "moments": OPTIMIZER.init(params)}


def train_step(state, batch):
    value, gradient = jax.value_and_grad(loss)(state["params"], batch)
    updates, moments = OPTIMIZER.update(gradient, state["moments"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, value


def batch(seed=0, size=8):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=(size, 4, 16)).astype(np.float32) for name in "xy"}


STATE = jax.eval_shape(make_state, jax.random.key(0))


def planned(step=train_step, **options):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    return unity.auto_shard(step, mesh=mesh, machine=slow(), **{"donate_argnums": 0, **options})


@pytest.fixture(scope="module", autouse=True)
def unrewritten():
    """The step is written with a concatenation: no search for rewrites is needed to find one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "searched", lambda: ())
        patch.setenv("UNITY_JAX_CACHE", "")
        yield


@pytest.fixture(scope="module")
def step(unrewritten):
    made = planned()
    made.plan(STATE, batch())
    return made


@pytest.fixture
def state(step):
    return step(step.init(make_state, jax.random.key(0)), batch())[0]


def test_weights_and_moments_are_held_as_one_and_train_alike(step):
    plan = step.plan(STATE, batch())
    held = [{plan.inputs[i].path for i in p.inputs} for p in plan.packed]
    assert {f"[0]['params']['{name}']" for name in "qkv"} in held and len(held) == 3
    assert "9 arguments" in str(plan) and "as one f32[16@x,64]" in plan.explain("[0]['params']['k']")
    state = make_state(jax.random.key(0))
    want = jax.jit(train_step)(state, batch())
    found = step(state, batch())
    close(found, want)
    assert state["params"]["q"].is_deleted() and step.plan(found[0], batch()) is plan


def test_arrays_go_in_and_out_without_copies(step, state):
    """The parts of one array, in their order, are that array; it is donated, and every view of it is gone."""
    held = state["params"]["q"]._held
    assert all(state["params"][name]._held is held for name in "qkv") and held.shape == (16, 64)
    before, (after, _) = state, step(state, batch())
    assert held.is_deleted() and before["params"]["k"].is_deleted()
    with pytest.raises(RuntimeError, match=r"Array has been deleted with shape=float32\[16,16\]"):
        np.asarray(before["params"]["k"])
    with pytest.raises(ValueError, match=r"argument \[0\]\['params'\]\['k'\] has been deleted"):
        step({**after, "params": {**after["params"], "k": before["params"]["k"]}}, batch())


def test_leaves_of_any_origin_are_packed_once(step, state):
    """Restored, exchanged, moved or mixed leaves: the step takes what there is, and computes the same."""
    host = jax.device_get(state)
    want = jax.jit(train_step)(host, batch(1))
    others = step(jax.tree.map(lambda x: x * 2, host), batch())[0]["params"]
    mixed = {**jax.tree.map(jnp.copy, state), "params": {**state["params"], "q": others["q"]}}
    exchanged = {**host, "params": {**host["params"], "q": np.asarray(others["q"])}}
    close(step(mixed, batch(1)), jax.jit(train_step)(exchanged, batch(1)))
    close(step(host, batch(1)), want)
    close(step(jax.device_put(host, jax.devices()[3]), batch(1)), want)


def test_a_leaf_is_an_array_to_everybody(state):
    leaf, want = state["params"]["k"], np.asarray(state["params"]["k"])
    assert isinstance(leaf, jax.Array) and want.dtype == np.float32
    assert (leaf.shape, leaf.dtype, leaf.ndim, leaf.size, leaf.nbytes) == ((16, 16), np.float32, 2, 256, 1024)
    assert leaf.sharding == leaf.addressable_shards[0].data.sharding or leaf.sharding.spec == P("x")
    assert leaf.is_fully_addressable and not leaf.is_fully_replicated and len(leaf.devices()) == 8
    assert jax.typeof(leaf) == jax.typeof(leaf + 0) and jax.block_until_ready(leaf) is leaf
    one, mesh = jax.devices()[0], leaf.sharding.mesh
    alike = [
        jax.device_get(leaf),
        jax.jit(lambda x: x * 1)(leaf),
        jax.jit(lambda x: x * 1, donate_argnums=0)(leaf),
        jax.jit(lambda: leaf)(),
        jax.jit(lambda x: x * leaf)(1.0),
        jax.jit(lambda x: x * 1).lower(leaf).compile()(leaf),
        jax.vmap(lambda x: x * 1)(leaf),
        jax.grad(lambda x: (x**2).sum() / 2)(leaf),
        jax.grad(lambda s: (s * leaf).sum())(jnp.ones((16, 16))),
        jax.shard_map(lambda x: x * 1, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(leaf),
        jax.tree.map(jnp.add, state, state)["params"]["k"] / 2,
        jax.device_put(leaf, one),
        jax.device_put(leaf, NamedSharding(mesh, P(None, "x"))),
        jnp.asarray(leaf),
        jnp.stack([leaf, leaf])[1],
        leaf.at[0].set(leaf[0]),
        leaf.astype(jnp.float32).T.T,
        1 * leaf,
        np.ones(()) * leaf,
        jnp.float32(1) * leaf,
        list(leaf),
        pickle.loads(pickle.dumps(leaf)),
        copy.copy(leaf),
        copy.deepcopy(leaf),
    ]
    for x in alike:
        np.testing.assert_array_equal(np.asarray(x), want)
    assert float(leaf[0, 0]) == want[0, 0] and len(leaf) == 16 and bool((leaf == want).all())
    assert repr(leaf) == repr(jnp.asarray(leaf)) and f"{leaf[0, 0]:.3f}" == f"{want[0, 0]:.3f}"
    with pytest.raises(TypeError, match="unhashable"):
        hash(leaf)
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(jax.jit(lambda x: x * 1)(leaf), want)


def test_three_steps_in_double_precision(monkeypatch):
    """As the unsharded step; and double precision stays where the reader has none."""
    monkeypatch.setattr(packing, "LIMITS", dataclasses.replace(LIMITS, packing_saves=-1.0))
    with jax.enable_x64(True):
        double = jax.tree.map(lambda x: x.astype(float) if x.dtype == np.float32 else x, make_state(jax.random.key(0)))
        found, want = planned(), jax.jit(train_step)
        states = double, jax.tree.map(jnp.copy, double)
        for i in range(3):
            data = jax.tree.map(lambda x: x.astype(float), batch(i))
            states = found(states[0], data)[0], want(states[1], data)[0]
        for a, b in zip(*map(jax.tree.leaves, states), strict=True):
            assert np.abs(np.asarray(a) - np.asarray(b)).max() <= 1e-9 * np.abs(np.asarray(b)).max()
    leaf = states[0]["params"]["k"]
    assert isinstance(leaf, Part) and np.asarray(leaf).dtype == np.float64


def test_the_program_concatenates_no_weights_and_communicates_as_planned(step, monkeypatch):
    monkeypatch.setattr(packing, "LIMITS", dataclasses.replace(LIMITS, packing_saves=1.0))
    joined = []
    for plan in (planned().plan(STATE, batch()), step.plan(STATE, batch())):
        program = lower(plan.stored, plan.pcg, plan.mesh)
        joined.append(program.as_text().count("stablehlo.concatenate %arg"))
        found = stablehlo_collectives(program.compiler_ir("stablehlo"), plan.axes)
        planned_ones = [Collective(c.kind, c.axes, c.bytes, c.count) for c in plan.predicted.collectives]
        assert count_difference(planned_ones, found) == []
    assert joined == [1, 0]


def test_checkpoints(step, state, tmp_path):
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", step.plan(STATE, batch()).abstract_state())
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        assert a.sharding == b.sharding
        np.testing.assert_array_equal(a, b)
    close(step(restored, batch(1)), step(state, batch(1)), rtol=0)


def test_other_functions_read_the_state(step, state):
    want = float(loss(jax.device_get(state["params"]), batch(2)))
    evaluate = unity.auto_shard(lambda state, batch: loss(state["params"], batch), like=step)
    assert float(jax.jit(loss)(state["params"], batch(2))) == pytest.approx(want, rel=1e-5)
    assert float(evaluate(state, batch(2))) == pytest.approx(want, rel=1e-5)
    assert len(evaluate.plan(state, batch(2)).packed) == 3  # it reads the arrays that hold them, and leaves them alone
    assert not state["params"]["q"].is_deleted()
    outer = jax.jit(lambda s, b: step(s, b)[1])
    assert float(outer(state, batch(2))) == pytest.approx(want, rel=1e-5)
    lowered = step.lower(state, batch(2))
    assert lowered.in_tree == jax.tree.structure(((state, batch(2)), {}))
    assert jax.tree.structure(lowered.out_info) == jax.tree.structure((state, 0))


def test_over_several_processes_leaves_are_arrays(step, monkeypatch):
    """A plan that packs, made elsewhere, packs within the step; a plan made there does not."""
    want = jax.jit(train_step)(make_state(jax.random.key(0)), batch())
    monkeypatch.setattr(processes, "are_several", lambda mesh: True)
    assert not planned().plan(STATE, batch()).packed
    found = planned(plan=step.plan(STATE, batch()))(make_state(jax.random.key(0)), batch())
    assert not any(isinstance(x, Part) for x in jax.tree.leaves(found))
    close(found, want)


def test_a_short_last_batch(step, state):
    want = jax.jit(train_step)(jax.device_get(state), batch(3, 4))
    want = jax.jit(train_step)(want[0], batch(4))
    held = state["params"]["q"]._held
    short, _ = step(state, batch(3, 4))
    assert held.is_deleted() and short["params"]["q"]._held is short["params"]["k"]._held
    close(step(short, batch(4)), want)


def test_plan_files(step, state, tmp_path):
    plan = step.plan(STATE, batch())
    plan.save(tmp_path / "plan.json")
    loaded = unity.Plan.load(tmp_path / "plan.json")
    assert loaded.packed == plan.packed
    again = planned(plan=loaded)
    assert str(again.plan(STATE, batch())) == str(plan)
    want = step(jax.tree.map(jnp.copy, state), batch(1))
    close(again(state, batch(1)), want, rtol=0)


def test_state_that_is_kept_or_pinned_is_not_packed():
    assert not planned(donate_argnums=None).plan(STATE, batch()).packed
    pins = jax.tree.map(lambda _: None, STATE)
    pins["params"]["k"] = P()
    plan = planned(in_shardings=(pins, None)).plan(STATE, batch())
    assert not any("params" in plan.inputs[i].path for p in plan.packed for i in p.inputs)


def test_what_saves_little_is_not_packed(step, monkeypatch):
    monkeypatch.setattr(packing, "LIMITS", dataclasses.replace(LIMITS, packing_saves=1.0))
    plain, plan = planned().plan(STATE, batch()), step.plan(STATE, batch())
    assert not plain.packed and plan.predicted.step_seconds < 0.99 * plain.predicted.step_seconds
    assert str(plan.in_shardings[0]) == str(plain.in_shardings[0])
    assert "packed" in plain.compare(plan)


def test_nnx_objects_hold_parts():
    """Objects are updated with arrays that are parts of the one that is held, and can be read as ever."""
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self):
            self.w = nnx.Dict({k: nnx.Param(x) for k, x in make_state(jax.random.key(0))["params"].items()})

    def make():
        model = Model()
        return model, nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)

    def step(model, optimizer, batch):
        value, gradient = nnx.value_and_grad(lambda m: loss({k: m.w[k][...] for k in "qkvb"}, batch))(model)
        optimizer.update(model, gradient)
        return value

    decorated, (model, optimizer), (expected, reference) = planned(step, donate_argnums=(0, 1)), make(), make()
    for i in range(2):
        close(decorated(model, optimizer, batch(i)), nnx.jit(step)(expected, reference, batch(i)), rtol=2e-4)
    assert decorated._known[0].packed and isinstance(model.w["q"].get_raw_value(), Part)
    close(nnx.state((model, optimizer)), nnx.state((expected, reference)), rtol=2e-4)
    close(model.w["q"][...] @ jnp.ones(32), expected.w["q"][...] @ jnp.ones(32), rtol=2e-4)
