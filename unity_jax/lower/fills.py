"""What a loop writes into is filled when the loop begins.

    _, ys = scan(f, dy, xs)   ->   dy', zero = optimization_barrier dy, 0
                                   _, ys = scan(f, dy', xs), which writes ys into a broadcast of that zero

The array that a loop stacks its results in, and one that it adds up to, begin as constants, which depend on nothing:
XLA:GPU's latency-hiding scheduler fills those of the backward pass before the loss is computed, and merges equal ones
of several loops, which it then copies for each. A state-space model of four layers for eight H100 had 357 MB of them
beside the gradients of its logits, of the 1,606 MB that it needed. Loops of the forward pass stack what is alive at its
end anyway; for them it would only take time, a kernel for each array (LSTM 2 % of a step).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from unity_jax import _compat
from unity_jax.pcg.graph import Graph, Op, Tensor
from unity_jax.pcg.loops import Scan
from unity_jax.pcg.mesh import MeshAxes

FILLS = "fills"
"""The parameter of a scan that fills late: `Fills`."""


class Fills(NamedTuple):
    """**Fields:** `numbers`: by its position among the operands of a scan, what a value that it carries is full of at
    first; `awaited`: the positions of those that are computed before it."""

    numbers: Mapping[int, Any]
    awaited: Sequence[int]


def filled_late(graph: Graph) -> Graph:
    """The same program, with scans of the backward pass that fill what they write into when they begin, as far as that
    is on the device."""
    ops: list[Op] = []
    for op in graph.ops:
        op = dataclasses.replace(op, bodies=tuple(map(filled_late, op.bodies)))
        if op.name == "scan" and op.backward and not any(map(_is_apart, op.outputs)):
            op = dataclasses.replace(op, params={**op.params, FILLS: _fills(graph, op)})
        ops.append(op)
    return Graph(graph.inputs, graph.outputs, ops)


def _is_apart(t: Tensor) -> bool:
    """Whether a tensor is no array of numbers on the device."""
    return t.on_host or _compat.is_key(t.dtype)


def _fills(graph: Graph, scan: Op) -> Fills:
    known = {i: _number(graph, t) for i, t in enumerate(scan.inputs)}
    roles, every = Scan.of(scan.params), range(len(scan.inputs))
    made = [i for i, t in enumerate(scan.inputs) if t in graph.producer and not _is_apart(t)]
    numbers = {i: known[i] for i in made if i in every[roles.carried] and known[i] is not None}
    return Fills(numbers, [i for i in made if known[i] is None and i not in every[roles.constants]])


def _number(graph: Graph, t: Tensor) -> Any:
    """The number that an array is full of, None if it is not known to be of one. However zeros are moved they are
    zeros; other numbers may become terms of a sum."""
    moved = False
    while t.literal is None and (op := graph.producer.get(t)) is not None:
        if op.name != "broadcast_in_dim" and op.move is None:
            return None
        (t, *_), moved = op.inputs, moved or op.move is not None
    return None if t.rank or t.literal is None or (moved and t.literal != 0) else t.literal


def begun(scan: Op, mesh: MeshAxes, operands: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The operands of a scan, and the arrays for what it stacks, filled once what it carries and slices is there."""
    found, (numbers, awaited) = list(operands), scan.params[FILLS]
    stacked = scan.outputs[Scan.of(scan.params).stacked]
    scalars = [np.asarray(number, operands[i].dtype) for i, number in numbers.items()]
    scalars += [np.zeros((), t.dtype) for t in stacked]
    scalars, there = jax.lax.optimization_barrier((scalars, [operands[i] for i in awaited]))
    for i, x in zip(awaited, there, strict=True):
        found[i] = x
    for i, x in zip(numbers, scalars, strict=False):
        found[i] = jnp.broadcast_to(x, operands[i].shape)
    shapes = [t.layout.local_shape(t.shape, mesh) for t in stacked if t.layout is not None]
    return found, list(map(jnp.broadcast_to, scalars[len(numbers) :], shapes))


def into(
    stacks: Sequence[Any],
    body: Callable[[Any, Any], tuple[Any, Sequence[Any]]],
    init: Any,
    xs: Any,
    *,
    length: int,
    reverse: bool,
    unroll: int,
) -> tuple[Any, list[Any]]:
    """`jax.lax.scan`, which stacks its results in these arrays."""
    leaves, tree = jax.tree.flatten(xs)
    trips = length // unroll if unroll else 0
    trips = 0 if trips == 1 < unroll else trips

    def step(n: Any, state: tuple[Any, Sequence[Any]]) -> tuple[Any, Sequence[Any]]:
        carry, stacks = state
        i = length - 1 - n if reverse else n
        parts = [jax.lax.dynamic_index_in_dim(x, i, keepdims=False, allow_negative_indices=False) for x in leaves]
        carry, ys = body(carry, jax.tree.unflatten(tree, parts))
        ys = [jax.lax.convert_element_type(y, x.dtype) for x, y in zip(stacks, ys, strict=True)]
        update = [
            jax.lax.dynamic_update_index_in_dim(x, y, i, 0, allow_negative_indices=False)
            for x, y in zip(stacks, ys, strict=True)
        ]
        return carry, update

    def block(loop: tuple[Any, Any]) -> tuple[Any, Any]:
        n, state = loop
        for k in range(unroll):
            state = step(n * unroll + k if unroll > 1 else n, state)
        return n + 1, state

    state = init, stacks
    if trips:
        _, state = jax.lax.while_loop(lambda loop: loop[0] < trips, block, (np.int32(0), state))
    for n in range(trips * unroll, length):
        state = step(n, state)
    return state[0], list(state[1])
