"""What all strategies of an op mean together is what each of them means by itself."""

import functools

import jax
import jax.numpy as jnp
import pytest

from tests.ops.harness import arg, ops_of
from unity_jax.ops.rule import Shard
from unity_jax.ops.rules import rule_of
from unity_jax.ops.strategies import alike, port_layouts, strategies
from unity_jax.pcg.mesh import MeshAxes

MESHES = MeshAxes(("x",), (4,)), MeshAxes(("x", "y"), (2, 4)), MeshAxes(("x", "y", "z"), (2, 3, 2))
FUNCTIONS = {
    "contraction": (functools.partial(jnp.einsum, "bij,bjk->bik"), (arg(4, 8, 6), arg(4, 6, 12))),
    "reduction": (lambda x: jnp.max(x, axis=1), (arg(8, 6, 4),)),
    "pointwise": (lambda x, y: x * y + x, (arg(8, 6), arg(8, 6))),
    "reshape": (lambda x: x.reshape(8, 12), (arg(8, 3, 4),)),
    "window": (lambda x: jax.lax.conv(x, jnp.ones((4, 2, 3, 3)), (1, 1), "SAME"), (arg(4, 2, 12, 12),)),
    "sort": (lambda x: jnp.sort(x, axis=1), (arg(8, 6),)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_all_strategies_at_once(name, mesh):
    function, arguments = FUNCTIONS[name]
    for op in ops_of(function, *arguments):
        rule = rule_of(op)
        choices = strategies(rule, mesh)
        shards = [Shard(op, rule, mesh, s) for s in choices]
        ins, outs = port_layouts(rule, mesh, choices)
        assert list(zip(*ins, strict=True)) == ([s.operand_layouts for s in shards] if ins else [])
        assert list(zip(*outs, strict=True)) == [s.result_layouts for s in shards]
        for s in shards:
            ends = zip((*op.inputs, *op.outputs), (*s.operand_layouts, *s.result_layouts), strict=True)
            assert s.shapes == tuple(layout.local_shape(t.shape, mesh) for t, layout in ends)
        works = [id(s.works) for s in shards]
        first, which = alike(rule, mesh, choices)
        assert [works[first[n]] for n in which] == works and len(first) == len(set(works))
