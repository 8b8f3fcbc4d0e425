"""The first hour of a user, item by item: under transformations, and on meshes that are set or given."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import unity_jax as unity
from tests.api.steps import AS_IT_IS, STATE, X, close, mlp_batch, mlp_loss, mlp_state, mlp_step


def test_under_jit(auto, reference):
    step = unity.auto_shard(mlp_step, mesh=auto, in_shardings=(STATE, P("a")))
    outer = jax.jit(lambda s, b: step(s, jax.tree.map(lambda x: x * 1, b)))
    close(outer(mlp_state(), mlp_batch()), reference)
    close(outer(step(mlp_state(), mlp_batch())[0], mlp_batch()), step(reference[0], mlp_batch()))


@pytest.mark.parametrize("outer", [lambda f: f, jax.jit])
def test_under_grad(auto, outer):
    loss = unity.auto_shard(mlp_loss, mesh=auto, in_shardings=({"w1": P(None, "b"), "w2": P("b")}, P("a")))
    params = {k: jnp.asarray(v) for k, v in mlp_state().items() if k != "step"}
    found = outer(jax.value_and_grad(loss))(params, mlp_batch())
    close(found, jax.value_and_grad(mlp_loss)(params, mlp_batch()))


def small(params, batch, scale):
    """(loss, an integer)"""
    return scale * jnp.mean(jnp.tanh(batch["x"] @ params["w"]) ** 2), batch["n"] + 1


def small_arguments():
    n = np.arange(16, dtype=np.float32).reshape(4, 4) / 16
    return {"w": jnp.asarray(n)}, {"x": jnp.asarray(np.cos(n)), "n": np.arange(3)}


def forward_mode(f):
    """The directional derivative of a loss, and that of this again."""
    params, batch = small_arguments()

    def along(params):
        loss, (_, n) = jax.jvp(lambda p: f(p, batch, 2.0), (params,), (params,))
        assert n.dtype == jax.dtypes.float0
        return loss[0], _

    return jax.jvp(along, (params,), ({"w": batch["x"]},))


@pytest.mark.parametrize("outer", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_under_jvp(auto, outer):
    planned = unity.auto_shard(small, mesh=auto, static_argnums=2, options=AS_IT_IS)
    close(outer(lambda: forward_mode(planned))(), forward_mode(small))
    assert planned._derivative._pushed._derivative._pushed._known  # with its tangents and theirs, planned as one


def reverse_twice(f):
    return jax.jacrev(jax.grad(f))


@pytest.mark.parametrize("of", [jax.jacfwd, jax.hessian, jax.jacrev, reverse_twice], ids=lambda f: f.__name__)
def test_under_jacobians(auto, of):
    params, batch = small_arguments()

    def take(f):
        return of(lambda p: f(p, batch, 2.0)[0])(params)

    close(take(unity.auto_shard(small, mesh=auto, static_argnums=2, options=AS_IT_IS)), take(small))


@pytest.mark.parametrize(
    "through",
    [jax.jit, jax.checkpoint, lambda f: lambda x: jax.lax.scan(lambda c, _: (c + f(x), None), 0.0, None, length=2)[0]],
    ids=["jit", "checkpoint", "scan"],
)
def test_reverse_mode_twice_through_a_traced_call(auto, through):
    def value(x):
        return (jnp.sin(x) * x**2).sum()

    def twice(f):
        return jax.grad(lambda x: jax.grad(f)(x).sum())(jnp.asarray(X))

    close(twice(through(unity.auto_shard(value, mesh=auto, options=AS_IT_IS))), twice(through(value)))


NUMBERS = {
    "grad of a number": lambda jit: jax.grad(jit(lambda x: x * x))(3.0),
    "grad beside a number": lambda jit: jax.grad(jit(lambda x, s: (x * x * s).sum()))(jnp.asarray(X), 0.5),
    "a keyword": lambda jit: jax.value_and_grad(jit(lambda p, lr: (p["w"] ** 2).sum() * lr))({"w": X}, lr=0.5),
    "jvp": lambda jit: jax.jvp(lambda x: jit(lambda x, s: (x * x * s).sum())(x, 3), (X,), (X,)),
    "vmap": lambda jit: jax.vmap(jit(lambda x, s: x * s), in_axes=(0, None))(X, 0.5),
    "vmap, an integer": lambda jit: jax.vmap(jit(lambda x, s: x * s), in_axes=(0, None))(X, 2),
    "jit": lambda jit: jax.jit(jit(lambda x, s, flag: x * s + flag))(X, 2, True),
}


@pytest.mark.parametrize("case", NUMBERS)
def test_python_numbers_under_transformations(auto, case):
    found, expected = (NUMBERS[case](j) for j in (lambda f: unity.auto_shard(f, mesh=auto, options=AS_IT_IS), jax.jit))
    close(found, expected)
    assert [x.dtype for x in jax.tree.leaves(found)] == [x.dtype for x in jax.tree.leaves(expected)]


def test_under_grad_with_integers_and_logsumexp(auto):
    def loss(w, x, labels, scale=1.0):
        logits = x @ w * scale
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1)
        return -picked.mean(), (logits.argmax(-1), labels)

    planned = unity.auto_shard(loss, mesh=auto, in_shardings=(P(None, "b"), P("a"), P("a")))
    labels = jnp.arange(8) % 4
    for _ in range(2):
        found = jax.grad(planned, has_aux=True)(jnp.asarray(X), X, labels)
    close(found, jax.grad(loss, has_aux=True)(jnp.asarray(X), X, labels))


def test_under_vmap(auto):
    f = unity.auto_shard(lambda w, x: jnp.tanh(x @ w).sum(0), mesh=auto, in_shardings=(P(None, "b"), P("a")))
    batch = np.stack([X, X + 1])
    expected = jax.vmap(lambda x: jnp.tanh(x @ X).sum(0))(batch)
    close(jax.vmap(f, in_axes=(None, 0))(X, batch), expected)
    close(jax.jit(jax.vmap(f, in_axes=(None, 0)))(X, batch), expected)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_under_set_mesh(auto, explicit, kind, reference):
    mesh = {"auto": auto, "explicit": explicit}[kind]
    step = unity.auto_shard(mlp_step)
    with jax.set_mesh(mesh):
        found = step(mlp_state(), mlp_batch())
        inside = jax.jit(lambda s, b: step(s, b))(mlp_state(), mlp_batch())
    assert step.plan(mlp_state(), mlp_batch()).mesh == mesh
    close(found, reference)
    close(inside, reference)
    assert all(x.sharding.mesh == mesh for x in jax.tree.leaves(found))


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_inside_jit_under_set_mesh_first(auto, explicit, kind, reference):
    mesh = {"auto": auto, "explicit": explicit}[kind]
    step = unity.auto_shard(mlp_step, in_shardings=(STATE, P("a")))
    with jax.set_mesh(mesh):
        inside = jax.jit(lambda s, b: step(s, jax.tree.map(lambda x: x * 1, b)))
        close(inside(mlp_state(), mlp_batch()), reference)
        sharded = jax.device_put(mlp_state(), step.plan(mlp_state(), mlp_batch()).in_shardings[0])
        close(inside(sharded, mlp_batch()), reference)
        close(step(sharded, mlp_batch()), reference)
    close(step(mlp_state(), mlp_batch()), reference)


def test_explicit_mesh_given_as_argument(explicit, reference):
    step = unity.auto_shard(mlp_step, mesh=explicit, in_shardings=(STATE, P("a")), donate_argnums=0)
    state, metrics = step(mlp_state(), mlp_batch())
    assert all(x.sharding.mesh == explicit for x in jax.tree.leaves((state, metrics)))
    assert str(jax.typeof(state["w1"])) == "float32[8,16@b]"
    close((state, metrics), reference)
    with jax.set_mesh(explicit):
        again, _ = step(state, mlp_batch())
        assert str(jax.typeof(again["w2"])) == "float32[16@b,8]"
        jnp.sum(again["w1"] * 2)  # works with what else the user computes on that mesh
        step(again, mlp_batch())


def test_other_mesh_inside_jit_is_refused(auto):
    step = unity.auto_shard(mlp_step, mesh=jax.devices())
    other = unity.auto_shard(mlp_step, mesh=Mesh(np.array(jax.devices()), ("x",)))
    with jax.set_mesh(auto):
        jax.jit(step)(mlp_state(), mlp_batch())
        with pytest.raises(
            unity.PlanError, match=r"planned for the mesh \(x=8\) and called inside jit under .*\(a=2, b=4\)"
        ):
            jax.jit(other)(mlp_state(), mlp_batch())
        other(mlp_state(), mlp_batch())


def test_x64(auto):
    with jax.enable_x64(True):
        state = jax.tree.map(lambda x: x.astype(np.float64) if x.ndim else x.astype(np.int64), mlp_state())
        step = unity.auto_shard(mlp_step, mesh=auto, in_shardings=(STATE, P("a")))
        found, expected = step(state, mlp_batch()), jax.jit(mlp_step)(state, mlp_batch())
        assert found[0]["w1"].dtype == np.float64 and found[0]["step"].dtype == np.int64
        close(found, expected, rtol=1e-12)
    assert step(mlp_state(), mlp_batch())[0]["w1"].dtype == np.float32


def test_attention_in_double_precision(auto):
    """`jax.nn.dot_product_attention` takes its softmax in float32 whatever its operands are, so that under `jax.jit` it
    is 1e-7 away from attention in float64 already; plans are as near to `jax.jit` as float32 lets them be."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        q, k, v = (rng.normal(size=(8, 8, 4, 8)) for _ in range(3))
        weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(8))
        exact = jnp.einsum("bnts,bsnh->btnh", weights, v)
        for spec in (P("b"), P(None, "b"), P("a", None, "b")):
            planned = unity.auto_shard(jax.nn.dot_product_attention, mesh=auto, in_shardings=spec, options=AS_IT_IS)
            found, expected = planned(q, k, v), jax.jit(jax.nn.dot_product_attention)(q, k, v)
            assert found.dtype == expected.dtype == np.float64
            assert 1e-9 < abs(expected - exact).max() < 1e-6
            assert abs(found - expected).max() < 1e-6


@pytest.mark.parametrize("count", [1, 2, 3, 6, 7])
def test_any_number_of_devices(count, reference):
    step = unity.auto_shard(mlp_step, mesh=jax.devices()[:count])
    found = step(mlp_state(), mlp_batch())
    close(found, reference)
    plan = step.plan(mlp_state(), mlp_batch())
    if count == 1:
        assert not plan.predicted.collectives and all(leaf.layout.is_replicated for leaf in plan.inputs)
    sharded = unity.auto_shard(lambda x: jnp.cumsum(x * 2) + 1, mesh=jax.devices()[:count], out_shardings=P("x"))
    if count in (1, 2, 3, 6):
        close(sharded(np.ones(12, np.float32)), 2 * jnp.arange(1.0, 13.0) + 1)


def test_dimension_smaller_than_the_mesh(auto):
    f = lambda x: jnp.tanh(x @ x.T) @ x  # noqa: E731
    close(unity.auto_shard(f)(X[:3]), jax.jit(f)(X[:3]))
    close(unity.auto_shard(f, mesh=auto, in_shardings=P(None, "b"))(X[:1]), jax.jit(f)(X[:1]))
