"""Collectives of a program that compute what another one computes: a compiler may leave them out.

    duplicates(jax.jit(lambda x: (psum(x.sum(0).sum(0)), psum(x.sum()))).lower(x).as_text(), axes)
    # [Collective(kind='all_reduce', axes=('x',), bytes=4, count=1)]

Values are numbered: two operations have one number if they do the same to operands with the same numbers. A reduction
of a reduction has the number of the reduction over both their dimensions, as compilers fold them; what only adds, drops
or reverses dimensions of size 1 (the window of a 1 x 1 convolution, in its gradient) has the number of its operand.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Iterator

from jax.extend.mlir import ir

from unity_jax.aot.collectives import Collective, Key, collective_key, counted, declared_meshes, parse_stablehlo
from unity_jax.pcg.mesh import MeshAxes

UNIQUE = {"stablehlo.optimization_barrier", "stablehlo.custom_call", "stablehlo.while", "stablehlo.case", "func.call"}
"""Operations whose results are taken to differ from all others, though some may not."""


def duplicates(program: str | ir.Module, mesh: MeshAxes) -> list[Collective]:
    """For every collective whose value stands more than once in a block: how often beyond the first."""
    module = parse_stablehlo(program)
    meshes = declared_meshes(module)
    found: Counter[Key] = Counter()
    for block in _blocks(module.operation):
        numbers = _Numbers()
        seen: set[Hashable] = set()
        for op in block.operations:
            number = numbers.add(op.operation)
            if (key := collective_key(op.operation, meshes, mesh)) is not None:
                found[key] += number in seen
                seen.add(number)
    return counted(+found)


def _blocks(op: ir.Operation) -> Iterator[ir.Block]:
    for region in op.regions:
        for block in region:
            yield block
            for inner in block.operations:
                yield from _blocks(inner.operation)


class _Numbers:
    """Numbers of the values of one block; values from outside it, and its arguments, have their own."""

    def __init__(self) -> None:
        self._ids: dict[Hashable, int] = {}
        self._of: dict[ir.Value, int] = {}
        self._reductions: dict[int, tuple[Hashable, ir.Value, tuple[int, ...]]] = {}
        self._fresh = itertools.count()

    def add(self, op: ir.Operation) -> int:
        """Number an operation and its results; the number of the operation."""
        if _is_view(op):
            self._of[op.results[0]] = self._value(op.operands[0])
            return self._of[op.results[0]]
        reduced = self._reduced(op)
        if op.name in UNIQUE:
            key: Hashable = ("unique", next(self._fresh))
        elif reduced is not None:
            way, source, dims = reduced
            key = ("reduction", way, self._typed(source), dims)
        elif op.name == "stablehlo.all_gather":
            key = ("all_gather", str(op.attributes["replica_groups"]), self._value(op.operands[0]), _gathered(op))
        else:
            key = (op.name, _attributes(op), self._regions(op), tuple(self._typed(v) for v in op.operands))
        number = self._ids.setdefault(key, len(self._ids))
        for i, result in enumerate(op.results):
            self._of[result] = self._ids.setdefault((number, i), len(self._ids))
        if reduced is not None:
            self._reductions[self._of[op.results[0]]] = reduced
        return number

    def _value(self, value: ir.Value) -> int:
        return self._of.setdefault(value, self._ids.setdefault(("outside", next(self._fresh)), len(self._ids)))

    def _typed(self, value: ir.Value) -> tuple[int, str]:
        return self._value(value), str(value.type)

    def _regions(self, op: ir.Operation) -> Hashable:
        """The bodies of an operation with their arguments and results by position."""
        made = []
        for block in (block for region in op.regions for block in region):
            places: dict[ir.Value, Hashable] = {argument: ("argument", i) for i, argument in enumerate(block.arguments)}
            for i, inner in enumerate(block.operations):
                operands = tuple(places[v] if v in places else self._typed(v) for v in inner.operands)
                made.append((inner.operation.name, _attributes(inner.operation), operands))
                places.update((r, (i, j)) for j, r in enumerate(inner.results))
        return tuple(made)

    def _reduced(self, op: ir.Operation) -> tuple[Hashable, ir.Value, tuple[int, ...]] | None:
        """How a reduction reduces, what, and over which of its dimensions: through a reduction of a reduction."""
        if op.name != "stablehlo.reduce" or len(op.results) > 1:
            return None
        operand, start = op.operands
        way, dims = (self._regions(op), self._typed(start)), tuple(ir.DenseI64ArrayAttr(op.attributes["dimensions"]))
        inner = self._reductions.get(self._value(operand))
        if inner is None or inner[0] != way or len(_shape(operand)) != len(_shape(inner[1])) - len(inner[2]):
            return way, operand, dims
        left = [d for d in range(len(_shape(inner[1]))) if d not in inner[2]]
        return way, inner[1], tuple(sorted((*inner[2], *(left[d] for d in dims))))


def _shape(value: ir.Value) -> list[int]:
    return list(ir.RankedTensorType(value.type).shape)


def _attributes(op: ir.Operation) -> str:
    return " ".join(sorted(f"{name}={op.attributes[name]}" for name in op.attributes)) + str(
        [r.type for r in op.results]
    )


def _is_view(op: ir.Operation) -> bool:
    """Whether an operation only adds, drops or reverses dimensions of size 1."""
    if op.name == "stablehlo.reverse":
        return all(_shape(op.results[0])[d] == 1 for d in ir.DenseI64ArrayAttr(op.attributes["dimensions"]))
    if op.name not in ("stablehlo.reshape", "stablehlo.broadcast_in_dim"):
        return False
    order = list(ir.DenseI64ArrayAttr(op.attributes["broadcast_dimensions"])) if "broadcast" in op.name else []
    before, after = ([n for n in _shape(v) if n != 1] for v in (op.operands[0], op.results[0]))
    return before == after and order == sorted(order)


def _gathered(op: ir.Operation) -> tuple[tuple[int, ...], int]:
    """The result of an all-gather and its gathered dimension, both without dimensions of size 1."""
    dim, shape = ir.IntegerAttr(op.attributes["all_gather_dim"]).value, _shape(op.results[0])
    return tuple(n for n in shape if n != 1), sum(n != 1 for n in shape[:dim])
