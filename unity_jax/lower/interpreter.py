"""The SPMD interpreter: runs a planned graph on one device's shards, inside `shard_map`.

Compute ops run their local program; parallel ops become their collective; loops and branches run their planned bodies.
Exactly the plan's collectives are issued, in the plan's order.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint

from unity_jax import _compat
from unity_jax.lower.fills import FILLS, begun, into
from unity_jax.lower.moves import apply_move
from unity_jax.lower.order import arrived, communicates, held, waits
from unity_jax.ops.rule import Fill
from unity_jax.pcg.graph import Graph, Op, Tensor
from unity_jax.pcg.loops import START, Scan, While, prefetched
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.pcg.parallel import SPILLED


def run(graph: Graph, mesh: MeshAxes, inputs: Sequence[Any], until: Any = None) -> list[Any]:
    """Evaluate a planned graph on local arrays; returns the local outputs.

    `until`: what its collectives wait for (`lower.order`); None where the compiler keeps them in order.
    """
    waiting = {} if until is None else waits(graph)
    env: dict[Tensor, Any] = dict(zip(graph.inputs, inputs, strict=True))

    once = _fills(graph)

    def read(t: Tensor) -> Any:
        return t.literal if t.literal is not None else env[t]

    for op in graph.ops:
        last = arrived(until, map(read, waiting[op])) if op in waiting else until
        operands = [read(t) for t in op.inputs]
        if op.shard is not None:
            rest = (
                [f for f in fills if f not in once.get(t, ())]
                for t, fills in zip(op.inputs, op.shard.fills, strict=True)
            )
            operands = list(map(_filled, operands, rest))
        found = evaluate(op, mesh, operands, last)
        env.update({t: _filled(x, once.get(t, ())) for t, x in zip(op.outputs, found, strict=True)})
    return [read(t) for t in graph.outputs]


def _fills(graph: Graph) -> dict[Tensor, list[Fill]]:
    """Fills of what a graph makes, along each dimension what the first needs that reads it; then it is done once, and
    those that need none read the same: a second copy of a large array costs more than they gain. Of what a graph is
    given there is one copy anyway."""
    made, found = {t for op in graph.ops for t in op.outputs}, dict[Tensor, list[Fill]]()
    for op in graph.ops:
        for t, fills in zip(op.inputs, op.shard.fills, strict=True) if op.shard is not None else ():
            if t in made:
                known = found.setdefault(t, [])
                known += [f for f in fills if all(f.dim != k.dim for k in known)]
    return found


def _filled(x: Any, fills: Iterable[Fill]) -> Any:
    return functools.reduce(lambda x, fill: fill(x), fills, x)


def evaluate(op: Op, mesh: MeshAxes, operands: Sequence[Any], until: Any = None) -> list[Any]:
    """One planned op on local operands."""
    if until is not None and not op.bodies and communicates(op):
        operands = [held(x, until) for x in operands]
    if (move := op.move) is not None:
        return [apply_move(operands[0], move, op.inputs[0].shape, mesh)]
    if op.name == "optimization_barrier":
        return list(jax.lax.optimization_barrier(list(operands)))
    if op.name == "layout_constraint":
        return [with_layout_constraint(x, Layout(tuple(range(x.ndim)))) for x in operands]
    if op.bodies:
        return _CONTROL[op.name](op, mesh, operands, until)
    return op.shard.run(operands)


def _scan(op: Op, mesh: MeshAxes, operands: Sequence[Any], until: Any) -> list[Any]:
    roles, loop = Scan.of(op.params), jax.lax.scan
    if FILLS in op.params:
        operands, stacks = begun(op, mesh, operands)
        loop = functools.partial(into, stacks)
    consts, init = operands[roles.constants], _typed(operands[roles.carried], op.outputs)
    sliced, length, start = operands[roles.sliced], op.params["length"], op.params.get(START)
    longer = [] if start is None else [i for i, x in enumerate(sliced) if len(x) > length]
    graph, ahead = _on_device(op)
    reverse, low = op.params["reverse"], start or 0
    high = low + length - 1
    if ahead and init:  # or the first copies would begin before the loss is computed
        (*waiting, init), sliced = jax.lax.optimization_barrier((*(sliced[i] for i in ahead), init)), list(sliced)
        for i, x in zip(ahead, waiting, strict=True):
            sliced[i] = x

    def part(i: int, index: Any) -> Any:  # what the scan itself is over begins with its first iteration
        return jax.lax.dynamic_index_in_dim(sliced[i], index - (0 if i in longer else low), 0, keepdims=False)

    def fetched(index: Any) -> list[Any]:  # behind the last iteration the same once more
        return [jax.device_put(part(i, jnp.clip(index, low, high)), jax.memory.Space.Device) for i in ahead]

    def body(carry: tuple[list[Any], list[Any]], given: tuple[list[Any], Any]) -> tuple[Any, list[Any]]:
        (before, here), (xs, index) = carry, given
        for i in longer:
            xs[i] = part(i, index)
        for i, x in zip(ahead, here, strict=True):
            xs[i] = x
        after = fetched(index + (-1 if reverse else 1)) if ahead else []
        outs = run(graph, mesh, [*consts, *before, *xs], until)
        return (_typed(outs[roles.last], op.outputs), after), outs[roles.stacked]

    (carry, _), ys = loop(
        body,
        (init, fetched(high if reverse else low)),
        (
            [None if i in (*longer, *ahead) else x for i, x in enumerate(sliced)],
            low + np.arange(length) if longer or ahead else None,
        ),
        length=length,
        reverse=reverse,
        unroll=op.params["unroll"],
    )
    return [*carry, *ys]


def _on_device(scan: Op) -> tuple[Graph, list[int]]:
    """The body of a scan that is given on the device what comes from the host an iteration ahead; and which of what is
    sliced that is."""
    (body,), copies = scan.bodies, [copy for copy in prefetched(scan) if copy.params[SPILLED]]
    if not copies:
        return body, []
    there = {copy.inputs[0]: copy.outputs[0] for copy in copies}
    sliced = body.inputs[Scan.of(scan.params).sliced]
    inputs, ops = tuple(there.get(t, t) for t in body.inputs), [op for op in body.ops if op not in copies]
    return Graph(inputs, body.outputs, ops), [i for i, t in enumerate(sliced) if t in there]


def _while(op: Op, mesh: MeshAxes, operands: Sequence[Any], until: Any) -> list[Any]:
    roles = While.of(op.params)
    cond_consts, body_consts = operands[roles.condition], operands[roles.constants]
    cond, body = op.bodies
    return jax.lax.while_loop(
        lambda carry: run(cond, mesh, [*cond_consts, *carry], until)[0],
        lambda carry: _typed(run(body, mesh, [*body_consts, *carry], until), op.outputs),
        _typed(operands[roles.carried], op.outputs),
    )


def _cond(op: Op, mesh: MeshAxes, operands: Sequence[Any], until: Any) -> list[Any]:
    def branch(graph: Graph) -> Any:
        return lambda *xs: _typed(run(graph, mesh, xs, until), op.outputs)

    return list(jax.lax.switch(operands[0], [branch(b) for b in op.bodies], *operands[1:]))


def _typed(values: Sequence[Any], like: Sequence[Tensor]) -> list[Any]:
    """Values as strongly typed arrays, so that loop carries and branches agree whatever literals they came from."""
    return [
        v if _compat.is_key(t.dtype) else jax.lax.convert_element_type(v, t.dtype)
        for v, t in zip(values, like, strict=False)
    ]


_CONTROL = {"scan": _scan, "while": _while, "cond": _cond}
