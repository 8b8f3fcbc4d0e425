"""On CPU devices no collective runs beside a loop that has collectives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.numerics.harness import Case
from unity_jax import _compat
from unity_jax.lower.compile import spmd
from unity_jax.lower.order import arrived, held, waits
from unity_jax.ops.manual import KINDS
from unity_jax.pcg.graph import nested


def inner(eqn):
    values = (v for p in eqn.params.values() for v in (p if isinstance(p, (tuple, list)) else (p,)))
    return [_compat.open_jaxpr(v)[0] for v in values if hasattr(_compat.open_jaxpr(v)[0], "eqns")]


def communicates(eqn):
    return eqn.primitive.name in KINDS or any(communicates(e) for jaxpr in inner(eqn) for e in jaxpr.eqns)


def unordered(jaxpr):
    """Pairs of a loop with collectives and another equation with collectives, neither of which needs the other."""
    needs, needed = {}, {}
    for eqn in jaxpr.eqns:
        needed[id(eqn)] = set().union(*(needs.get(v, set()) for v in eqn.invars if not _compat.is_literal(v)))
        needs.update(dict.fromkeys(eqn.outvars, needed[id(eqn)] | {id(eqn)}))
    late = [e for e in jaxpr.eqns if communicates(e)]
    pairs = [
        (a, b) for i, b in enumerate(late) for a in late[:i] if (inner(a) or inner(b)) and id(a) not in needed[id(b)]
    ]
    return pairs + [pair for e in jaxpr.eqns for body in inner(e) for pair in unordered(body)]


def scans(x, w, z):
    """Two loops and other arithmetic, none of which needs the others."""
    y, rows = jax.lax.scan(lambda c, r: (jnp.tanh(c @ r), c.sum(0)), x, w)
    v = jax.lax.fori_loop(0, 3, lambda i, c: jnp.sin(c) @ c, z)
    return (z @ z).sum(1), y, rows, v, jnp.cos(w).sum((0, 1))


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        yield Case.of(scans, [jnp.asarray(rng.normal(size=s)) for s in ((8, 8), (3, 8, 8), (8, 8))])


@pytest.mark.parametrize("seed", range(2))
def test_loops_and_collectives_are_ordered(case, seed):
    plan = case.sample((2, 4), seed)
    assert any(waits(graph) for _, graph, _ in nested(plan.graph))
    program = jax.make_jaxpr(spmd(plan.graph, plan.mesh))(case.flat)
    assert unordered(program.jaxpr) == []
    assert case.differences(case.run(plan)) == []


@pytest.mark.parametrize("x", [np.nan, np.inf, 3, True, 1j, np.zeros((2, 0)), np.arange(6).reshape(2, 3)], ids=str)
def test_waiting_changes_no_value(x):
    x = jnp.asarray(x)
    for value in (x, jax.random.key(7)):
        got = jax.jit(lambda x, value: held(value, arrived(True, [x, value])))(x, value)
        assert got.dtype == value.dtype
        raw = [jax.random.key_data(v) if _compat.is_key(v.dtype) else v for v in (got, value)]
        np.testing.assert_array_equal(*raw)
