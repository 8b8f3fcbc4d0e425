"""The update of stacked state layer by layer: a leaf that holds the state of all layers need not be there as a whole.

    mu', nu', w' = update(mu, nu, w, g)        all [24, 8192, 2048]
    for each of 24 layers                      its [8192, 2048] of each, written into w

What is computed of such state must be elementwise, all of it, as are the updates of Adam and of momentum; one that
needs a norm of a weight stays as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from unity_jax.ops.rules import is_pointwise
from unity_jax.pcg.graph import Graph, Op, Tensor
from unity_jax.pcg.loops import Scan
from unity_jax.residuals.change import Change, Origin
from unity_jax.residuals.loop import computed, scan_of
from unity_jax.residuals.recompute import is_constant
from unity_jax.rewrite.apply import in_order


def by_layer(graph: Graph, hosted: Collection[int]) -> Change:
    """The graph with the update of stacked inputs as loops over layers; the inputs are on the host.

    **Arguments:** `hosted`: the inputs, by index; others than stacked ones are not looped over.
    """
    inputs = [graph.inputs[i] for i in sorted(hosted)]
    stacked = {t.shape for op in graph.ops if op.name == "scan" for t in op.inputs[Scan.of(op.params).sliced]}
    leaves = [t for t in inputs if t.rank > 1 and t.shape in stacked and t.times == 1]
    ops, replaced, origin = list(graph.ops), dict[Tensor, Tensor](), dict[Tensor, Origin]()
    for core in _updates(graph, leaves):
        region = _with_gradients(graph, core)
        writer = _Writer(graph, region, inputs, origin)
        replaced |= writer.results
        ops = [op for op in ops if op not in region or is_constant(op)] + writer.ops
    if not replaced:
        return Change(graph, {}, frozenset(hosted))
    outputs = tuple(replaced.get(t, t) for t in graph.outputs)
    order = in_order(ops, {op: i for i, op in enumerate(graph.ops)})
    return Change(Graph(graph.inputs, outputs, order), origin, frozenset(hosted))


def _updates(graph: Graph, leaves: Sequence[Tensor]) -> Iterator[list[Op]]:
    """All that is computed of some leaves, of those together that some op reads both of; nothing of leaves of which not
    all is elementwise."""
    group = {t: n for n, t in enumerate(leaves)}  # of each tensor that is made of leaves
    ops: dict[int, list[Op]] = {n: [] for n in group.values()}
    for op in graph.ops:
        read = sorted({group[t] for t in op.inputs if t in group})
        if not read:
            continue
        first, *others = read
        for n in others:
            group.update((t, first) for t, m in group.items() if m == n)
            ops[first] += ops.pop(n)
        ops[first].append(op)
        group.update(dict.fromkeys(op.outputs, first))
    yield from (found for found in ops.values() if found and all(_is_apart(op, found[0].outputs[0]) for op in found))


def _is_apart(op: Op, like: Tensor) -> bool:
    """Whether an op computes each element of an array of this shape from the same one of its operands."""
    whole = all(t.shape == like.shape or t.rank == 0 for t in op.inputs) and op.outputs[0].shape == like.shape
    return whole and is_pointwise(op)


def _with_gradients(graph: Graph, core: Sequence[Op]) -> list[Op]:
    """An update with what is computed elementwise for it alone, and constants."""
    region, like, kept = set(core), core[0].outputs[0], set(graph.outputs)
    for op in reversed(graph.ops):
        readers = graph.readers.get(op.outputs[0], ()) if len(op.outputs) == 1 else ()
        if not region.isdisjoint(readers):
            alone = region.issuperset(readers) and op.outputs[0] not in kept and op.backward and _is_apart(op, like)
            if alone or (is_constant(op) and op.name == "broadcast_in_dim" and op.outputs[0].shape == like.shape):
                region.add(op)
    return [op for op in graph.ops if op in region]


class _Writer:
    """Writes the scan over layers that does what some ops do. A weight that is updated goes through the loop, which
    writes one layer of it at a time: so it stays in its place.

    **Fields:** `ops`: the scan, and what it needs before; `results`: those of the ops, with what they are now.
    """

    def __init__(
        self, graph: Graph, region: Sequence[Op], leaves: Collection[Tensor], origin: dict[Tensor, Origin]
    ) -> None:
        self.origin, self.source, self.ops = origin, region[-1], list[Op]()
        made = {t: op for op in region for t in op.outputs}
        read = dict.fromkeys(t for op in region for t in op.inputs if t.literal is None and t not in made)
        ends = [t for t in dict.fromkeys(graph.outputs) if t in made]
        own = {t for t in graph.inputs if t in read and t.rank and t not in leaves}
        updated = {w: r for r in ends for w in made[r].inputs if w in own and w.dtype == r.dtype}
        whole = [t for t in read if t.rank == 0]
        cut = [t for t in read if t.rank and t not in updated]
        stacked = [t for t in ends if t not in updated.values()]
        length = self.source.outputs[0].shape[0]
        layers = self._added(lambda: [jnp.arange(length, dtype=jnp.int32)], (), self.ops)
        index = self._fresh(layers, ())
        env = {t: self._fresh(t, t.shape[1:]) for t in (*whole, *cut, *made)}
        before = {w: self._fresh(w, w.shape) for w in updated}
        body = list[Op]()
        for w, x in before.items():
            env[w] = self._added(lambda x, i: [jax.lax.dynamic_index_in_dim(x, i, 0, False)], (x, index), body)
        body += [_of_layer(op, env) for op in region]
        after = list[Tensor]()
        for w, r in updated.items():
            operands = before[w], env[r], index
            after.append(self._added(lambda x, y, i: [jax.lax.dynamic_update_index_in_dim(x, y, i, 0)], operands, body))
        arguments = (*(env[t] for t in whole), *before.values(), index, *(env[t] for t in cut))
        inner = Graph(arguments, (*after, *(env[t] for t in stacked)), body)
        self.results = {t: dataclasses.replace(t) for t in (*updated.values(), *stacked)}
        origin.update((x, t) for t, x in self.results.items())
        given = (*whole, *updated, layers, *cut)
        self.ops.append(
            scan_of(length, len(whole), len(updated), given, tuple(self.results.values()), inner, self.source)
        )

    def _fresh(self, t: Tensor, shape: tuple[int, ...]) -> Tensor:
        """What an iteration has in place of a tensor."""
        found = dataclasses.replace(t, name="", shape=shape)
        self.origin[found] = t
        return found

    def _added(self, fn: Callable[..., Any], operands: tuple[Tensor, ...], ops: list[Op]) -> Tensor:
        """The result of a JAX function, whose ops are added."""
        written, (result,) = computed(fn, operands, self.source)
        key = operands[0] if operands else self.source.outputs[0]
        made = (t for op in written for t in op.outputs)
        self.origin.update((t, ("layer", key, len(ops), i)) for i, t in enumerate(made))
        ops += (dataclasses.replace(op, backward=True) for op in written)
        return result


def _of_layer(op: Op, env: dict[Tensor, Tensor]) -> Op:
    """An op on one layer."""
    params = {**op.params, "shape": op.outputs[0].shape[1:]} if op.name == "broadcast_in_dim" else op.params
    inputs, outputs = tuple(env.get(t, t) for t in op.inputs), tuple(env[t] for t in op.outputs)
    return dataclasses.replace(op, inputs=inputs, outputs=outputs, params=params)
