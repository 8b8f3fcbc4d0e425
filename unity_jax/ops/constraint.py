"""Sharding constraints in the user's code: an identity whose operand and result have the layout the user wrote.

`with_sharding_constraint(x, P("data"))` and, under Explicit meshes, `reshard` and `out_sharding=` all are traced to
this op.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from unity_jax.ops.rule import Rule, make_rule, register
from unity_jax.pcg.graph import Graph, Op

CODE = ("sharding_constraint", "shard_map")
"""The ops with which the user's code fixes layouts."""


@register("sharding_constraint")
def sharding_constraint(op: Op) -> Rule:
    labels = [None] * op.inputs[0].rank
    rule = make_rule(op, [labels], [labels], flops=0, local=lambda shard, x: x, bytes=lambda shard: 0.0)
    layout = (op.params["layout"],)
    return dataclasses.replace(rule, fixed=(layout, layout))


def code_mesh(graph: Graph) -> Any | None:
    """The mesh of the first sharding constraint or `shard_map` in the code."""
    for op in graph.walk():
        if op.name in CODE:
            mesh = op.params["sharding"].mesh if op.name == "sharding_constraint" else op.params["mesh"]
            if not mesh.empty:
                return mesh
    return None
