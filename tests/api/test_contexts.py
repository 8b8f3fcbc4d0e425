"""The first hour of a user, item by item: where and how the function is called, and what stands in it."""

import functools
import gc
import io
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import unity_jax as unity
from tests.api.steps import close, mlp_batch, mlp_loss, mlp_state, mlp_step
from unity_jax.runner import Runner
from unity_jax.search import joint

AS_IT_IS = unity.Options(rewrite=False)
STATE = {"w1": P(None, "b"), "w2": P("b"), "step": P()}
X = np.arange(64, dtype=np.float32).reshape(8, 8) / 64


@pytest.fixture(scope="module")
def auto():
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))


@pytest.fixture(scope="module")
def explicit():
    return jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)


@pytest.fixture(scope="module")
def reference():
    return jax.device_get(jax.jit(mlp_step)(mlp_state(), mlp_batch()))


# Threads


def test_threads_that_ask_for_one_plan_take_the_first(monkeypatch):
    """Also of functions that call each other, in either order."""
    searched, plan, start = [], joint.plan, threading.Barrier(6)

    def slowly(program, *rest):
        searched.append(program.name)
        time.sleep(0.2)
        return plan(program, *rest)

    def first(x, depth):
        return (second(x, depth - 1) if depth else x) * 2

    def second(x, depth):
        return (first(x, depth - 1) if depth else x) + 1

    def ask(i):
        start.wait()
        return (first, second)[i % 2](X, 1)

    monkeypatch.setattr(joint, "plan", slowly)
    first, second = (unity.auto_shard(f, static_argnums=1, options=AS_IT_IS) for f in (first, second))
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(ask, range(6)))
    for i, array in enumerate(found):
        close(array, jnp.asarray((X + 1) * 2 if i % 2 == 0 else X * 2 + 1))
    assert sorted(searched) == ["first", "first", "second", "second"]
    assert gc.isenabled()


# Results and arguments


def test_metrics_are_replicated(auto):
    plan = unity.auto_shard(mlp_step, mesh=auto, in_shardings=(STATE, P("a"))).plan(mlp_state(), mlp_batch())
    assert all(s.is_fully_replicated for s in jax.tree.leaves(plan.out_shardings[1]))
    assert unity.auto_shard(lambda x: x.sum(), mesh=auto, in_shardings=P("a"))(X).sharding.is_fully_replicated


def test_static_and_keyword_arguments():
    @functools.partial(unity.auto_shard, static_argnums=0, static_argnames=("times", "flag"), donate_argnames="y")
    def f(name, x, *, y, times, flag=True):
        return {name: (x * times if flag else x) + y}

    for times in (2, 3):
        found = f("out", X, y=jnp.ones((8, 8)), times=times)
        close(found, {"out": jnp.asarray(X * times + 1)})
    assert len(f._known) == 2
    close(f("other", X, y=np.ones((8, 8), np.float32), times=2, flag=False), {"other": jnp.asarray(X + 1)})
    named = unity.auto_shard(lambda x, n: x * n, static_argnums=1)
    close(named(X, n=3), jnp.asarray(X * 3))
    lowered = named.lower(X, 3)
    close(lowered.compile()(jax.device_put(X, named.plan(X, 3).in_shardings[0])), jnp.asarray(X * 3))


def test_forward_only(auto):
    forward = unity.auto_shard(lambda p, x: jnp.tanh(x @ p), mesh=auto, in_shardings=(P(None, "b"), P("a")))
    close(forward(X, X), jnp.tanh(X @ X))


def test_captured_arrays_are_inputs_and_sharded():
    mesh = Mesh(np.array(jax.devices()), ("x",))
    table, inner_table, loop_table = (jnp.asarray(X) + i for i in range(3))

    @jax.jit
    def inner(x):
        return x @ inner_table

    @jax.jit
    def in_loop(c):
        return c @ loop_table

    def f(x):
        y, _ = jax.lax.scan(lambda c, _: (in_loop(c), None), inner(x) @ table, None, length=2)
        z = jax.lax.cond(x[0, 0] > 0, lambda a: in_loop(a) + 1, lambda a: a, y)
        return jax.lax.while_loop(lambda c: c[1] < 2, lambda c: (in_loop(c[0]) / 8, c[1] + 1), (z, 0))[0]

    planned = unity.auto_shard(f, mesh=mesh, in_shardings=P("x"))
    plan = planned.plan(X)
    assert {leaf.path for leaf in plan.inputs} == {"const0", "const1", "const2", "[0]"}
    close(planned(X), jax.jit(f)(X), rtol=1e-4)
    text = planned.lower(X).as_text()
    assert "constant dense<[[" not in text
    lowered = planned.lower(X).compile()
    held = tuple(
        jax.device_put(c, s) for c, s in zip(plan.program.constants, Runner(plan).shardings, strict=False)
    )
    close(lowered(held, planned.shard(X)), jax.jit(f)(X), rtol=1e-4)


# Transformations and meshes


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


# Pins


def test_struct_sharding_and_out_shardings_are_pins(auto):
    step = unity.auto_shard(mlp_step, mesh=auto, out_shardings=(None, {"loss": None, "norm": P()}))
    state = jax.eval_shape(mlp_state)
    state["w1"] = jax.ShapeDtypeStruct((8, 16), np.float32, sharding=NamedSharding(auto, P("a", "b")))
    plan = step.plan(state, mlp_batch())
    assert plan.in_shardings[0]["w1"] == plan.out_shardings[0]["w1"] == NamedSharding(auto, P("a", "b"))
    found, _ = step(mlp_state(), mlp_batch())  # arrays of these shapes run by that plan
    assert found["w1"].sharding == NamedSharding(auto, P("a", "b"))
    pinned = unity.auto_shard(mlp_step, mesh=auto, out_shardings=({"w1": P("b"), "w2": None, "step": None}, None))
    assert pinned.plan(mlp_state(), mlp_batch()).in_shardings[0]["w1"].spec == P("b")


def test_pins_bring_their_mesh(auto):
    plan = unity.auto_shard(lambda x: x * 2, in_shardings=NamedSharding(auto, P("b"))).plan(X)
    assert plan.mesh == auto and plan.in_shardings[0].spec == P("b")


def constrained(pcg):
    return [str(op.outputs[0]) for op in pcg.walk() if op.name == "sharding_constraint"]


def test_constraint_in_the_code_is_a_pin(auto):
    def f(w, x):
        def body(c, _):
            return jax.lax.with_sharding_constraint(jnp.tanh(c @ w), NamedSharding(auto, P("a", "b"))), None

        y, _ = jax.lax.scan(body, x, None, length=2)
        return jax.lax.with_sharding_constraint(y, NamedSharding(auto, P("b"))).sum(0)

    planned = unity.auto_shard(f)
    plan = planned.plan(X, X)
    assert plan.mesh == auto
    assert constrained(plan.pcg) == ["f32[8@a,8@b]", "f32[8@b,8]"]
    close(planned(X, X), jnp.tanh(jnp.tanh(X @ X) @ X).sum(0))
    by_mesh = unity.auto_shard(lambda x: jax.lax.with_sharding_constraint(x * 2, P("a")), mesh=auto)
    assert constrained(by_mesh.plan(X).pcg) == ["f32[8@a,8]"]


def test_reshard_and_out_sharding_under_explicit_mesh(explicit):
    def f(w, x):
        x = jax.reshard(x, P("a", None))
        y = jnp.einsum("ij,jk->ik", x, w, out_sharding=P("a", "b"))
        return (y**2).sum()

    planned = unity.auto_shard(jax.grad(f), mesh=explicit)
    plan = planned.plan(X, X)
    assert constrained(plan.pcg)[:2] == ["f32[8@a,8]", "f32[8@a,8@b]"]
    close(planned(X, X), 2 * X.T @ (X @ X), rtol=1e-4)


# A user's own parallel code


def test_users_shard_map(auto):
    def f(w, x):
        @functools.partial(jax.shard_map, mesh=auto, in_specs=(P("b"), P("a", "b")), out_specs=P("a"))
        def matmul(w, x):
            return jax.lax.psum(x @ w, "b")

        return (matmul(w, jnp.tanh(x)) ** 2).mean()

    planned = unity.auto_shard(jax.value_and_grad(f))
    plan = planned.plan(X, X)
    assert plan.mesh == auto
    assert any(c.kind == "all_reduce" and c.axes == ("b",) for c in plan.predicted.collectives)
    close(planned(X, X), jax.jit(jax.value_and_grad(f))(X, X), rtol=1e-4)
    with pytest.raises(
        unity.UnsupportedError, match=r"test_contexts.py:\d+.*shard_map over the mesh .*'a': 2.*pass the mesh"
    ):
        unity.auto_shard(f, mesh=jax.devices()).plan(X, X)


def test_users_shard_map_over_some_axes(auto):
    def f(x):
        inner = jax.shard_map(lambda y: jax.lax.all_gather(y, "b", axis=0, tiled=True) * 2, mesh=auto, in_specs=P("b"),
                              out_specs=P(), axis_names={"b"}, check_vma=False)  # fmt: skip
        return inner(x) + x

    close(unity.auto_shard(f, in_shardings=P("a"))(X), jnp.asarray(3 * X))


def test_pallas_call_is_replicated_and_said_so():
    pl = pytest.importorskip("jax.experimental.pallas")

    def kernel(x, o):
        o[...] = x[...] * 2

    def f(x):
        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(jnp.tanh(x)) + 1

    planned = unity.auto_shard(f, in_shardings=P("x"), mesh=Mesh(np.array(jax.devices()), ("x",)))
    (said,) = planned.plan(X).replicated
    assert said.startswith("pallas_call f32[8, 8] at ") and "test_contexts.py" in said
    close(planned(X), jnp.tanh(X) * 2 + 1)


def test_unknown_primitive_is_replicated_and_said_so(auto):
    def f(x):
        # How a callback treats dimensions that `vmap` adds says nothing about those that are there.
        return jax.pure_callback(np.tanh, x, x @ x.T, vmap_method="broadcast_all")

    planned = unity.auto_shard(f, mesh=auto, in_shardings=P("a"))
    (said,) = planned.plan(X).replicated
    assert said.startswith("pure_callback f32[8, 8] at ") and "test_contexts.py" in said
    assert said.endswith(": there is no rule for it")
    close(planned(X), np.tanh(X @ X.T))


# Effects


def test_prints_and_callbacks_run_once(auto):
    seen = []

    def f(x):
        jax.debug.print("max {m}", m=x.max())
        jax.debug.callback(lambda v: seen.append(v.shape), x)

        def body(c, i):
            jax.debug.print("trip {i}", i=i)
            return c + 1, None

        return jax.lax.scan(body, x, jnp.arange(2))[0]

    planned = unity.auto_shard(f, mesh=auto, in_shardings=P("a", "b"))
    out = io.StringIO()
    with redirect_stdout(out):
        y = planned(X)
        jax.effects_barrier()
    assert sorted(out.getvalue().split("\n")) == ["", "max 0.984375", "trip 0", "trip 1"]
    assert seen == [(8, 8)]
    close(y, jnp.asarray(X + 2))


def test_io_callback_runs_once_and_reaches_all_devices(auto):
    from jax.experimental import io_callback

    calls = []

    def host(x):
        calls.append(x.shape)
        return x * 2, x > 0.5

    def f(x):
        types = (jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(x.shape, bool))
        double, large = io_callback(host, types, x, ordered=False)
        return jnp.where(large, double, x)

    planned = unity.auto_shard(f, mesh=auto, in_shardings=P("a", "b"))
    close(planned(X), jnp.where(X > 0.5, X * 2, X))
    assert calls == [(8, 8)]
    kinds = [(c.kind, c.axes, c.bytes) for c in planned.plan(X).predicted.collectives]
    assert ("all_reduce", ("a", "b"), 256) in kinds and ("all_reduce", ("a", "b"), 64) in kinds
    close(unity.auto_shard(f, mesh=jax.devices()[:1])(X), jnp.where(X > 0.5, X * 2, X))


# Without the devices


def test_offline_plan_needs_no_accelerator():
    shapes = jax.eval_shape(mlp_state), jax.eval_shape(mlp_batch)
    plan = unity.plan(mlp_step, *shapes, machine="v5e:4x4", donate_argnums=0)
    assert plan.mesh.size == 16 and plan.machine == "v5e:4x4" and plan.fits
    assert plan.in_shardings[0]["w1"].shard_shape((8, 16))
    with pytest.raises(
        unity.PlanError, match=r"16 devices .* there are 8: it can be read, saved and compared, not run here"
    ):
        unity.auto_shard(mlp_step, machine="v5e:4x4")(mlp_state(), mlp_batch())


@pytest.mark.extra("tpu-aot")
def test_ahead_of_time_topology():
    from jax.experimental import topologies

    devices = topologies.get_topology_desc("v5e:2x4", "tpu").devices
    compiled = unity.auto_shard(mlp_step, mesh=devices).lower(mlp_state(), mlp_batch()).compile()
    assert compiled.memory_analysis().argument_size_in_bytes > 0


def test_sequence_of_devices_compiles_ahead_of_time():
    step = unity.auto_shard(mlp_step, mesh=jax.devices()[:4])
    compiled = step.lower(jax.eval_shape(mlp_state), jax.eval_shape(mlp_batch)).compile()
    args = jax.device_put((mlp_state(), mlp_batch()), step.plan(mlp_state(), mlp_batch()).in_shardings)
    close(compiled(*args), jax.jit(mlp_step)(mlp_state(), mlp_batch()))


def test_plan_over_the_limit_is_returned_and_does_not_run():
    step = unity.auto_shard(mlp_step, memory_limit=500)
    plan = step.plan(mlp_state(), mlp_batch())
    assert not plan.fits and "DOES NOT FIT" in str(plan)
    with pytest.raises(
        unity.MemoryLimitError, match=r"(?s)mlp_step needs .*the limit is 500 B.*\n.*(w1|w2|x).*jax.checkpoint"
    ):
        step(mlp_state(), mlp_batch())


def run_python(code, **environment):
    env = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
    return subprocess.Popen(
        [sys.executable, "-c", code], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def test_import_touches_nothing_global():
    code = """
import jax
before = dict(jax.config.values)
import unity_jax
from jax.extend.backend import backends
import sys
assert dict(jax.config.values) == before
import jax._src.xla_bridge as bridge
assert not bridge.backends_are_initialized()
jax.config.update("jax_num_cpu_devices", 2)  # still possible
assert len(jax.devices()) == 2
print("fine")
"""
    code = code.replace("from jax.extend.backend import backends\nimport sys\n", "")
    process = run_python(code, XLA_FLAGS="")
    out, _ = process.communicate(timeout=60)
    assert out == "fine\n", out


def test_two_processes(tmp_path):
    code = """
import sys, socket
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(f"localhost:{sys.argv[1]}", num_processes=2, process_id=int(sys.argv[2]))
import unity_jax as unity
from jax.sharding import PartitionSpec as P, Mesh
mesh = Mesh(np.array(jax.devices()), ("x",))
step = unity.auto_shard(lambda w, x: (w + x.sum(0), x.mean()), mesh=mesh, in_shardings=(P(), P("x")), out_shardings=P())
w, x = np.ones(4, np.float32), np.arange(16, dtype=np.float32).reshape(4, 4)
plan = step.plan(w, x)
batch = step.shard(x[2 * int(sys.argv[2]):][:2])
assert batch.shape == (4, 4) and batch.sharding.spec == P("x"), batch.sharding
w, mean = step(w, batch)
w, mean = step(w, batch)
print(float(mean), np.asarray(w).tolist(), plan.program_hash)
"""
    import socket

    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = str(s.getsockname()[1])
    code = "import sys\n" + code.replace("sys.argv[1]", repr(port))
    processes = [run_python(code.replace("sys.argv[2]", repr(i)), XLA_FLAGS="", UNITY_JAX_CACHE="") for i in (0, 1)]
    outs = [p.communicate(timeout=120)[0].strip().split("\n")[-1] for p in processes]
    assert outs[0] == outs[1] and outs[0].startswith("7.5 [49.0, 57.0, 65.0, 73.0]"), outs
