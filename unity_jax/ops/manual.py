"""A `shard_map` that the user wrote inside the step: its body runs as it is, on operands laid out by its own specs.

The plan has the mesh axes of the user's mesh, so the body's collectives mean the same inside the planned program. An
axis that the user left to the compiler (`axis_names=`) holds copies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.extend import core

from unity_jax import _compat
from unity_jax.ops.rule import InnerCollective, Rule, Shard, make_rule, register
from unity_jax.pcg.graph import Op
from unity_jax.specs import layout_of

KINDS = {
    "psum": "all_reduce",
    "psum_invariant": "all_reduce",
    "pmax": "all_reduce",
    "pmin": "all_reduce",
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "ppermute": "permute",
}


@register("shard_map")
def shard_map(op: Op) -> Rule:
    mesh = op.params["mesh"].shape
    found = []
    for tensors, specs in ((op.inputs, op.params["in_specs"]), (op.outputs, op.params["out_specs"])):
        found.append(tuple(layout_of(s, mesh, t.shape, op.source) for t, s in zip(tensors, specs, strict=True)))
    rule = make_rule(
        op,
        [[None] * t.rank for t in op.inputs],
        [[None] * t.rank for t in op.outputs],
        local=_body,
        inner=_collectives,
    )
    return dataclasses.replace(rule, fixed=(found[0], found[1]))


def _body(shard: Shard, *operands: Any) -> list[Any]:
    """The user's body. Its mesh has the axes of ours, and ours are all manual already."""
    opened, consts = _compat.open_jaxpr(shard.op.params["jaxpr"])
    return _compat.evaluate(opened, consts, operands)


def _collectives(shard: Shard) -> list[InnerCollective]:
    opened, _ = _compat.open_jaxpr(shard.op.params["jaxpr"])
    return list(_walk(opened, dict(zip(shard.mesh.names, shard.mesh.sizes, strict=True))))


def _walk(jaxpr: Any, sizes: dict[str, int]) -> Iterator[InnerCollective]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in KINDS:
            named = eqn.params.get("axes", eqn.params.get("axis_name"))
            axes = tuple(a for a in ((named,) if isinstance(named, str) else named) if sizes.get(a, 1) > 1)
            if axes:
                for x, y in zip(eqn.invars, eqn.outvars, strict=True):
                    nbytes = max(int(np.prod(v.aval.shape)) * np.dtype(v.aval.dtype).itemsize for v in (x, y))
                    yield InnerCollective(KINDS[eqn.primitive.name], axes, nbytes)
        for value in eqn.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(inner, (core.Jaxpr, core.ClosedJaxpr)):
                    yield from _walk(_compat.open_jaxpr(inner)[0], sizes)
