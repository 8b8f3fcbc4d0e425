"""Rewriting a graph: what a match found is replaced by the rule's target."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Mapping, Sequence

from unity_jax.pcg.graph import Graph, Op, Tensor
from unity_jax.rewrite.dims import CannotEmit
from unity_jax.rewrite.emit import emit
from unity_jax.rewrite.find import Match
from unity_jax.rewrite.view import View
from unity_jax.trace import has_effects, without_dead_code


def rewritten(graph: Graph, found: Sequence[Match], view: View) -> tuple[Graph, frozenset[Op]]:
    """The graph with every match replaced, and the ops that are new.

    **Arguments:** `found`: matches in this graph of which none has a result that another has.
    **Raises:** `CannotEmit` where a target does not exist for these tensors, or needs what depends on its own results.
    """
    replaced: dict[Tensor, Tensor] = {}
    fresh: list[Op] = []
    for match in found:
        target, inputs = emit(match, view)
        for t in inputs:
            while (op := view.virtual(t)) is not None and op not in fresh:
                fresh.append(op)
                t = op.inputs[-1]
        fresh += _spliced(target, inputs, match, view, replaced)
    dropped = {view.maker[t] for t in replaced if all(o in replaced for o in view.maker[t].outputs)}
    ops = _renamed([op for op in graph.ops if op not in dropped] + fresh, replaced)
    ops = _without_copies(ops, len(graph.ops) - len(dropped), replaced)
    outputs = tuple(_final(t, replaced) for t in graph.outputs)
    result = without_dead_code(Graph(graph.inputs, outputs, _in_order(ops, {op: i for i, op in enumerate(graph.ops)})))
    made = {t for op in fresh for t in op.outputs}
    return result, frozenset(op for op in result.ops if any(t in made for t in op.outputs))


def _spliced(
    target: Graph, inputs: Sequence[Tensor], match: Match, view: View, replaced: dict[Tensor, Tensor]
) -> list[Op]:
    """The ops of a target over the tensors of the graph; its results are noted as what replaces the roots.

    They belong to the phase, and to the user's line, of the ops that they replace.
    """
    makers = [view.maker[root.tensor] for root in match.roots]
    names = dict(zip(target.inputs, inputs, strict=True))
    for root, t in zip(match.roots, target.outputs, strict=True):
        replaced[root.tensor] = names.get(t, t)
    late = any(op.backward for op in makers)
    return [
        dataclasses.replace(
            op,
            inputs=tuple(names.get(t, t) for t in op.inputs),
            eqn=op.eqn
            and op.eqn.replace(source_info=makers[0].eqn.source_info if makers[0].eqn else op.eqn.source_info),
            callers=makers[0].callers,
            backward=late,
        )
        for op in target.ops
    ]


def _final(t: Tensor, replaced: Mapping[Tensor, Tensor]) -> Tensor:
    while t in replaced:
        t = replaced[t]
    return t


def _renamed(ops: Sequence[Op], replaced: Mapping[Tensor, Tensor]) -> list[Op]:
    found = []
    for op in ops:
        inputs = tuple(_final(t, replaced) for t in op.inputs)
        same = all(a is b for a, b in zip(inputs, op.inputs, strict=True))
        found.append(op if same else dataclasses.replace(op, inputs=inputs))
    return found


def _without_copies(ops: Sequence[Op], old: int, replaced: dict[Tensor, Tensor]) -> list[Op]:
    """Without new ops (those from `old` on) that compute what another op computes."""
    known: dict[object, Op] = {}
    kept = []
    for i, op in enumerate(ops):
        if i >= old:
            (op,) = _renamed([op], replaced)
        if op.bodies or op.name.startswith("random") or has_effects(op):
            kept.append(op)
            continue
        key = (op.signature, tuple(id(t) for t in op.inputs if t.literal is None))
        same = known.setdefault(key, op)
        if same is op or i < old:
            kept.append(op)
        else:
            replaced.update(zip(op.outputs, same.outputs, strict=True))
    return _renamed(kept, replaced)


def _in_order(ops: Sequence[Op], place: Mapping[Op, int]) -> list[Op]:
    """Ops after what they read, otherwise as near to the order of the program as can be: new ones as late as their
    readers allow."""
    maker = {t: i for i, op in enumerate(ops) for t in op.outputs}
    before = [{maker[t] for t in op.inputs if t in maker} for op in ops]
    after: list[list[int]] = [[] for _ in ops]
    for i, needs in enumerate(before):
        for j in needs:
            after[j].append(i)
    outputs = {t: place[op] for op in place for t in op.outputs}
    rank = [min((outputs[t] for t in op.outputs if t in outputs), default=-1) for op in ops]
    for i in reversed(range(len(ops))):  # a new op goes where its first reader is
        if rank[i] < 0:
            rank[i] = min((rank[j] for j in after[i] if rank[j] >= 0), default=len(place))
    waits = [len(needs) for needs in before]
    ready = [(rank[i], i) for i, n in enumerate(waits) if n == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        _, i = heapq.heappop(ready)
        order.append(ops[i])
        for j in after[i]:
            waits[j] -= 1
            if waits[j] == 0:
                heapq.heappush(ready, (rank[j], j))
    if len(order) < len(ops):
        raise CannotEmit("the target needs what depends on its own results")
    return order
