"""The backward pass computes some values of the forward pass again, so that they need not be kept for it.

    y = tanh x                      y = tanh x
    ...                             ...
    dx = dy * (1 - y * y)           x', dy' = optimization_barrier x, dy
                                    y' = tanh x'
                                    dx = dy' * (1 - y' * y')

The barrier ties what is computed again to a cotangent, which exists only when the backward pass has come as far: else
the compiler would merge the repetition with the original, or begin with it at once (Chen et al. 2016,
https://arxiv.org/abs/1604.06174; Checkmate, https://arxiv.org/abs/1910.02653). Values that are connected are computed
again together, behind one barrier.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

from unity_jax.pcg.graph import Graph, Op, Tensor
from unity_jax.residuals.change import Change, Origin, made
from unity_jax.residuals.pair import LOSS, Pair, in_loops, in_pairs, pairs
from unity_jax.rewrite.apply import in_order
from unity_jax.trace import has_effects, without_dead_code


class _Part(NamedTuple):
    """Ops that are repeated together, and the cotangent that they wait for."""

    ops: Sequence[Op]
    tie: Tensor


def can_repeat(op: Op) -> bool:
    """Whether an op may be computed again: loops and branches are not, nor what does more than compute, nor all that
    lies between the layers of both passes."""
    return not op.bodies and not has_effects(op) and bool(op.outputs) and op.name != LOSS


def is_constant(op: Op) -> bool:
    """Whether an op makes the same at every step."""
    return all(t.literal is not None for t in op.inputs) and can_repeat(op)


def recomputed(graph: Graph, values: Set[Tensor], written: Set[Tensor]) -> Change:
    """The graph whose backward pass computes these values of the forward pass again, from all others that it reads.

    Values of the layers of a scan are computed again in the scan of its backward pass, of what is stacked then. What no
    cotangent can be told of that exists before it is read stays as it is.

    **Arguments:** `values`: made by ops that `can_repeat`; `written`: tensors that are in memory at some time, of which
    a cotangent is held back at no cost.
    """

    return in_loops(graph, lambda inside: _with_layers(inside, values, written))


def _with_layers(graph: Graph, values: Set[Tensor], written: Set[Tensor]) -> Change:
    """The same, of a graph without the loops over microbatches in it."""
    if values.isdisjoint(made(graph)):
        return Change(graph, {})

    def within(pair: Pair) -> Change | None:
        own = {t for op in pair.joined.ops for t in op.outputs}
        again = values & own.difference(pair.carried)
        return _recomputed(pair.joined, again, written) if again else None

    layers = in_pairs(graph, pairs(graph), within)
    found = _recomputed(layers.graph, values, written)
    return Change(found.graph, {**layers.origin, **found.origin})


def _recomputed(graph: Graph, values: Set[Tensor], written: Set[Tensor]) -> Change:
    """The same, of the ops of a graph itself."""
    copies: dict[Tensor, Tensor] = {}
    origin: dict[Tensor, Origin] = {}
    ops: list[Op] = []
    held: dict[Tensor, list[Tensor]] = {}  # by the cotangent of each barrier, what it holds back
    passed: dict[tuple[Tensor, Tensor], Tensor] = {}

    def hold(t: Tensor, tie: Tensor) -> Tensor:
        if (t, tie) not in passed:
            passed[t, tie] = fresh = _fresh(t)
            origin[fresh] = t
            held.setdefault(tie, []).append(t)
        return passed[t, tie]

    for part in _parts(graph, values, written):
        own: dict[Tensor, Tensor] = {}
        for op in part.ops:
            own.update((t, _fresh(t)) for t in op.outputs)
            reads = [t for t in op.inputs if t.literal is None]
            lasting = {t for t in reads if t not in graph.producer}  # arguments are there all the time
            behind = {t for t in reads if t not in own and (t not in lasting or len(lasting) == len(reads))}
            inputs = tuple(own.get(t) or (hold(t, part.tie) if t in behind else t) for t in op.inputs)
            outputs = tuple(own[t] for t in op.outputs)
            ops.append(dataclasses.replace(op, inputs=inputs, outputs=outputs, backward=True))
        origin.update((copy, t) for t, copy in own.items())
        copies.update((t, copy) for t, copy in own.items() if t in values)
    ties = {tie: hold(tie, tie) for tie in list(held)}
    barriers = [
        Op("optimization_barrier", tuple(ts), tuple(passed[t, tie] for t in ts), backward=True)
        for tie, ts in held.items()
    ]
    late = {**copies, **ties}
    kept = [op.reading(late) if op.backward else op for op in graph.ops]
    order = in_order([*kept, *barriers, *ops], {op: i for i, op in enumerate(graph.ops)})
    return Change(without_dead_code(Graph(graph.inputs, graph.outputs, order)), origin)


def _fresh(t: Tensor) -> Tensor:
    return dataclasses.replace(t, name="", enters=0, leaves=0)


def _parts(graph: Graph, values: Set[Tensor], written: Set[Tensor]) -> list[_Part]:
    """What is to be repeated, in parts that share nothing."""
    needed = _needed(graph, values)
    part: dict[Op, int] = {}
    members: dict[int, list[Op]] = {}
    for op in (op for op in graph.ops if op in needed):
        before = {part[graph.producer[t]] for t in op.inputs if t in values}
        first = min(before, default=len(part))
        members.setdefault(first, [])
        for other in sorted(before - {first}):
            part.update(dict.fromkeys(members[other], first))
            members[first] += members.pop(other)
        part[op] = first
        members[first].append(op)
    position, level = {op: i for i, op in enumerate(graph.ops)}, _levels(graph)
    found = []
    for ops in members.values():
        made = {t for op in ops for t in op.outputs if t in values}
        tie = _tie(graph, made, written, level)
        if tie is not None:
            found.append(_Part(sorted(ops, key=position.__getitem__), tie))
    return _apart(graph, values, found)


def _apart(graph: Graph, values: Set[Tensor], parts: Sequence[_Part]) -> list[_Part]:
    """Parts without those that would wait for themselves: their cotangent is computed of what another part computes
    again, which waits for one that is computed of theirs."""
    made = {t: 1 << i for i, part in enumerate(parts) for op in part.ops for t in op.outputs if t in values}
    of: dict[Tensor, int] = {}  # the parts that a cotangent is computed of, a bit each
    for op in (op for op in graph.ops if op.backward):
        bits = functools.reduce(int.__or__, (made.get(t, 0) | of.get(t, 0) for t in op.inputs), 0)
        of.update(dict.fromkeys(op.outputs, bits))
    needs, kept = [of.get(part.tie, 0) for part in parts], 0

    def is_circular(i: int) -> bool:
        known, waiting = 0, needs[i] & kept
        while waiting:
            j = waiting.bit_length() - 1
            if needs[j] >> i & 1:
                return True
            known |= 1 << j
            waiting = (waiting | needs[j] & kept) & ~known
        return False

    for i in range(len(parts)):
        kept |= 0 if is_circular(i) else 1 << i
    return [part for i, part in enumerate(parts) if kept >> i & 1]


def _needed(graph: Graph, values: Set[Tensor]) -> set[Op]:
    """The ops that make these values, those that the backward pass reads and what they are made of."""
    found: set[Op] = set()
    waiting = [t for op in graph.ops if op.backward for t in op.inputs if t in values]
    while waiting:
        op = graph.producer[waiting.pop()]
        if op not in found:
            found.add(op)
            waiting += [t for t in op.inputs if t in values]
    return found


def _tie(graph: Graph, values: Set[Tensor], written: Set[Tensor], level: Mapping[Tensor, int]) -> Tensor | None:
    """A cotangent that the first readers of some values in the backward pass need as well: of what does not depend on
    the values itself, and comes after them, the last one, as it is in memory."""
    after = set(values)
    for op in graph.ops:
        if op.backward and not after.isdisjoint(op.inputs):
            first = max(level[t] for t in op.inputs if t in after)
            late = [t for t in op.inputs if t not in after and _is_late(graph, t) and level[t] > first]
            if late:
                return _in_memory(graph, max(late, key=level.__getitem__), written, first, level)
            after.update(op.outputs)
    return None


def _in_memory(graph: Graph, t: Tensor, written: Set[Tensor], first: int, level: Mapping[Tensor, int]) -> Tensor:
    """What is in memory of the values that a cotangent is computed of; itself if none is."""
    at = t
    while at not in written:
        late = [u for u in graph.producer[at].inputs if _is_late(graph, u) and level[u] > first]
        if not late:
            return t
        at = max(late, key=level.__getitem__)
    return at


def _is_late(graph: Graph, t: Tensor) -> bool:
    return t in graph.producer and graph.producer[t].backward


def _levels(graph: Graph) -> dict[Tensor, int]:
    """Of each tensor how many ops are on the longest way to it: constants and casts of arguments are there early."""
    found = dict.fromkeys(graph.inputs, 0)
    for op in graph.ops:
        found.update(dict.fromkeys(op.outputs, 1 + max((found.get(t, 0) for t in op.inputs), default=0)))
    return found
