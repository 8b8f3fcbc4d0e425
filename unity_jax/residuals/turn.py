"""One op on a chunk of its rows, as ops: its local program, written as part of a graph.

    bits = random_bits[shape=(32, 8)] key   ->   position = index + 4 iota ...     rows 3, 7, 11, ... of 32
                                                 bits = threefry2x32 key position

An axis of time splits a factor as a mesh axis does (`ops.rule`): the program that computes a device's part computes a
chunk. It is traced, once for equal ops; what the op stood for (its line, its pass, how many layers) its parts keep.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unity_jax.ops.random import Rows, counts, drawn_for
from unity_jax.ops.rule import Shard
from unity_jax.pcg.graph import Graph, Op, Tensor
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.residuals.region import TIME, NoRegionError, Region
from unity_jax.trace import build


class _NotConsecutiveError(Exception):
    """A local program needs consecutive rows, of which a chunk has every so many."""


@dataclass(frozen=True, eq=False)
class _Turn(Shard):
    """An op on one chunk of its rows. **Fields:** `index`: which; None where a chunk is no block of rows."""

    index: Any = None

    def offset(self, factor: int) -> Any:
        if not self.factor_axes[factor]:
            return 0
        if self.index is None:
            raise _NotConsecutiveError
        return self.index * self.local_size(factor)


class Turns:
    """Writes ops on a chunk of their rows."""

    def __init__(self, region: Region, parts: int) -> None:
        self.region, self.parts, self.mesh = region, parts, MeshAxes((TIME,), (parts,))
        self._known: dict[object, Graph] = {}

    def shape(self, t: Tensor) -> tuple[int, ...]:
        """Of a chunk of a tensor."""
        dim = self.region.rows.get(t)
        return tuple(n // self.parts if d == dim else n for d, n in enumerate(t.shape))

    def written(self, op: Op, index: Tensor, env: Mapping[Tensor, Tensor]) -> tuple[list[Op], list[Tensor]]:
        """The ops that compute a chunk of the results of an op, and these.

        **Arguments:** `index`: which chunk; `env`: chunks of the operands.
        **Raises:** `NoRegionError` where an op must have consecutive rows.
        """
        if op.name in ("random_bits", "random_split"):
            return self._drawn(op, index, env)
        reads = [t for t in op.inputs if t.literal is None]
        arrays = tuple(id(t.literal) for t in op.inputs if np.ndim(t.literal) > 0)  # which signatures cut short
        key = (op.signature, self.region.factors[op], arrays)
        if key not in self._known:
            self._known[key] = self._traced(op)
        local = self._known[key]
        outputs = dict(zip(local.outputs, op.outputs, strict=True))
        names = dict(zip(local.inputs, (index, *(env[t] for t in reads)), strict=True))
        like = functools.partial(_made_like, op, outputs)
        ops = renamed(local.ops, names, like, functools.partial(as_of, op))
        return ops, [names.get(t, t) for t in local.outputs]

    def _drawn(self, op: Op, index: Tensor, env: Mapping[Tensor, Tensor]) -> tuple[list[Op], list[Tensor]]:
        """The bits of a chunk of rows."""
        if not counts(op):
            raise NoRegionError(op.source)
        (drawn,), rows = op.outputs, self._rows(op)
        made = dataclasses.replace(drawn, name="", shape=self.shape(drawn))
        op = dataclasses.replace(op, inputs=tuple(env.get(t, t) for t in op.inputs))
        return [drawn_for(op, rows, index, made)], [made]

    def _rows(self, op: Op) -> Rows:
        """Which of the rows of what an op makes a chunk has."""
        region, (made,) = self.region, op.outputs
        size = region.rules[op].factors[region.factors[op]].size
        return Rows(region.rows[made], self.parts, size // (region.size if region.spaced else self.parts))

    def _traced(self, op: Op) -> Graph:
        region, rule = self.region, self.region.rules[op]
        turn = _Turn(op, rule, self.mesh, (region.factors[op],))
        small = [turn.operand_shape(i) for i in range(len(op.inputs))]
        places = [i for i, t in enumerate(op.inputs) if t.literal is None]

        def run(index: Any, *arrays: Any) -> list[Any]:
            given = dict(zip(places, arrays, strict=True))
            if op.name == "iota" and op.params["dimension"] == region.rows[op.outputs[0]]:
                row = jax.lax.broadcasted_iota(jnp.int32, self.shape(op.outputs[0]), op.params["dimension"])
                return [self._rows(op).positions(index, row).astype(op.params["dtype"])]
            values = [given[i] if i in given else _chunk(turn, i, t) for i, t in enumerate(op.inputs)]
            return dataclasses.replace(turn, index=None if region.spaced else index).run(values)

        shapes = [jax.ShapeDtypeStruct(small[i], op.inputs[i].dtype) for i in places]
        captured: list[Any] = []
        try:
            found = build(jax.make_jaxpr(run)(jax.ShapeDtypeStruct((), jnp.int32), *shapes), captured=captured)
        except _NotConsecutiveError:
            raise NoRegionError(op.source) from None
        if captured:
            raise NoRegionError(op.source)
        return found


def _chunk(turn: _Turn, i: int, t: Tensor) -> Any:
    """A literal operand, of which all rows are equal or which has none."""
    if turn.operand_shape(i) != t.shape:
        raise _NotConsecutiveError
    return t.literal


def _made_like(op: Op, outputs: Mapping[Tensor, Tensor], t: Tensor) -> Tensor:
    """A fresh tensor for one of a traced program: a result is like that of the op."""
    of = outputs.get(t)
    if of is None:
        return dataclasses.replace(t, times=op.times)
    return dataclasses.replace(of, name="", shape=t.shape)


def as_of(source: Op, op: Op) -> Op:
    """An op that was traced for another one: of its line and its pass."""
    info = source.eqn.source_info if source.eqn is not None else None
    eqn = op.eqn.replace(source_info=info) if op.eqn is not None and info is not None else op.eqn
    return dataclasses.replace(op, eqn=eqn, callers=source.callers, backward=source.backward)


def renamed(
    ops: Sequence[Op], names: dict[Tensor, Tensor], fresh: Callable[[Tensor], Tensor], also: Callable[[Op], Op]
) -> list[Op]:
    """Ops with other tensors: what `names` says, which the results are added to."""
    found = []
    for op in ops:
        for t in op.outputs:
            names[t] = fresh(t)
        bodies = []
        for body in op.bodies:
            inner = {t: dataclasses.replace(t) for t in body.inputs}
            given = tuple(inner.values())
            inside = renamed(body.ops, inner, dataclasses.replace, also)
            outs = tuple(inner.get(t, t) for t in body.outputs)
            bodies.append(Graph(given, outs, inside))
        inputs, outputs = tuple(names.get(t, t) for t in op.inputs), tuple(names[t] for t in op.outputs)
        found.append(also(dataclasses.replace(op, inputs=inputs, outputs=outputs, bodies=tuple(bodies))))
    return found
