"""Pins that cannot be: an error that names the argument, or the user's line, and says what to do."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import unity_jax as unity
from tests.api.failing import X, double, fails, plan
from tests.api.steps import mlp_batch, mlp_state, mlp_step


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))


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
        r"^\S*test_bad_pins.py:\d+.*constraint is for mesh axes {'a': 8}",
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
