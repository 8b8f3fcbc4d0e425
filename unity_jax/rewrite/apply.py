"""Rewriting a graph: what a match found is replaced by the rule's target."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from unity_jax.pcg.graph import Graph, Op, Tensor
from unity_jax.pcg.topological import topological
from unity_jax.rewrite.bind import Match, sums
from unity_jax.rewrite.dims import CannotEmit
from unity_jax.rewrite.emit import emit
from unity_jax.rewrite.view import View, computes
from unity_jax.trace import has_effects, without_dead_code


def rewritten(graph: Graph, found: Sequence[Match], view: View) -> tuple[Graph, frozenset[Op]]:
    """The graph with every match replaced, and the ops that are new.

    **Arguments:** `found`: matches in this graph of which none has a result that another has.
    **Raises:** `CannotEmit` where a target does not exist for these tensors, or needs what depends on its own results.
    """
    replaced: dict[Tensor, Tensor] = {}
    fresh: list[Op] = []
    for match in found:
        new, results = target_ops(match, view)
        fresh += [op for op in new if op not in fresh]
        replaced.update(results)
    dropped = {view.maker[t] for t in replaced if all(o in replaced for o in view.maker[t].outputs)}
    ops = flattened(_renamed([op for op in graph.ops if op not in dropped] + fresh, replaced))
    ops = _without_copies(ops, len(graph.ops) - len(dropped), replaced)
    outputs = tuple(_final(t, replaced) for t in graph.outputs)
    result = without_dead_code(Graph(graph.inputs, outputs, in_order(ops, {op: i for i, op in enumerate(graph.ops)})))
    made = {t for op in fresh for t in op.outputs}
    return result, frozenset(op for op in result.ops if not made.isdisjoint(op.outputs))


def target_ops(match: Match, view: View) -> tuple[list[Op], dict[Tensor, Tensor]]:
    """The ops of a match's target over the tensors of the graph, and what replaces the roots.

    They belong to the phase, and to the user's line, of the ops that they replace. What is concatenated is so in the
    order in which the graph has it already, if it has; otherwise what is a concatenation comes first, so that merging
    the same siblings anywhere else gives the same order. Raises `CannotEmit`.
    """
    ways = [_spliced(match, view, turned) for turned in ((False, True) if sums(match.rule) else (False,))]
    ops, results = min(
        ways, key=lambda way: (len(unknown(flattened(way[0], view.maker), view)), _extends(way[0], view))
    )
    return flattened(ops, view.maker), results


def unknown(ops: Sequence[Op], view: View) -> list[Op]:
    """Those ops that compute what the graph does not compute already."""
    same: dict[Tensor, Tensor] = {}
    found = []
    for op in ops:
        (op,) = _renamed([op], same)
        known = view.computing(op)
        if known is None:
            found.append(op)
        else:
            same.update(zip(op.outputs, known.outputs, strict=True))
    return found


def _extends(ops: Sequence[Op], view: View) -> int:
    """How many concatenations put something before one that there is."""
    joins = [[view.maker.get(t) for t in op.inputs] for op in ops if op.name == "concatenate"]
    before = [[op is not None and op.name == "concatenate" for op in makers] for makers in joins]
    return sum(is_joined[-1] and not is_joined[0] for is_joined in before)


def _spliced(match: Match, view: View, turned: bool) -> tuple[list[Op], dict[Tensor, Tensor]]:
    target, inputs = emit(match, view, turned)
    ops: list[Op] = []
    for t in inputs:
        while (op := view.virtual(t)) is not None:
            ops.append(op)
            t = op.inputs[-1]
    makers = [view.maker[root.tensor] for root in match.roots]
    names, times = dict(zip(target.inputs, inputs, strict=True)), match.roots[0].tensor.times
    names.update((t, dataclasses.replace(t, times=times)) for op in target.ops for t in op.outputs)
    late = any(op.backward for op in makers)
    for op in target.ops:
        source = makers[0].eqn.source_info if makers[0].eqn else op.eqn.source_info
        made = dataclasses.replace(
            op,
            inputs=tuple([names.get(t, t) for t in op.inputs]),
            outputs=tuple([names[t] for t in op.outputs]),
            eqn=op.eqn and op.eqn.replace(source_info=source),
            callers=makers[0].callers,
            backward=late,
        )
        made.__dict__["signature"] = op.signature  # its operands have the same types
        ops.append(made)
    results = {r.tensor: names.get(t, t) for r, t in zip(match.roots, target.outputs, strict=True)}
    for root, t in results.items():
        t.enters, t.leaves = t.enters or root.enters, t.leaves or root.leaves
    return ops, results


def flattened(ops: Sequence[Op], maker: Mapping[Tensor, Op] = MappingProxyType({})) -> list[Op]:
    """A concatenation of concatenations as one, and a slice of a slice: three siblings are merged two at a time.

    **Arguments:** `maker`: what makes tensors that none of these ops makes.
    """
    made = {t: op for op in ops if op.name in _FLATTENED for t in op.outputs}

    def flat(op: Op) -> Op:
        before = [made.get(t) or maker.get(t) for t in op.inputs]
        if op.name == "slice" and (inner := before[0]) is not None and _follows(op, inner):
            return flat(_slice_of_slice(op, inner))
        if op.name == "concatenate" and any(inner is not None and _joins(op, inner) for inner in before):
            parts = (i.inputs if i and _joins(op, i) else (t,) for t, i in zip(op.inputs, before, strict=True))
            return flat(dataclasses.replace(op, inputs=tuple(t for part in parts for t in part)))
        return op

    return [flat(op) if op.name in _FLATTENED else op for op in ops]


_FLATTENED = ("slice", "concatenate")


def _follows(op: Op, inner: Op) -> bool:
    return inner.name == "slice" and not any(s != 1 for o in (op, inner) for s in o.params["strides"] or ())


def _joins(op: Op, inner: Op) -> bool:
    return inner.name == "concatenate" and inner.params["dimension"] == op.params["dimension"]


def _slice_of_slice(op: Op, inner: Op) -> Op:
    first = inner.params["start_indices"]
    moved = {k: tuple(map(sum, zip(first, op.params[k], strict=True))) for k in ("start_indices", "limit_indices")}
    return dataclasses.replace(op, inputs=inner.inputs, params={**op.params, **moved})


def _final(t: Tensor, replaced: Mapping[Tensor, Tensor]) -> Tensor:
    while t in replaced:
        t = replaced[t]
    return t


def _renamed(ops: Sequence[Op], replaced: Mapping[Tensor, Tensor]) -> list[Op]:
    names = replaced.keys()
    return [
        op
        if names.isdisjoint(op.inputs)
        else dataclasses.replace(op, inputs=tuple(_final(t, replaced) for t in op.inputs))
        for op in ops
    ]


def _without_copies(ops: Sequence[Op], old: int, replaced: dict[Tensor, Tensor]) -> list[Op]:
    """Without new ops (those from `old` on) that compute what another op computes."""
    known: dict[object, Op] = {}
    kept, new = [], {op.name for op in ops[old:]}
    for i, op in enumerate(ops):
        if i >= old:
            (op,) = _renamed([op], replaced)
        if op.name not in new or op.bodies or op.name.startswith("random") or has_effects(op):
            kept.append(op)
            continue
        key = computes(op)
        same = known.setdefault(key, op)
        if same is op or i < old:
            kept.append(op)
        else:
            replaced.update(zip(op.outputs, same.outputs, strict=True))
    return _renamed(kept, replaced) if len(kept) < len(ops) else kept


def in_order(ops: Sequence[Op], place: Mapping[Op, int]) -> list[Op]:
    """Ops after what they read, otherwise as near to the order of the program as can be: new ones as late as their
    readers allow."""
    maker = {t: i for i, op in enumerate(ops) for t in op.outputs}
    moved = {t for op in ops if op not in place for t in op.outputs}
    at = {t: i for op, i in place.items() for t in op.outputs if t in moved}
    rank = [place[op] if op in place else min([at[t] for t in op.outputs if t in at], default=-1) for op in ops]
    new = [i for i, r in enumerate(rank) if r < 0]
    made, readers = {t: i for i in new for t in ops[i].outputs}, dict[int, list[int]]()
    for j, op in enumerate(ops) if made else ():
        if not made.keys().isdisjoint(op.inputs):
            for i in {made[t] for t in op.inputs if t in made}:
                readers.setdefault(i, []).append(j)
    for i in reversed(new):  # a new op goes where its first reader is, ahead of it
        rank[i] = min((rank[j] for j in readers.get(i, ()) if rank[j] >= 0), default=len(place))
    ahead = dict.fromkeys(new, 0)
    order = sorted(range(len(ops)), key=lambda i: (rank[i], ahead.get(i, 1), i))
    return [ops[i] for i in (order if _is_possible(order, ops, maker) else _waiting(rank, ops, maker))]


def _is_possible(order: Sequence[int], ops: Sequence[Op], maker: Mapping[Tensor, int]) -> bool:
    """Whether each op comes after what it reads."""
    turn = [0] * len(ops)
    for n, i in enumerate(order):
        turn[i] = n
    return all(turn[j] < n for n, i in enumerate(order) for t in ops[i].inputs if (j := maker.get(t, -1)) >= 0)


def _waiting(rank: Sequence[int], ops: Sequence[Op], maker: Mapping[Tensor, int]) -> list[int]:
    """Always the op of the lowest rank of those that wait for nothing more."""
    before = [{maker[t] for t in op.inputs if t in maker} for op in ops]
    order = topological(before, rank)
    if len(order) < len(ops):
        raise CannotEmit("the target needs what depends on its own results")
    return order
