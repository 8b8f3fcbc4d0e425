"""The first hour of a user, item by item: where and how the function is called, and what stands in it."""

import functools
import gc
import io
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
from tests.api.steps import AS_IT_IS, STATE, X, close, mlp_batch, mlp_state, mlp_step
from unity_jax.runner import Runner
from unity_jax.search import joint

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
