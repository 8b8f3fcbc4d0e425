"""Bad and unusual input: an error that names the argument or starts at the user's line and says what to do, or what
is documented."""

import json
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import unity_jax as unity
from tests.api.steps import close, mlp_batch, mlp_state, mlp_step

X = np.arange(64, dtype=np.float32).reshape(8, 8) / 64


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))


def double(x):
    return x * 2


def plan(fun=double, *args, **settings):
    return unity.auto_shard(fun, **settings).plan(*(args or (X,)))


def fails(error, match, fun, *args, **kwargs):
    """The call raises this error, whose message fits on a screen, from which pytest hides our frames."""
    with pytest.raises(error, match=match) as caught:
        fun(*args, **kwargs)
    assert len(str(caught.value)) < 1500
    return caught


# Decoration

DECORATIONS = [
    ({"memory_limit": -1}, ValueError, "memory_limit= takes a positive number of bytes"),
    ({"memory_limit": "16GB"}, ValueError, "memory_limit= takes a positive number of bytes"),
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


# Pins

PINS = [
    (
        P("c"),
        r"in_shardings of \[0\]: .*'c'.*names mesh axes \['c'\], the mesh has \(a=2, b=4\); pass the mesh you mean as "
        "mesh=",
    ),
    (P(None, None, "a"), "3 entries, the array .8, 8. has 2 dimensions"),
    (P(P.UNCONSTRAINED, "a"), "unconstrained; name every dimension"),
    (P("a", "a"), r"names mesh axes \['a'\] twice; an axis splits one dimension, once"),
    (P(("b", "a", "b")), r"names mesh axes \['b'\] twice"),
    (P(("b", "a")), r"axes \['b', 'a'\] of dimension 0 must be in the order of the mesh"),
    (7, "a NamedSharding or PartitionSpec is needed, not int"),
    ((P(), P()), "in_shardings has 2 entries for 1 positional arguments"),
    ({"missing": P()}, "in_shardings is not a tree prefix of the arguments"),
]


@pytest.mark.parametrize(("pin", "match"), PINS)
def test_bad_pin(mesh, pin, match):
    fails(
        unity.PinError,
        match,
        plan,
        in_shardings=pin if isinstance(pin, tuple) and not isinstance(pin, P) else (pin,),
        mesh=mesh,
    )


def test_pin_on_a_missing_path(mesh):
    pins = ({"w1": P("a"), "w3": P("b"), "step": None}, None)
    message = fails(unity.PinError, "w3", plan, mlp_step, mlp_state(), mlp_batch(), mesh=mesh, in_shardings=pins)
    assert "in_shardings" in str(message.value) and "w2" in str(message.value)
    message = fails(unity.PinError, "out_shardings", plan, double, mesh=mesh, out_shardings=(P(), P()))


def test_pin_that_does_not_divide(mesh):
    match = (
        r"in_shardings of \[0\]: dimension 0 of \[7, 8\] has 7 elements, which mesh axes \['a'\] \(2 shards\) do not"
    )
    fails(unity.PinError, match, plan, double, X[:7], mesh=mesh, in_shardings=P("a"))


def test_pin_for_another_mesh(mesh):
    other = Mesh(np.array(jax.devices()), ("a",))
    match = r"is for mesh axes {'a': 8}, the plan for the mesh \(a=2, b=4\); pass mesh="
    fails(unity.PinError, match, plan, double, X, mesh=mesh, in_shardings=NamedSharding(other, P("a")))
    struct = jax.ShapeDtypeStruct((8, 8), np.float32, sharding=NamedSharding(other, P("a")))
    fails(unity.PinError, r"argument \[0\]: " + match.replace("is", ".* is", 1), plan, double, struct, mesh=mesh)
    constrained = lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(other, P("a")))  # noqa: E731
    fails((unity.PinError, ValueError), r"mesh", plan, constrained, X, mesh=mesh)
    fails(
        unity.PinError,
        r"^\S*test_bad_input.py:\d+.*constraint is for mesh axes {'a': 8}",
        plan,
        constrained,
        X,
        mesh=jax.devices(),
    )


def test_pin_without_a_mesh():
    fails(
        unity.PinError,
        r"names mesh axes \['data'\], the mesh has \(x=8\); pass the mesh",
        plan,
        double,
        X,
        in_shardings=P("data"),
    )


def test_two_pins_that_disagree(mesh):
    struct = jax.ShapeDtypeStruct((8, 8), np.float32, sharding=NamedSharding(mesh, P("a")))
    fails(
        unity.PinError,
        r"\[0\] is pinned twice: \[a,.\] by its ShapeDtypeStruct",
        plan,
        double,
        struct,
        mesh=mesh,
        in_shardings=P("b"),
    )
    match = r"\['w1'\] replaces argument \[0\]\['w1'\], so they need one layout, .* pinned to \[.,b\] and \[a,.\]"
    fails(unity.PinError, match, plan, lambda s: {"w1": s["w1"] * 2}, {"w1": X}, mesh=mesh,
          in_shardings={"w1": P("a")}, out_shardings={"w1": P(None, "b")})  # fmt: skip


def test_mesh_and_machine_that_disagree(mesh):
    fails(
        ValueError, r"mesh= has 8 devices, machine v5e:4x4 has 16: they must agree", plan, mesh=mesh, machine="v5e:4x4"
    )
    abstract = jax.sharding.AbstractMesh((3,), ("x",))
    fails(ValueError, r"the mesh \(x=3\) has no devices: pass machine=", plan, mesh=abstract)


# Memory


def test_over_tight_memory_limit():
    step = unity.auto_shard(mlp_step, memory_limit=100)
    assert not step.plan(mlp_state(), mlp_batch()).fits
    error = fails(unity.MemoryLimitError, "memory_limit=", step, mlp_state(), mlp_batch())
    assert "w1" in str(error.value) or "w2" in str(error.value)


def test_a_limit_below_the_arguments_alone():
    """Nothing that is computed again, or by chunks, helps there; on one device as on several."""
    for mesh in (jax.devices()[:1], jax.devices()):
        step = unity.auto_shard(mlp_step, memory_limit=100, mesh=mesh)
        fails(unity.MemoryLimitError, "The arguments alone take .*B. The largest", step, mlp_state(), mlp_batch())


def test_a_limit_above_the_arguments_alone():
    args = mlp_state(), mlp_batch()
    given = sum(leaf.bytes for leaf in unity.auto_shard(mlp_step, mesh=jax.devices()[:1]).plan(*args).inputs)
    error = fails(
        unity.MemoryLimitError,
        "memory_limit=",
        unity.auto_shard(mlp_step, memory_limit=given + 1, mesh=jax.devices()[:1]),
        *args,
    )
    assert "alone" not in str(error.value)


# Plans from files


@pytest.fixture
def saved(tmp_path, mesh):
    path = tmp_path / "plan.json"
    plan(mlp_step, mlp_state(), mlp_batch(), mesh=mesh).save(path)
    return path


def changed(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return path


def test_plan_file_missing_truncated_or_something_else(saved, tmp_path):
    load = unity.Plan.load
    fails(unity.PlanError, "there is no plan file '.*nothing.json'", load, tmp_path / "nothing.json")
    text = saved.read_text()
    saved.write_text(text[: len(text) // 2])
    fails(unity.PlanError, "is not a plan file: .*Save the plan again", load, saved)
    saved.write_bytes(b"\xff\xfe\x00")
    fails(unity.PlanError, "is not a plan file", load, saved)
    saved.write_text("[1, 2]")
    fails(unity.PlanError, "no format 'unity_jax plan'", load, saved)
    fails(unity.PlanError, "is not a plan file", load, tmp_path)


DAMAGES = [
    ({"version": 99}, "plan version 99, this unity_jax reads version"),
    ({"inputs": None}, "damaged"),
    ({"decisions": {}}, "damaged: KeyError"),
    ({"mesh": {"names": ["a"], "sizes": ["x"]}}, "damaged"),
    ({"inputs": 0, "layout": [[["q"], []], []]}, r"the layout of .*\['w1'\], .*q.* names axes that the mesh"),
    ({"inputs": 0, "layout": [[["a"], ["a"]], []]}, r"the layout of .*\['w1'\], .* names an axis twice"),
    ({"inputs": 0, "layout": [[["b", "a"], []], []]}, "axes in another order than the mesh"),
    ({"inputs": 0, "layout": [[[], []], [["a", "sum"]]]}, "is not summed"),
    ({"inputs": 0, "shape": [7, 16], "layout": [[["a"], []], []]}, r"does not divide \[7, 16\]"),
    ({"inputs": 0, "layout": [[[]], []]}, r"1 dimensions, the array \[8, 16\] has 2"),
    ({"inputs": 0, "bytes": float("inf")}, "damaged: OverflowError"),
    ({"predicted": {"collectives": [], "step_seconds": "soon"}}, "damaged"),
    ({"saving": [{"kind": "zip"}]}, "damaged: KeyError: 'zip'"),
    ({"saving": [{"kind": "chunk", "seed": [0]}]}, "damaged"),
    ({"saving": 3}, "damaged: TypeError"),
]


@pytest.mark.parametrize(("values", "match"), DAMAGES)
def test_plan_file_of_another_version_or_damaged(saved, values, match):
    if values.get("inputs") == 0:
        inputs = json.loads(saved.read_text())["inputs"]
        assert inputs[1]["path"] == "[0]['w1']"
        inputs[1] |= {k: v for k, v in values.items() if k != "inputs"}
        values = {"inputs": inputs}
    fails(unity.PlanError, match, unity.Plan.load, changed(saved, **values))


AGAIN = {"kind": "recompute", "compiler": "cpu", "where": "", "count": 1, "bytes": 1, "seconds": 0.0}
CHUNK = {"kind": "chunk", "dim": 0, "parts": 8, "where": "a.py:1", "bytes": 1}
SAVINGS = [
    ({**AGAIN, "values": [[10**6, 0]]}, "the plan does not fit mlp_step .IndexError.*plan again"),
    ({**AGAIN, "values": [], "compiler": "gcc"}, "the plan does not fit mlp_step .KeyError.*plan again"),
    ({**CHUNK, "seed": [0, 0], "dim": 7}, "there is no loss to be chunked at a.py:1.*plan again"),
    ({**CHUNK, "seed": [0, 0]}, "there is no loss to be chunked at a.py:1.*plan again"),
]


@pytest.mark.parametrize(("saving", "match"), SAVINGS)
def test_plan_file_that_saves_memory_where_it_cannot_be(saved, saving, match):
    loaded = unity.Plan.load(changed(saved, saving=[saving]))
    fails(unity.PlanError, match, unity.auto_shard(mlp_step, plan=loaded), mlp_state(), mlp_batch())


def test_plan_file_from_before_plans_saved_memory(saved):
    data = json.loads(saved.read_text())
    del data["saving"]
    saved.write_text(json.dumps({**data, "version": 5}))
    loaded = unity.Plan.load(saved)
    assert loaded.saving == ()
    close(unity.auto_shard(mlp_step, plan=loaded)(mlp_state(), mlp_batch()), mlp_step(mlp_state(), mlp_batch()))


DECISIONS = [
    ("strategies", -2, [0], r"strategy \d+ of the plan, \(0,\), is none of \w+ \(.*test_?\w*|steps.py:\d+.*mesh"),
    ("strategies", -2, [99, -1], r"strategy \d+ of the plan, \(99, -1\), is none of"),
    ("strategies", -2, None, r"strategy \d+ of the plan, None, is none of"),
    ("strategies", None, [], r"the plan has 0 ops, this program has \d+: plan again"),
    ("layouts", 0, None, "layout 0 of the plan, .*, is missing"),
    ("layouts", 1, [[["q"], []], []], r"layout 1 of the plan, of \[0\]\['w1'\].* names axes that the mesh"),
    ("outputs", 0, [[["a", "b", "a"]], []], "the layout of result 0 in the plan"),
    ("outputs", None, [], "the plan has 0 results"),
    ("rings", None, [[10**6, 0]], r"a ring at op 1000000, the program \d+ ops"),
]


def edited(path, field, place, value):
    """A plan file with one decision changed, or all of a field; `place` counts the decisions that are there."""
    data = json.loads(path.read_text())
    if place is None:
        data["decisions"][field] = value
    else:
        there = [i for i, x in enumerate(data["decisions"][field]) if x is not None]
        data["decisions"][field][there[place]] = value
    path.write_text(json.dumps(data))


@pytest.mark.parametrize(("field", "place", "value", "match"), DECISIONS)
def test_plan_file_with_decisions_that_cannot_be(saved, field, place, value, match):
    edited(saved, field, place, value)
    step = unity.auto_shard(mlp_step, plan=unity.Plan.load(saved))
    fails(unity.PlanError, match, step, mlp_state(), mlp_batch())


@pytest.mark.parametrize(("field", "place", "value", "match"), DECISIONS)
def test_damaged_entry_of_the_cache_is_replaced(tmp_path, mesh, field, place, value, match):
    settings = {"mesh": mesh, "options": unity.Options(cache=tmp_path)}
    made = plan(mlp_step, mlp_state(), mlp_batch(), **settings)
    (entry,) = (tmp_path / "plans").iterdir()
    edited(entry, field, place, value)
    assert plan(mlp_step, mlp_state(), mlp_batch(), **settings) == made
    assert unity.Plan.load(entry) == made


def test_plan_file_whose_rules_have_other_names_now(saved):
    step = {"graph": [], "rule": "dot-2", "spots": [[0, 0, 0]]}
    done = {"rule": "dot-2", "where": "", "count": 1, "saved": 0.0, "proof": "", "steps": [step]}
    loaded = unity.Plan.load(changed(saved, version=4, rewrites=[done]))
    match = "by rules that are not there any more: plan again"
    fails(unity.PlanError, match, unity.auto_shard(mlp_step, plan=loaded), mlp_state(), mlp_batch())


def test_plan_for_another_signature(saved):
    loaded = unity.Plan.load(saved)
    match = (
        r"another signature of mlp_step: argument \[1\]\['x'\] is float32\[4, 8\] here and float32\[8, 8\] in the plan"
    )
    fails(unity.PlanError, match, unity.auto_shard(mlp_step, plan=loaded), mlp_state(), mlp_batch(4))
    fails(unity.PlanError, r"argument \[0\]\['step'\] is missing here", unity.auto_shard(double, plan=loaded), X)


def test_plan_for_another_program(saved):
    def mlp_step_changed(state, batch):
        state, metrics = mlp_step(state, batch)
        return {**state, "w1": state["w1"] * 2}, metrics

    changed = unity.auto_shard(mlp_step_changed, plan=unity.Plan.load(saved))
    fails(
        unity.PlanError,
        "made for another version of mlp_step: its program differs; plan again",
        changed,
        mlp_state(),
        mlp_batch(),
    )


def test_plan_for_another_mesh_or_machine(saved):
    loaded = unity.Plan.load(saved)
    other = unity.auto_shard(mlp_step, plan=loaded, mesh=Mesh(np.array(jax.devices()), ("a",)))
    fails(unity.PlanError, r"the plan is for the mesh \(a=2, b=4\), mesh= is \(a=8\)", other, mlp_state(), mlp_batch())
    fewer = unity.auto_shard(mlp_step, plan=loaded, mesh=jax.devices()[:4])
    fails((unity.PlanError, ValueError), "devices", fewer, mlp_state(), mlp_batch())
    odd = unity.Plan.load(changed(saved, machine="my cluster"))
    step = unity.auto_shard(mlp_step, plan=odd)
    fails(unity.PlanError, "machine 'my cluster', which is no preset: pass machine=", step, mlp_state(), mlp_batch())


def test_loaded_plan_asked_for_what_it_cannot_know(saved):
    loaded = unity.Plan.load(saved)
    assert "[0]['w1']" in loaded.in_shardings
    fails(unity.PlanError, "auto_shard\\(step, plan=plan\\)", lambda: loaded.pcg)
    fails(unity.PlanError, "does not know its function", loaded.abstract_state)
    fails(unity.PlanError, "does not know its function", loaded.explain, "w1")


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
