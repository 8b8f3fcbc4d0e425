"""The first hour of a user, item by item: state and arguments."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import unity_jax as unity
from tests.api.steps import close, mlp_batch, mlp_loss, mlp_state, mlp_step
from unity_jax.call import Call

SHARDED = ({"w1": P(None, "x"), "w2": P("x"), "step": P()}, {"x": P(), "y": P()})
DATA = ({"w1": P("x"), "w2": P("x"), "step": P()}, P("x"))


@pytest.fixture(scope="module")
def mesh():
    return jax.sharding.Mesh(np.array(jax.devices()), ("x",))


# Trees


def test_pytree_step_for_three_steps():
    step = unity.auto_shard(mlp_step)
    state, expected = mlp_state(), mlp_state()
    for _ in range(3):
        state, metrics = step(state, mlp_batch())
        expected, reference = jax.jit(mlp_step)(expected, mlp_batch())
    close(state, expected)
    close(metrics, reference)


def test_a_state_with_a_typed_key_for_three_steps(mesh):
    def step(state, x):
        key, own = jax.random.split(state["key"])
        return {"key": key, "w": state["w"] + jax.random.normal(own, x.shape) * x}

    def start():
        return {"key": jax.random.key(1), "w": jnp.zeros((8, 4))}

    sharded = unity.auto_shard(step, mesh=mesh, donate_argnums=0)
    state, expected, x = start(), start(), jnp.ones((8, 4))
    for _ in range(3):
        state, expected = sharded(state, x), jax.jit(step)(expected, x)
    assert (jax.random.key_data(state["key"]) == jax.random.key_data(expected["key"])).all()
    close(state["w"], expected["w"])


def test_linen_train_state(mesh):
    import flax.linen as nn
    from flax.training import train_state

    model = nn.Dense(16)
    params = model.init(jax.random.key(0), jnp.zeros((1, 8)))
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-2))

    def step(state, x):
        loss, grads = jax.value_and_grad(lambda p: (state.apply_fn(p, x) ** 2).mean())(state.params)
        return state.apply_gradients(grads=grads), loss

    x = mlp_batch()["x"]
    sharded = unity.auto_shard(step, mesh=mesh, in_shardings=(None, P("x")))
    expected, _ = jax.jit(step)(state, x)
    found, _ = sharded(state, x)
    close(found, expected)
    found, _ = sharded(found, x)  # `step` was a Python int and is an array now: the plan is the same
    assert len(sharded._known) == 1


def test_nnx_split_state(mesh):
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.l1, self.l2 = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.l2(self.dropout(nnx.relu(self.l1(x))))

    model = Model(nnx.Rngs(0))
    graph, state = nnx.split((model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)))

    def step(state, x):
        model, optimizer = nnx.merge(graph, state)
        loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss

    x = mlp_batch()["x"]
    expected = jax.jit(step)(state, x)
    close(unity.auto_shard(step, mesh=mesh, in_shardings=(None, P("x")))(state, x), expected)


def test_registered_dataclass_with_typed_key(mesh):
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Layer:  # what an equinox module is
        weight: jax.Array
        key: jax.Array
        name: str = dataclasses.field(default="layer", metadata={"static": True})

    def step(layer, x):
        key, used = jax.random.split(layer.key)
        keep = jax.random.bernoulli(used, 0.5, x.shape)
        grad = jax.grad(lambda w: (jnp.where(keep, x, 0) @ w).sum())(layer.weight)
        return dataclasses.replace(layer, weight=layer.weight - grad, key=key), keep

    layer, x = Layer(jnp.ones((8, 4)), jax.random.key(3)), mlp_batch()["x"]
    expected = jax.jit(step)(layer, x)
    found = unity.auto_shard(step, mesh=mesh, in_shardings=(None, P("x")))(layer, x)
    close(found, expected)
    assert found[0].name == "layer"


@pytest.mark.parametrize("name", ["sgd", "adamw", "adafactor", "lion"])
def test_optax_states(mesh, name):
    optimizer = getattr(optax, name)(1e-2)
    params = {k: v for k, v in mlp_state().items() if k != "step"}

    def step(params, opt_state, batch):
        grads = jax.grad(mlp_loss)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    expected = jax.jit(step)(params, optimizer.init(params), mlp_batch())
    found = unity.auto_shard(step, mesh=mesh, in_shardings=(None, None, P("x")))(
        params, optimizer.init(params), mlp_batch()
    )
    close(found, expected)


# Donation and layouts


@pytest.mark.parametrize("place", ["device", "mesh", "elsewhere"])
def test_donated_arguments_stay_donated(mesh, place):
    step = unity.auto_shard(mlp_step, mesh=mesh, in_shardings=SHARDED, donate_argnums=0)
    shardings = {
        "device": jax.devices()[0],
        "mesh": step.plan(mlp_state(), mlp_batch()).in_shardings[0],
        "elsewhere": NamedSharding(mesh, P()),
    }
    state = jax.device_put(mlp_state(), shardings[place])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "donated buffers were not usable"
        new, _ = step(state, mlp_batch())
        jax.block_until_ready(new)
        later, _ = step(new, mlp_batch())
    assert state["w1"].is_deleted()  # (a slice of a CPU array may share its memory, and then keeps it)
    assert all(x.is_deleted() for x in jax.tree.leaves(new))
    compiled = step.lower(mlp_state(), mlp_batch()).compile()
    held = sum(leaf.bytes for leaf in step.plan(mlp_state(), mlp_batch()).inputs[:3])
    assert compiled.memory_analysis().alias_size_in_bytes == held
    close(later, jax.jit(mlp_step)(jax.jit(mlp_step)(mlp_state(), mlp_batch())[0], mlp_batch())[0])


def test_undonated_arguments_are_left_alone(mesh):
    step = unity.auto_shard(mlp_step, mesh=mesh, in_shardings=SHARDED)
    state = jax.device_put(mlp_state(), jax.devices()[0])
    step(state, mlp_batch())
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))


def test_layouts_of_arrays_are_no_pins_and_not_in_the_key(mesh):
    step = unity.auto_shard(mlp_step, mesh=mesh, in_shardings=DATA)
    plan = step.plan(mlp_state(), mlp_batch())
    places = [None, jax.devices()[3], NamedSharding(mesh, P()), plan.in_shardings[0]]
    other = jax.sharding.Mesh(np.array(jax.devices()[::-1]).reshape(2, 4), ("a", "b"))
    results = [step(mlp_state(), mlp_batch())]
    results += [
        step(jax.device_put(mlp_state(), p) if p else jax.tree.map(jnp.asarray, mlp_state()), mlp_batch())
        for p in places
    ]
    restored = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(other, P("a") if x.ndim else P())), mlp_state())
    results.append(step(restored, mlp_batch()))
    assert len(step._known) == 1 and step.plan(restored, mlp_batch()) is plan
    for r in results[1:]:
        close(r, results[0], rtol=0)
        assert jax.tree.map(lambda x: x.sharding, r[0]) == plan.out_shardings[0]


def test_outputs_reenter_without_copies(mesh, monkeypatch):
    step = unity.auto_shard(mlp_step, mesh=mesh, in_shardings=DATA, donate_argnums=0)
    batch = step.plan(mlp_state(), mlp_batch()) and step.shard(mlp_batch())
    state, _ = step(mlp_state(), batch)
    monkeypatch.setattr(jax, "device_put", lambda *a, **k: pytest.fail("an array was moved"))
    state, _ = step(state, batch)
    step(state, batch)


@pytest.mark.parametrize("host", [False, True], ids=["arrays", "a batch of the host"])
def test_a_call_like_the_last_one_is_not_looked_into(mesh, monkeypatch, host):
    step = unity.auto_shard(mlp_step, mesh=mesh, donate_argnums=0)
    expected, state = mlp_state(), mlp_state()
    batch = jax.tree.map(np.asarray, mlp_batch()) if host else mlp_batch()
    for _ in range(2):
        expected, _ = mlp_step(expected, batch)
        state, _ = step(state, batch)
    monkeypatch.setattr(Call, "key", property(lambda self: pytest.fail("the call was looked up")))
    for _ in range(2):
        expected, _ = mlp_step(expected, batch)
        state, _ = step(state, batch)
    close(state, expected)


def test_a_call_of_other_types_is_looked_up(mesh):
    step, a = unity.auto_shard(lambda x, y: x * y, mesh=mesh), np.ones((8, 4), np.float32)
    for x, y in ((a, a), (a, 2), (a.astype(np.int32), 2), (a, 2.5), (a[:4], a[:4]), (jnp.asarray(a), a), (a, a)):
        found, expected = step(x, y), jax.jit(lambda x, y: x * y)(x, y)
        close(found, expected)
        assert found.dtype == expected.dtype


def test_weak_types_and_numpy_do_not_replan(monkeypatch):
    def step(state, lr):
        return {"w": state["w"] * lr, "n": state["n"] + 1}

    planned = unity.auto_shard(step)
    w = np.ones((8, 8), np.float32)
    first = planned({"w": w, "n": 0}, 0.5)
    monkeypatch.setattr("unity_jax.search.joint.plan", lambda *a: pytest.fail("planned again"))
    second = planned(first, np.float32(0.5))
    third = planned({"w": jnp.asarray(second["w"]), "n": np.int32(2)}, jnp.float32(0.5))
    assert float(third["w"][0, 0]) == 0.125 and int(third["n"]) == 3


@pytest.mark.parametrize("devices", [1, 8])
def test_results_keep_their_weak_types(devices):
    def step(x, y):
        return {"weak": x * 2, "strong": y * x, "count": 3, "both": (x + 1, y.sum())}

    def types(tree):
        return jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)

    planned = unity.auto_shard(step, mesh=jax.devices()[:devices])
    y = np.ones(4, np.float32)
    for x in (3.0, np.float32(3.0), jnp.float32(3.0), jnp.asarray(3.0)):
        for run in (planned, jax.jit(planned), lambda *a: planned.lower(*a).compile()(*a)):
            found, expected = run(x, y), jax.jit(step)(x, y)
            assert types(found) == types(expected)
        assert (planned(x, y)["weak"] * jnp.ones(2, jnp.bfloat16)).dtype == (x * jnp.ones(2, jnp.bfloat16)).dtype
    assert len({id(planned.plan(x, y)) for x in (3.0, np.float32(3.0), jnp.asarray(3.0))}) == 1


def test_weak_types_promote_as_in_jit():
    step = unity.auto_shard(lambda x, lr: x * lr)
    x = jnp.ones(8, jnp.bfloat16)
    assert step(x, 0.5).dtype == jnp.bfloat16
    assert step(x, jnp.float32(0.5)).dtype == jnp.float32


# Building state and batches


def test_init_builds_the_state_sharded(mesh):
    step = unity.auto_shard(mlp_step, mesh=mesh, in_shardings=SHARDED)

    def make(key):
        w1, w2 = jax.random.split(key)
        return {
            "w1": jax.random.normal(w1, (8, 16)),
            "w2": jax.random.normal(w2, (16, 8)),
            "step": jnp.zeros((), jnp.int32),
        }

    step.plan(jax.eval_shape(make, jax.random.key(0)), mlp_batch())
    state = step.init(make, jax.random.key(0))
    assert state["w1"].sharding == NamedSharding(mesh, P(None, "x"))
    assert state["w1"].addressable_shards[0].data.shape == (8, 2)
    close(state, make(jax.random.key(0)))


def test_shard_places_batches_also_short_ones(mesh):
    step = unity.auto_shard(mlp_step, mesh=mesh, in_shardings=DATA)
    step.plan(mlp_state(), mlp_batch())
    assert step.shard(mlp_batch())["x"].sharding.spec == P("x")
    short = step.shard(mlp_batch(3))
    assert short["x"].sharding.is_fully_replicated
    assert step.shard(mlp_state(), argument=0)["w1"].sharding.spec == P("x")


def test_pinned_results_may_hold_none(mesh):
    step = unity.auto_shard(lambda x: (x + 1, None, {"y": x}), mesh=mesh, out_shardings=P("x"))
    found = step(np.ones(8, np.float32))
    assert found[1] is None and found[0].sharding.spec == found[2]["y"].sharding.spec == P("x")
