"""Terms of a sum that are sums over devices themselves are added first, and reduced once.

    g = add (add d (reduce a)) (reduce b)     ->     g = add d (reduce (add a b))

So are the gradients of a table that is read twice. XLA does it to an addition of two all-reduces, where it finds one
(`AllReduceReassociate`), but after it has looked for scatters into zeros that may go into another array instead: the
gradients of both reads are then in memory at once.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Set
from dataclasses import dataclass

from unity_jax import _compat
from unity_jax.ops.strategies import making
from unity_jax.pcg.graph import Graph, Op, Tensor, with_layout
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.pcg.parallel import Move
from unity_jax.search.rule_cache import RuleCache

ADDS = frozenset({"add", "add_any"})
_REDUCES = frozenset({"reduce", "reduce_scatter"})


@dataclass(frozen=True)
class _Sum:
    """Additions that nobody sees anything of but the result of the last, and what they add, from left to right."""

    ops: list[Op]
    terms: list[Tensor]


def reduced_once(graph: Graph, rules: RuleCache, mesh: MeshAxes) -> Graph:
    """The planned graph, with one reduction of each kind in each of its sums; the same graph where that is so."""
    gone: set[Op] = set()
    instead: dict[Op, list[Op]] = {}
    place: dict[Op, int] = {}
    kept = set(graph.outputs)
    for total in _sums(graph, kept):
        alike: defaultdict[Move, list[Op]] = defaultdict(list)
        for t in total.terms:
            op = graph.producer.get(t)
            alone = t not in kept and len(graph.readers[t]) == 1
            if op is not None and op.move is not None and alone and _may_wait(op.move):
                alike[op.move].append(op)
        together = {move: terms for move, terms in alike.items() if len(terms) > 1}
        if together:
            gone.update(total.ops, *together.values())
            place = place or {op: i for i, op in enumerate(graph.ops)}
            instead |= _rewritten(place, total, together, rules, mesh)
    if not gone:
        return graph
    ops = [new for op in graph.ops for new in instead.get(op, () if op in gone else (op,))]
    return Graph(graph.inputs, graph.outputs, ops)


def _sums(graph: Graph, kept: Set[Tensor]) -> Iterator[_Sum]:
    def is_inside(op: Op) -> bool:
        readers = graph.readers.get(op.outputs[0], [])
        return op.outputs[0] not in kept and len(readers) == 1 and readers[0] in adds

    adds = {op: None for op in graph.ops if _adds(op)}
    inside = set(filter(is_inside, adds))

    for last in (op for op in adds if op not in inside):
        ops, terms, left = [last], list[Tensor](), [*last.inputs]
        while left:
            made = graph.producer.get(t := left.pop())
            if made is not None and made in inside:
                ops.append(made)
                left += made.inputs
            else:
                terms.append(t)
        yield _Sum(ops[::-1], terms[::-1])


def _adds(op: Op) -> bool:
    """Whether it adds arrays that lie alike, none of them a term of a sum over devices, in whatever order one likes."""
    if op.name not in ADDS or op.shard is None:
        return False
    (result,), layout = op.outputs, op.outputs[0].layout
    alike = {(t.shape, t.dtype, t.layout) for t in (*op.inputs, result)}
    return len(alike) == 1 and _compat.is_float(result.dtype) and layout is not None and not layout.partial


def _may_wait(move: Move) -> bool:
    """Whether it reduces what may be added to before."""
    return move.kind in _REDUCES and {kind for _, kind in move.before.partial} == {"sum"}


def _rewritten(
    place: dict[Op, int], total: _Sum, together: dict[Move, list[Op]], rules: RuleCache, mesh: MeshAxes
) -> dict[Op, list[Op]]:
    """The ops of a sum, by the op in whose place they are: terms that are reduced alike are added and reduced where the
    last of them was, the rest is added where the sum was complete."""
    instead: dict[Op, list[Op]] = {}
    reduced: dict[Tensor, Tensor | None] = {}  # what is added in the place of a term, if anything is
    adders = iter(total.ops)
    for move, terms in together.items():
        ops, value = list[Op](), terms[0].inputs[0]
        for term in terms[1:]:
            op = next(adders)
            operands, value = (value, term.inputs[0]), with_layout(value, move.before)
            adds = rules(op)
            both = adds.linear.index(frozenset({0, 1}))
            shard = rules.shard(op, mesh, making(adds, mesh, move.before, both))
            ops.append(dataclasses.replace(op, inputs=operands, outputs=(value,), shard=shard))
        whole, last = with_layout(terms[0].outputs[0], move.after), max(terms, key=place.__getitem__)
        instead[last] = [*ops, dataclasses.replace(last, inputs=(value,), outputs=(whole,))]
        reduced |= {op.outputs[0]: None for op in terms} | {terms[0].outputs[0]: whole}
    values = [v for t in total.terms if (v := reduced.get(t, t)) is not None]
    end, value = total.ops[-1], values[0]
    instead[end] = []
    for term in values[1:]:
        operands, value = (value, term), dataclasses.replace(end.outputs[0])
        instead[end].append(dataclasses.replace(next(adders), inputs=operands, outputs=(value,)))
    return _named(instead, value, end.outputs)


def _named(ops: dict[Op, list[Op]], value: Tensor, outputs: tuple[Tensor, ...]) -> dict[Op, list[Op]]:
    """The same ops, of which the one that makes a value makes these outputs."""
    return {
        place: [dataclasses.replace(op, outputs=outputs) if op.outputs == (value,) else op for op in made]
        for place, made in ops.items()
    }
