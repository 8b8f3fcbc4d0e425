"""Collectives of a program that compute what another one computes: a compiler may leave them out.

    >>> duplicates(jax.jit(lambda x: (psum(x.sum(0).sum(0)), psum(x.sum()))).lower(x).as_text(), axes)
    [Collective(kind='all_reduce', axes=('x',), bytes=4, count=1)]

Values are numbered: two operations have one number if they do the same to operands with the same numbers. A reduction
of a reduction has the number of the reduction over both their dimensions, as compilers fold them, and a reversal of
dimensions of size 1 (of the window of a 1 x 1 convolution, in its gradient) that of its operand.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Iterator

from jax.extend.mlir import ir

from unity_jax.pcg.mesh import MeshAxes
from unity_jax.report.collectives import Collective, Key, collective_key, counted, declared_meshes, parse_stablehlo

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
        self._reductions: dict[int, tuple[Hashable, int, tuple[int, ...]]] = {}
        self._fresh = itertools.count()

    def add(self, op: ir.Operation) -> int:
        """Number an operation and its results."""
        key: Hashable = (op.name, self._attributes(op), self._regions(op), tuple(self._value(v) for v in op.operands))
        if op.name in UNIQUE:
            key = ("unique", next(self._fresh))
        elif op.name == "stablehlo.reduce" and len(op.results) == 1:
            key = self._reduction(op)
        if op.name == "stablehlo.reverse" and self._changes_nothing(op):
            self._of[op.results[0]] = self._value(op.operands[0])
            return self._of[op.results[0]]
        number = self._ids.setdefault(key, len(self._ids))
        for i, result in enumerate(op.results):
            self._of[result] = self._ids.setdefault((number, i), len(self._ids))
            if isinstance(key, tuple) and key[0] == "reduction":
                self._reductions[self._of[result]] = key[1:]
        return number

    def _changes_nothing(self, reverse: ir.Operation) -> bool:
        shape = ir.RankedTensorType(reverse.results[0].type).shape
        return all(shape[d] == 1 for d in ir.DenseI64ArrayAttr(reverse.attributes["dimensions"]))

    def _value(self, value: ir.Value) -> int:
        return self._of.setdefault(value, self._ids.setdefault(("outside", next(self._fresh)), len(self._ids)))

    def _attributes(self, op: ir.Operation) -> str:
        return " ".join(sorted(f"{name}={op.attributes[name]}" for name in op.attributes)) + str(
            [r.type for r in op.results]
        )

    def _regions(self, op: ir.Operation) -> Hashable:
        """The bodies of an operation with their arguments and results by position."""
        if op.name in UNIQUE:
            return ()
        made = []
        for block in (block for region in op.regions for block in region):
            places = {argument: ("argument", i) for i, argument in enumerate(block.arguments)}
            for i, inner in enumerate(block.operations):
                operands = tuple(places[v] if v in places else self._value(v) for v in inner.operands)
                made.append((inner.operation.name, self._attributes(inner.operation), operands))
                places.update((r, (i, j)) for j, r in enumerate(inner.results))
        return tuple(made)

    def _reduction(self, op: ir.Operation) -> Hashable:
        """What is reduced in which way over which of its dimensions, through reductions of reductions."""
        operand, start = (self._value(v) for v in op.operands)
        dims = tuple(ir.DenseI64ArrayAttr(op.attributes["dimensions"]))
        way = (self._regions(op), start)
        if operand in self._reductions and self._reductions[operand][0] == way:
            _, source, before = self._reductions[operand]
            rank = len(before) + len(ir.RankedTensorType(op.operands[0].type).shape)
            left = [d for d in range(rank) if d not in before]
            return ("reduction", way, source, tuple(sorted((*before, *(left[d] for d in dims)))))
        return ("reduction", way, operand, tuple(sorted(dims)))
