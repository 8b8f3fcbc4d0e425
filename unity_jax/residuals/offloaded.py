"""What the policy of a user's `jax.checkpoint` has layers of a scan keep on the host: an activation like any other,
which a plan keeps there or does not.

    h = tanh x                          h = tanh x
    away = device_put h  to the host    outputs h           a stack that the user would have on the host
    outputs away                 ->
    ...                                 ...
    h = device_put away  to the device  cos h               in the scan of the backward pass
    cos h

What is offloaded outside of loops runs as it is written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Set
from typing import Any

import jax

from unity_jax.pcg.graph import Graph, Op, Tensor
from unity_jax.residuals.change import Change
from unity_jax.residuals.pair import in_layer, in_loops, pairs

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def kept_here(graph: Graph) -> Change:
    """The graph without copies of what layers stack; its stacks of which there were are `spilled`."""
    return in_loops(graph, _kept_here)


def _kept_here(graph: Graph) -> Change:
    replaced, spilled = dict[Op, Op](), set[Tensor]()
    for pair in pairs(graph):
        (body,), (back,) = pair.forward.bodies, pair.backward.bodies
        away = {t: body.producer.get(in_layer(pair.forward, t)) for t in pair.stacks}
        there = {t: op for t, op in away.items() if op is not None and _is_copy(op, HOST)}
        if there:
            spilled |= there.keys()
            returns = {op for op in back.ops if _is_copy(op, DEVICE)}
            for op, inside, copies in ((pair.forward, body, {*there.values()}), (pair.backward, back, returns)):
                replaced[op] = dataclasses.replace(op, bodies=(_without(inside, copies),))
    ops = [replaced.get(op, op) for op in graph.ops]
    return Change(Graph(graph.inputs, graph.outputs, ops) if replaced else graph, {}, spilled=frozenset(spilled))


def _is_copy(op: Op, to: Any) -> bool:
    return op.name == "device_put" and {*op.params["devices"]} == {to}


def _without(graph: Graph, copies: Set[Op]) -> Graph:
    """A graph that has what is copied in place of its copies."""
    names, ops = dict[Tensor, Tensor](), list[Op]()
    for op in graph.ops:
        read = op.reading(names)
        if op in copies:
            names.update(zip(op.outputs, read.inputs, strict=True))
        else:
            ops.append(read)
    return Graph(graph.inputs, tuple(names.get(t, t) for t in graph.outputs), ops)
