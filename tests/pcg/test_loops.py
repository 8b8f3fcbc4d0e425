"""What goes into a loop and comes out, by its role."""

import jax
import jax.numpy as jnp
import pytest

from unity_jax.pcg.loops import Scan, While
from unity_jax.program import trace


def loop(fn, name, *args):
    (found,) = (op for op in trace(fn, args, {}).graph.ops if op.name == name)
    return found


def shapes(tensors):
    return [t.shape for t in tensors]


def scanned(w, carry, xs):
    def body(c, x):
        return (c[0] @ w + x.sum(), c[1] + 1), (c[0].sum(1), x * 2)

    return jax.lax.scan(body, carry, xs)


CARRY = (jnp.ones((2, 3)), jnp.zeros((), jnp.int32))


def test_roles_of_a_scan():
    op = loop(scanned, "scan", jnp.ones((3, 3)), CARRY, jnp.ones((5, 4)))
    roles, (body,) = Scan.of(op.params), op.bodies
    for tensors in (op.inputs, body.inputs):
        assert shapes(tensors[roles.constants]) == [(3, 3)]
        assert shapes(tensors[roles.carried]) == [(2, 3), ()]
    assert (shapes(op.inputs[roles.sliced]), shapes(body.inputs[roles.sliced])) == ([(5, 4)], [(4,)])
    assert shapes(op.outputs[roles.last]) == shapes(body.outputs[roles.last]) == [(2, 3), ()]
    assert (shapes(op.outputs[roles.stacked]), shapes(body.outputs[roles.stacked])) == ([(5, 2), (5, 4)], [(2,), (4,)])


def test_a_scan_without_constants_carries_and_parts():
    op = loop(lambda xs: jax.lax.scan(lambda c, x: (c, x * 2), None, xs)[1], "scan", jnp.ones((5, 4)))
    roles = Scan.of(op.params)
    assert [len(op.inputs[r]) for r in (roles.constants, roles.carried, roles.sliced)] == [0, 0, 1]
    assert [len(op.outputs[r]) for r in (roles.last, roles.stacked)] == [0, 1]


@pytest.mark.parametrize("count", [0, 3])
def test_another_number_of_constants(count):
    op = loop(scanned, "scan", jnp.ones((3, 3)), CARRY, jnp.ones((5, 4)))
    before = Scan.of(op.params)
    after = Scan.of(before.with_constants(op.params, count))
    assert (after.constants, after.last, after.stacked) == (slice(0, count), before.last, before.stacked)
    assert (after.carried, after.sliced) == (slice(count, count + 2), slice(count + 2, None))


def test_roles_of_a_while_loop():
    def fn(limit, w, x):
        return jax.lax.while_loop(lambda s: (s[0] < limit).all(), lambda s: (s[0] + 1, s[1] @ w), (jnp.zeros(2), x))

    op = loop(fn, "while", jnp.ones(2), jnp.ones((3, 3)), jnp.ones((4, 3)))
    roles, (cond, body) = While.of(op.params), op.bodies
    assert shapes(op.inputs[roles.condition]) == shapes(cond.inputs[roles.condition]) == [(2,)]
    assert shapes(op.inputs[roles.constants]) == shapes(body.inputs[: roles.before.start]) == [(3, 3)]
    carried = [(2,), (4, 3)]
    assert shapes(op.inputs[roles.carried]) == shapes(cond.inputs[roles.tested]) == carried
    assert shapes(body.inputs[roles.before]) == shapes(body.outputs) == shapes(op.outputs) == carried
    assert While.of(roles.with_constants(op.params, 2, 0)).carried == slice(2, None)
