"""Bad and unusual input: an error that names the argument or starts at the user's line and says what to do, or what
is documented."""

import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import unity_jax as unity
from tests.api.failing import X, double, fails, plan
from tests.api.steps import close, mlp_batch, mlp_state, mlp_step


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))


# Decoration

DECORATIONS = [
    ({"machine": "tpu9000:8"}, ValueError, r"unknown machine 'tpu9000'.*v5e:XxY"),
    ({"machine": "v5e:4"}, ValueError, "malformed topology '4'"),
    ({"mesh": "data"}, TypeError, "mesh= takes a jax.sharding.Mesh or a sequence of devices"),
    ({"mesh": []}, ValueError, "at least one device"),
    ({"mesh": [1, 2]}, ValueError, "devices only"),
    ({"mesh": "twice"}, ValueError, "a device twice"),
    ({"like": double}, TypeError, "like= takes a function decorated with auto_shard"),
    ({"plan": "plan.json"}, TypeError, "unity.Plan.load reads one from a file"),
    ({"donate_argnums": 3}, ValueError, "donate_argnums.*3"),
    ({"static_argnames": "nothing"}, ValueError, "nothing"),
    ({"options": {"cache": None}}, TypeError, "options= takes unity.Options"),
]


@pytest.mark.parametrize(("settings", "error", "match"), DECORATIONS)
def test_decoration(settings, error, match):
    if settings.get("mesh") == "twice":
        settings = {"mesh": [jax.devices()[0]] * 2}
    fails(error, match, unity.auto_shard, double, **settings)


def test_not_a_function():
    fails(TypeError, "auto_shard needs a function, not 3 of type int", unity.auto_shard, 3)
    fails(TypeError, "unexpected keyword argument 'meshh'", unity.auto_shard, double, meshh=None)


# Arguments


def test_argument_that_is_no_array():
    step = unity.auto_shard(lambda x: x["a"]["n"])
    fails(
        unity.UnsupportedError,
        r"argument \[0\]\['a'\]\['n'\] is 'text' of type str, not an array; mark",
        step,
        {"a": {"n": "text"}},
    )
    fails(unity.UnsupportedError, r"argument \[0\]\['a'\]\['n'\] is .* of type object", step, {"a": {"n": object()}})


def test_unhashable_static_argument():
    step = unity.auto_shard(lambda x, n: x, static_argnums=1)
    fails(TypeError, "static argument 1 must be hashable", step, X, [1])


def test_error_in_the_users_code_starts_at_the_users_line():
    def broken(x):
        return x @ jnp.ones((3, 3))

    caught = fails(
        TypeError, "dot_general requires contracting dimensions to have the same shape", unity.auto_shard(broken), X
    )
    frames = [Path(f.filename) for f in traceback.extract_tb(caught.tb)]
    shown = [f for f in caught.traceback if not f.ishidden(caught)]
    ours = Path(unity.__file__).parent
    assert not any(Path(f.path).is_relative_to(ours) for f in shown)
    assert any(f.name == Path(__file__).name for f in frames)


def test_empty_batch_and_zero_size_arrays(mesh):
    close(unity.auto_shard(lambda x: (x * 2, x.sum(), jnp.concatenate([x, x])))(X[:0]), (X[:0], jnp.float32(0), X[:0]))
    close(
        unity.auto_shard(lambda w, x: x @ w, mesh=mesh, in_shardings=(P(None, "b"), None))(X, X[:0]),
        X[:0] @ jnp.asarray(X),
    )


def test_complex_and_integer_state(mesh):
    def step(state):
        return {"z": state["z"] * (1 + 2j) + state["n"].sum(), "n": state["n"] // 2, "b": ~state["b"]}

    state = {"z": (X + 1j).astype(np.complex64), "n": np.arange(8), "b": np.arange(8) > 3}
    planned = unity.auto_shard(
        step, mesh=mesh, in_shardings={"z": P("a", "b"), "n": P("a"), "b": P("b")}, donate_argnums=0
    )
    close(planned(state), jax.jit(step)(state))


def test_python_integer_out_of_range():
    fails(OverflowError, "int", unity.auto_shard(double), 2**40)


def test_no_arguments_and_no_results():
    close(unity.auto_shard(lambda: jnp.ones(8))(), jnp.ones(8))
    assert unity.auto_shard(lambda x: None)(X) is None
    close(unity.auto_shard(lambda x: (x, 3))(X), (jnp.asarray(X), jnp.asarray(3)))


# State and effects


def test_ref_arguments_and_ref_state_are_refused():
    ref = jax.ref.new_ref(jnp.zeros(3))
    fails(
        unity.UnsupportedError,
        r"argument \[0\] is a jax.Ref.*return the updated arrays",
        unity.auto_shard(lambda r: r[...]),
        ref,
    )

    def inside(x):
        ref = jax.ref.new_ref(x)
        ref[...] += 1
        return ref[...]

    fails(unity.UnsupportedError, r"^\S*test_bad_input.py:\d+.*jax.Ref", unity.auto_shard(inside), X)

    def captured(x):
        ref[...] += x.sum()
        return x

    fails(unity.UnsupportedError, r"jax.Ref", unity.auto_shard(captured), X)


def test_ordered_effects_are_refused():
    from jax.experimental import io_callback

    def printing(x):
        jax.debug.print("{x}", x=x[0, 0], ordered=True)
        return x

    def calling(x):
        return io_callback(lambda v: v, jax.ShapeDtypeStruct((8, 8), np.float32), x, ordered=True)

    for fun in (printing, calling):
        fails(
            unity.UnsupportedError,
            r"^\S*test_bad_input.py:\d+.*ordered=True.*use ordered=False",
            unity.auto_shard(fun),
            X,
        )


def test_captured_tracer_is_refused():
    def outer(w):
        return unity.auto_shard(lambda x: x @ w)(X)

    fails(
        unity.UnsupportedError,
        "captures a value that an outer transformation is tracing.*pass it as an argument",
        jax.jit(outer),
        X,
    )


def test_forward_mode_of_a_traced_call_says_so(mesh):
    f = unity.auto_shard(lambda x: x.sum(), mesh=mesh)
    fails(TypeError, "forward-mode", jax.jvp, jax.jit(f), (jnp.asarray(X),), (jnp.asarray(X),))


# Donation


def test_wrong_donation_warns_as_jit_does():
    f = unity.auto_shard(lambda x: x.sum(), donate_argnums=0, mesh=jax.devices()[:1])
    with pytest.warns(UserWarning, match="donated buffers were not usable"):
        f(jnp.asarray(X))


def test_one_array_donated_and_given_again():
    """As under `jax.jit`, whose runtime refuses it, in words that name the arguments."""
    x, y = jnp.asarray(X), jnp.asarray(X)
    add = lambda a, b: a + b["b"]  # noqa: E731
    match = r"argument \[0\] is donated, and argument \[1\]\['b'\] is the same array: donate neither, or pass a copy"
    fails(ValueError, match, unity.auto_shard(add, donate_argnums=0), x, {"b": x})
    fails(ValueError, match, unity.auto_shard(add, donate_argnums=(0, 1)), x, {"b": x})
    assert not x.is_deleted()
    close(unity.auto_shard(add)(x, {"b": x}), x + x)
    close(unity.auto_shard(add, donate_argnums=0)(x, {"b": y}), y + y)
    close(unity.auto_shard(add, donate_argnums=0)(X, {"b": X}), y + y)


def test_deleted_argument():
    step = unity.auto_shard(double, donate_argnums=0)
    x = step(jnp.asarray(X))
    step(x)
    fails((RuntimeError, ValueError), "deleted", step, x)


# Stages in the wrong order or with the wrong arguments


def test_init_and_shard_before_a_plan():
    step = unity.auto_shard(mlp_step)
    fails(unity.PlanError, "init: there is no plan yet", step.init, mlp_state)
    fails(unity.PlanError, "shard: there is no plan yet", step.shard, mlp_batch())


def test_init_and_shard_of_something_else():
    step = unity.auto_shard(mlp_step)
    step.plan(mlp_state(), mlp_batch())
    fails(
        unity.PlanError,
        r"no argument of mlp_step has a leaf \['w9'\] of type float32\[3\]",
        step.init,
        lambda: {"w9": jnp.ones(3)},
    )
    fails(unity.PlanError, "shard: the batch has structure", step.shard, {"x": X})
    fails(
        unity.PlanError,
        "shard: mlp_step has 2 positional arguments, there is no argument 5",
        step.shard,
        mlp_batch(),
        5,
    )


def test_wrong_tie():
    options = unity.Options(ties={"[9]": "[0]"})
    fails(ValueError, r"options.ties: '\[9\]' -> '\[0\]' names no output or no input", plan, double, X, options=options)


def test_primitive_without_a_rule_is_said():
    (said,) = plan(lambda x: jax.pure_callback(np.cumsum, x[0], x[0]), X).replicated
    assert "test_bad_input.py" in said and said.endswith(": there is no rule for it")


def test_explain_without_a_match():
    fails(ValueError, "no argument and no op of double matches 'nothing'", plan().explain, "nothing")
