"""A region as a loop over chunks of its rows.

    logits = x W                         for each of 8 chunks of rows of x and labels:
    loss = sum(cross entropy(logits))        logits = x W, its part of loss and dlogits
    dx, dW = ...                             a chunk of dx; loss and dW: what there was, and its part

Each iteration of one scan computes all of the region for a chunk, so that an eighth of what lies between its results is
there at a time, and nothing is computed twice. Exact up to the order of sums. What ops stand for (lines, passes, layers
of a folded program) stays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from unity_jax import _compat
from unity_jax.pcg.graph import Graph, Op, Tensor, nested
from unity_jax.pcg.loops import Scan
from unity_jax.residuals.change import Change, Origin
from unity_jax.residuals.region import Region
from unity_jax.residuals.turn import Turns, as_of, renamed
from unity_jax.rewrite.apply import in_order
from unity_jax.trace import build, without_dead_code


def looped(graph: Graph, region: Region, parts: int, source: Op) -> Change:
    """The graph with a region as a loop over so many chunks.

    **Arguments:** `source`: the op whose line the loop is of.
    **Raises:** `NoRegionError` where an op must know which rows it has and they are not consecutive.
    """
    writer = _Writer(region, parts, source)
    replaced, ops = writer.loop()
    left = [op for op in graph.ops if op not in region.alone]
    left = [dataclasses.replace(op, inputs=tuple(replaced.get(t, t) for t in op.inputs)) for op in left]
    order = in_order([*left, *ops], {op: i for i, op in enumerate(graph.ops)})
    outputs = tuple(replaced.get(t, t) for t in graph.outputs)
    ops = _behind(order, set(replaced.values())) if writer.late else order
    whole = without_dead_code(Graph(graph.inputs, outputs, ops))
    return Change(whole, writer.origin)


class _Writer:
    """Writes the loop. **Fields:** `late`: whether it is of the backward pass; `origin`: see `Change`."""

    def __init__(self, region: Region, parts: int, source: Op) -> None:
        self.region, self.parts, self.source = region, parts, source
        self.turns = Turns(region, parts)
        self.late = any(op.backward for op in region.alone)
        self.origin: dict[Tensor, Origin] = {}

    def loop(self) -> tuple[dict[Tensor, Tensor], list[Op]]:
        """What the results of the region are now, and the ops that make them."""
        region = self.region
        ops: list[Op] = []
        index = Tensor((), jnp.dtype(jnp.int32))
        totals = {t: _like(t, t.shape, wide(t.dtype)) for t in region.sums}
        env = {t: _like(t, self.turns.shape(t), t.dtype) for t in (*region.cut, *region.whole)}
        arguments = [*(env[t] for t in region.whole), *totals.values(), index, *(env[t] for t in region.cut)]
        inside = self.ops(region.ops, index, env)
        added = []
        for t, total in totals.items():
            (now,) = self._computed(lambda x, y: [x + y.astype(x.dtype)], (total, env[t]), ("total", t), inside)
            added.append(now)
        body = without_dead_code(Graph(tuple(arguments), (*added, *(env[t] for t in region.stacked)), inside))
        self._as_one_layer(body)
        self.origin |= {env[t]: t for t in (*region.whole, *region.cut)}
        self.origin |= {x: ("carried", t) for t, x in totals.items()} | {index: ("index",)}
        zeros = [
            self._computed(lambda x=x: [jnp.zeros(x.shape, x.dtype)], (), ("zeros", t), ops)[0]
            for t, x in totals.items()
        ]
        counted = self._computed(lambda: [jnp.arange(self.parts, dtype=jnp.int32)], (), ("index",), ops)
        chunks = [self._computed(self._split(t), (t,), ("chunks", t), ops)[0] for t in region.cut]
        sums = [_like(t, t.shape, total.dtype) for t, total in totals.items()]
        stacks = [_like(t, (self.parts, *self.turns.shape(t)), t.dtype) for t in region.stacked]
        self.origin.update((x, ("sum", t)) for x, t in zip(sums, region.sums, strict=True))
        self.origin.update((x, ("stack", t)) for x, t in zip(stacks, region.stacked, strict=True))
        operands, results = (*region.whole, *zeros, *counted, *chunks), (*sums, *stacks)
        ops.append(scan_of(self.parts, len(region.whole), len(region.sums), operands, results, body, self.source))
        replaced = {}
        for t, x in zip(region.sums, sums, strict=True):
            replaced[t] = self._computed(lambda x, t=t: [x.astype(t.dtype)], (x,), ("result", t), ops)[0]
        for t, x in zip(region.stacked, stacks, strict=True):
            replaced[t] = self._computed(self._join(t), (x,), ("result", t), ops)[0]
        for t, x in replaced.items():
            self.origin[x] = t
            x.enters, x.leaves = t.enters, t.leaves
        return replaced, [dataclasses.replace(op, backward=self.late) for op in ops]

    def _as_one_layer(self, body: Graph) -> None:
        """Have a body stand for one layer: the loop that it is of stands for all."""
        every = {t for op in body.walk() for t in op.outputs}.union(*(g.inputs for _, g, _ in nested(body)))
        for t in every:
            t.times = max(1, t.times // self.region.times)

    def ops(self, ops: Sequence[Op], index: Tensor, env: dict[Tensor, Tensor]) -> list[Op]:
        """The ops on a chunk. **Arguments:** `env`: what they read; what they make is added."""
        found: list[Op] = []
        for op in ops:
            if op.bodies:
                found.append(self._control(op, index, env))
            elif op in self.region.factors:
                written, results = self.turns.written(op, index, env)
                env.update(zip(op.outputs, results, strict=True))
                within = (t for part in written for t in part.outputs)
                self.origin.update((t, (op.outputs[0], i)) for i, t in enumerate(within))
                found += written
            else:
                env.update((t, _like(t, self.turns.shape(t), t.dtype)) for t in op.outputs)
                inputs = tuple(env.get(t, t) for t in op.inputs)
                found.append(dataclasses.replace(op, inputs=inputs, outputs=tuple(env[t] for t in op.outputs)))
            self.origin.update((env[t], t) for t in op.outputs)
        return found

    def _control(self, op: Op, index: Tensor, env: dict[Tensor, Tensor]) -> Op:
        """A loop or branch; of a scan over layers, each iteration is told which chunk it has."""
        env.update((t, _like(t, self.turns.shape(t), t.dtype)) for t in op.outputs)
        inputs, outputs = tuple(env.get(t, t) for t in op.inputs), tuple(env[t] for t in op.outputs)
        if op.name != "scan":
            return dataclasses.replace(op, inputs=inputs, outputs=outputs)
        (body,), roles, here = op.bodies, Scan.of(op.params), dataclasses.replace(index)
        inner = {t: _like(t, self.turns.shape(t), t.dtype) for t in body.inputs}
        self.origin |= {x: t for t, x in inner.items()} | {here: ("index", op.outputs[0])}
        known = dict(inner)
        ops = self.ops(body.ops, here, known)
        made = Graph((here, *inner.values()), tuple(known.get(t, t) for t in body.outputs), ops)
        params = roles.with_constants(op.params, roles.constants.stop + 1)
        return dataclasses.replace(op, inputs=(index, *inputs), outputs=outputs, params=params, bodies=(made,))

    def _computed(self, fn: Callable[..., Any], operands: Sequence[Tensor], key: Origin, ops: list[Op]) -> list[Tensor]:
        """The results of a JAX function, whose ops are added."""
        made, results = computed(fn, operands, self.source, self.region.times)
        self.origin.update((t, (key, i)) for i, t in enumerate(t for op in made for t in op.outputs))
        ops += made
        return results

    def _split(self, t: Tensor) -> Callable[[Any], list[Any]]:
        """A function that makes of an array a stack of its chunks: blocks of rows, or one of every so many."""
        region, parts, dim = self.region, self.parts, self.region.rows[t]
        before, rest, after = t.shape[:dim], t.shape[dim] // region.size, t.shape[dim + 1 :]

        def split(x: Any) -> list[Any]:
            if not region.spaced:
                return [jnp.moveaxis(x.reshape(*before, parts, -1, *after), dim, 0)]
            x = x.reshape(*before, region.size // parts, parts, rest, *after)
            return [jnp.moveaxis(x, dim + 1, 0).reshape(parts, *before, t.shape[dim] // parts, *after)]

        return split

    def _join(self, t: Tensor) -> Callable[[Any], list[Any]]:
        """A function that makes an array of the stack of its chunks."""
        region, parts, dim = self.region, self.parts, self.region.rows[t]
        before, rest, after = t.shape[:dim], t.shape[dim] // region.size, t.shape[dim + 1 :]

        def join(x: Any) -> list[Any]:
            if region.spaced:
                x = x.reshape(parts, *before, region.size // parts, rest, *after)
                return [jnp.moveaxis(x, 0, dim + 1).reshape(t.shape)]
            return [jnp.moveaxis(x, 0, dim).reshape(t.shape)]

        return join


def computed(
    fn: Callable[..., Any], operands: Sequence[Tensor], source: Op, layers: int = 1
) -> tuple[list[Op], list[Tensor]]:
    """A JAX function of tensors as ops, and its results.

    **Arguments:** `source`: the op whose line they are of; `layers`: for how many they stand at least.
    """
    traced = build(jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(t.shape, t.dtype) for t in operands)))
    names = dict(zip(traced.inputs, operands, strict=True))
    times = max(layers, *(t.times for t in operands), 1)

    def fresh(t: Tensor) -> Tensor:
        return dataclasses.replace(t, times=times)

    made = renamed(traced.ops, names, fresh, lambda op: as_of(source, op))
    return made, [names.get(t, t) for t in traced.outputs]


def scan_of(
    length: int,
    constants: int,
    carried: int,
    operands: tuple[Tensor, ...],
    results: tuple[Tensor, ...],
    body: Graph,
    source: Op,
) -> Op:
    """A loop, as JAX traces one. **Arguments:** `source`: the op whose line it is of, and whose pass."""
    traced = build(jax.make_jaxpr(lambda: jax.lax.scan(lambda x, _: (x + 1, None), 0, length=length))())
    (op,) = (op for op in traced.ops if op.name == "scan")
    params = {**op.params, "num_consts": constants, "num_carry": carried}
    op = dataclasses.replace(op, inputs=operands, outputs=results, params=params, bodies=(body,))
    return as_of(source, op)


def _like(t: Tensor, shape: tuple[int, ...], dtype: Any) -> Tensor:
    """A fresh tensor in place of another one."""
    return dataclasses.replace(t, name="", shape=shape, dtype=dtype)


def wide(dtype: Any) -> Any:
    """The type in which parts are added up: rounded to half of it, eight parts would lose what one sum does not."""
    return jnp.dtype(jnp.float32) if _compat.is_float(dtype) and jnp.dtype(dtype).itemsize < 4 else dtype


def _behind(ops: Sequence[Op], late: set[Tensor]) -> list[Op]:
    """Ops, of which those that read what is made in the backward pass belong to that."""
    found = []
    for op in ops:
        if not op.backward and not late.isdisjoint(op.inputs):
            op = dataclasses.replace(op, backward=True)
        if op.backward:
            late.update(op.outputs)
        found.append(op)
    return found
