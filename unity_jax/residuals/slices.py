"""The update of stacked state layer by layer: a leaf that holds the state of all layers need not be there as a whole.

    mu', nu', w' = update(mu, nu, w, g)        all [24, 8192, 2048]
    for each of 24 layers                      its [8192, 2048] of each

What is computed of such state must be elementwise, all of it, as are the updates of Adam and of momentum; one that
needs a norm of a weight stays as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator

from unity_jax.ops.rules import is_pointwise
from unity_jax.pcg.graph import Graph, Op, Tensor
from unity_jax.pcg.loops import Scan
from unity_jax.residuals.change import Change, Origin
from unity_jax.residuals.loop import scan_of
from unity_jax.residuals.recompute import is_constant
from unity_jax.rewrite.apply import in_order


def by_layer(graph: Graph, hosted: Collection[int]) -> Change:
    """The graph with the update of stacked inputs as loops over layers; the inputs are on the host.

    **Arguments:** `hosted`: the inputs, by index; others than stacked ones are not looped over.
    """
    origin: dict[Tensor, Origin] = {}
    stacked = {t.shape for op in graph.ops if op.name == "scan" for t in op.inputs[Scan.of(op.params).sliced]}
    inputs = (graph.inputs[i] for i in sorted(hosted))
    leaves = [t for t in inputs if t.rank > 1 and t.shape in stacked and t.times == 1]
    ops, replaced = list(graph.ops), dict[Tensor, Tensor]()
    for core in _updates(graph, leaves):
        region = _with_gradients(graph, core)
        loop, results = _loop(graph, region, origin)
        replaced.update(results)
        ops = [op for op in ops if op not in region or is_constant(op)] + [loop]
    if not replaced:
        return Change(graph, {}, frozenset(hosted))
    outputs = tuple(replaced.get(t, t) for t in graph.outputs)
    order = in_order(ops, {op: i for i, op in enumerate(graph.ops)})
    return Change(Graph(graph.inputs, outputs, order), origin, frozenset(hosted))


def _updates(graph: Graph, leaves: list[Tensor]) -> Iterator[list[Op]]:
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


def _with_gradients(graph: Graph, core: list[Op]) -> list[Op]:
    """An update with what is computed elementwise for it alone, and constants."""
    region, like, kept = set(core), core[0].outputs[0], set(graph.outputs)
    for op in reversed(graph.ops):
        readers = graph.readers.get(op.outputs[0], ()) if len(op.outputs) == 1 else ()
        if not region.isdisjoint(readers):
            alone = region.issuperset(readers) and op.outputs[0] not in kept and op.backward and _is_apart(op, like)
            if alone or (is_constant(op) and op.name == "broadcast_in_dim" and op.outputs[0].shape == like.shape):
                region.add(op)
    return [op for op in graph.ops if op in region]


def _loop(graph: Graph, region: list[Op], origin: dict[Tensor, Origin]) -> tuple[Op, dict[Tensor, Tensor]]:
    """The scan over layers that does what some ops do, and its results in place of theirs."""
    made = {t for op in region for t in op.outputs}
    read = dict.fromkeys(t for op in region for t in op.inputs if t.literal is None and t not in made)
    whole, cut = [t for t in read if t.rank == 0], [t for t in read if t.rank]
    results = [t for t in dict.fromkeys(graph.outputs) if t in made]

    def layer(t: Tensor) -> Tensor:
        return dataclasses.replace(t, name="", shape=t.shape[1:])

    env = {t: layer(t) for t in (*whole, *cut, *made)}
    origin.update((x, ("layer", t)) for t, x in env.items())
    body = [_of_layer(op, env) for op in region]
    inner = Graph(tuple(env[t] for t in (*whole, *cut)), tuple(env[t] for t in results), body)
    outs = {t: dataclasses.replace(t) for t in results}
    origin.update((x, t) for t, x in outs.items())
    length = cut[0].shape[0]
    return scan_of(length, len(whole), 0, (*whole, *cut), tuple(outs.values()), inner, region[-1]), outs


def _of_layer(op: Op, env: dict[Tensor, Tensor]) -> Op:
    """An op on one layer."""
    params = {**op.params, "shape": op.outputs[0].shape[1:]} if op.name == "broadcast_in_dim" else op.params
    inputs, outputs = tuple(env.get(t, t) for t in op.inputs), tuple(env[t] for t in op.outputs)
    return dataclasses.replace(op, inputs=inputs, outputs=outputs, params=params)
