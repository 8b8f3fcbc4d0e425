"""Collectives as rings: a contraction and the collective beside it, as partial contractions beside permutes.

    x' = combine[y] x             x_1 = shift x         x_2 = shift x_1         x_3 = shift x_2
    z = dot_general x' w     ->   z_0 = dot x w         z_1 = dot x_1 w ...     z = z_0, z_1, z_2, z_3 in their places

A shard of the gathered operand makes a slice of the result or, where the gathered dimension is contracted, a term of
it; of a result that is reduce-scattered, the partial sums travel. No permute waits for the contraction beside it (Wang
et al., ASPLOS 2023, https://doi.org/10.1145/3567955.3567959). What the ops wait for besides is what makes XLA run them
so: as compiled for v5e:2x4 and h100:8, every permute is started and awaited around a contraction of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np

from unity_jax import _compat
from unity_jax.machine.machine import Machine
from unity_jax.network.ring import ring_of
from unity_jax.ops import ring as local
from unity_jax.ops.ring import Chunks
from unity_jax.ops.rule import Shard
from unity_jax.ops.rules import rule_of
from unity_jax.pcg.graph import Graph, Op, Tensor, barrier
from unity_jax.pcg.layout import Layout
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.pcg.parallel import Move, Shift
from unity_jax.search.limits import LIMITS

Place = tuple[Op, int]
"""A contraction of the traced program and which of its operands is gathered; `RESULT`: its result is scattered."""

RESULT = 2


@dataclass(frozen=True, eq=False)
class Match:
    """A collective that can run as a ring, and the contractions around it with the side on which it is."""

    collective: Op
    products: tuple[tuple[Op, int], ...]

    @property
    def places(self) -> tuple[Place, ...]:
        return tuple((op.traced, side) for op, side in self.products if op.traced is not None)


def matches(graph: Graph, mesh: MeshAxes) -> Iterator[Match]:
    """The collectives of a planned graph (its bodies not included) that can run as rings: all-gathers that only
    contractions read, and reduce-scatters of what is nothing but the result of one."""
    kept = set(graph.outputs)
    for op in graph.ops:
        move = op.move
        if move is None or move.kind not in ("combine", "reduce_scatter"):
            continue
        if move.kind == "combine":
            found = [(r, r.inputs.index(op.outputs[0])) for r in graph.readers.get(op.outputs[0], ())]
            alone = op.outputs[0] not in kept
        else:
            maker = graph.producer.get(op.inputs[0])
            found = [(maker, RESULT)] if maker is not None else []
            alone = op.inputs[0] not in kept and len(graph.readers[op.inputs[0]]) == 1
        products = dict(found)
        splits = _is_even(op, move, mesh) and all(_splits(r, side, move, mesh) for r, side in products.items())
        if found and alone and len(products) == len(found) and splits:
            yield Match(op, tuple(found))


def _is_even(op: Op, move: Move, mesh: MeshAxes) -> bool:
    """Whether the shards are equal, without padding."""
    assert move.dim is not None
    n, size = mesh.size(move.axes), op.inputs[0].shape[move.dim]
    divided = size % mesh.size({*move.before.dims[move.dim], *move.after.dims[move.dim]}) == 0
    return 1 < n <= LIMITS.ring_shards and divided


def _splits(op: Op, side: int, move: Move, mesh: MeshAxes) -> bool:
    """Whether an op is a contraction that can be computed shard by shard along the dimension that is gathered or
    scattered."""
    if op.name != "dot_general" or op.shard is None or op.traced is None:
        return False
    if not (op.params["precision"] is None or isinstance(op.params["precision"], tuple)):
        return False  # a `DotAlgorithm` says how sums are accumulated
    return bool(_factor(op, side, move)) and op.outputs[0].rank > 0


def _factor(op: Op, side: int, move: Move) -> tuple[int, ...]:
    """The factor of the dimension that is gathered or scattered; none if a shard of it is a single element."""
    rule = op.shard.rule
    found = (*rule.operands, *rule.results)[side][move.dim]
    n = op.shard.mesh.size(move.axes)
    return tuple(f for f in found if rule.factors[f].size > n)


def decompose(graph: Graph, chosen: Collection[Place], mesh: MeshAxes, machine: Machine) -> Graph:
    """A planned graph with these collectives as rings, those of its loops and branches too. A contraction takes part
    in one ring, the first."""
    if not chosen:
        return graph
    found, used = [], set[Op]()
    for match in matches(graph, mesh):
        ops = {op for op, _ in match.products}
        if used.isdisjoint(ops) and all(place in chosen for place in match.places):
            used |= ops
            found.append(match)
    writer = _Writer(mesh, machine)
    gathered = {m.collective: m for m in found if m.collective.name == "combine"}
    scattered = {m.products[0][0]: m for m in found if m.collective.name == "reduce_scatter"}
    moved = {m.collective for m in scattered.values()}
    of_product = {op: (m, side) for m in gathered.values() for op, side in m.products}
    for op in graph.ops:
        if op in of_product:
            match, side = of_product[op]
            writer.gathered(op, side, match.collective)
        elif op in scattered:
            writer.scattered(op, scattered[op].collective)
        elif op.bodies:
            bodies = tuple(decompose(body, chosen, mesh, machine) for body in op.bodies)
            writer.ops.append(dataclasses.replace(op, bodies=bodies))
        elif op not in moved and op not in gathered:
            writer.ops.append(op)
    return Graph(graph.inputs, graph.outputs, writer.ops)


def _distances(n: int, both: bool) -> list[int]:
    """How far away the other shards are, nearest first: `both` ahead and behind in turns, or all ahead."""
    return [(i // 2 + 1) * (-1 if i % 2 else 1) for i in range(n - 1)] if both else list(range(1, n))


class _Writer:
    """Writes the ops of rings."""

    def __init__(self, mesh: MeshAxes, machine: Machine) -> None:
        self.mesh, self.machine = mesh, machine
        self.ops: list[Op] = []
        self.shards: dict[Op, dict[int, Tensor]] = {}  # of each all-gather, by how far away they come from

    def _shift(self, x: Tensor, move: Move, by: int, of: str, index: int, backward: bool) -> Tensor:
        """`x` of the neighbour. `index` of the pass among those of the ring: where it has two directions, the first
        and the second run at once, the third and the fourth, ..."""
        assert x.layout is not None
        ring = ring_of(self.machine, self.mesh, move.axes)
        paired = ring.ways == 2 and (index % 2 == 1 or index + 1 < len(ring.members) - 1)
        moved = dataclasses.replace(x, name="", literal=None)
        shift = Shift("shift", move.axes, move.dim, None, x.layout, x.layout, ring.members, by, of, 1 + paired)
        self.ops.append(Op("shift", (x,), (moved,), backward=backward, move=shift))
        return moved

    def gathered(self, op: Op, side: int, gather: Op) -> None:
        """A contraction with a gathered operand: of each shard, a slice of the result or a term of it.

        A shard is passed on when the product before its own is there, so that each pass is beside one product: XLA:GPU
        would put several products beside the last passes, and none beside the first. Other contractions of the same
        operand use the shards of the first.
        """
        move = gather.move
        assert move is not None
        part = _Part.of(op, side, move, self.mesh, summed=True)
        ring = ring_of(self.machine, self.mesh, move.axes)
        order = [0, *_distances(len(ring.members), ring.ways == 2)]
        passes = gather not in self.shards
        shards = self.shards.setdefault(gather, {0: gather.inputs[0]})
        made: Tensor | None = None
        for i, d in enumerate(order):
            x = shards[d]
            if made is not None:
                x, made = self._held((x, made), op)
            for step in (1, -1) if passes else ():
                if d * step >= 0 and d + step in order:
                    index = order.index(d + step) - 1
                    shards[d + step] = self._shift(x, move, -step, "all_gather", index, gather.backward)
            term = self._product(op, part, {side: x}, ring.ahead(d), move.axes)
            last = i + 1 == len(order)
            if part.result_dim < 0:
                exact = last and part.result.dtype == op.outputs[0].dtype
                made = term if made is None else self._added(made, term, op.outputs[0] if exact else None, op)
            else:
                if made is None:
                    made = dataclasses.replace(op.outputs[0], name="")
                    self.ops.append(local.empty(made, op, self.mesh))
                whole = op.outputs[0] if last else dataclasses.replace(op.outputs[0], name="")
                where = Chunks(part.result_dim, move.axes, ring.ahead(d))
                self.ops.append(local.put(made, term, whole, where, op, self.mesh))
                made = whole
        if made is not op.outputs[0]:
            assert made is not None
            self.ops.append(local.convert(made, op.outputs[0], op, self.mesh))

    def scattered(self, op: Op, scatter: Op) -> None:
        """A contraction whose result is reduce-scattered: partial sums travel to where they belong, and every device
        adds its term to those that it passes on.

        They come from both sides in turns, whatever the network: XLA adds a term to the sum that arrived as part of
        the product, which then waits for that sum, while the other one travels.
        """
        move = scatter.move
        assert move is not None
        part = _Part.of(op, RESULT, move, self.mesh)
        ring = ring_of(self.machine, self.mesh, move.axes)
        sliced = next(i for i, dim in enumerate(part.dims) if dim >= 0)
        sums: dict[int, Tensor] = {}
        for i, d in reversed(list(enumerate(_distances(len(ring.members), both=True)))):
            step = 1 if d > 0 else -1
            total = self._product(op, part, {}, ring.ahead(d), move.axes)
            if step in sums:
                total = self._added(sums[step], total, None, op)
            # XLA:GPU merges products that share an operand (`DotMerger`), unless one follows the other.
            x, total = self._held((op.inputs[sliced], total), op)
            op = dataclasses.replace(op, inputs=(*op.inputs[:sliced], x, *op.inputs[sliced + 1 :]))
            sums[step] = self._shift(total, move, step, "reduce_scatter", i, scatter.backward)
        made = self._product(op, part, {}, ring.ahead(0), move.axes)
        if -1 in sums:
            made = self._added(sums[-1], made, None, op)
        # The last sum to arrive is added by itself, so that the product does not wait for it.
        (made,) = self._held((made,), op)
        self._added(sums[1], made, scatter.outputs[0], op)

    def _held(self, tensors: tuple[Tensor, ...], op: Op) -> tuple[Tensor, ...]:
        """These tensors, for ops that wait for all of them."""
        waiting = barrier(tensors, op.backward)
        self.ops.append(waiting)
        return waiting.outputs

    def _product(
        self, op: Op, part: _Part, shards: dict[int, Tensor], chunk: tuple[int, ...], axes: tuple[str, ...]
    ) -> Tensor:
        """The partial contraction for one chunk; `shards`: operands that are that chunk already."""
        operands = []
        for i, (t, small, dim) in enumerate(zip(op.inputs, part.shard.op.inputs, part.dims, strict=True)):
            if i not in shards and dim >= 0:
                taken = dataclasses.replace(small, layout=part.shard.operand_layouts[i])
                self.ops.append(local.take(t, taken, Chunks(dim, axes, chunk), op, self.mesh))
                operands.append(taken)
            else:
                operands.append(shards.get(i, t))
        made = dataclasses.replace(part.result)
        self.ops.append(
            dataclasses.replace(
                op, inputs=tuple(operands), outputs=(made,), params=part.shard.op.params, shard=part.shard
            )
        )
        return made

    def _added(self, x: Tensor, y: Tensor, result: Tensor | None, op: Op) -> Tensor:
        made = dataclasses.replace(y) if result is None else result
        self.ops.append(local.add(x, y, made, op, self.mesh))
        return made


@dataclass(frozen=True, eq=False)
class _Part:
    """A contraction over one chunk of a factor.

    **Fields:** `shard`: how it is split; `dims`: the dimension of each operand that is in chunks, -1 for none;
    `result_dim`: that of the result; `result`: the layout and dtype of what it makes.
    """

    shard: Shard
    dims: tuple[int, ...]
    result_dim: int
    result: Tensor

    @staticmethod
    def of(op: Op, side: int, move: Move, mesh: MeshAxes, summed: bool = False) -> _Part:
        """The part of one shard. `summed`: terms of a result in a narrow type are added in the type in which the
        contraction adds, float32."""
        (factor,), n = _factor(op, side, move), mesh.size(move.axes)
        rule = op.shard.rule
        *dims, result_dim = (
            next((d for d, fs in enumerate(of) if factor in fs), -1) for of in (*rule.operands, *rule.results)
        )
        *operands, made = (
            Tensor(tuple(size // n if d == dim else size for d, size in enumerate(t.shape)), t.dtype)
            for t, dim in zip((*op.inputs, *op.outputs), (*dims, result_dim), strict=True)
        )
        params = op.params
        if summed and result_dim < 0 and _compat.is_float(made.dtype) and made.itemsize == 2:
            made.dtype = np.dtype("float32")
            params = {**params, "preferred_element_type": made.dtype}
        small = Op(op.name, tuple(operands), (made,), params, eqn=op.eqn, callers=op.callers)
        shard = Shard(small, rule_of(small), mesh, op.shard.strategy)
        layout = shard.result_layouts[0]
        if side == RESULT:  # the sum over these axes is what the ring makes
            layout = Layout(layout.dims, tuple((a, r) for a, r in layout.partial if a not in move.axes))
        return _Part(shard, tuple(dims), result_dim, dataclasses.replace(made, layout=layout))
