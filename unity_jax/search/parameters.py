"""What experts tell apart in a program: its batch and positions; parameters and state; of parameters those that they
treat in a way of their own: tables of which rows are looked up, and stacks of layers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from unity_jax.ops.follow import Dims
from unity_jax.ops.numbers import is_gather
from unity_jax.pcg.graph import Graph, Op, Tensor
from unity_jax.pcg.loops import Scan
from unity_jax.program import Program
from unity_jax.search.batch import ahead, batch_dims, batch_factors, position_dims
from unity_jax.search.rule_cache import RuleCache


@dataclass(frozen=True, eq=False)
class Roles:
    """What the tensors and ops of a program are to experts, on any mesh.

    **Fields:** `batch`: the dimensions that run over it; `batch_of` and `along`: the factors of each op that the batch,
    and positions, index; `params`: state that the forward pass reads; `state`: the rest of it; `layers`: see `stacked`;
    `tables`: shapes of tables (`looked_up`); `statistics`: what the forward pass sums over the batch, and computes of
    such sums alone: the moments of a batch norm.
    """

    batch: Dims
    batch_of: Mapping[Op, frozenset[int]]
    along: Mapping[Op, frozenset[int]]
    params: frozenset[Tensor]
    state: frozenset[Tensor]
    layers: frozenset[Tensor]
    tables: frozenset[tuple[int, ...]]
    statistics: frozenset[Tensor]

    @staticmethod
    def of(program: Program, rules: RuleCache, ways: int) -> Roles:
        """**Arguments:** `ways`: the number of devices."""
        known = _known.setdefault(program.graph, {})
        if ways not in known:
            known[ways] = _roles(program, rules, ways)
        return known[ways]


_known: WeakKeyDictionary[Graph, dict[int, Roles]] = WeakKeyDictionary()


def _roles(program: Program, rules: RuleCache, ways: int) -> Roles:
    graph, batch = program.graph, batch_dims(program, rules, ways)
    positions = position_dims(program, rules, batch)
    every = [op for op in graph.walk() if not op.bodies]
    batch_of, along = ({op: frozenset(batch_factors(op, rules, of)) for op in every} for of in (batch, positions))
    held = {graph.inputs[i] for i in program.ties.values()}
    params = held & {t for op in graph.walk() if not op.backward for t in op.inputs}
    statistics, batched = set[Tensor](), {t for t, _ in batch}
    for op, _ in ahead(graph):
        of_batch = batch_of[op] or not statistics.isdisjoint(op.inputs)
        if of_batch and held.isdisjoint(op.inputs):
            statistics |= {t for t in op.outputs if t not in batched}
    layers, tables = stacked(graph, {t.shape for t in params}), {t.shape for t in looked_up(graph, params)}
    return Roles(batch, batch_of, along, *map(frozenset, (params, held - params, layers, tables, statistics)))


def looked_up(graph: Graph, params: set[Tensor]) -> set[Tensor]:
    """The parameters of which only rows are read, by index; none, unless they are most of the parameters."""
    read: dict[Tensor, list[Op]] = {}
    for op in graph.ops:
        for t in op.inputs if not op.backward else ():
            read.setdefault(t, []).append(op)

    def only_rows(t: Tensor) -> bool:
        readers = read.get(t, ())
        rows = (
            (is_gather(op) and op.inputs[0] is t and op.inputs[1] is not t)
            or (op.name == "convert_element_type" and only_rows(op.outputs[0]))
            for op in readers
        )
        return t not in graph.outputs and bool(readers) and all(rows)

    found = set(filter(only_rows, params))
    return found if 2 * sum(t.nbytes for t in found) > sum(t.nbytes for t in params) else set()


def stacked(graph: Graph, shapes: Collection[tuple[int, ...]]) -> set[Tensor]:
    """Where scans take one layer of what has one of these shapes, and where they stack such layers up again (their
    gradients): FSDP keeps both sharded, and gathers the weights of one layer at a time.
    """
    found: set[Tensor] = set()
    for op in graph.walk():
        if op.name == "scan":
            roles, (body,) = Scan.of(op.params), op.bodies
            taken = zip(body.inputs[roles.sliced], op.inputs[roles.sliced], strict=True)
            found |= {layer for layer, whole in taken if whole.shape in shapes}
            found |= {whole for whole in op.outputs[roles.stacked] if whole.shape in shapes}
    return found
